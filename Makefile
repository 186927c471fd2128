# Every target works on this folder, wherever make is called from, and sets .venv up first if there is something to do.
ROOT := $(shell cd "$$(dirname "$(strip $(MAKEFILE_LIST))")" && pwd)
PY := .venv/bin/python

export PYTHON DEVICE PINS
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

.PHONY: help setup demo demo-real check test test-all test-next mutate bench libraries gpu-check doctor
.DEFAULT_GOAL := help

help:
	@echo 'make setup                     make .venv: Python 3.12 and exact versions (DEVICE=cpu or gpu, PYTHON=... to choose)'
	@echo 'make demo                      GRPO on a small Qwen3 with Ray and vLLM, from nothing (BACKEND=bridge, ARGS="...")'
	@echo 'make demo-real                 GRPO on SmolLM2-135M, pretrained, on sums of reasoning-gym (a quarter of an hour; ARGS="...")'
	@echo 'make check                     lint, types, import contracts and the unit tests without heavy imports (minutes)'
	@echo 'make test                      lint, types, import contracts and tests (ARGS="..." goes to pytest)'
	@echo 'make test-all                  the same with every case and long proof; writes benchmarks/results/matrix.json'
	@echo 'make test-next                 some tests with newer versions, in .venv-next (make setup PINS=next)'
	@echo 'make mutate                    put deliberate faults into a copy, one by one, and print those that no test notices'
	@echo 'make bench NAME=train_speed    run one benchmark; without NAME, list them (ARGS="...")'
	@echo 'make libraries                 install other libraries and a pretrained model beside .venv, for the tests that use them'
	@echo 'make gpu-check                 run the tests that need a GPU and write a JSON result (PYTHON=python3: without set-up)'
	@echo 'make doctor                    what is installed, what is missing, what this machine can run'

setup:
	@cd "$(ROOT)" && ./.ci/setup.sh

demo: setup
	@cd "$(ROOT)" && exec $(PY) -m examples.demo $(if $(BACKEND),--backend "$(BACKEND)") $(ARGS)

demo-real: override LIBRARIES := gym smollm2
demo-real: libraries
	@cd "$(ROOT)" && PYTHONPATH="$(ROOT)/.libraries/gym" exec $(PY) -m examples.demo_real $(ARGS)

test-all: libraries
test-all: override ARGS := -m 'long or not long' --matrix=benchmarks/results/matrix.json $(ARGS)
check: TESTS := tests.support.light
test test-all: TESTS := tests.lanes
check test test-all: setup
	@cd "$(ROOT)" && \
	echo 'ruff check' && $(PY) -m ruff check && \
	echo 'ruff format' && $(PY) -m ruff format --check && \
	echo 'mypy' && $(PY) -m mypy && \
	echo 'import contracts' && .venv/bin/lint-imports --no-logo && \
	echo 'pytest' && exec $(PY) -m $(TESTS) $(ARGS)

test-next: override PINS := next
test-next: setup
	@cd "$(ROOT)" && exec $(PY) -m tests.next $(ARGS)

mutate: setup
	@cd "$(ROOT)" && PYTHONPATH="$(ROOT)" exec $(PY) -m tests.mutations $(ARGS)

bench: setup
	@cd "$(ROOT)" && \
	if [ -n "$(NAME)" ] && [ -f "benchmarks/$(NAME).py" ]; then exec $(PY) -m "benchmarks.$(NAME)" $(ARGS); fi; \
	$(if $(NAME),echo 'error: there is no benchmark called $(NAME)' >&2;) \
	echo 'Benchmarks, to run with make bench NAME=...:' >&2; \
	for file in benchmarks/[a-z]*.py; do \
		[ -f "$$file" ] && grep -q '__main__' "$$file" && echo "  $$(basename "$$file" .py)" >&2; \
	done; \
	exit 2

# ARGS of a target that needs them are that target's: all are installed, or its LIBRARIES.
libraries: setup
	@cd "$(ROOT)" && exec $(PY) -m tests.support.libraries $(if $(filter libraries,$(MAKECMDGOALS)),$(ARGS),$(LIBRARIES))

# A Python named on the command line runs the check itself, for machines where .venv cannot be made.
ifeq ($(origin PYTHON),command line)
gpu-check:
	@cd "$(ROOT)" && exec "$(PYTHON)" -m rl_backend.cli gpu-check $(ARGS)
else
gpu-check: setup
	@cd "$(ROOT)" && exec $(PY) -m rl_backend.cli gpu-check $(ARGS)
endif

doctor: setup
	@cd "$(ROOT)" && exec $(PY) -m rl_backend.cli doctor $(ARGS)
