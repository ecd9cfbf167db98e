# make quickstart   train a small model on this machine's CPU
# make setup        all that tests and development need, in .venv; with uv where it is installed
# make test         run the tests
# make lint         check form, types, layers and the shape of the code
# make docs         write the generated pages again
# make lock         write requirements.hashes, the hashes of what requirements.lock names, as the package index gives them
# make audit        ask for known advisories on what requirements.lock names; needs a network
# WORKERS=2         processes that make test uses: much of a test is waiting for processes to start
# GPU=1             take torch with CUDA instead of the CPU build

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
TORCH := 2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
UV := $(shell command -v uv 2>/dev/null)
# Modules are compiled when they are first imported: most of what is installed never is. Where Python may not write what it
# compiles, the installer does it: else every process would compile torch again
COMPILE := $(PYTHONDONTWRITEBYTECODE)
ifneq ($(UV),)
INSTALL := $(UV) pip install --quiet $(if $(COMPILE),--compile-bytecode) --python $(VENV)/bin/python
else
INSTALL := $(PIP) install --quiet $(if $(COMPILE),,--no-compile) --only-binary=:all:
endif
AUDIT := $(VENV)/audit
ADVISORIES := https://pypi.org/pypi/pip/json
TORCH_INSTALL := $(PIP) install --quiet $(if $(COMPILE),,--no-compile)
READY := $(VENV)/.ready
TOOLS := $(VENV)/.ready-for-tests

define ASK_PYTHON
import sys
version = ".".join(map(str, sys.version_info[:3]))
if not (3, 11) <= sys.version_info[:2] <= (3, 12):
    sys.exit(f"millrace needs Python 3.11 or 3.12, and $(PYTHON) is Python {version}: make setup PYTHON=python3.12")
endef
export ASK_PYTHON

define ASK_INDEX
import sys, urllib.request
try:
    urllib.request.urlopen("$(ADVISORIES)", timeout=30).close()
except OSError as error:
    sys.exit(f"make audit asks $(ADVISORIES) and the like for advisories, and needs a network: {error}")
endef
export ASK_INDEX

.PHONY: setup quickstart test lint docs lock audit

setup: $(TOOLS)

$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c "$$ASK_PYTHON"
	@echo "1/3 a virtual environment with torch $(TORCH)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
ifneq ($(GPU),)
	$(TORCH_INSTALL) torch==$(TORCH)
else ifeq ($(shell uname -s),Linux)
	$(TORCH_INSTALL) torch==$(TORCH)+cpu || \
		$(TORCH_INSTALL) --index-url $(CPU_INDEX) torch==$(TORCH)+cpu
else
	$(TORCH_INSTALL) torch==$(TORCH)
endif
	@echo "2/3 millrace and what it needs, by $(if $(UV),uv,pip)"
	$(INSTALL) --constraint requirements.lock --editable .
	@echo "3/3 ready: $(VENV)/bin/millrace"
	touch $(READY)

$(TOOLS): $(READY)
	$(INSTALL) --constraint requirements.lock --editable '.[dev]'
	touch $(TOOLS)

quickstart: $(READY)
	$(VENV)/bin/millrace quickstart

test: $(TOOLS)
	$(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile

lint: $(TOOLS)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m tests.house

docs: $(READY)
	$(VENV)/bin/python -m millrace.core.config.reading.docs_page
	$(VENV)/bin/python -m benchmarks.page

lock: $(TOOLS)
	$(VENV)/bin/uv pip compile --quiet --no-deps --generate-hashes --no-annotate --no-header --python-version 3.11 \
		--output-file requirements.hashes requirements.lock

audit:
	@$(PYTHON) -c "$$ASK_INDEX"
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet pip-audit==2.10.1
	$(AUDIT)/bin/pip-audit --strict --disable-pip --require-hashes --requirement requirements.hashes
