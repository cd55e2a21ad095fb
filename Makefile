# Everything runs in .venv, which the first target to need it builds. `make clean` removes it.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

VENV := .venv
WORKERS := 2
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
# Released model code that the demos and the adapter tests run. Their own dependency lists (torchaudio, onnxruntime,
# diffusers, ...) serve parts that nothing here uses, hence --no-deps.
VENDOR := stepaudio2-minicpmo==0.1.1 silero-vad==6.2.3
# Brings a top-level `stepaudio2` of its own, so it gets a folder of its own, which `bench.vendor` looks into.
SECOND := minicpmo-utils
# A fork of it has the same name, so it gets a folder, too.
CODEC := moshi
# The serving system whose graphs the benchmark is compared with; of it, one folder is imported.
SERVER := vllm-omni

.PHONY: help setup demo test lint bench clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## build .venv

# The stamp follows the files that decide what is installed; the sources do not, since the install is editable.
$(STAMP): pyproject.toml constraints.txt Makefile
	@if [ ! -x $(PY) ]; then
	    for python in python3.11 python3.12 python3; do
	        if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	            "$$python" -m venv $(VENV); break
	        fi
	    done
	    [ -x $(PY) ] || { echo "no Python 3.11 or later found (python3.11, python3.12, python3)" >&2; exit 1; }
	fi
	echo "installing $(TORCH), cadence-fx and $(VENDOR) into $(VENV)"
	$(PY) -m pip install -qq -c constraints.txt $(TORCH)
	$(PY) -m pip install -qq -c constraints.txt -e '.[dev,demo]'
	$(PY) -m pip install -qq --no-deps $(VENDOR)
	$(PY) -m pip install -qq --no-deps --upgrade --target $(VENV)/vendor/$(SECOND) $(SECOND)==1.0.7
	$(PY) -m pip install -qq --no-deps --upgrade --target $(VENV)/vendor/$(CODEC) $(CODEC)==0.2.13
	$(PY) -m pip install -qq --no-deps --upgrade --target $(VENV)/vendor/$(SERVER) $(SERVER)==0.30.0
	touch $@

demo: $(STAMP)  ## eager against cadence: a trained model on recorded speech, and a released speech decoder
	$(PY) -m bench.demo_vad
	$(PY) -m bench.demo_token2wav

# Two processes, one thread each: what is tested is mostly Python, and a file's tests share what they compile.
test: lint  ## lint, then the whole test suite (WORKERS=8 for more cores)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile

lint: $(STAMP)  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy cadence_fx tests

bench: $(STAMP)  ## the benchmarks (ARGS=... are handed on to the first); without a GPU a small run that only checks its code
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
	    $(PY) -m bench.token2wav $(ARGS)
	    $(PY) -m bench.passes
	    $(PY) -m bench.vocoder
	    $(PY) -m bench.warm_up
	    $(PY) -m bench.host_time
	    $(PY) -m bench.families
	    $(PY) -m bench.prediction
	else
	    echo "no CUDA device: small layers on the CPU, which checks the code and measures nothing"
	    $(PY) -m bench.token2wav --small --device cpu --out out/bench $(ARGS)
	fi

clean:  ## remove .venv and every cache
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
