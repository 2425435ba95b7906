# Every target that needs the environment makes it first; nothing is installed twice unless pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up

.DEFAULT_GOAL := help

.PHONY: help
help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s  %s\n", $$1, $$2 }' Makefile

.PHONY: setup
setup: $(STAMP) ## make .venv with the package, torch for this machine and the tools of the tests
	@echo "$(VENV) is ready; PYTHON=python3.12 chooses another Python when it is made anew"

$(STAMP): pyproject.toml tools/bootstrap.py
	@$(PYTHON) tools/bootstrap.py --venv $(VENV)
	@touch $@

.PHONY: demo
demo: $(STAMP) ## train a small operator, predict with it and show what it learned
	@$(BIN)/oformer demo

# Without bytecode on the disk, each of the many processes of the tests would compile torch and the rest anew.
unexport PYTHONDONTWRITEBYTECODE

# Three processes keep two cores busy: some tests wait for a clock. Tests that share a fixture stay together.
.PHONY: test
test: lint ## lint, then the fast tests, and which of them took longest
	@$(BIN)/python -m pytest -n 3 --dist loadgroup --durations 25

.PHONY: test-slow
test-slow: $(STAMP) ## the tests marked slow
	@$(BIN)/python -m pytest -n 2 -m "slow and not gpu" --timeout 3600

.PHONY: lint
lint: $(STAMP) ## ruff, pyright and the import contract
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-logo

.PHONY: format
format: $(STAMP) ## rewrite the code in the house format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

.PHONY: bench
bench: $(STAMP) ## time the library
	@$(BIN)/python benchmarks/run.py

# The live page needs npm and the network at its first build; LIVE=0 builds the site without it.
LIVE ?= 1

.PHONY: docs
docs: $(VENV)/.docs ## build the site in build/docs; warnings are errors; LIVE=0 leaves out the live page
ifeq ($(LIVE),0)
	@$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs
else
	@$(BIN)/python tools/live.py build/live
	@$(BIN)/sphinx-build -W --keep-going -q -t live -b html docs build/docs
	@echo "for the live page: $(BIN)/python -m http.server -d build/docs"
endif
	@echo "open build/docs/index.html"

$(VENV)/.docs: $(STAMP)
	@$(PYTHON) tools/bootstrap.py --venv $(VENV) --extra docs
	@touch $@

.PHONY: clean
clean: ## remove caches and build products, but not .venv
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
