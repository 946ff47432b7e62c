# Everything happens in .venv; `make` alone lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first of these that runs and is new enough (a shim on the PATH may be neither).
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
ARGS ?=
PYTEST_ARGS ?=

.PHONY: help setup quickstart test test-slow stress lint format bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(VENV)/.installed  ## make .venv with streampack, editable, and all it needs (once)

quickstart: setup  ## train a small model on streamed, packed text; ARGS="..." goes to it
	$(BIN)/python -m streampack_recipes.quickstart $(ARGS)

# One thread in each test process: two workers with a thread pool each only wait for one another on two cores.
test: lint  ## lint, then every test that needs neither a GPU nor minutes; PYTEST_ARGS="..." goes to pytest
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow and not gpu" $(PYTEST_ARGS)

test-slow: setup  ## the tests that take minutes, and those for a GPU where there is one
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or gpu" $(PYTEST_ARGS)

stress: setup  ## the reliability table: kills, elastic resumes, a million packs; writes docs/reliability.md; ARGS="--list"
	$(BIN)/python -m stress $(ARGS)

lint: setup  ## ruff (lint, format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-bench  ## density and speed beside the peers', time to the first batch; writes benchmarks/results/
	$(BIN)/python -m benchmarks.density $(ARGS)
	$(BIN)/python -m benchmarks.start

clean:  ## remove .venv, builds and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: pip runs again only when what it reads has changed.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found on the PATH; install one or set PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ".[tune,hf,zstd,inspect,dev]"
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(BIN)/python -m pip install -c constraints.txt -e ".[bench]"
	@touch $@
