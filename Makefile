# All but `gpu` work on a machine with nothing but Python: .venv is made on first use and remade when its inputs change.
PYTHON ?= python3
# Another version than the pinned one (several GB), in a folder of its own: make test TORCH=2.15.0
TORCH :=
VENV := .venv$(TORCH:%=-torch-%)
BIN := $(VENV)/bin
PINS := $(if $(TORCH),torch==$(TORCH),-c constraints-dev.txt)
# Clients with many dependencies: their functions run alone, from their files (tests/clients/sources.py).
SOURCES := ai2-olmo-core==3.0.0 axolotl==0.19.0 fairseq2==0.8.1 nemo-automodel==0.7.0 nvidia-modelopt==0.47.0 \
	transformer-engine==2.20.2 veomni==0.1.12 verl==0.9.1
ARGS ?=
SCRIPTS ?=
SEEDS ?= 100
# Three processes on 2 cores, each with its own ranks: two compute while one waits for messages.
PYTEST := $(BIN)/pytest -n 3 --timeout 300

# Some 20 processes read the same files: let the first one keep what it has compiled.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help train test test-ci test-exhaustive fuzz pairs soak mutations clients lint bench bench-check gpu docs clean
.NOTPARALLEL: # two pips must not write to one .venv

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  ARGS="..." passes arguments on: make train ARGS="--steps 50", make test ARGS="-k schedule"'

train: $(VENV)/.installed ## train the example language model on 2 ranks
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 docs/examples/train_lm.py $(ARGS)

test: $(VENV)/.installed ## run the tests, but for the long ones
	$(PYTEST) $(ARGS)

test-ci: $(VENV)/.installed ## run what CI runs beyond that: of the long tests, another share at each landing
	$(PYTEST) -n 2 -m "long and not rare" $(ARGS)

test-exhaustive: $(VENV)/.installed ## run all tests: before a release
	$(PYTEST) -n 2 --timeout 900 -m "" $(ARGS)

fuzz: $(VENV)/.installed ## compare runtimes on random programs: make fuzz SEEDS=1000 ARGS="--first 5000 --ranks 4"
	$(BIN)/python -m tests.programs --seeds $(SEEDS) $(ARGS)

pairs: $(VENV)/.installed ## compare them on programs with every pair of features: make pairs ARGS="--ranks 4"
	$(BIN)/python -m tests.programs pairs $(ARGS)

soak: $(VENV)/.installed ## train for 30 minutes with kills, slow ranks, full disks and errors: make soak ARGS="--minutes 2"
	$(BIN)/python -m tests.faults.soak $(ARGS)

mutations: $(VENV)/.installed ## put each of some 100 defects into a copy of the package; say which test notices it
	$(BIN)/python -m tests.mutations $(ARGS)

clients: $(VENV)/.clients ## run libraries that call fully_shard with torch's runtime and with ours, and compare
	$(PYTEST) -n 0 -m "" tests/clients $(ARGS)

lint: $(VENV)/.installed ## check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy docs/examples

bench: $(VENV)/.bench ## run every benchmark, or those in SCRIPTS, and render their tables and plots
	$(BIN)/python benchmarks/run.py $(SCRIPTS) -- $(ARGS); status=$$?; $(BIN)/python benchmarks/render.py && exit $$status

bench-check: $(VENV)/.bench ## run them again; print what got worse or better than the committed results
	$(BIN)/python benchmarks/check.py $(SCRIPTS)

gpu: ## all that one GPU can say, in 8 minutes: with PYTHON as it is, without .venv and network
	$(PYTHON) benchmarks/gpu/acceptance.py $(ARGS)

docs: $(VENV)/.installed ## write the reference from the docstrings; check that examples run and links resolve
	$(BIN)/python docs/reference/generate.py
	$(PYTEST) -m "" tests/docs $(ARGS)

clean: ## remove .venv, caches and results of runs
	rm -rf .venv* .mypy_cache .pytest_cache .ruff_cache build dist runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml constraints-dev.txt
	@echo 'Setting up $(VENV): pip downloads torch (several GB if the index has only its CUDA build) and the tools for tests.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PINS) -e '.[dev,train]'
	touch $@

$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/pip install $(PINS) -e '.[bench]'
	touch $@

$(VENV)/.clients: $(VENV)/.installed
	$(BIN)/pip install $(PINS) -e '.[clients]'
	$(BIN)/pip install --no-deps --target $(VENV)/client-sources $(SOURCES)
	touch $@
