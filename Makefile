# `make demo` and `make test` need nothing but Python >= 3.11 and, the first time, the network.

# Two environments: the tests' libtpu, which compiles for TPUs that are not there, would have every
# later `import jax` of the user's look for one.
VENV ?= .venv
TEST_VENV ?= .venv-test
SPECJAX_TEST_WORKERS ?= 2
PYTEST_ARGS ?=

TEST := $(TEST_VENV)/bin
SOURCES := $(shell find specjax ckpt_convert -type f -not -path '*/__pycache__/*')
INSTALL := -m pip --disable-pip-version-check install -qq --no-build-isolation

.PHONY: help demo test test-environment lint format clean
# An installation that failed halfway must not count as made.
.DELETE_ON_ERROR:
# Environments are reached through pattern rules and are no intermediate files.
.SECONDARY:

help:
	@echo "make demo    install specjax into $(VENV), fetch a small model, show plain against speculative"
	@echo "make test    install specjax and its test tools into $(TEST_VENV), run the whole suite"
	@echo "make lint    formatting, lint, types and import contracts"
	@echo "make format  rewrite the sources in the project's format"
	@echo "make clean   remove the environments, the caches and the builds"

demo: $(VENV)/.package
	@$(VENV)/bin/specjax demo

test-environment: $(TEST_VENV)/.package
	@:

# PYTHONSAFEPATH keeps the checkout off sys.path, here and in every process that a test starts:
# what is tested is the installed package.
test: test-environment
	PYTHONSAFEPATH=1 SPECJAX_TEST_INSTALLED=1 $(TEST)/pytest \
		-n $(SPECJAX_TEST_WORKERS) --dist loadfile --durations=10 $(PYTEST_ARGS)

lint: test-environment
	$(TEST)/ruff format --check .
	$(TEST)/ruff check .
	$(TEST)/pyright --pythonpath $(TEST)/python
	$(TEST)/lint-imports --no-cache

format: test-environment
	$(TEST)/ruff check --fix .
	$(TEST)/ruff format .

clean:
	rm -rf $(VENV) $(TEST_VENV) .venv-newest .cache build dist .pytest_cache .ruff_cache
	find specjax ckpt_convert tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.requirements: EXTRAS := convert
$(TEST_VENV)/.requirements: EXTRAS := test,dev

# Names on PATH may be shims of a version manager that fail when called, and some systems split
# `ensurepip` off: a candidate counts only if it runs and can make an environment.
%/bin/python:
	@for candidate in $(PYTHON) python3.13 python3.12 python3.11 python3; do \
		if "$$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' \
			>/dev/null 2>&1; then \
			echo "making $* with $$("$$candidate" --version)"; \
			exec "$$candidate" -m venv $*; \
		fi; \
	done; \
	echo "specjax needs Python >= 3.11 with venv; name yours: make PYTHON=/path/to/python3.11" >&2; \
	exit 1

# The build backend is installed beside the package, so that a changed source is rebuilt offline.
%/.requirements: pyproject.toml | %/bin/python
	@echo "installing specjax[$(EXTRAS)] into $* (a minute or two, once)"
	@$*/bin/python $(INSTALL) 'hatchling>=1.26'
	@$*/bin/python $(INSTALL) '.[$(EXTRAS)]'
	@touch $@

%/.package: %/.requirements README.md $(SOURCES)
	@$*/bin/python $(INSTALL) --no-deps --no-index --force-reinstall .
	@touch $@
