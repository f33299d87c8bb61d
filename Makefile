# Each command makes its own environment first, where it is missing or stale.
# PADDLE=3.1.1 works in an environment of its own; PYTHON=/path/to/python3.11 chooses the interpreter.

PADDLE ?= 3.3.1
VENV := $(if $(filter 3.3.1,$(PADDLE)),.venv,.venv-$(PADDLE))
BIN := $(VENV)/bin
export PYTHON

# GPUs need Paddle's GPU build, which is installed by hand: its environment's `galvatron` is taken where one is active.
GALVATRON ?= $(if $(shell command -v galvatron),galvatron,$(BIN)/galvatron)

.PHONY: help setup quickstart gpu-check lint test test-lint test-run test-full validate docs pages wheels clean

help:
	@echo "make quickstart   measure this machine, search a plan, train with it (at most 10 minutes)"
	@echo "make test         style, types, the package's import rules and tests (about 13 minutes on two cores)"
	@echo "make test-full    the long tests too (at most 80 minutes)"
	@echo "make validate     predictions compared with real steps, on two idle cores (at most 20 minutes)"
	@echo "make gpu-check    try this node's GPUs in ten minutes, in the active environment (ARGS='--nproc 2 --parts parity')"
	@echo "make lint         style, types, the package's import rules, English and size only"
	@echo "make docs         the documentation as a site, in build/site (at most 2 minutes)"
	@echo "make pages        the pages and tables of the documentation that are made from the code"
	@echo "make wheels       a wheel for each CPython of 3.11 to 3.13 that is here, in build/wheels"
	@echo "make setup        the environment only"
	@echo "make clean        remove environments, builds, caches and runs"

setup:
	@scripts/setup.sh $(VENV) $(PADDLE)

quickstart: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/quickstart.sh

gpu-check:
	@$(GALVATRON) gpu-check $(ARGS)

lint: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/english.py
	@$(BIN)/python tools/size.py

# Lint has a core of its own while it runs; its report comes in one piece. Workers wait for ranks a third of their time.
WORKERS ?= 3
test: setup
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-lint test-run

test-lint:
	@report=$$(MAKEFLAGS= $(MAKE) --no-print-directory lint 2>&1); code=$$?; printf '%s\n' "$$report"; exit $$code

test-run:
	@$(BIN)/pytest -m "not slow" --numprocesses $(WORKERS) --dist worksteal --durations 20

test-full: lint
	@scripts/test_full.sh $(VENV)

validate: setup
	@GALVATRON=$(BIN)/galvatron scripts/validate.sh

pages: setup
	@$(BIN)/python tools/pages.py
	@$(BIN)/python tools/blocks.py

wheels:
	@scripts/wheels.sh

docs:
	@scripts/build_docs.sh .venv-docs

clean:
	rm -rf .venv .venv-* build dist runs *.egg-info .test-full .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
