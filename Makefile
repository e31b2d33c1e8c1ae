# Two commands from a fresh clone on a machine that has only Python: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

# For torch without CUDA, which brings none: tests/kernels/budgets.json is recorded with it.
TRITON := triton==3.6.0; platform_system == 'Linux' and platform_machine == 'x86_64'
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
NEWEST := $(CURDIR)/build/newest-triton

.PHONY: demo test test-rest test-all test-newest-triton test-torch lint wheel try-wheel site docs clean

demo: $(VENV)/.installed-cli
	$(BIN)/duotone compare --force --out runs/demo

# Each feature once. Files in the order of their names: by their number of tests, one long test would come last.
test: $(VENV)/.installed-dev
	$(PYTEST)

# What `make test` leaves out, without slow tests: graphs, ranks, other libraries, pages, all recipes.
test-rest: $(VENV)/.installed-dev
	$(PYTEST) -m "rest and not slow"

test-all: $(VENV)/.installed-dev
	$(PYTEST) -m ""

# Its own warnings, and budgets that it exceeds, do not fail.
test-newest-triton: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(NEWEST) triton
	PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest -n auto --maxprocesses 8 -W default -m "slow or not slow" tests/kernels

# The wheel and all tests with the newest torch in an environment of several GB.
# For others: make test-torch TORCH=2.11.0 PYTHON=python3.12
test-torch:
	mkdir -p build
	sed 's/^torch==.*/torch$(addprefix ==,$(TORCH))/' constraints.txt > build/torch$(TORCH).txt
	$(MAKE) wheel test test-rest VENV=build/torch$(TORCH) CONSTRAINTS=build/torch$(TORCH).txt

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests bench docs
	$(BIN)/ruff format --check src tests bench docs/*/*.py
	$(BIN)/pyright
	$(BIN)/pyright -p pyrightconfig.strict.json

wheel: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist .
	$(BIN)/python tests/check_wheel.py dist/duotone-*.whl

# The wheel with the oldest torch and the newest that was tried, each for a minute in 5 GB. What cannot be had is skipped.
try-wheel: wheel
	$(BIN)/python tests/try_wheel.py dist/duotone-*.whl

# Links that lead nowhere fail.
site: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir build/site

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-cli: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "installing duotone and torch into $(VENV)"
	$(INSTALL) torch
	$(INSTALL) -e '.[cli]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "installing duotone with its test tools into $(VENV)"
	$(INSTALL) torch
	$(BIN)/python -c 'import triton' 2>/dev/null || $(INSTALL) "$(TRITON)"
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed-cli

clean:
	rm -rf $(VENV) build dist runs
