# Everything happens in .venv; `make` alone lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first of these that runs and is new enough (a shim on the PATH may be neither).
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
# Test processes. On two cores, because each waits for processes and servers a quarter of its time.
JOBS ?= 3
ARGS ?=
PYTEST_ARGS ?=
DEVICE ?= cuda
GPU_PYTHON ?= python3

.PHONY: help setup quickstart test slow test-eval test-ray test-torchtitan test-kernels test-lowest test-newest test-wheel try-wheel mutants stress lint format bench paper models stock-configs gpu wheels docs dist publish clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(VENV)/.installed  ## make .venv with streampack, editable, and all it needs (once)

quickstart: setup  ## train a small model on streamed, packed text; ARGS="..." goes to it
	$(BIN)/python -m streampack_recipes.quickstart $(ARGS)

# One thread in each test process: two workers with a thread pool each only wait for one another on two cores. Bytecode
# is kept whatever the caller's environment says: each process compiles all tests otherwise, 4 s of CPU time a process.
test: setup  ## every test that needs neither a GPU nor minutes, and the ten slowest; PYTEST_ARGS="..." goes to pytest
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal \
		--durations=10 -m "not slow and not gpu" $(PYTEST_ARGS)

slow: setup  ## the tests that take minutes, and those for a GPU where there is one
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=10 -m "slow or gpu" $(PYTEST_ARGS)

test-eval: $(VENV)/.installed-eval  ## lm-evaluation-harness with our model class, beside its own; installs the harness
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest tests/integrations/test_lm_eval.py $(PYTEST_ARGS)

test-ray: $(VENV)/.installed-ray  ## token shards by a Ray cluster on this machine, whose nodes and workers are killed; installs Ray
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(BIN)/python -m pytest -m "slow or not slow" tests/tokenize/test_on_ray.py $(PYTEST_ARGS)

test-torchtitan: $(VENV)-torchtitan/.installed  ## torchtitan's trainer on our packs, on a CPU; installs torchtitan beside .venv
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VENV)-torchtitan/bin/python -m pytest -m "slow or not slow" \
		tests/integrations/test_torchtitan.py tests/integrations/test_torchtitan_trainer.py $(PYTEST_ARGS)

# The kernels have their own folder: transformers would use them in every other test, and without a GPU they fail.
test-kernels: .site-kernels/.installed  ## kernels that are told where sequences begin, interpreted on the CPU
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/.site-kernels:$(PYTHONPATH) $(BIN)/python -m pytest -n $(JOBS) \
		-p tests.harness.kernels_on_cpu tests/attention/test_mixers.py tests/integrations/test_hf_trainer.py -k interpreted $(PYTEST_ARGS)

test-lowest: $(VENV)-lowest/.installed  ## `make test` with the oldest versions that pyproject.toml allows
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VENV)-lowest/bin/python -m pytest -p no:anyio -n $(JOBS) --dist worksteal \
		-m "not slow and not gpu" $(PYTEST_ARGS)

test-newest: $(VENV)-newest/.installed  ## `make test` with the newest releases of torch, transformers and all else
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VENV)-newest/bin/python -m pytest -p no:anyio -n $(JOBS) --dist worksteal \
		-m "not slow and not gpu" $(PYTEST_ARGS)

test-wheel: dist  ## build a wheel, and `make try-wheel`
	$(MAKE) try-wheel

try-wheel:  ## the README's commands from the wheel in dist/, in a fresh environment far from the clone
	rm -rf $(VENV)-wheel
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet "$$(ls dist/*.whl)[hf,data,tune]"
	PATH="$(CURDIR)/$(VENV)-wheel/bin:$$PATH" $(VENV)-wheel/bin/python -P tests/harness/installed.py

mutants: setup  ## plant known faults, one at a time, and say which no test sees; resumable; ARGS="sources."
	$(BIN)/python -m tests.mutants --jobs $(JOBS) $(ARGS)

stress: $(VENV)/.installed-stress  ## the reliability table: kills, elastic resumes, a million packs; writes docs/reliability.md; ARGS="--list"
	$(BIN)/python -m stress $(ARGS)

lint: setup  ## ruff (lint, format), mypy, and the schema of workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

format: setup  ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

BENCHMARKS := density lanes images inputs text scale straggling even_steps groups scoring mixers prefill

bench: $(VENV)/.installed-bench  ## density and speed beside the peers', and the other figures of README and docs; ARGS="--smoke" shows that all run
	set -e; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name $(ARGS); done

models: setup  ## docs/guides/models.md: which families of models keep samples apart, as the tests see it now; ARGS="-k bloom" for some
	mkdir -p build && rm -f build/models.jsonl
	STREAMPACK_WRITE_TABLES=build/models.jsonl OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu" \
		tests/attention/test_packed_equals_alone.py $(ARGS)
	$(BIN)/python -m tests.harness.models_table build/models.jsonl $(if $(ARGS),--some)

stock-configs: setup  ## docs/guides/stock_configs.md: torchtune's configs, made small, in our recipes; ARGS="qlora" for some
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.harness.stock_table $(ARGS)

# A GPU machine without network has a torch of its own; what else it needs comes as wheels (`make wheels`), which are
# installed beside that torch: a virtual environment would not see it, and often the torch lives in one itself.
ifneq ($(and $(wildcard wheels/*.whl),$(if $(wildcard $(VENV)/.installed),,no .venv)),)
GPU_READY := .site-gpu/.installed
GPU_RUN := PYTHONPATH=$(CURDIR)/.site-gpu $(GPU_PYTHON)
else
GPU_READY := setup
GPU_RUN := $(BIN)/python
endif

gpu: $(GPU_READY)  ## nine minutes on one GPU: correctness, isolation, host waits, speed, in one table; DEVICE=cpu shows that it runs
	$(GPU_RUN) -m benchmarks.gpu --device $(DEVICE) $(ARGS)

paper: setup  ## an epoch by every method of batching, 3 seeds: minutes on a CPU
	$(BIN)/python -m benchmarks.paper $(ARGS)

# What `import torchtune`, the tests marked gpu and the benchmark need besides torch, transformers and their own needs.
WHEELS := torchtune torchao torchdata omegaconf datasets dill multiprocess xxhash kagglehub kagglesdk blobfile \
	pycryptodomex lxml sentencepiece tiktoken psutil pytest hypothesis sortedcontainers
WHEELS_PYTHON ?= 3.12
# pip takes a wheel for exactly the platforms that are named.
PLATFORMS := manylinux1 manylinux2010 manylinux2014 $(addprefix manylinux_2_,$(shell seq 5 39))

wheels:  ## what a GPU machine without network lacks, as a folder to copy there; WHEELS_PYTHON=3.12 names its Python
	rm -rf wheels
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version $(WHEELS_PYTHON) \
		$(PLATFORMS:%=--platform %_x86_64) -c constraints.txt -d wheels $(WHEELS)

# The tables and pictures in docs/ are made from the code; a warning of Sphinx is an error.
docs: $(VENV)/.installed-docs  ## the documentation as pages that open from disk: build/docs/index.html
	$(BIN)/python -m docs.tables
	$(BIN)/python -m docs.drawings
	$(BIN)/python -m sphinx -q -b html -c docs -d build/doctrees -W --keep-going -n . build/docs
	@echo "open build/docs/index.html"

dist: $(VENV)/.installed-release  ## the wheel and the source distribution, checked: dist/
	rm -rf dist build/lib
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*

# In an environment with twine alone: what runs here can take the token of the release.
publish: $(VENV)-publish/.installed  ## upload dist/; in the workflow of a release, which the index trusts
	$(VENV)-publish/bin/python -m twine upload --non-interactive dist/*

clean:  ## remove .venv, builds, caches, and the quickstart's runs; what you trained in outputs/ stays
	rm -rf $(VENV) $(VENV)-* .site-gpu .site-kernels wheels build dist *.egg-info outputs/quickstart .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: pip runs again only when what it reads has changed.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found on the PATH; install one or set PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=25.1"  # the first that knows --group
	$(BIN)/python -m pip install -c constraints.txt -e ".[tune,hf,data]" --group dev
	@touch $@

.site-gpu/.installed: $(wildcard wheels/*.whl)
	rm -rf $(@D)
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --target $(@D) $^
	@touch $@

$(VENV)/.installed-stress: $(VENV)/.installed
	$(BIN)/python -m pip install -c constraints.txt --group stress
	@touch $@

$(VENV)/.installed-eval: $(VENV)/.installed
	$(BIN)/python -m pip install -c constraints.txt -e ".[eval]"
	@touch $@

$(VENV)/.installed-ray: $(VENV)/.installed
	$(BIN)/python -m pip install -c constraints.txt -e ".[ray]"
	@touch $@

.site-kernels/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --no-deps --upgrade --target $(@D) triton==3.7.1 flash-linear-attention==0.6.0 fla-core==0.6.0 einops==0.8.2 liger-kernel==0.8.5
	@touch $@

# torchtitan needs other versions of datasets and torchao than torchtune: its environment has these, and sees .venv for all else.
SITE := python -c "import sysconfig; print(sysconfig.get_path('purelib'))"

$(VENV)-torchtitan/.installed: $(VENV)/.installed
	$(BIN)/python -m venv --clear $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/$(SITE))')" > $$($(@D)/bin/$(SITE))/venv.pth
	grep '^torch==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install -c $(@D)/constraints.txt -e ".[torchtitan]" triton "torchao>=0.18"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install -c constraints.txt --group docs
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(BIN)/python -m pip install -c constraints.txt --group bench
	@touch $@

$(VENV)-publish/.installed: constraints.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install -c constraints.txt twine
	@touch $@

$(VENV)/.installed-release: $(VENV)/.installed
	$(BIN)/python -m pip install -c constraints.txt --group release
	@touch $@

# pip takes the newest that is allowed; uv can be asked for the oldest.
$(VENV)-lowest/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet uv
	$(@D)/bin/python -m uv pip install --python $(@D)/bin/python --compile-bytecode --resolution lowest-direct -e ".[hf,tune,data]"
	$(@D)/bin/python -m uv pip install --python $(@D)/bin/python --compile-bytecode \
		pytest pytest-xdist hypothesis zstandard aiohttp s3fs  # trl would bring newer ones of what is tested
	@touch $@

$(VENV)-newest/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install -e ".[hf,tune,data]" --group dev
	@touch $@
