# `make quickstart` and `make test` set up everything they need in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN = $(VENV)/bin
OUT ?= quickstart-out
NEWEST ?= .venv-newest
NEWEST_OUT ?= newest-out
GPU_OUT ?= gpu-report-out
GPU_OPTIONS ?=
GPU_PYTHON ?= python3
# Public tables of operators and collectives that `make bench` scores the models on.
DATA ?=
# Folder of public tables of step times and peak memory, for the same.
STEPS ?=
NO_DATA = benchmarks/models.py skipped: no tables given; make bench DATA='TABLE.csv.gz ...'
NO_STEPS = benchmarks/steps.py and memory.py skipped: no folder given; make bench STEPS=FOLDER

# A file of tests is one process's, since its tests share what they have trained.
SIDE_BY_SIDE = -n auto --dist loadfile --no-loadscope-reorder

# The versions of one day, where there is a file for this Python; without one the newest are taken.
PYVERSION = $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])')
CONSTRAINED = $(addprefix -c ,$(wildcard constraints-py$(PYVERSION).txt))

.PHONY: setup quickstart test test-room test-all test-nightly test-newest check docs dist bench gpu-report gpu-page clean

setup: $(VENV)/.ready

$(VENV)/.ready: setup.cfg pyproject.toml $(wildcard constraints-py*.txt)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(CONSTRAINED) torch==2.13.0
	$(BIN)/python -m pip install --quiet $(CONSTRAINED) -e '.[all,megatron,dev]'
	touch $@

quickstart: setup
	rm -rf $(OUT)
	$(BIN)/torchrun --standalone --nproc-per-node 2 recipes/pretrain_gpt.py \
	    --train-iters 200 --calibrate --calibrate-dir=$(OUT)
	$(BIN)/forerun report $(OUT)

# What a change is likeliest to break: in 6 minutes on two cores that do nothing else.
test: setup
	$(BIN)/python -m pytest -q -m 'not slow and not nightly' $(SIDE_BY_SIDE)

# Fast tests of one room, examples in docstrings, layers: make test-room ROOM=calib/steps
test-room: setup
	$(if $(ROOM),,$(error ROOM is not given; give a folder of tests/, as in make test-room ROOM=calib/steps))
	$(BIN)/python -m pytest -q -m 'not slow and not nightly' -n 2 --dist loadfile tests/$(ROOM) tests/test_layering.py \
	    tests/calib/test_doctests.py

# Before a merge.
test-all: setup
	$(BIN)/python -m pytest -q -m 'not nightly' $(SIDE_BY_SIDE)

# Benchmarks started as a user would, and the commands of the pages.
test-nightly: setup
	$(BIN)/python -m pytest -q -m nightly $(SIDE_BY_SIDE)

# What hooks meet tomorrow: the newest torch, transformers and Lightning, as pip gives them, in an
# environment of their own: tests of hooks (real loops over DDP and FSDP2 among them), the loops of
# recipes/, the quick start.  It takes 7 minutes of processor time, 2 of them for the environment.
test-newest: $(NEWEST)/.ready
	$(NEWEST)/bin/python -c 'import torch; print("torch", torch.__version__)'
	$(NEWEST)/bin/python -m pytest -q -m 'not slow and not nightly' tests/hooks $(SIDE_BY_SIDE)
	$(NEWEST)/bin/python -m pytest -q $(SIDE_BY_SIDE) \
	    tests/recipes/test_loops.py::test_a_loop_is_seen_described_and_answered
	rm -rf $(NEWEST_OUT)
	$(NEWEST)/bin/torchrun --standalone --nproc-per-node 2 recipes/pretrain_gpt.py \
	    --train-iters 200 --calibrate --calibrate-dir=$(NEWEST_OUT)
	$(NEWEST)/bin/forerun report $(NEWEST_OUT)

$(NEWEST)/.ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet 'torch>=2.14' -e '.[all,mcore,dev]'
	touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The site, into docs-out; a warning is an error.  The reference is written from the code first.
docs: setup
	$(BIN)/python docs/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel is built from the sdist, so that either is whole.
dist: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation

bench: setup
	$(BIN)/python benchmarks/costs/overhead.py
	rm -rf bench-out
	$(BIN)/python benchmarks/cpu_layouts.py --out bench-out --repetitions 3 --sizes recipe
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/costs/plan.py
	$(if $(strip $(STEPS)),$(BIN)/python benchmarks/memory.py $(STEPS),@echo "$(NO_STEPS)")
	$(if $(strip $(STEPS)),$(BIN)/python benchmarks/steps.py $(STEPS))
	$(if $(strip $(DATA)),$(BIN)/python benchmarks/models.py $(DATA),@echo "$(NO_DATA)")

# What only a GPU can show, on a machine with one and nothing else: no set-up, no network.  On any
# machine later, make gpu-page holds it against its bars.
# GPU_OPTIONS='--part 1 --carry FOLDER', or '--cpu --megatron CLONE' for a rehearsal.
gpu-report:
	$(GPU_PYTHON) benchmarks/gpu/collect.py --out $(GPU_OUT) $(GPU_OPTIONS)

gpu-page: setup
	$(BIN)/python benchmarks/gpu/judge.py $(GPU_OUT) --out $(GPU_OUT)/report.md

clean:
	rm -rf $(VENV) $(NEWEST) $(OUT) $(NEWEST_OUT) bench-out docs-out build dist *.egg-info
