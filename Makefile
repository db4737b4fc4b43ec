# Needs make, Python 3.10 to 3.13 with pip, PyPI and, for the tests, a C++ compiler.
# Nothing outside this folder is changed. PYTHON=python3.12 make demo takes another
# interpreter.

SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(firstword $(foreach python,python3 python3.13 python3.12 python3.11 \
  python3.10 python,$(shell $(python) -c '$(SUPPORTED)' 2>/dev/null && echo $(python))))
VENV ?= .venv
BUILD ?= build
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO := $(BUILD)/demo
CODE := launcher strategies tests benchmarks configs docs k8s tools
HOROVOD ?= .cache/horovod
BENCHMARKS := $(filter-out __init__ dummy_worker group_kills kill_sequence kills oracle prediction search,$(basename $(notdir $(wildcard benchmarks/*.py))))
RUNS ?= 50
KILLS ?= 30
GROUP_RUNS ?= 30
# One more than cores: tests that run out of memory mostly wait for TensorFlow to say so.
JOBS ?= $(shell echo $$(($$(nproc) + 1)))

# A failed test is run once more; RERUNS=0 make test does without. See decision 0030.
RERUNS ?= 1

.PHONY: help demo test check chaos horovod keras-suite versions bench bench-memory clean
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' Makefile | awk -F'|' '{printf "%-20s%s\n", $$1, $$2}'

demo: $(VENV)/.demo ## set up, run the main job, show how it went
	@$(BIN)/python -m compileall -q launcher strategies
	rm -rf $(DEMO)
	mkdir -p $(DEMO)
	cd $(DEMO) && $(abspath $(BIN))/oomrun $(abspath configs/quickstart/job.yaml)
	@echo
	cd $(DEMO) && $(abspath $(BIN))/oomrun status runs/quickstart

test: check $(VENV)/.horovod ## set up, run all checks and all tests but the slow ones
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(JOBS) --reruns $(RERUNS)

check: $(VENV)/.test ## lint, types, import contracts
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/mypy tools
	$(BIN)/lint-imports

chaos: $(VENV)/.horovod keras-suite ## kills at random moments (RUNS=50, KILLS=30 of one job, GROUP_RUNS=30), the slow tests, keras-suite
	@mkdir -p $(BUILD)/bench
	$(BIN)/python -m benchmarks.kills --runs $(RUNS) > $(BUILD)/bench/kills.json
	@cat $(BUILD)/bench/kills.json
	$(BIN)/python -m benchmarks.kills --in-sequence $(KILLS) \
	  > $(BUILD)/bench/kills_in_sequence.json
	@cat $(BUILD)/bench/kills_in_sequence.json
	$(BIN)/python -m benchmarks.group_kills --runs $(GROUP_RUNS) \
	  > $(BUILD)/bench/group_kills.json
	@cat $(BUILD)/bench/group_kills.json
	$(BIN)/python -m pytest -m slow -n $(JOBS) || [ $$? -eq 5 ] # 5: no test is marked so

horovod: $(VENV)/.horovod ## Horovod, built against the TensorFlow in .venv (CPU, Gloo)

keras-suite: $(VENV)/.keras ## Keras's own tests pass under oomrun as they do plain
	@mkdir -p $(BUILD)/bench
	$(BIN)/python tests/keras_suite/compare.py --folder $(BUILD)/keras-suite \
	  > $(BUILD)/bench/keras_suite.json || { cat $(BUILD)/bench/keras_suite.json; exit 1; }
	@cat $(BUILD)/bench/keras_suite.json

versions: $(VENV)/.venv ## the lowest and the newest TensorFlow, Keras and Python
	$(BIN)/python tests/versions/matrix.py --folder $(BUILD)/versions

bench: $(VENV)/.horovod ## the benchmarks; their JSON goes to build/bench
	@mkdir -p $(BUILD)/bench
	@set -e; for name in $(BENCHMARKS); do echo "$$name"; \
	  PYTHONPATH=tests:tests/e2e $(BIN)/python -m benchmarks.$$name > $(BUILD)/bench/$$name.json; \
	  cat $(BUILD)/bench/$$name.json; done

bench-memory: $(VENV)/.test ## what is planned against what fits: an hour and more
	@mkdir -p $(BUILD)/bench
	@set -e; for name in prediction search; do echo "$$name"; \
	  PYTHONPATH=tests $(BIN)/python -m benchmarks.$$name --json \
	    > $(BUILD)/bench/$$name.json; cat $(BUILD)/bench/$$name.json; done

clean: ## remove all that make has made
	rm -rf $(VENV) $(BUILD) .cache dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
	  .import_linter_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: one says that the environment exists, the others what is installed.

$(VENV)/.venv:
	$(if $(PYTHON),,$(error no Python 3.10 to 3.13 found; name one: PYTHON=... make))
	@rm -rf $(VENV)
	@# Debian keeps ensurepip apart: then the pip that is there installs into it.
	$(PYTHON) -m venv $(VENV) || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install pip; }
	@touch $@

$(VENV)/.demo: $(VENV)/.venv pyproject.toml
	$(PIP) install --quiet --editable '.[tensorflow]'
	@touch $@

$(VENV)/.test: $(VENV)/.venv pyproject.toml
	$(PIP) install --quiet --editable '.[test]'
	@touch $@ $(VENV)/.demo

# Some minutes the first time. HOROVOD_GPU_OPERATIONS=NCCL make horovod, and the other
# variables of Horovod's own build, are passed through.
$(VENV)/.horovod: $(VENV)/.test tools/build_horovod.py
	$(BIN)/python tools/build_horovod.py --cache $(HOROVOD)
	@touch $@

$(VENV)/.keras: $(VENV)/.test pyproject.toml
	$(PIP) install --quiet --editable '.[keras-tests]'
	@touch $@ $(VENV)/.test $(VENV)/.demo
