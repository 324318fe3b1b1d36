# make demo   set everything up, then run the main job (report/index.html)
# make test   set everything up, then run the tests
# make bench  set everything up, then time every op against its peers
# make gpu    on a machine with a GPU whose own Python has torch, triton, ninja and the test extras: build, test, time
# make versions  set everything up, then run the tests on torch 2.10, 2.11 and the newest (downloads several GB each)

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(VENV)/bin/pip --disable-pip-version-check
# processes that share the tests, of one thread each
WORKERS ?= 2

CXX_FILES := '*.cpp' '*.h' '*.cu' '*.cuh'

.PHONY: demo test test-slow versions bench gpu lint format build wheel clean

demo: build
	$(PY) -m examples.demo

test: build
	$(PY) -m pytest -n $(WORKERS) --dist worksteal

test-slow: build
	$(PY) -m pytest -m slow

versions: build
	WORKERS=$(WORKERS) $(PY) tests/versions.py

bench: build
	$(PY) -m benchmarks

# torch and the build tools first: the package is built without isolation, against the torch that will run it.
$(VENV)/.stamp: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch numpy setuptools wheel ninja
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[test,lint,triton]'
	touch $@

build: $(VENV)/.stamp
	$(PY) setup.py -q build_ext --inplace

wheel: build
	$(PIP) wheel -q --no-build-isolation --no-deps -w dist .

gpu:
	SEQKERN_CUDA_ARCHS=native $(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) -m pytest -m gpu
	$(PYTHON) -m benchmarks --device cuda

lint: build
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	git ls-files $(CXX_FILES) | xargs $(VENV)/bin/clang-format --dry-run --Werror

format:
	$(VENV)/bin/ruff check --fix-only -q .
	$(VENV)/bin/ruff format -q .
	git ls-files $(CXX_FILES) | xargs $(VENV)/bin/clang-format -i

clean:
	rm -rf build dist report .benchmarks seqkern/_C.abi3.so *.egg-info
