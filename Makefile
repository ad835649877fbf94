# Sets up .venv by itself: needs only make and Python 3.11 or newer with its venv module.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
RUN_READY := $(VENV)/.run-ready
DEV_READY := $(VENV)/.dev-ready
# Override with: make PYTHON=/path/to/python3
PYTHON ?=
# As `pip install`, by uv where the package index has it; both take pip's settings.
INSTALL := $(BIN)/python .ci/install.py

.PHONY: help plan test check lint types tests unit fuzz attack slow soak coverage mutants benchmarks supply oracles ray docs accuracy calibrate clean

help:
	@echo "make plan      plan Llama-3.1-405B on 16,384 GPUs (installs into .venv the first time)"
	@echo "make test      lint, types and the tests"
	@echo "make check     the same without the slow tests, 2 to 3 minutes on 2 cores"
	@echo "make fuzz      10,000 damaged files for every reader of users' files"
	@echo "make attack    20 minutes of random layouts and changed requests against what plans prove"
	@echo "make slow      what takes longer: more cases of each kind, one in 24 of the longest suites"
	@echo "make soak      all of their cases, and all examples of the property tests"
	@echo "make coverage  lines of the rules, the cost model, the search, its bounds and mixed clusters that the tests run (installs into .measure)"
	@echo "make mutants   400 small faults in the rules: how many the tests notice (installs into .measure)"
	@echo "make lint | types | tests | unit    one of them; unit is tests without the slow ones"
	@echo "make oracles   launch files through the parsers of the real frameworks (installs them into .oracles)"
	@echo "make ray       batches on a local Ray cluster of two machines (installs Ray into .ray)"
	@echo "make docs      the documentation as a site, in build/site (installs MkDocs into .docs)"
	@echo "make accuracy  the cost model against measured runs, left out of the fit in turn; writes docs/accuracy.md"
	@echo "make calibrate refit the free constants on those steps, then score sources and families left out"
	@echo "make benchmarks plans by cluster size, mapping, batches, estimates: the tables of docs/benchmarks.md, in build/benchmarks"
	@echo "make supply    wheel and sdist built twice and compared, bill of materials, known faults (installs into .supply)"
	@echo "make clean     remove .venv and caches"

plan: $(RUN_READY)
	$(BIN)/meshwright plan llama-3.1-405b --cluster llama3-24k --gpus 16384 --global-batch 2048 --seq-len 8192

# Compiled modules are kept beside the packages, whatever the environment says: uv installs none, and without them
# every process that the tests start compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/bytecode

APART := not oracle and not ray
# Two processes: the tests are limited by the processor, and two cores are what CI has.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

# Types are checked beside the tests: one process each would leave a core idle meanwhile.
test: lint
	$(MAKE) --no-print-directory -j 2 types tests

check: lint
	$(MAKE) --no-print-directory -j 2 types unit

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The package's root is the repository's: mypy finds it under its name through a link.
types: $(DEV_READY)
	@mkdir -p $(VENV)/src && ln -sfn ../.. $(VENV)/src/meshwright
	MYPYPATH=$(VENV)/src $(BIN)/mypy -p meshwright

tests: $(DEV_READY)
	$(PYTEST) -m "not soak and $(APART)"

unit: $(DEV_READY)
	$(PYTEST) -m "not slow and not soak and $(APART)"

fuzz: $(DEV_READY)
	MESHWRIGHT_FUZZ_CASES=$${MESHWRIGHT_FUZZ_CASES:-10000} $(PYTEST) -m soak tests/fuzz

# MESHWRIGHT_ATTACK_S: seconds in all; MESHWRIGHT_ATTACK_SEED: another beginning.
attack: $(DEV_READY)
	MESHWRIGHT_ATTACK_S=$${MESHWRIGHT_ATTACK_S:-1150} $(BIN)/python -m pytest -s -m soak tests/attack

slow: $(DEV_READY)
	$(PYTEST) -m "soak and $(APART)"

soak: $(DEV_READY)
	MESHWRIGHT_SOAK_SHARE=1 MESHWRIGHT_INTERRUPTS=10 $(PYTEST) -m "(soak or hypothesis) and $(APART)"

RESULTS := build/benchmarks

benchmarks: $(DEV_READY)
	@mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.growth | tee $(RESULTS)/growth.md
	$(BIN)/python -m benchmarks.memory_growth 100 | tee $(RESULTS)/memory.md
	$(BIN)/python -m benchmarks.plan_speed | tee $(RESULTS)/plans.md
	$(BIN)/python -m benchmarks.cost_model_speed | tee $(RESULTS)/estimates.md
	$(BIN)/python -m benchmarks.fabric | tee $(RESULTS)/mapping.md
	$(BIN)/python -m benchmarks.batch_speed $(RESULTS)/batch 50 1 | tee $(RESULTS)/batch.md

MEASURE := .measure
COVERED := constraints costmodel planner/search planner/bounds planner/mixed

coverage: $(MEASURE)/.ready
	$(MEASURE)/bin/python -m coverage run -m pytest -m "not soak and $(APART)" \
	  $(addprefix tests/,$(COVERED)) tests/frameworks tests/planner/plan tests/planner/runs tests/planner/mapping/test_fabric_joint.py
	for folder in $(COVERED); do \
	  $(MEASURE)/bin/python -m coverage report --include="$$folder/*" --fail-under=95; \
	done

# MESHWRIGHT_MUTANTS: how many are drawn; all are some 3,200. A fault of the same second and length as the one before
# would find that one compiled.
mutants: export PYTHONDONTWRITEBYTECODE := 1
mutants: $(MEASURE)/.ready
	$(MEASURE)/bin/python -m benchmarks.mutants --sample $${MESHWRIGHT_MUTANTS:-400} --fail-under 90

$(MEASURE)/.ready: pyproject.toml requirements-dev.lock | $(BIN)/python
	$(BIN)/python -m venv $(MEASURE)
	$(INSTALL) $(MEASURE)/bin/python $(LOCK) -e '.[dev]' coverage==7.17.3 cosmic-ray==8.7.0
	@touch $@

SUPPLY := .supply

supply: $(SUPPLY)/.ready
	$(SUPPLY)/bin/python -m benchmarks.supply build/supply
	$(SUPPLY)/bin/pip-audit --requirement requirements-dev.lock --no-deps --disable-pip

$(SUPPLY)/.ready: | $(BIN)/python
	$(BIN)/python -m venv $(SUPPLY)
	$(INSTALL) $(SUPPLY)/bin/python build cyclonedx-bom pip-audit
	@touch $@

# The frameworks, pinned, in an environment of their own: torch for the CPU, Megatron, Megatron-Bridge and Axolotl unpacked
# beside it (the wheels ask for Python 3.12, what is used of them runs on 3.11 too). Megatron-Bridge 0.6.2 imports a
# module of transformers 5.23 that 5.24 lacks. axe-core lies in a package for Playwright, of which nothing else is used.
ORACLES := .oracles
ORACLES_READY := $(ORACLES)/.ready-17
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

ORACLE_TESTS := ORACLE_PYTHON=$(CURDIR)/$(ORACLES)/bin/python $(BIN)/python -m pytest -m oracle
# They time a browser: nothing runs beside them.
IN_A_BROWSER := $(addprefix tests/oracles/,test_browser.py test_perfetto.py test_served_page.py)

oracles: $(DEV_READY) $(ORACLES_READY)
	$(ORACLE_TESTS) -n 2 --maxschedchunk 1 -rP $(addprefix --ignore=,$(IN_A_BROWSER)) tests/oracles
	$(ORACLE_TESTS) -s $(IN_A_BROWSER)

$(ORACLES_READY): tests/oracles/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv $(ORACLES)
	@$(INSTALL) $(ORACLES)/bin/python torch==2.13.0+cpu 2>/dev/null || \
	  $(INSTALL) $(ORACLES)/bin/python torch==2.13.0+cpu --extra-index-url $(TORCH_INDEX)
	$(INSTALL) $(ORACLES)/bin/python -r tests/oracles/requirements.txt
	$(INSTALL) $(ORACLES)/bin/python --no-deps axe-playwright-python==0.1.8 \
	  liger-kernel==0.8.5 llamafactory==0.9.5 mcore-bridge==1.6.5 ms-swift==4.6.0 openrlhf==0.11.2 trl==1.16.0 verl==0.9.1
	$(INSTALL) $(ORACLES)/bin/python --no-deps --target $(ORACLES)/for_bridge transformers==5.23.0
	$(ORACLES)/bin/python -m pip download --quiet --no-deps --python-version 3.12 --only-binary=:all: \
	  -d $(ORACLES)/wheels megatron-core==0.19.2 megatron-bridge==0.6.2 axolotl==0.21.0
	for wheel in $(ORACLES)/wheels/{megatron_core-0.19.2,megatron_bridge-0.6.2,axolotl-0.21.0}*.whl; do \
	  $(ORACLES)/bin/python -m zipfile -e "$$wheel" \
	    "$$($(ORACLES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	done
	@touch $@

RAY := .ray

ray: $(RAY)/.ready
	$(RAY)/bin/python -m pytest -m ray tests/planner/many/test_batch_ray.py

$(RAY)/.ready: pyproject.toml requirements-dev.lock | $(BIN)/python
	$(BIN)/python -m venv $(RAY)
	$(INSTALL) $(RAY)/bin/python $(LOCK) -e '.[dev,ray,parquet]'
	@touch $@

SITE := .docs

# Strict: a broken link is an error. The reference is read from the sources, under the package's name: links to what
# is in it, as a link to the whole repository would lead back to itself.
docs: $(SITE)/.ready
	@mkdir -p $(SITE)/src/meshwright
	@for name in *.py */__init__.py; do ln -sfn "../../../$${name%/__init__.py}" $(SITE)/src/meshwright/; done
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict

$(SITE)/.ready: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv $(SITE)
	$(INSTALL) $(SITE)/bin/python -e '.[docs]'
	@touch $@

accuracy: $(DEV_READY)
	$(BIN)/python -m benchmarks.accuracy --quick

calibrate: $(DEV_READY)
	$(BIN)/python -m benchmarks.calibrate
	$(BIN)/python -m benchmarks.accuracy

clean:
	rm -rf $(VENV) $(ORACLES) $(RAY) $(SITE) $(MEASURE) $(SUPPLY) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A venv that was only half made, say without ensurepip, must not look finished the next time.
$(BIN)/python:
	@python=""; \
	for candidate in $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python3.14); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    python="$$candidate"; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "meshwright needs Python 3.11 or newer, and none of these is: $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python3.14)." >&2; \
	  echo "Install one (Debian, Ubuntu: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3" >&2; \
	  exit 1; \
	fi; \
	if ! "$$python" -m venv $(VENV); then \
	  rm -rf $(VENV); \
	  echo "$$python cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; \
	  exit 1; \
	fi

$(RUN_READY): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

# The development extra includes everything that a run needs.
# The locked versions; `make LOCK=` takes the newest that pyproject.toml allows.
LOCK ?= -c requirements-dev.lock

$(DEV_READY): pyproject.toml requirements-dev.lock | $(BIN)/python
	$(INSTALL) $(BIN)/python $(LOCK) -e '.[dev]'
	@touch $(RUN_READY) $@
