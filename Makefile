# `make demo` and `make test` set up everything they need in .venv, on a machine with or without a GPU.
# PYTHON=... picks the interpreter for a new .venv (3.11 or newer), K=expr selects tests by name.

SHELL := /bin/bash
PYTHON ?= python3
# What a new .venv gets: the version CI tests. A torch that is in .venv already is kept.
TORCH ?= torch==2.13.0
VENV ?= .venv
PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest $(if $(K),-k "$(K)")
# Files side by side; the tensors are tiny and every process runs one thread. In the order of their
# names: by default the files with few tests come last, and those are the longest ones.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu test-deep bench check format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-test  ## run the main example
	$(PY) examples/prefill.py

test: $(VENV)/.installed-test  ## CPU suite: references, interpreter, properties, gloo ranks
	$(PYTEST) $(PARALLEL)

test-gpu: $(VENV)/.installed-test  ## the tests that need CUDA devices, kernels compiled
	$(PYTEST) -m "gpu or dist_gpu"

test-deep: $(VENV)/.installed-test  ## the CPU suite with 5000 examples a property, and the slow tests
	$(PYTEST) -m "not gpu and not dist_gpu and not bench" --hypothesis-profile deep --timeout 3600

# OP=sparse_mla,topk selects ops; .peer is made by ../shared/peers/prepare.py (benchmarks/README.md).
bench: $(VENV)/.installed-test  ## time the kernels beside their peers on one GPU
	$(PY) benchmarks/kernels.py $(if $(OP),--only $(OP)) $(if $(wildcard .peer/peers.py),--peers .peer)

check: $(VENV)/.installed-dev  ## lint, format, types, house rules
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)
	$(PY) -m pytest -q tests/test_policy.py

format: $(VENV)/.installed-dev  ## apply the formatter and the safe lint fixes
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist

$(PY):
	$(PYTHON) -m venv $(VENV)

# Torch goes first and alone: the package's own range would bring the newest release.
define install
	$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install '$(TORCH)'
	$(PY) -m pip install --editable '.[$(1)]'
endef

$(VENV)/.installed-test: pyproject.toml | $(PY)
	$(call install,test)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(PY)
	$(call install,dev)
	@touch $@ $(VENV)/.installed-test
