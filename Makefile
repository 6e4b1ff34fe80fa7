# draftline: every target sets up what it needs.
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test chaos bench-protection lint types lock gpu-check clean

BIN := .venv/bin
ARGS ?=
SEEDS ?= 0-19
export PYTHON

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | while IFS='|' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

.venv/.ready: requirements/cpu.lock pyproject.toml
	@.ci/setup

setup: .venv/.ready ## virtual environment, pinned packages, system libraries (when root)

quickstart: .venv/.ready ## the whole pipeline on a small real model; ARGS=--no-wait ends it when it is done
	@exec $(BIN)/draftline run jobs/recipes/quickstart.yaml $(ARGS)

test: .venv/.ready ## unit and integration tests; ARGS go to pytest
	@exec $(BIN)/python -m pytest $(ARGS)

chaos: .venv/.ready ## kills parts of real runs, SEEDS=0-19, and compares the weights; ARGS=--plan says what it does
	@cd tests && exec $(CURDIR)/$(BIN)/python -m chaos.run --seeds $(SEEDS) $(ARGS)

bench-protection: .venv/.ready ## what a training pays for surviving: prints the ratio; ARGS=--help
	@cd tests && exec $(CURDIR)/$(BIN)/python -m benchmarks.protection $(ARGS)

lint: .venv/.ready ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.ready ## mypy
	$(BIN)/mypy

lock: .venv/.ready ## resolve the packages again and write requirements/cpu.lock
	$(BIN)/python .ci/lock

gpu-check: .venv/.ready ## whether the gpu extra resolves (needs a package index)
	$(BIN)/python -m pip install --dry-run --ignore-installed --quiet --report .venv/gpu-report.json '.[gpu]'
	@echo "the gpu extra resolves: .venv/gpu-report.json"

clean: ## remove caches and build leftovers; runs and .venv stay
	rm -rf build .pytest_cache .ruff_cache .mypy_cache .hypothesis platform/*.egg-info
	find platform jobs serve tests .ci -name __pycache__ -type d -prune -exec rm -rf {} +
