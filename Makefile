# Every target works on a machine with nothing but Python: .venv is made on first use and remade when its inputs change.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
SCRIPTS ?= $(filter-out benchmarks/common.py,$(sort $(wildcard benchmarks/*.py)))

.DEFAULT_GOAL := help
.PHONY: help train test lint bench docs clean
.NOTPARALLEL: # two pips must not write to one .venv

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  ARGS="..." passes arguments on: make train ARGS="--steps 50", make test ARGS="-k schedule"'

train: .venv/.installed ## train the example language model on 2 ranks
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 docs/examples/train_lm.py $(ARGS)

test: .venv/.installed ## run the tests
	$(BIN)/pytest --timeout 300 $(ARGS)

lint: .venv/.installed ## check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy docs/examples

bench: .venv/.installed ## run every benchmark, one after the other, or those in SCRIPTS
	set -e; for script in $(SCRIPTS); do $(BIN)/python $$script $(ARGS); done

docs: .venv/.installed ## check that the documentation's examples run and its links resolve
	$(BIN)/pytest --timeout 300 tests/docs $(ARGS)

clean: ## remove .venv, caches and results of runs
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints-dev.txt -e '.[dev,train]'
	touch $@
