# Everything happens in a virtual environment inside the clone; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Some images set it, and then each of the processes that tests start would compile zbpipe anew.
unexport PYTHONDONTWRITEBYTECODE
# What is imported is compiled then; pip would compile all of torch, for each environment.
export PIP_NO_COMPILE := 1
# What each of the processes with tests would compile at the same time.
IMPORTED := torch._inductor.compile_fx, torch.distributed.pipelining

ACTIVATE := echo "zbpipe is installed in $(VENV): run \`. $(BIN)/activate\`, then zbpipe --help"

.DEFAULT_GOAL := help
.PHONY: help demo test everything types tests quick coverage test-oldest test-torch test-python test-titan02 test-automodel test-models long mutants interleavings wheel compatibility gallery docs format clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

demo: $(VENV)/titan  ## set up, train TorchTitan's Llama with 1F1B, ZBVZeroBubble and ZBV
	$(BIN)/zbpipe demo
	@$(ACTIVATE)

test:  ## set up what is missing, then lint, type checks and the tests
everything: SELECT := -m "" --ignore=tests/test_torch.py
everything:  ## the same with all tests, also those that are left to CI

# The types are checked beside the tests, which often wait.
test everything: $(VENV)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(MAKE) --no-print-directory --jobs 2 types tests SELECT='$(SELECT)'

types:
	$(BIN)/mypy

tests:
	$(PYTEST) $(SELECT)

# Tests that wait, for ranks or a browser, run beside those that compute. Each process takes four seconds to begin.
WORKERS := 3
SPREAD := -q --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/pytest $(SPREAD)

quick: $(VENV)/dev  ## what tells most in half a minute, without TorchTitan
	$(PYTEST) $(QUICK:%=tests/test_%.py) $(OF_SCHEDULES:%=tests/test_schedules.py::test_%)

# The other tests need no torch, or TorchTitan.
QUICK := accumulation costs ir layer_costs actions split split_page validation waiting
OF_SCHEDULES := bubble_and_memory v_half v_min dualpipe_v zbv_has_no_bubble_but_the_skew_at_the_start warm_up_forwards_of_zbv
RUN_ON_TORCH := accumulation capture compile data_parallel faults fill_waits frameworks actions reduction refusals split split_memory steps torch waiting warm_up

# Those whose outcome may differ.
OF_VERSIONS := -m '(not long or versions) and not newest'

test-oldest: $(VENV)-oldest/dev  ## what runs on torch alone, with an older one (2.13.0) in an environment of its own
	$(VENV)-oldest/bin/pytest $(SPREAD) $(OF_VERSIONS) $(RUN_ON_TORCH:%=tests/test_%.py)

TORCH := 2.12.0
test-torch: $(VENV)-torch-$(TORCH)/dev  ## what works on another torch, written into docs/compatibility.md: TORCH=2.12.0
	$(VENV)-torch-$(TORCH)/bin/pytest -m '' tests/test_torch.py --write-compatibility

test-titan02: $(VENV)-titan02/dev  ## torchtitan 0.2.2 on torch 2.13.0, and Primus, in an environment of its own
	$(VENV)-titan02/bin/python -m pytest $(SPREAD) $(OF_VERSIONS) tests/test_titan.py tests/test_matrix.py tests/test_titan_integration.py tests/test_primus.py $(WRITE)

test-automodel: $(VENV)-automodel/dev  ## NeMo AutoModel 0.7.0 on torch 2.13.0, in an environment of its own
	$(VENV)-automodel/bin/python -m pytest -q tests/test_automodel.py $(WRITE)

MODELS := transformers==5.24.0 timm==1.0.31 diffusers==0.42.1 peft==0.21.2 torchao==0.18.0 torchvision==0.28.0
# The tests of the first file are spread one by one; those of the second share processes.
test-models: $(VENV)-models/dev  ## models of transformers, timm, diffusers, peft, torchao and torchvision, in an environment of its own
	$(VENV)-models/bin/python -m pytest $(SPREAD) --dist worksteal tests/test_models.py
	$(VENV)-models/bin/python -m pytest -q tests/test_pipelined_models.py

WITHOUT_TORCH := costs ir jitter planner published simulation testing transport validation views wrong_input
test-python: $(VENV)-without-torch/dev  ## what needs no torch, on another Python: PYTHON=python3.14
	PYTHONPATH=tests $(VENV)-without-torch/bin/pytest --noconftest -p determinism $(WITHOUT_TORCH:%=tests/test_%.py)

long: $(VENV)/dev  ## the tests that are left to CI: some 100 small models against plain autograd, TorchTitan with everything turned on, ...
	$(PYTEST) -m long --ignore=tests/test_torch.py

PART := 1/1
mutants: $(VENV)/dev  ## put a fault at a time into a copy of the package: a test has to find each; PART=3/10 takes a tenth
	$(BIN)/python tests/mutants.py --part $(PART)

SCALE := 1
interleavings: $(VENV)/dev  ## run a million orders of the ranks' turns, in six minutes; SCALE=0.1 takes a tenth
	PYTHONPATH=benchmarks $(BIN)/python tests/interleavings.py --scale $(SCALE)

compatibility: $(VENV)/dev  ## make docs/compatibility.md and the refusals of docs/the-split.md anew
	$(BIN)/pytest -q -m '' tests/test_matrix.py tests/test_torch.py tests/test_split_page.py --write-compatibility

coverage: $(VENV)/dev  ## which lines the quick tests and a few pipelines reach, by folder; not in CI
	$(BIN)/pip install --quiet 'coverage>=7.10'
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q $(COVERED:%=tests/test_%.py)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-empty

COVERED := $(QUICK) simulation planner views cli profiler steps faults frameworks gradient_check refusals

wheel: $(VENV)/dev $(VENV)-wheel/dev  ## build wheel and sdist, and try the wheel from an empty folder
	.ci/wheel

gallery: $(VENV)/dev  ## make schedules/ anew
	$(BIN)/python schedules/regenerate.py

docs: $(VENV)-docs/dev  ## build the documentation into site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(VENV)-docs/bin/mkdocs build --quiet --strict

format: $(VENV)/dev  ## put the code into its standard form
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove the environment and all caches
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-torch-* $(VENV)-titan02 $(VENV)-automodel $(VENV)-models $(VENV)-docs $(VENV)-wheel $(VENV)-without-torch
	rm -rf dist .mypy_cache .ruff_cache .pytest_cache .hypothesis outputs site

CHECK_PYTHON := $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "zbpipe needs Python 3.11 or newer; set PYTHON=..."; exit 1; }

$(BIN)/python:
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --upgrade pip  # that of Python 3.11 takes a third longer

# The pip of the first environment installs into the others, which need none.
PIP = $(BIN)/pip --python $(@D)/bin/python install --quiet
$(VENV)-%/bin/python: | $(BIN)/python
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv --without-pip $(VENV)-$*

# The marks are made again when pyproject.toml changes, so that new dependencies arrive.
$(VENV)/titan: EXTRAS := titan
$(VENV)/dev: EXTRAS := titan,dev
$(VENV)/titan $(VENV)/dev: pyproject.toml | $(BIN)/python
	@echo "Installing torch and TorchTitan into $(VENV); this takes a few minutes."
	$(PIP) 'torch>=2.14' 'torchtitan>=0.3,<0.4' --editable '.[$(EXTRAS)]'
	@# At the same time the search is compiled.
	@$(BIN)/python -c 'import zbpipe; zbpipe.plan(4, 6, (1, 1.2, 0.8), 2.5, placements=["v"])' & \
		$(BIN)/python -c 'import $(IMPORTED), torchtitan.train' 2>/dev/null; wait
	@touch $@

$(VENV)-oldest/dev: pyproject.toml | $(VENV)-oldest/bin/python
	$(PIP) torch==2.13.0 --editable '.[dev]'
	@$(VENV)-oldest/bin/python -c 'import $(IMPORTED)'
	@touch $@

# The frameworks with torch 2.13 see the packages of that environment, and install the others.
WITH_OLDEST := $(VENV)-titan02/dev $(VENV)-automodel/dev $(VENV)-models/dev
$(WITH_OLDEST): %/dev: pyproject.toml $(VENV)-oldest/dev | %/bin/python
	@$*/bin/python -c 'import sys, sysconfig; own = sysconfig.get_path("purelib"); open(own + "/oldest.pth", "w").write(own.replace(sys.prefix, "$(abspath $(VENV)-oldest)"))'
	$(PIP) torch==2.13.0 $(PACKAGES)
	@touch $@
# The CPU's build of torch brings no triton, which torchtitan imports.
$(VENV)-titan02/dev: PACKAGES := triton --editable '.[titan02,dev]'
# AutoModel 0.7.0 shards by names of FSDP2 that torch 2.15 lacks, and Triton 3.9 refuses one of its kernels.
$(VENV)-automodel/dev: PACKAGES := nemo-automodel==0.7.0 'triton<3.9' --editable '.[dev]'
$(VENV)-models/dev: PACKAGES = $(MODELS) --editable '.[dev]'

# What zbpipe depends on without an extra.
$(VENV)-without-torch/dev: pyproject.toml | $(VENV)-without-torch/bin/python
	$(PIP) hypothesis pytest pytest-timeout --editable .
	@touch $@

$(VENV)-torch-$(TORCH)/dev: pyproject.toml | $(VENV)-torch-$(TORCH)/bin/python
	$(PIP) torch==$(TORCH) --editable '.[dev]'
	@touch $@

# The extra `docs` alone: pip would bring zbpipe with it.
$(VENV)-docs/dev: pyproject.toml | $(VENV)-docs/bin/python
	$| -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		| $(PIP) --requirement /dev/stdin
	@touch $@

$(VENV)-wheel/dev: pyproject.toml | $(VENV)-wheel/bin/python
	$(PIP) build 'hatchling>=1.25'
	@touch $@
