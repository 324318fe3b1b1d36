# make demo   set everything up, then run the main job (report/index.html)
# make gallery  set everything up, then train every system of the textbooks (report/gallery/index.html); SEEDS=3: of three seeds
# make test   set everything up, then run the tests
# make prove  set everything up for every GPU target, then run the long tests that `make test` need not repeat
# make bench  set everything up, then time every op against its peers
# make docs   set everything up, then build the manual (build/docs/html/index.html)
# make gpu    on a machine with a GPU: build and smoke, test, time, in three stages (benchmarks/GPU.md); make gpu-1 for one
# make versions  set everything up, then run the tests on torch 2.10, 2.11 and the newest (downloads several GB each)
# make matrix    set everything up, then run the integrations' tests on torch x transformers x Python (the same downloads)

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(VENV)/bin/pip --disable-pip-version-check
BUILD := $(PY) setup.py -q build_ext --inplace
# processes that share the tests, of one thread each
WORKERS ?= 2

# of triton, beside the one in constraints.txt: those that tests/triton/test_triton_driver.py compiles with
TRITON_OLDEST := 3.6.0
TRITON_NEWEST := 3.9.0

CXX_FILES := '*.cpp' '*.h' '*.cu' '*.cuh'

.PHONY: demo gallery data test test-slow prove versions matrix bench docs gpu gpu-1 gpu-2 gpu-3 lint format build wheel clean

# The demo needs kernels for the GPUs that are here, if any; test, bench and wheel build them all. What the user sets wins.
demo gallery: export SEQKERN_CUDA_ARCHS ?= present
gallery: OPTIONS = $(if $(SEEDS),--seeds $(SEEDS))
demo gallery:
	$(MAKE) --no-print-directory build data
	$(PY) -m examples.$@ $(OPTIONS)

# A source distribution whose data its wheel lacks: examples/data/snippets.py reads it.
SNIPPETS := build/data/vaderSentiment-3.3.2.tar.gz

data: $(SNIPPETS)

$(SNIPPETS): | $(VENV)/.stamp
	$(PIP) download -q --no-deps --no-build-isolation --no-binary :all: -d $(@D) vaderSentiment==3.3.2

test: build data build/triton-$(TRITON_OLDEST)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal

test-slow: build build/triton-$(TRITON_OLDEST) build/triton-$(TRITON_NEWEST)
	$(PY) -m pytest -m slow

# The tests that tests/proven.py lists and whose sources changed; their hashes in tests/proven.json are to be committed.
prove: build build/triton-$(TRITON_OLDEST)
	$(PY) tests/proven.py --prove --pytest="-n $(WORKERS) --dist worksteal"

versions: build build/triton-$(TRITON_OLDEST)
	WORKERS=$(WORKERS) $(PY) tests/versions.py

matrix: build
	WORKERS=$(WORKERS) $(PY) tests/matrix.py

bench: build
	$(PY) -m benchmarks

# Without a network, and with every warning an error.
docs: build
	$(PY) -m sphinx -W --keep-going -q -b html -d build/docs/doctrees docs build/docs/html
	@echo build/docs/html/index.html

# torch and the build tools first: the package is built without isolation, against the torch that will run it. Built
# here before pip, which would hide the compiler's progress and then finds everything compiled.
$(VENV)/.stamp: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch numpy setuptools wheel ninja
	$(BUILD)
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[test,lint,docs,triton,data]'
	touch $@

build: $(VENV)/.stamp
	$(BUILD)

# A version of triton in a folder of its own, which tests put first in the module path.
build/triton-%: | $(VENV)/.stamp
	rm -rf $@.part
	$(PIP) install -q --no-deps --target $@.part triton==$*
	mv $@.part $@

wheel: build
	$(PIP) wheel -q --no-build-isolation --no-deps -w dist .

# By that machine's own Python. GPU=... for more arguments, DEVICE=cpu for a dry run.
gpu:
	$(PYTHON) -m benchmarks.gpu $(GPU)

gpu-1 gpu-2 gpu-3: gpu-%:
	$(PYTHON) -m benchmarks.gpu --stage $* $(GPU)

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
	rm -rf build dist report .benchmarks seqkern/_C.abi3.so seqkern/_node-*.so *.egg-info
