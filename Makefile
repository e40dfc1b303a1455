# Two commands matter: `make demo` runs the main job on a real model, `make test` passes the tests.
# Both set up what they need in .venv and need nothing but Python 3.11+, make and the package registry.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# an idle OpenMP thread that spins takes the core from the process beside it
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-all lint bench clean help

help:
	@echo "make demo      set up, run SmolLM2-135M in float, W8A8 and W4A4, show the leaderboard (minutes)"
	@echo "make test      set up and run lint, types and tests (under 15 minutes)"
	@echo "make test-all  the same with the slow tests"
	@echo "make bench     speed ratios, measured side by side on this machine"

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "quant-bench needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	@touch $@

# torch first and pinned: a looser requirement would fetch gigabytes of GPU libraries that nobody asked for
$(VENV)/.installed: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.developed: $(VENV)/.installed pyproject.toml
	$(PIP) install --constraint constraints.txt --group test --group lint
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/quant-bench demo

test: $(VENV)/.developed lint
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: $(VENV)/.developed lint
	$(BIN)/python -m pytest -m "not gpu"

lint: $(VENV)/.developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.developed
	$(BIN)/python benchmarks/linear.py
	$(BIN)/python benchmarks/observe.py
	$(BIN)/python benchmarks/harness.py

clean:
	rm -rf $(VENV) build dist
