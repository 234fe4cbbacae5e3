# make demo: set up and train the quickstart.   make test: set up and run the whole test-suite.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
DEMO_ARGS ?=
PYTEST_ARGS ?=

.PHONY: demo test lint types check docs bench clean

demo: $(VENV)/.base
	$(BIN)/trainwright train recipes/quickstart.yaml run.overwrite=true $(DEMO_ARGS)
	@echo; echo "--- a sample of what it writes (runs/quickstart/sample.txt):"; cat runs/quickstart/sample.txt
	@echo; echo "--- the report: runs/quickstart/report.html"

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

check: lint types test

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/peers.py

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one by make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV)/.bench: $(VENV)/.base
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache site
