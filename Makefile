# make setup | model | demo | test | lint | bench | gpu | clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
WORKERS ?= 2

.PHONY: setup model demo test lint format bench gpu clean

setup: $(VENV)/.installed-$(EXTRAS)

$(VENV)/.installed-$(EXTRAS): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.$(if $(EXTRAS),[$(EXTRAS)])'
	touch $@

model: setup
	$(BIN)/python scripts/fetch_model.py

demo: model
	$(BIN)/python scripts/demo.py

test: model
	$(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadgroup

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: model
	$(BIN)/python scripts/bench_cpu.py

# tests, parity and benchmarks on an NVIDIA GPU: make gpu
gpu:
	$(MAKE) model EXTRAS=cuda,dev
	PYTHON=$(BIN)/python scripts/gpu_check.sh

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
