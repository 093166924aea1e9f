PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: test lint fast slow demo clean

# Lint, types and every test: what CI runs.
test: lint
	$(BIN)/python -m pytest -q

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fast: $(STAMP)
	$(BIN)/python -m pytest -q -m "not slow"

slow: $(STAMP)
	$(BIN)/python -m pytest -q -m slow

# A model larger than its budget answers, with a draft and without.
demo: $(STAMP)
	$(BIN)/python -m benchmarks.demo

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf .venv .cache
