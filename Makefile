# Everything from a fresh clone, with Python 3.11 or newer and make alone:
#   make demo    installs what it needs into .venv and runs the main job
#   make check   installs into .venv and runs lint, types, floors and the fast tests
#   make test    installs into .venv and runs lint, types, floors and the tests, but for the slow and exhaustive ones
#   make test-all   and those too

PYTHON ?= python3
ARGS ?=
# A wheel index to take torch from, for a machine whose default torch is a CUDA build of several GB.
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-the-demo
PIP := $(BIN)/python -m pip --disable-pip-version-check
EXTRAS := ray,archive,trainer,demo,mooncake,reports,docs,dev
# The fast tests: without those that start processes (and whole folders of such), or try thousands of cases.
CHECK := -m 'not (ray or mooncake or queue or slow or exhaustive)' --ignore=tests/actors --ignore=tests/scenarios/faults --ignore=tests/demo \
  --ignore=tests/bench
TORCH := torch==2.13.0
# The reference verifier of the differential tests. It asks for a newer Python and a hundred packages that its verifier does
# not use: hence --no-deps --ignore-requires-python.
NEMO_GYM := nemo-gym==0.7.0

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo check test test-all bench lint format docs clean

help:  ## say what there is (the default)
	@echo 'usage: make TARGET [ARGS="..."] [PYTHON=python3.12] [TORCH_INDEX=URL]'
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

venv: $(STAMP)  ## make .venv and install everything into it

demo: $(DEMO_STAMP)  ## run the main job: reassemble demo $(ARGS)
	$(BIN)/reassemble demo $(ARGS)

check: lint  ## lint, types, floors and the fast tests (a minute): nothing that starts Ray, a queue, a store or a policy
	$(BIN)/pytest -q $(CHECK) $(ARGS)

test: lint  ## lint, types and floors, then the tests but for slow and exhaustive ones: pytest -q $(ARGS)
	$(BIN)/pytest -q -m 'not (slow or exhaustive)' $(ARGS)

test-all: lint  ## the same with all tests, as CI runs them
	$(BIN)/pytest -q $(ARGS)

bench: $(STAMP)  ## measure: reassemble bench $(ARGS)
	$(BIN)/reassemble bench $(ARGS)

lint: $(STAMP)  ## ruff, mypy, import-linter; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## the docs site into build/docs; a link or name that leads nowhere is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo 'build/docs/index.html'

clean:  ## remove .venv, caches and builds; runs/ stays
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || \
	  { echo 'make: no "$(PYTHON)" on the PATH. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: Python 3.11 or newer is needed, $(PYTHON) is $$("$(PYTHON)" -V 2>&1). Name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' || \
	  { echo 'make: $(PYTHON) has no venv module (Debian, Ubuntu: apt-get install python3-venv)' >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(VENV)

$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install '$(TORCH)' -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)')
	$(PIP) install -e '.[demo]' -c constraints.txt
	@touch $@

$(STAMP): $(DEMO_STAMP)
	$(PIP) install -e '.[$(EXTRAS)]' -c constraints.txt
	$(PIP) install --no-deps --ignore-requires-python '$(NEMO_GYM)'
	@touch $@
