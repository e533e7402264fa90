# `make up` and `make test` do everything on a bare machine with Python 3.11 or 3.12. Options: ARGS="…".
SHELL := /bin/bash
VENV := .venv/bin
ARGS ?=
.DEFAULT_GOAL := help
# Images often forbid bytecode, and uv installs none: then each start of a program compiles all that it imports, vLLM
# three times over. From bytecode ours start in a third to half of the time.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup up demo test test-long quick check format pins bench bench-temporal bench-publish bench-injections bench-direct-vote bench-train

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup:  ## environment in pinned versions, for the CPU or CUDA as the machine is; DEVICE=cpu|cuda overrides
	@bash deploy/install.sh

up: setup  ## start everything on this machine; Ctrl-C stops it
	@$(VENV)/clawloop up $(ARGS)

demo:  ## see it learn: a toy model, a synthetic user, everything real; ARGS="--keep", "--faults", "--seeds 10"
	@began=$$(date +%s) && $(MAKE) --no-print-directory setup && $(VENV)/clawloop demo run --began $$began $(ARGS)

test: setup  ## all checks and tests, on real PostgreSQL, Temporal and vLLM
	@$(MAKE) --no-print-directory check
	$(VENV)/python -m pytest -m "not long" $(ARGS)

test-long: setup  ## what `make test` has no time for
	$(VENV)/python -m pytest -m long $(ARGS)

quick: setup  ## what needs no engine, no database and no patience, under a minute
	$(VENV)/python -m pytest -m "not engine and not postgres and not slow and not long" $(ARGS)

check: setup  ## ruff, mypy strict, import-linter
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports

format: setup  ## what ruff can mend by itself
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

bench: setup  ## side-by-side figures of the relay
	$(VENV)/python -m benchmarks.relay $(ARGS)

bench-temporal: setup  ## what a chat notices of Temporal: up, hanging and ended side by side
	$(VENV)/python -m benchmarks.temporal_away $(ARGS)

bench-publish: setup  ## gaps between tokens while versions are published, trainer idle and busy
	$(VENV)/python -m benchmarks.publish $(ARGS)

bench-injections: setup  ## how often injected text sways a judge; ARGS="--url URL --name MODEL" for one on vLLM
	$(VENV)/python -m benchmarks.injections $(ARGS)

bench-direct-vote: setup  ## one direct vote beside m sampled ones: agreement, tokens, time; ARGS as bench-injections
	$(VENV)/python -m benchmarks.direct_vote $(ARGS)

bench-train: setup  ## a training step beside PEFT + transformers and torchtune; ARGS="--gpu" with CUDA
	$(VENV)/python -m benchmarks.train_step $(ARGS)

pins: setup  ## resolve pyproject.toml's ranges anew, for CPU and CUDA; ARGS="--upgrade", "--upgrade-package NAME"
	@bash requirements/resolve.sh $(ARGS)
