# Every target sets up what it needs from nothing: Python 3.11 or newer with pip, and a package index.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
LOWEST_VENV ?= .venv-lowest
MOCK_VENV ?= .venv-mock
DOCS_VENV ?= .venv-docs
# Where torch comes from. Empty: the CPU build, from the index that pip is configured with if that has it, else from
# PyTorch's own. For a GPU, say, RLITE_TORCH_INDEX=https://download.pytorch.org/whl/cu130
RLITE_TORCH_INDEX ?=
# Hundreds of tests start processes: one that may not keep bytecode compiles torch and transformers at each start.
unexport PYTHONDONTWRITEBYTECODE

TORCH := $(shell sed -n 's/^torch==//p' constraints-cpu.txt)
# releases of torch for CUDA bring their own
TRITON := 3.9.0
BIN := $(VENV)/bin
SOURCES := rlite tests examples recipes benchmarks tools docs/generate_interfaces.py docs/generate_screenshots.py
# test files are distributed to this many processes: more than two cores, because tests also wait
JOBS ?= 3
# one thread each, and threads of tests that ask for more sleep when idle: they would spin on cores that others need
# a process of tests that has died is not replaced: what killed it may kill the next one
DEALT = --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder --max-worker-restart=0
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(DEALT)
# a quarter of the examples of property tests; `make nightly` tries them all
QUICKLY = $(PYTEST) -m "not slow and not nightly" --hypothesis-profile=quick

.DEFAULT_GOAL := help
.PHONY: help docs wheel wheel-check release-files test-lowest quickstart test test-fast test-vllm test-harness test-doors test-tinker test-transformers test-triton nightly gpu-check gpu-rehearsal check static core sloc interfaces format bench-vllm-env bench-trl-env clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

quickstart: $(VENV)/.installed  ## GRPO on a small reasoning task, on CPU, in a few minutes
	$(BIN)/rlite quickstart

test: $(VENV)/.peers-installed $(VENV)/.browser-installed $(VENV)/.tinker-0.38.0-installed  ## all tests but nightly ones, in three processes; without a GPU or Chromium, their tests are skipped
	$(PYTEST) -m "not nightly" --hypothesis-profile=quick tests

test-fast: JOBS = 2
test-fast: $(VENV)/.installed  ## for the inner loop: quick tests without worker processes and browsers, in less than three minutes
	$(QUICKLY) tests $(addprefix --ignore=tests/,browser integration peers)

# releases of the client of the Tinker API; `make test` and `make test-vllm` have the newest
TINKER = 0.25.0 0.30.0 0.34.0 0.38.0

test-vllm: JOBS = 3
test-vllm: MARKS = not nightly
test-vllm: CONTRACTS = test_inference_executors test_declared_methods test_actor_program
test-vllm: $(VLLM_VENV)/.tinker-$(lastword $(TINKER))-installed  ## tests of executor="vllm" with the real vLLM on CPU, in an environment of their own
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest $(DEALT) tests/vllm $(CONTRACTS:%=tests/contracts/%.py) -k vllm -m "$(MARKS)"

test-harness: $(VENV)/.harness-installed  ## tests of lm-evaluation-harness and Inspect AI against rlite's engines
	HF_HUB_OFFLINE=1 PYTHONPATH=$(abspath $(VENV)/harness) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/harness

# triton, which needs nothing else, stays outside the environment: torch must run without it
test-triton: $(VENV)/.triton-installed  ## tests of our GPU kernels without a GPU: by Triton's interpreter, and compiled ahead of time
	PYTHONPATH=$(abspath $(VENV)/triton) OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
		tests/unit/engine/test_triton_decode.py tests/unit/backends/models/test_triton_head.py

# each contract has packages of its own, because their pins exclude each other
DOORS ?= verifiers openenv openreward
test-doors: $(DOORS:%=$(VENV)/.door-%-installed)  ## tests of environments with the real verifiers, OpenEnv and openreward
	@failed=; for door in $(DOORS); do \
		HF_HUB_OFFLINE=1 PYTHONPATH=$(abspath $(VENV))/doors/$$door OMP_NUM_THREADS=1 \
			$(BIN)/python -m pytest tests/doors/test_$$door.py || failed="$$failed $$door"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

test-tinker: $(TINKER:%=$(VENV)/.tinker-%-installed) $(VENV)/.cookbook-installed  ## the server of the Tinker API with real clients of several releases, and recipes of its cookbook
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/tinker

# releases of transformers beside the pinned one: the oldest that rlite supports, and the newest
TRANSFORMERS = 5.17.0 5.24.0
VERSION ?= $(lastword $(TRANSFORMERS))
OTHER = $(abspath $(VENV))/transformers-$(VERSION)
test-transformers: $(VENV)/.installed  ## tests of models with another release of transformers: VERSION=5.17.0
	$(BIN)/pip install --quiet --no-deps --no-compile --upgrade --target $(OTHER) transformers==$(VERSION)
	$(BIN)/pip install --quiet --no-deps --no-compile --upgrade --target $(OTHER) \
		"$$(sed -n 's/^Requires-Dist: \(huggingface-hub[^;]*\).*/\1/p' $(OTHER)/transformers-*.dist-info/METADATA | head -n 1)"
	PYTHONPATH=$(OTHER) $(PYTEST) -m "not nightly" tests/unit/backends/models tests/unit/nn

test-lowest: $(LOWEST_VENV)/.installed  ## quick tests with the oldest releases that pyproject.toml allows
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(LOWEST_VENV)/bin/python -m pytest $(DEALT) -m "not slow and not nightly" \
		--hypothesis-profile=quick tests \
		$(addprefix --ignore=tests/,architecture browser integration peers release unit/benchmarks vllm)

# each is `python -m benchmarks.NAME`; one that fails does not keep the others from running
NIGHTLY = comparison_intervals audit_mutations hostile_models chaos chaos_jobs architectures
nightly: $(VENV)/.peers-installed $(VENV)/.browser-installed  ## what is too long for CI: long tests, attacks, faults, simulations, all models; about an hour
	@failed=; $(PYTEST) -m "nightly or hypothesis" tests || failed=tests; \
	$(MAKE) test-vllm MARKS=nightly || failed="$$failed vllm"; \
	$(MAKE) test-tinker || failed="$$failed tinker"; \
	$(MAKE) wheel-check || failed="$$failed wheel-check"; \
	{ $(MAKE) docs && $(BIN)/python -m tools.site.questions; } || failed="$$failed docs"; \
	$(MAKE) test-lowest || failed="$$failed test-lowest"; \
	for version in $(TRANSFORMERS); do \
		$(MAKE) test-transformers VERSION=$$version || failed="$$failed transformers-$$version"; \
	done; \
	for name in $(NIGHTLY); do \
		begun=$$(date +%s); echo "== $$name"; \
		$(BIN)/python -m benchmarks.$$name || failed="$$failed $$name"; \
		echo "== $$name took $$((($$(date +%s) - begun) / 60)) minutes"; \
	done; $(MAKE) gpu-rehearsal || failed="$$failed gpu-rehearsal"; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

gpu-check: $(VENV)/.installed  ## on a machine with a GPU: what works there, its tests, and a training benchmark
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu-check: torch %s finds no CUDA device here. On a machine with one: make gpu-check VENV=.venv-gpu RLITE_TORCH_INDEX=https://download.pytorch.org/whl/cu130" % torch.__version__)'
	$(BIN)/pip install --quiet -c constraints-cpu.txt -e ".[liger]"
	$(BIN)/python -m benchmarks.gpu_bringup --seconds 1800 --out outputs/bringup
	$(BIN)/python -m pytest tests/gpu
	$(BIN)/python -m benchmarks.gpu_training
	$(BIN)/python -m benchmarks.gpu_training --use-liger-kernel

gpu-rehearsal: $(MOCK_VENV)/.installed  ## without a GPU: the CUDA path on a mock of one, against budgets of waits, launches and memory
	$(MOCK_VENV)/bin/python -m tools.mock_gpu.rehearse $(ARGS)

check: static test  ## what CI runs: formatting, lint, types, layers, tests

static: $(VENV)/.installed  ## formatting, lint, types, layers
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

VERSION_OF_RLITE := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
DIST ?= dist
WHEEL = $(DIST)/rlite-$(VERSION_OF_RLITE)-py3-none-any.whl
# the wheel is built from the unpacked sdist, so that neither needs what only a checkout has
wheel: $(VENV)/.installed  ## sdist and wheel, in dist/
	$(BIN)/python -m hatchling build --directory $(DIST) --target sdist
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) $(DIST)/rlite-$(VERSION_OF_RLITE).tar.gz

# CHECK_PYTHON: the interpreter that the wheel is installed for
CHECK_PYTHON ?= $(PYTHON)
wheel-check: wheel  ## the wheel in an empty environment outside of the checkout: a smoke test, and the quickstart
	unset PYTHONPATH; scratch=$$(mktemp -d) && trap "rm -rf $$scratch" EXIT && $(CHECK_PYTHON) -m venv $$scratch/venv \
		&& { $(call install_torch,$$scratch/venv); } \
		&& $$scratch/venv/bin/pip install --quiet --no-compile -c constraints-cpu.txt "$(WHEEL)[quickstart]" \
		&& cp tests/release/smoke.py $$scratch && cd $$scratch && export PYTHONNOUSERSITE=1 HF_HUB_OFFLINE=1 \
		&& venv/bin/python smoke.py && venv/bin/rlite quickstart

# opens with `python -m http.server --directory site`; search needs a server, and nothing else does
docs: $(DOCS_VENV)/.installed  ## the documentation site, in site/; fails on a warning or a dead link
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --quiet --strict
	$(DOCS_VENV)/bin/python -m tools.site.check

release-files: $(VENV)/.installed  ## write CITATION.cff, SECURITY.md and the links of issue templates from pyproject.toml
	$(BIN)/python -m tools.release_files

core: $(VENV)/.installed  ## files that one GRPO step enters, in the order of use
	@$(BIN)/python -m benchmarks.core_path

sloc:  ## source lines of the library: no blanks, comments, docstrings
	@$(PYTHON) -m benchmarks.sloc

interfaces: $(VENV)/.installed  ## write docs/interfaces.md from the code
	$(BIN)/python docs/generate_interfaces.py

format: $(VENV)/.installed  ## rewrite the sources with ruff
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench-vllm-env: $(VLLM_VENV)/.installed  ## .venv-vllm: the real vLLM on CPU, for tests and benchmarks/peers/vllm_generate.py

bench-trl-env: .venv-trl/.installed  ## .venv-trl: TRL, for benchmarks/peers/trl_grpo.py

clean:  ## remove every environment and cache that make made
	rm -rf $(VENV) $(VLLM_VENV) $(LOWEST_VENV) $(MOCK_VENV) $(DOCS_VENV) .venv-trl $(DIST) site .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# $(call install_torch,VENV): the CPU build carries the suffix +cpu on Linux and none elsewhere
ifeq ($(RLITE_TORCH_INDEX),)
install_torch = $(1)/bin/pip install --quiet --no-compile "torch==$(TORCH)+cpu" 2>/dev/null \
	|| $(1)/bin/pip install --no-compile --extra-index-url https://download.pytorch.org/whl/cpu "torch==$(TORCH)"
else
install_torch = $(1)/bin/pip install --no-compile --index-url $(RLITE_TORCH_INDEX) "torch==$(TORCH)"
endif

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"rlite needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(call install_torch,$(VENV))
	$(BIN)/pip install --quiet --no-compile -c constraints-cpu.txt -e ".[dev]"
	touch $@

# for tests/peers, tests/contracts/test_sglang*.py and tests/integration/test_job_submission.py alone; torch and
# transformers are the environment's
$(VENV)/.peers-installed: $(VENV)/.installed tests/peers/requirements.txt
	$(BIN)/pip install --quiet --no-deps --no-compile --upgrade --target $(VENV)/peers -r tests/peers/requirements.txt
	touch $@

# for tests/harness alone, whose process finds the folder by PYTHONPATH
$(VENV)/.harness-installed: $(VENV)/.installed tests/harness/requirements.txt
	$(BIN)/pip install --quiet --no-deps --no-compile --upgrade --target $(VENV)/harness -r tests/harness/requirements.txt
	touch $@

# for tests of the server of the Tinker API alone, which add one of the folders to their path
install_tinker = $(1)/bin/pip install --quiet --no-deps --no-compile --upgrade --target $(1)/tinker/$(2) \
	-r tests/tinker/requirements.txt tinker==$(2)
$(VENV)/.tinker-%-installed: $(VENV)/.installed tests/tinker/requirements.txt
	$(call install_tinker,$(VENV),$*)
	touch $@
$(VLLM_VENV)/.tinker-%-installed: $(VLLM_VENV)/.installed tests/tinker/requirements.txt
	$(call install_tinker,$(VLLM_VENV),$*)
	touch $@

$(VENV)/.cookbook-installed: $(VENV)/.installed tests/tinker/cookbook.txt
	$(BIN)/pip install --quiet --no-deps --no-compile --upgrade --target $(VENV)/tinker/cookbook -r tests/tinker/cookbook.txt
	touch $@

# for tests/doors alone, whose process finds the folder by PYTHONPATH
$(VENV)/.door-%-installed: $(VENV)/.installed tests/doors/requirements-%.txt
	$(BIN)/pip install --quiet --no-compile --upgrade --target $(VENV)/doors/$* -r tests/doors/requirements-$*.txt
	touch $@

# for test-triton alone
$(VENV)/.triton-installed: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps --no-compile --upgrade --target $(VENV)/triton triton==$(TRITON)
	touch $@

# drives Chromium in tests/browser; the browser itself is the machine's
$(VENV)/.browser-installed: $(VENV)/.installed tests/browser/requirements.txt
	$(BIN)/pip install --quiet --no-compile -r tests/browser/requirements.txt
	touch $@

$(VLLM_VENV)/.installed: benchmarks/peers/requirements-vllm.txt constraints-cpu.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(call install_torch,$(VLLM_VENV))
	$(VLLM_VENV)/bin/pip install --quiet --no-deps --no-compile -r benchmarks/peers/requirements-vllm.txt
	$(VLLM_VENV)/bin/pip install --quiet --no-deps -e .
	touch $@

# reads the sources without importing them, so it needs neither rlite nor torch
$(DOCS_VENV)/.installed: tools/site/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet -r tools/site/requirements.txt
	touch $@

# the bounds of the dependencies of rlite itself; the rest is what pip finds beside them. A bound of torch below the pinned
# release replaces the CPU build
$(LOWEST_VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(call install_torch,$(LOWEST_VENV))
	sed -n '/^dependencies = \[/,/^\]/s/^ *"\([^>]*\)>=\([^"]*\)".*/\1==\2/p' pyproject.toml > $(LOWEST_VENV)/constraints.txt
	$(LOWEST_VENV)/bin/pip install --quiet --no-compile -c $(LOWEST_VENV)/constraints.txt -e ".[dev]"
	touch $@

# the CUDA build, whatever pip prefers: PyPI's wheel has no suffix in its version, which === demands
$(MOCK_VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(MOCK_VENV)
	$(MOCK_VENV)/bin/pip install --quiet --no-compile "torch===$(TORCH)"
	grep -v '^torch==' constraints-cpu.txt > $(MOCK_VENV)/constraints.txt
	$(MOCK_VENV)/bin/pip install --quiet --no-compile -c $(MOCK_VENV)/constraints.txt -e ".[lora,plot]"
	touch $@

.venv-trl/.installed: benchmarks/peers/requirements-trl.txt constraints-cpu.txt
	$(PYTHON) -m venv .venv-trl
	$(call install_torch,.venv-trl)
	.venv-trl/bin/pip install --quiet -r benchmarks/peers/requirements-trl.txt
	touch $@
