# `make up` and `make test` do everything on a bare machine with what README.md names. Options: ARGS="…".
SHELL := /bin/bash
VENV := .venv/bin
ARGS ?=
# Two workers: tests/conftest.py says which runs what. The slowest tests are listed at the end.
# Folders of which nothing, or hardly anything, is quick, not even the import.
NOT_QUICK := $(addprefix --ignore=tests/,api browser clients deploy e2e evaluation golden gpu local simulation training workflows)
PYTEST := $(VENV)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=50
.DEFAULT_GOAL := help
# Images often forbid bytecode, and uv installs none: then each start of a program compiles all that it imports, vLLM
# three times over. From bytecode ours start in a third to half of the time.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup up demo test test-long quick check format docs pins sbom audit bench bench-check bench-train gpu-check chaos

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup:  ## environment in pinned versions, for the CPU or CUDA as the machine is; DEVICE=cpu|cuda overrides
	@bash deploy/install.sh

up: setup  ## start everything on this machine; Ctrl-C stops it
	@$(VENV)/clawloop up $(ARGS)

demo:  ## see it learn: a pretrained model, a synthetic user, everything real; ARGS="--quick" (a toy), "--keep", "--seed 2"
	@began=$$(date +%s) && $(MAKE) --no-print-directory setup && $(VENV)/clawloop demo run --began $$began $(ARGS)

test: setup  ## all checks and tests, on real PostgreSQL, Temporal and vLLM
	@$(MAKE) --no-print-directory check
	$(PYTEST) -m "not long and not containers" $(ARGS)

test-long: setup  ## what `make test` has no time for, in one worker: some of it measures
	$(PYTEST) -n 0 -m "long and not containers" $(ARGS)

quick: setup  ## what needs no engine, no database and no patience
	$(PYTEST) $(NOT_QUICK) -m "not engine and not postgres and not slow and not long and not containers" $(ARGS)

check: setup  ## ruff, mypy strict, import-linter
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports

format: setup  ## what ruff can mend by itself
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

docs: setup  ## write what the code says into the tables of docs/
	@$(VENV)/python -m tests.rules.tables

bench: setup  ## a benchmark: ARGS="gateway", "judging --quick"; without ARGS: their list
	@$(VENV)/python -m benchmarks $(ARGS)

bench-check: setup  ## quick runs of the benchmarks, their ratios beside the committed ones; not on a busy machine
	@$(VENV)/python -m benchmarks check $(ARGS)

bench-train: setup  ## a training step beside PEFT + transformers and torchtune; ARGS="--gpu"
	@$(VENV)/python -m benchmarks train $(ARGS)

gpu-check:  ## a bare GPU machine's ten minutes, without set-up: ARGS="trainer", "serving"; before, here: ARGS="wheels"
	@$(if $(wildcard $(VENV)/python),$(VENV)/python,python3) -m benchmarks.gpu_check $(ARGS)

chaos: setup  ## faults by seed in the whole system while 16 sessions chat; ARGS="--runs 200 --seed 1"
	$(VENV)/python -m benchmarks.chaos $(ARGS)

pins: setup  ## resolve pyproject.toml's ranges anew, with hashes, for CPU and CUDA; ARGS="--upgrade", "--upgrade-package NAME"
	@bash requirements/resolve.sh $(ARGS)

sbom: setup  ## write sbom.json, a CycloneDX bill of materials of .venv
	@bash deploy/audit.sh sbom sbom.json

audit: setup  ## known vulnerabilities of all pinned packages, by pip-audit; needs PyPI's JSON API
	@bash deploy/audit.sh vulnerabilities
