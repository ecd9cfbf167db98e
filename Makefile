# make quickstart   train a small model on this machine's CPU
# make test         run the tests
# make lint         check form, types, layers and the shape of the code
# make docs         write the generated pages again
# WORKERS=2         processes that make test uses: much of a test is waiting for processes to start
# GPU=1             take torch with CUDA instead of the CPU build

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
TORCH := 2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(VENV)/bin/python -m pip
READY := $(VENV)/.ready

.PHONY: setup quickstart test lint docs

setup: $(READY)

$(READY): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
ifneq ($(GPU),)
	$(PIP) install torch==$(TORCH)
else ifeq ($(shell uname -s),Linux)
	$(PIP) install torch==$(TORCH)+cpu || $(PIP) install --index-url $(CPU_INDEX) torch==$(TORCH)+cpu
else
	$(PIP) install torch==$(TORCH)
endif
	$(PIP) install --constraint requirements.lock --editable '.[dev]'
	touch $(READY)

quickstart: $(READY)
	$(VENV)/bin/millrace quickstart

test: $(READY)
	$(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m tests.house

docs: $(READY)
	$(VENV)/bin/python -m millrace.core.config.reading.docs_page
	$(VENV)/bin/python -m benchmarks.page
