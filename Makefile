# make demo    run every example on whatever device is here
# make test    the tests that need no GPU       (TEST_ARGS="-k cache" picks some)
# make test-slow   those of them that take long: fuzzing, kernels compiled for GPUs that are not here
# make lint    ruff and pyright
# make bench   time flexc beside its peers, on a GPU
#
# Each sets up $(VENV) on its first run. A machine without an NVIDIA driver gets the versions of constraints-cpu.txt.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
TEST_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,-c constraints-cpu.txt)
EXAMPLES := $(filter-out examples/show.py,$(sort $(wildcard examples/*.py)))

.PHONY: demo test test-slow test-gpu lint format bench clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { echo "no venv module: on Debian, apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }

$(VENV)/.examples: $(BIN)/python pyproject.toml constraints-cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e '.[examples]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints-cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e '.[dev,examples]'
	@touch $@ $(VENV)/.examples

demo: $(VENV)/.examples
	@set -e; for example in $(EXAMPLES); do \
		printf '\n──── python %s ────\n\n' "$$example"; \
		$(BIN)/python "$$example"; \
	done
	@printf '\nThe whole kernel of one of them, for a GPU that need not be here:\n  %s -m flexc show examples/alibi.py:alibi --backend triton --target sm_90a\n' '$(BIN)/python'

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'not gpu and not slow' -n $(JOBS) --dist worksteal $(TEST_ARGS)

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'slow and not gpu' -n $(JOBS) --dist worksteal $(TEST_ARGS)

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu -n $(JOBS) --dist worksteal $(TEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/attention.py $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
