# make demo: a real model answers, through ring, persistent kernel and paged cache
# make test: the tests (CPU only); make test-cuda: those that need a GPU
# make sanitize-cuda: the kernel that serves, and single phases, under NVIDIA's compute-sanitizer
# make compile-all: the kernel, compiled for each compute capability and type of numbers, with no GPU
# make soak: random histories of the engine, 20,000 of them
# make mutants: what the checker says when one barrier, acquire or release is left out of the engine
# make bench: figures of this machine, stored; make bench-compare: measured again, beside the stored ones
#
# Each target sets up $(VENV) by itself. Where the packages are already installed and there is no network,
# `make test-cuda VENV=` uses $(PYTHON) as it is.

PYTHON ?= python3
VENV ?= .venv

ifeq ($(VENV),)
RUN := $(PYTHON)
else
RUN := $(VENV)/bin/python
endif

# CUDA wheels only where there is a driver, of the major version that the driver speaks
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \(1[23]\).*/,cuda\1/p')

CARD = $(shell nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 | tr ' ' '-')

# phases that share the arena between warps, each launched alone: racecheck is slow
PHASES = tests/test_kernels_layers.py tests/test_kernels_attention.py tests/test_kernels_flash.py \
	tests/test_kernels_flash_decoding.py

# the driver maps windows that lie in memory, not on a disk
MEMORY := /dev/shm/blink_ref-tests

# figures of a kind of machine are kept under its name, such as bench/results/AMD-EPYC-2-cores.json
CPU_RESULTS = bench/results/$(shell $(RUN) -m bench.machine).json
CUDA_RESULTS = bench/results/$(CARD).json
COMPARE = --benchmark-columns=min,median,rounds --benchmark-group-by=fullname --benchmark-compare

kept = test -f "$(1)" || { echo "there is no stored run of this kind of machine ($(1)): make $(2) stores one"; exit 1; }

.PHONY: demo test test-cuda sanitize-cuda compile-all soak mutants bench bench-compare bench-cuda bench-cuda-compare notebook lint clean

demo: $(VENV:%=%/.for-use)
	@$(RUN) -m blink_ref generate --watch --chat --max-tokens 160 "Explain in three sentences why the sky is blue."
	@echo
	@echo "That was SmolLM2-135M: prompt and tokens went through a shared-memory ring to a persistent kernel, and"
	@echo "no host code ran for a token. What to type next:"
	@echo "  $(RUN) -m blink_ref generate 'Once upon a time'            another prompt"
	@echo "  $(RUN) -m blink_ref generate --model tiny 'Elizabeth'      a model of 1.3 million parameters"
	@echo "  $(RUN) -m blink_ref serve                                  an OpenAI-style server on port 8000"
	@echo "  less blink_ref/engine/persistent.py                                 the kernel: start reading there"

test: $(VENV:%=%/.for-development)
	$(RUN) -m pytest -q tests

test-cuda: $(VENV:%=%/.for-development)
	$(RUN) -m pytest -q -m cuda tests --basetemp=$(MEMORY)
	@rm -rf $(MEMORY)

sanitize-cuda: $(VENV:%=%/.for-development)
	compute-sanitizer --tool memcheck --error-exitcode 3 $(RUN) -m tests.sanitized
	compute-sanitizer --tool synccheck --error-exitcode 3 $(RUN) -m tests.sanitized
	compute-sanitizer --tool racecheck --error-exitcode 3 $(RUN) -m pytest -q -m cuda $(PHASES)

compile-all: $(VENV:%=%/.for-development)
	$(RUN) -m blink_ref compile --all

soak: $(VENV:%=%/.for-development)
	BLINK_REF_EXAMPLES=20000 $(RUN) -m pytest -q -x --timeout=0 tests/test_engine_histories.py tests/test_engine_fuzz.py

mutants: $(VENV:%=%/.for-development)
	$(RUN) -m tests.mutants

bench: $(VENV:%=%/.for-development)
	$(RUN) -m pytest -q -m "not cuda" bench --benchmark-json="$(CPU_RESULTS)"

bench-compare: $(VENV:%=%/.for-development)
	@$(call kept,$(CPU_RESULTS),bench)
	$(RUN) -m pytest -q -m "not cuda" bench $(COMPARE)="$(CPU_RESULTS)"

bench-cuda: $(VENV:%=%/.for-development)
	$(RUN) -m pytest -q -m cuda bench --benchmark-json="$(CUDA_RESULTS)"

bench-cuda-compare: $(VENV:%=%/.for-development)
	@$(call kept,$(CUDA_RESULTS),bench-cuda)
	$(RUN) -m pytest -q -m cuda bench $(COMPARE)="$(CUDA_RESULTS)"

notebook: $(VENV:%=%/.for-notebooks)
	$(RUN) -m jupytext --to ipynb notebooks/a_tokens_journey.py
	@echo "now: $(RUN) -m jupyter lab notebooks/a_tokens_journey.ipynb"

lint: $(VENV:%=%/.for-development)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.for-use: pyproject.toml | $(VENV)/bin/python
	@echo "setting up $(VENV)"
	@$(VENV)/bin/python -m pip install -q --disable-pip-version-check -e '.[serve$(CUDA)]'
	@touch $@

$(VENV)/.for-notebooks: pyproject.toml | $(VENV)/bin/python
	@echo "setting up $(VENV) for notebooks"
	@$(VENV)/bin/python -m pip install -q --disable-pip-version-check -e '.[notebooks$(CUDA)]'
	@touch $@

$(VENV)/.for-development: pyproject.toml | $(VENV)/bin/python
	@echo "setting up $(VENV) for development"
	@$(VENV)/bin/python -m pip install -q --disable-pip-version-check -e '.[dev$(CUDA)]'
	@touch $@
