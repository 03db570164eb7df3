# `make` lists the commands. All of them work on a fresh machine: Linux, Python >= 3.11, make.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
READY := .venv/ready
TRITON := .venv/triton/ready
MKDOCS := .venv/mkdocs/ready

# The number of GPUs that DS_ACCELERATOR and CUDA_VISIBLE_DEVICES allow.
comma := ,
ifeq ($(DS_ACCELERATOR),cpu)
  GPUS := 0
else ifneq ($(origin CUDA_VISIBLE_DEVICES),undefined)
  GPUS := $(words $(subst $(comma), ,$(CUDA_VISIBLE_DEVICES)))
else
  GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
endif

ifeq ($(GPUS),0)
  RANKS := 2
  export DS_ACCELERATOR ?= cpu
  export OMP_NUM_THREADS ?= 1
else ifeq ($(GPUS),1)
  RANKS := 1
  LAYOUT := --set layout.pipeline=1
else  # the largest power of two, because the number of ranks must divide the recipe's batch
  RANKS := $(shell n=2; while [ $$((2 * n)) -le $(GPUS) ]; do n=$$((2 * n)); done; echo $$n)
endif

# `deepspeed --num_gpus` ignores CUDA_VISIBLE_DEVICES, so the visible GPUs are passed explicitly.
DEVICES := --num_gpus $(RANKS)
ifneq ($(GPUS),0)
ifneq ($(origin CUDA_VISIBLE_DEVICES),undefined)
  DEVICES := --include localhost:$(shell echo $(CUDA_VISIBLE_DEVICES) | cut -d, -f1-$(RANKS))
endif
endif

# Ctrl-C also reaches the ranks, which save and stop. `deepspeed` alone would print a traceback and
# not wait for them. The launcher process that it starts still prints one if it is importing torch.
DEEPSPEED := $(BIN)/python -c 'from signal import SIGINT, SIG_DFL, signal; signal(SIGINT, SIG_DFL); \
  from deepspeed.launcher.runner import main; signal(SIGINT, lambda *_: None); main()'

# `make gpu` installs nothing: it uses PYTHON if given, or .venv if `make setup` has created it.
ifeq ($(origin PYTHON),command line)
  GPU_PYTHON := $(PYTHON)
else
  GPU_PYTHON := $(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON))
endif

.DEFAULT_GOAL := help
.PHONY: help setup pretrain reproduce test long exhaustive cluster soak fuzz mutants gpu lint format site

help: ## list these commands
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/make \1\t\2/p' Makefile | expand -t 17
	@echo
	@echo "ARGS passes options on: make pretrain ARGS='--set training.steps=50', make test ARGS=tests/models"

setup: $(READY) ## install the pinned packages into .venv; the other commands do it when needed

# Modules that few programs import. Python compiles each when it is first imported.
RARELY_USED := /tests?/|/testing/|/transformers/models/

$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  f"Threefold needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}; use make PYTHON=python3.11")'
	@echo "setting up .venv (a few minutes, once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --requirement requirements.txt
	@$(BIN)/python -m compileall -qq -j 0 -x '$(RARELY_USED)' .venv/lib || true # on all cores; pip would use one
	@touch $@

data/stdlib/manifest.json: | $(READY)
	@$(BIN)/python recipes/prepare_data.py

pretrain: $(READY) data/stdlib/manifest.json ## train recipes/tiny.toml and export it, in minutes
	@port=$$($(BIN)/python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])') && \
	$(DEEPSPEED) --quiet $(DEVICES) --master_port $$port \
	  recipes/pretrain.py recipes/tiny.toml $(LAYOUT) --run-dir runs/tiny $(ARGS)
ifeq ($(findstring --run-dir,$(ARGS)),)
	@$(BIN)/python recipes/convert.py to-hf runs/tiny runs/tiny/hugging_face --overwrite --prompt "def "
endif

reproduce: $(READY) ## reproduce published results and plain training loops, in 15 minutes
	@$(BIN)/python benchmarks/published_results.py $(ARGS)

soak: $(READY) ## kill and resume small runs hundreds of times, and check that nothing is lost
	@$(BIN)/python tests/fault_injection/soak.py $(ARGS)
	@$(BIN)/python tests/fault_injection/soak_control.py $(ARGS)
	@$(BIN)/python tests/fault_injection/soak_data.py $(ARGS)

# `make test BUDGET=600` fails if the tests need more core-seconds, whatever the machine's load.
BUDGET ?=
LIMIT := $(if $(BUDGET),--budget $(BUDGET))

# Compiled kernels are kept, because compiling them takes half a minute.
test long: export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor

# Bytecode is kept: otherwise each process would compile all modules of the repository.
export PYTHONDONTWRITEBYTECODE :=

test: $(READY) ## run the fast tests, five to ten minutes on two cores
	@$(BIN)/python -m tests.core_seconds $(LIMIT) $(BIN)/python -m tests.parallel $(ARGS)

fuzz: $(READY) ## fuzz every parser of files and options for five minutes
	@$(BIN)/python -m tests.fuzzing $(ARGS)

mutants: $(READY) ## seed small faults into copies of the code, and check that the tests notice each
	@$(BIN)/python -m tests.mutants $(ARGS)

cluster: $(READY) ## test launching and faults with Slurm and hosts on this machine (as root)
	@$(BIN)/python -m tests.parallel --processes 3 -m "cluster and not exhaustive" -rs tests/cluster $(ARGS)

# torch for CPUs does not include Triton, which the long tests need to compile GPU kernels. Triton is installed
# in .venv/triton, because torch and DeepSpeed would import it in every run if it were in .venv.
$(TRITON): requirements-triton.txt | $(READY)
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install --quiet \
	  --disable-pip-version-check --no-deps --upgrade --target .venv/triton --requirement requirements-triton.txt
	@mkdir -p .venv/triton && touch $@

long: $(READY) $(TRITON) $(MKDOCS) ## run the tests that take minutes, such as kills of a run at random instants
	@$(BIN)/python -m tests.core_seconds $(LIMIT) $(BIN)/python -m tests.parallel --processes 4 -m long $(ARGS)

# CI runs a few of these tests for each commit: --portion. Run all of them after a change to the
# pipeline or to supervision.
exhaustive: $(READY) ## run all other tests, which take hours: every layout, recipe and fault
	@$(BIN)/python -m pytest -m exhaustive -rs $(ARGS)

gpu: ## check losses, resuming, export and speed on your GPUs, for at most eight minutes; repeat with ARGS=--missing
	@$(GPU_PYTHON) -m tests.gpu $(ARGS)

lint: $(READY) ## check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(READY) ## format the code and apply the fixes that ruff considers safe
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# The packages of the site are next to .venv's own, which `make test` does not need, as Triton above.
$(MKDOCS): requirements-docs.txt | $(READY)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/mkdocs \
	  --requirement $<
	@touch $@

# The pages keep their places relative to each other, so that their links are those of the repository.
site: $(READY) $(MKDOCS) ## build the documentation site into .site/html, and check its links
	@rm -rf .site/pages && mkdir -p .site/pages
	@ln -s $(addprefix ../../,$(wildcard *.md) LICENSE docs) .site/pages
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=.venv/mkdocs $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "wrote .site/html; to search in it: $(BIN)/python -m http.server --directory .site/html"
