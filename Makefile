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

.PHONY: help plan test check lint types unit slow accuracy clean

help:
	@echo "make plan      plan Llama-3.1-405B on 16,384 GPUs (installs into .venv the first time)"
	@echo "make test      everything: lint, types, all tests"
	@echo "make check     the same without the slow tests"
	@echo "make lint | types | unit | slow    one of them"
	@echo "make accuracy  the cost model against published, measured steps"
	@echo "make clean     remove .venv and caches"

plan: $(RUN_READY)
	$(BIN)/meshwright plan llama-3.1-405b --cluster llama3-24k --gpus 16384 --global-batch 2048 --seq-len 8192

test: lint types $(DEV_READY)
	$(BIN)/python -m pytest

check: lint types unit

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_READY)
	$(BIN)/mypy

unit: $(DEV_READY)
	$(BIN)/python -m pytest -m "not slow"

slow: $(DEV_READY)
	$(BIN)/python -m pytest -m slow

accuracy: $(RUN_READY)
	$(BIN)/meshwright validate tests/data/published_runs.yaml

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
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
$(DEV_READY): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $(RUN_READY) $@
