# Everything is built into .venv; all that a machine needs beforehand is Python 3.11+ and Rust.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build

PYTHON ?= python3
BIN := .venv/bin
MATURIN := VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/maturin

VLLM ?= 0.32.0
VLLM_ENV := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/decodebench/vllm-$(VLLM)

.PHONY: build demo test test-rust test-python test-vllm check lint bench bench-fast clean

## Build the extension and install the package, with its tools, into .venv.
build: .venv/tools
	$(MATURIN) develop --release --locked --extras dev

.venv/tools: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade 'maturin>=1.9,<2'
	touch $@

## The built-in workload under the right selection, and under the one that destroys shared blocks.
demo: build
	$(BIN)/decodebench replay
	@echo
	@# Damage is what this one is to show: the memory check fails, with exit code 1.
	$(BIN)/decodebench replay --selection leading || [ $$? -eq 1 ]

## All tests.
test: test-rust test-python

test-rust:
	cargo test --workspace --exclude decodebench-py --locked

test-python: build
	$(BIN)/python -m pytest

## The connector under a real vLLM, VLLM=0.32.0 or another version that has a CPU build on PyPI. It
## is installed once, outside the checkout.
test-vllm: build
	PYTHON=$(PYTHON) tests/vllm/install.sh $(VLLM) $(VLLM_ENV)
	rm -rf target/vllm
	$(MATURIN) build --release --locked --out target/vllm
	$(BIN)/pip install --quiet --no-deps --target target/vllm/site target/vllm/*.whl
	$(BIN)/pip install --quiet --target target/vllm/site hypothesis
	@# vLLM's own imports warn.
	PYTHONPATH=$(CURDIR)/target/vllm/site $(VLLM_ENV)/bin/python -m pytest -W default tests/vllm

## What CI runs.
check: lint test bench-fast

lint: build
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --locked
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest decodebench._core

## Medians and ratios; every answer is checked before it is timed.
bench: build
	cargo bench --locked -p decodebench-core
	$(BIN)/python benches/plan_step.py
	$(BIN)/python benches/numpy_fill.py
	$(BIN)/python benches/replay.py

## The same, once and small: do they still run and agree?
bench-fast: build
	cargo bench --locked -p decodebench-core -- --test
	$(BIN)/python benches/plan_step.py --fast
	$(BIN)/python benches/numpy_fill.py --fast
	$(BIN)/python benches/gpu_fill.py --fake
	$(BIN)/python benches/replay.py --fast

clean:
	rm -rf .venv target
