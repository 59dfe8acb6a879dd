# Short names for the commands of the README and of .ci/run.
PYTHON ?= .venv/bin/python

.PHONY: setup test test-all cuda gpu-rehearsal benchmark lint types docs ci

setup:
	python3.11 -m venv .venv
	$(PYTHON) -m pip install -q --no-compile -c constraints.txt -e '.[zoo,search,test]'

test:
	$(PYTHON) -m pytest -q -n 2 --dist loadfile

test-all:
	$(PYTHON) -m pytest -q -n 2 --dist loadfile -m "slow or not slow"

# The tests on CUDA: a CUDA build of torch in an environment of its own (6 GB), on a GPU or under stand-ins.
cuda:
	bash .ci/cuda

# benchmarks/gpu.sh as it runs on a bare GPU machine, in small sizes, on a GPU or under stand-ins.
gpu-rehearsal:
	bash .ci/gpu-rehearsal

benchmark:
	$(PYTHON) -m benchmarks.compare --resume

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(dir $(PYTHON))lint-imports --no-cache

types:
	$(PYTHON) -m mypy

# The site: all pages, the notebooks and the API reference. Its search needs a server:
# .venv/bin/python -m http.server -d build/docs
docs:
	$(PYTHON) -m pip install -q --no-compile -c constraints.txt -e '.[docs]'
	$(PYTHON) docs/build_site.py build/docs

ci:
	bash .ci/run
