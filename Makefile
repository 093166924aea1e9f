PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: test lint fast slow demo clean

# On a machine with other work, torch's threads that spin while they wait for each other lose a scheduler tick at every
# matrix product: the tests on real weights then take three times as long or more. Results do not depend on it.
test fast slow: export OMP_WAIT_POLICY ?= passive

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
