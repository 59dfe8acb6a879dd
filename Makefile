# Short names for the commands of the README and of .ci/run.
PYTHON ?= .venv/bin/python

.PHONY: setup test lint types ci

setup:
	python3.11 -m venv .venv
	$(PYTHON) -m pip install -q -c constraints.txt -e '.[zoo,search,test]'

test:
	$(PYTHON) -m pytest -q -n 2

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

ci:
	bash .ci/run
