# Two commands from a fresh clone on a machine that has only Python: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint wheel clean

demo: $(VENV)/.installed-cli
	$(BIN)/duotone compare --out runs/demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/pyright

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-cli: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing duotone and torch into $(VENV)"
	$(INSTALL) torch
	$(INSTALL) -e '.[cli]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing duotone with its test tools into $(VENV)"
	$(INSTALL) torch
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed-cli

clean:
	rm -rf $(VENV) dist runs
