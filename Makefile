# Every target sets up .venv by itself; nothing is needed but Python 3.11 to 3.13 with venv and pip.
#
#   make demo       partition a Llama and a T5 over four local ranks, prove, verify, train; writes out/
#   make test       the tests, without those marked slow       make test-all   all of them
#   make lint       ruff and mypy --strict                     make bench      step time against hand-written peers
#   make docs       the documentation site, into site/
#   make integrations   Lightning, Ray and Model Explorer in an environment of their own, and the tests that need them
#   make parsers    environments with other frameworks, for tests/integration/test_real_parsers.py
#
# TORCH_INDEX=https://download.pytorch.org/whl/cpu  installs torch from there (on Linux: the small CPU build)
# PYTHON=python3.12                                 uses that interpreter

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.installed-docs
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
FITS   := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
# Tests wait for the processes that they start, so a few more run than there are processors.
WORKERS ?= $(shell python3 -c 'import os; print(min(4, 3 * (os.cpu_count() or 1) // 2))' 2>/dev/null || echo 2)
PYTHON ?= $(firstword $(shell for p in python3 python3.13 python3.12 python3.11; do \
            $$p -c '$(FITS)' 2>/dev/null && echo $$p; done))

# The ranks of a test are processes of their own: one thread each.
export OMP_NUM_THREADS ?= 1
# And each would compile all modules anew where bytecode is not kept.
unexport PYTHONDONTWRITEBYTECODE
export HF_HUB_OFFLINE  ?= 1

.PHONY: setup demo test test-all lint format bench docs images parsers integrations clean

setup: $(STAMP)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "needs Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
	  && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (once; takes a few minutes)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints.txt torch
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(ARGS)

test-all: $(STAMP)
	@$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	@$(BIN)/python benchmarks/overhead.py --json $(ARGS)

$(DOCS): $(STAMP)
	@$(PIP) -c constraints.txt -e '.[docs]'
	@touch $@

# Without --quiet, which would hide the warnings that --strict counts.
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "the documentation is in site/index.html; with search: python3 -m http.server -d site"

images: $(STAMP)
	@$(BIN)/python docs/images/draw.py

# The frameworks whose configurations are read and written, each in an environment of its own, without CUDA. What their
# parsers import is listed by hand: their requirements would bring builds of torch for GPUs.
PARSERS ?= .parsers
OF_torchtitan := torchtitan==0.3.0 spmd_types==0.2.3 datasets==4.7.0 torchdata tensorboard triton tyro docstring_parser typeguard \
  einops safetensors torch_checkpointing
NEEDED_torchtitan := tokenizers pillow protobuf requests pyarrow pandas dill multiprocess xxhash aiohttp httpx absl-py tqdm
OF_deepspeed := deepspeed==0.19.8
NEEDED_deepspeed := hjson packaging psutil py-cpuinfo pydantic tqdm einops msgpack
OF_megatron-core := megatron-core==0.16.1
NEEDED_megatron-core := packaging

parsers: $(foreach name,torchtitan deepspeed megatron-core,$(PARSERS)/$(name)/.installed)

$(PARSERS)/%/.installed: Makefile
	@echo "installing $* into $(@D)"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 \
	  --index-url $(or $(TORCH_INDEX),https://download.pytorch.org/whl/cpu)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check numpy pyyaml $(NEEDED_$*)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(OF_$*)
	@touch $@

# Lightning, Ray Train and Model Explorer in an environment of their own, which sees the packages of .venv. It is no nightly part of the
# tests: Ray is 200 MB, and starts its processes for each test.
INTEGRATIONS ?= .integrations
WITH         := $(INTEGRATIONS)/bin/python
INTEGRATED   := tests/integration/test_lightning.py tests/integration/test_ray_train.py \
  tests/partitioner/reports/test_viewers.py

$(INTEGRATIONS)/.installed: Makefile pyproject.toml $(STAMP)
	@echo "installing into $(INTEGRATIONS)"
	@$(PYTHON) -m venv $(INTEGRATIONS)
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
	  > "$$($(WITH) -c 'import site; print(site.getsitepackages()[0])')/venv.pth"
	@$(WITH) -m pip install --quiet --disable-pip-version-check 'lightning>=2.6' 'ray[train]>=2.40' 'setuptools>=77'
	@$(WITH) -m pip install --quiet --disable-pip-version-check --no-deps ai-edge-model-explorer
	@touch $@

integrations: $(INTEGRATIONS)/.installed
	@PYTHONPATH=$(CURDIR) $(WITH) -m pytest $(INTEGRATED) $(ARGS)
	@PYTHONPATH=$(CURDIR) $(WITH) -m pytest tests/integration/test_examples.py -k "lightning or ray" $(ARGS)

clean:
	rm -rf $(VENV) out build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
