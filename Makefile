# `make install` prepares everything in .venv; every other target does that first where needed.
# PYTHON=/path/to/python3.12 chooses the interpreter; VENV=DIR puts the environment elsewhere.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo "$$p"; break; }; \
	done)

export RAY_USAGE_STATS_ENABLED := 0
export HF_HUB_DISABLE_TELEMETRY := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install demo test test-quick check docs bench clean

help:
	@echo "make install     .venv with haversack and all it needs, pinned"
	@echo "make demo        score and generate on the default model, twice, and compare"
	@echo "make test        the whole test suite (make test-quick: without the slow ones)"
	@echo "make check       ruff and mypy"
	@echo "make docs        write the pages of docs/ that come from the code"
	@echo "make bench       throughput beside vLLM and transformers (PEERS=\"transformers\" picks)"
	@echo "make clean       remove caches and build outputs (not .venv)"

install: $(STAMP)

# setuptools comes first so that the package is built by the pinned one, not by a fetched one.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.10 or newer found: install one, or give PYTHON=/path/to/it" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 10) or \
		sys.exit(f"Python 3.10 or newer is needed, {sys.executable} is {v}"); \
		print(f"installing into $(VENV) with Python {v}")'
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "No virtual environment could be made (Debian: apt install python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test,dev,bench]'
	@touch $(STAMP)

demo: install
	$(BIN)/python -m cluster.demo

# Two processes, each with a Ray of its own.
PYTEST := $(BIN)/python -m pytest --numprocesses 2

test: install
	$(PYTEST)

test-quick: install
	$(PYTEST) -m "not slow"

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	$(BIN)/python -m docs.generator
	$(BIN)/python -m cluster.dashboards

bench: install
	$(BIN)/python -m bench.throughput $(if $(PEERS),--peers "$(PEERS)") $(BENCH_ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './.bench-venvs/*' -prune -exec rm -rf {} +
