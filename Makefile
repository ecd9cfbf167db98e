# make quickstart   train a small model on this machine's CPU
# make setup        all that tests and development need, in .venv; with uv where it is installed
# make test         run the tests
# make lint         check form, types, layers and the shape of the code
# make docs         write the generated pages again
# make lock         write requirements.hashes, the hashes of what requirements.lock names, as the package index gives them;
#                   make setup compares them, but for torch, which comes from an index of its own
# make audit        ask for known advisories on what requirements.lock names; needs a network
# WORKERS=3         processes that make test uses: much of a test is waiting for processes to start
# GPU=1             take torch with CUDA instead of the CPU build

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 3
TORCH := 2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
UV := $(shell command -v uv 2>/dev/null)
# Modules are compiled when they are first imported: most of what is installed never is. Where Python may not write what it
# compiles, the installer does it: else every process would compile torch again
COMPILE := $(PYTHONDONTWRITEBYTECODE)
ifneq ($(UV),)
INSTALL := $(UV) pip install --quiet $(if $(COMPILE),--compile-bytecode) --python $(VENV)/bin/python --no-deps
else
INSTALL := $(PIP) install --quiet $(if $(COMPILE),,--no-compile) --no-deps
endif
HASHED := --require-hashes --only-binary :all: --requirement
# A part of requirements.hashes, in a file
PART = awk '/^\# part: / {taken = $$3 == "$(1)"} taken' requirements.hashes > $(VENV)/$(1).txt
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

$(READY): pyproject.toml requirements.hashes
	@$(PYTHON) -c "$$ASK_PYTHON"
	@echo "1/3 a virtual environment with what millrace needs, by $(if $(UV),uv,pip)"
	$(PYTHON) -m venv $(VENV)
	$(call PART,pip)
	$(PIP) install --quiet --no-deps $(HASHED) $(VENV)/pip.txt
	$(call PART,needed)
	$(INSTALL) $(HASHED) $(VENV)/needed.txt
	@echo "2/3 torch $(TORCH)"
ifneq ($(GPU),)
	$(TORCH_INSTALL) torch==$(TORCH)
else ifeq ($(shell uname -s),Linux)
	$(TORCH_INSTALL) torch==$(TORCH)+cpu || \
		$(TORCH_INSTALL) --index-url $(CPU_INDEX) torch==$(TORCH)+cpu
else
	$(TORCH_INSTALL) torch==$(TORCH)
endif
	$(INSTALL) --no-build-isolation --editable .
	$(PIP) check
	@echo "3/3 ready: $(VENV)/bin/millrace"
	touch $(READY)

$(TOOLS): $(READY)
	$(call PART,tests)
	$(INSTALL) $(HASHED) $(VENV)/tests.txt
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
	$(VENV)/bin/python -m tests.support.configuration_page
	$(VENV)/bin/python -m tests.support.models_page
	$(VENV)/bin/python -m benchmarks.page

lock: $(TOOLS)
	$(VENV)/bin/python -m tests.installed.hashes

audit:
	@$(PYTHON) -c "$$ASK_INDEX"
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet pip-audit==2.10.1
	$(AUDIT)/bin/pip-audit --strict --disable-pip --require-hashes --requirement requirements.hashes
