PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
CONFIG ?= examples/python-sources.toml
LARGER := examples/python-sources-64.toml
JOBS   ?= 3
MINUTES ?= 60
SEED   ?= 0
GPU_RESULTS ?= benchmarks/results/gpu
BIN    := $(VENV)/bin
READY  := $(VENV)/.headrace-ready
DOCS   := $(VENV)/.headrace-docs
# Files of tests side by side; a file stays in one process, as its tests share what they made.
TESTS  := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# Each of many processes would compile all that it imports, torch and the tests' asserts too.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo picture test slow long gpu benchmarks attack lint docs reference lock clean
.PHONY: installed compiled

help: ## list what can be made
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

installed: $(DOCS)

compiled: $(READY)
	$(BIN)/python -m pytest --collect-only -q >/dev/null

demo: $(READY) ## train on the Python sources of this machine, then plan them for 64 devices
	$(BIN)/headrace train $(CONFIG)
	@mkdir -p runs
	@echo && echo 'the same documents, an 8-billion-parameter model, 64 devices that need not be here:'
	$(BIN)/headrace plan $(LARGER) --picture runs/plan-64.svg

test: $(READY) ## run the tests
	$(TESTS) -m "not slow and not long"

slow: $(READY) ## run the tests that take longer
	$(TESTS) -m slow

long: $(READY) ## run the tests that CI has no time for
	$(BIN)/python -m pytest -m long

gpu: $(READY) ## test and measure on this machine's GPU, in seven commands
	$(BIN)/python -m pytest -m gpu tests/running/ops
	$(BIN)/python -m pytest -m gpu tests/running/gpu
	$(BIN)/python benchmarks/gpu_kernels.py --json $(GPU_RESULTS)/kernels.json
	$(BIN)/python benchmarks/gpu_layer.py --json $(GPU_RESULTS)/layer.json
	$(BIN)/python benchmarks/gpu_step.py --json $(GPU_RESULTS)/step.json
	$(BIN)/python benchmarks/gpu_loop.py --compiled --json $(GPU_RESULTS)/loop.json
	$(BIN)/headrace profile $(LARGER) --ranks 1 --set model.layers=2 --efficiency $(GPU_RESULTS)/device.json

benchmarks: $(READY) ## hold the papers' claims beside headrace anew, and write what the docs say of it
	$(BIN)/headrace papers --out benchmarks/results/papers
	$(BIN)/python docs/make_benchmarks.py

attack: $(READY) ## attack the library at random for MINUTES=60 (ARGS=--help: what else)
	PYTHONPATH=src:tests $(BIN)/python -m attacks --minutes $(MINUTES) --seed $(SEED) $(ARGS)

lint: $(READY) ## format, lint, types, spelling, dependencies, floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/codespell src tests benchmarks examples docs README.md CHANGELOG.md CONTRIBUTING.md
	$(BIN)/deptry src
	$(BIN)/lint-imports
	$(BIN)/python docs/make_reference.py --check
	$(BIN)/python docs/make_benchmarks.py --check
	$(BIN)/python docs/make_house.py --check
	$(BIN)/python docs/count_flows.py --check

docs: $(DOCS) ## build the documentation
	$(BIN)/sphinx-build -qW docs docs/_build

picture: $(READY) ## draw the plan that README.md shows anew
	$(BIN)/headrace plan examples/llama-8b.toml --ranks 64 \
	    --lengths 'lognormal:median=2000,sigma=1.8,max=131072' --picture docs/pictures/plan-64.svg

reference: $(READY) ## write the generated pages and the drawing of the documentation anew
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_benchmarks.py
	$(BIN)/python docs/make_house.py
	$(BIN)/python docs/count_flows.py

lock: ## pin anew what constraints.txt pins (needs uv)
	echo '$(TORCH)' | uv pip compile -q --universal --python-version 3.11 --all-extras \
	    --no-header --no-annotate -c /dev/stdin pyproject.toml \
	  | grep -vE '^(torch|triton|cuda-|nvidia-[cn])' >constraints.txt

clean: ## remove the virtual environment
	rm -rf $(VENV)

# A torch already there is kept; otherwise pip fetches $(TORCH), its CUDA build on Linux
# unless pip has been told of another (PIP_FIND_LINKS, PIP_INDEX_URL, pip.conf). Python
# compiles what is imported when it is, which is a small part of what is installed.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -q --no-compile '$(TORCH)'
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[dev]'
	touch $@

$(DOCS): $(READY)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[docs]'
	touch $@
