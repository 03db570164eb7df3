# `make pretrain` and `make test` work on a fresh machine: Linux, Python >= 3.11, make.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
READY := .venv/ready

# Of the GPUs here, those that DS_ACCELERATOR and CUDA_VISIBLE_DEVICES leave.
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
else  # the largest power of two, which divides the recipe's batch
  RANKS := $(shell n=2; while [ $$((2 * n)) -le $(GPUS) ]; do n=$$((2 * n)); done; echo $$n)
endif

# DeepSpeed takes `--num_gpus` from all GPUs of the machine, whatever is visible.
DEVICES := --num_gpus $(RANKS)
ifneq ($(GPUS),0)
ifneq ($(origin CUDA_VISIBLE_DEVICES),undefined)
  DEVICES := --include localhost:$(shell echo $(CUDA_VISIBLE_DEVICES) | cut -d, -f1-$(RANKS))
endif
endif

# `make gpu` installs nothing: it uses the given PYTHON, or .venv if `make setup` has created it.
ifeq ($(origin PYTHON),command line)
  GPU_PYTHON := $(PYTHON)
else
  GPU_PYTHON := $(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON))
endif

.PHONY: setup pretrain test lint soak cluster long exhaustive gpu

setup: $(READY)

$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  f"Threefold needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}; use make PYTHON=python3.11")'
	@echo "setting up .venv (a few minutes, once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.txt
	@touch $@

data/stdlib/manifest.json: | $(READY)
	@$(BIN)/python recipes/prepare_data.py

pretrain: $(READY) data/stdlib/manifest.json
	@port=$$($(BIN)/python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])') && \
	$(BIN)/deepspeed --quiet $(DEVICES) --master_port $$port \
	  recipes/pretrain.py recipes/tiny.toml $(LAYOUT) --run-dir runs/tiny $(ARGS)
ifeq ($(findstring --run-dir,$(ARGS)),)
	@$(BIN)/python recipes/convert.py to-hf runs/tiny runs/tiny/hugging_face --overwrite --prompt "def "
endif

soak: $(READY)
	@$(BIN)/python tests/fault_injection/soak.py $(ARGS)
	@$(BIN)/python tests/fault_injection/soak_control.py $(ARGS)
	@$(BIN)/python tests/fault_injection/soak_data.py $(ARGS)

# Many tests wait for processes: two files of tests run at a time, each with tests in order.
PARALLEL := --numprocesses 2 --dist loadfile

test: $(READY)
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

cluster: $(READY)
	@$(BIN)/python -m pytest tests/cluster -m "cluster and not exhaustive" -rs $(ARGS)

long: $(READY)
	@$(BIN)/python -m pytest -m long $(PARALLEL) $(ARGS)

# CI runs all other tests; run these after a change of the pipeline or of supervision.
exhaustive: $(READY)
	@$(BIN)/python -m pytest -m exhaustive -rs $(ARGS)

gpu:
	@$(GPU_PYTHON) -m tests.gpu $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
