# make demo: a real model answers, through ring, persistent kernel and paged cache
# make test: the tests (CPU only); make test-cuda: those that need a GPU
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

# the driver maps windows that lie in memory, not on a disk
MEMORY := /dev/shm/blink_ref-tests

.PHONY: demo test test-cuda bench-cuda lint clean

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

# Keeps the figures under the card's name, such as bench/results/NVIDIA-H200.json.
bench-cuda: $(VENV:%=%/.for-development)
	$(RUN) -m pytest -q -m cuda bench --benchmark-json="bench/results/$(CARD).json"

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

$(VENV)/.for-development: pyproject.toml | $(VENV)/bin/python
	@echo "setting up $(VENV) for development"
	@$(VENV)/bin/python -m pip install -q --disable-pip-version-check -e '.[dev$(CUDA)]'
	@touch $@
