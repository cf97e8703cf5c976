# Everything runs in a virtual environment in the checkout; every target sets up what it needs.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# One worker more than processors, as tests often wait; the tests of a file stay together, so that they share what is costly to start, and
# files run in the order in which they are collected: those that take longest first.
WORKERS := $(shell expr $$(nproc) + 1)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=60
# Jobs with failures on virtual time that `make soak` runs.
SCHEDULES ?= 10000
# Faults that `make mutants` puts into the code, one at a time; SEED draws the same ones again, ONLY names a part of a path.
MUTANTS ?= 300
SEED ?=
ONLY ?=

.PHONY: venv demo docs test lint bench soak lab mutants clean

venv: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found: install Python 3.11, or name one: make PYTHON=python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv
	$(BIN)/holdfast train docs/examples/demo.yaml

docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html (with search: python -m http.server -d site)"

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(PYTEST)

bench: venv
	$(BIN)/holdfast bench train --json bench-train.json

soak: venv
	$(BIN)/holdfast chaos --simulated $(SCHEDULES)
	$(PYTEST) -m soak -o faulthandler_timeout=3600

# Whole machines are lost, in a lab of hosts on this one: every scenario, and five minutes of what a seed decides.
lab: venv
	$(BIN)/python -m pytest -m '' tests/lab
	$(BIN)/holdfast chaos --engine ray --hosts 5 --minutes 5 $(if $(SEED),--seed $(SEED))

mutants: venv
	$(BIN)/python -m tests.mutants --mutants $(MUTANTS) $(if $(SEED),--seed $(SEED)) --only '$(ONLY)'

clean:
	rm -rf $(VENV) build site .mypy_cache .ruff_cache .pytest_cache
