# `make serve` starts everything embedded; `make test` runs what the machine checks. Both install what
# they need into one virtual environment and reuse it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: serve test check docs bench clean

serve: $(VENV)/.installed
	$(BIN)/tollhouse serve

test: $(VENV)/.installed-dev check
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(BIN)/mypy

docs: $(VENV)/.installed-dev
	$(BIN)/python -m tests.rules.reference

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

# torch first and alone: a range asked for by another package would fetch its GPU build.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	touch $@
