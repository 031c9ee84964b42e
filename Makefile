# Set-up happens once, and again when a lock file changes. README.md has the plain commands that these stand for.
PYTHON ?= python3
# cuda or cpu: which build of torch. Once installed, it stays until the other one is asked for.
TORCH ?= $(if $(wildcard .venv/installed-cpu-*),cpu,cuda)
# Options of the command that a target runs: make study ARGS="--gpus 1,2", make test ARGS="-k store"
ARGS ?=

# Every rank of every group imports torch; without cached bytecode that takes seconds more each time.
export PYTHONDONTWRITEBYTECODE :=

RUN := .venv/installed-$(TORCH)-requirements.lock
DEVELOP := .venv/installed-$(TORCH)-requirements-dev.lock

# Three processes on two cores: tests that start Ray or hosts mostly wait.
PYTEST := .venv/bin/python -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder

.PHONY: help study test test-system test-faults lint lock audit clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

study: $(RUN) ## run the default study, or what ARGS asks for
	.venv/bin/python -m study.scaling $(ARGS)

# Tests that need something from the system, such as a browser, are skipped without it (tests/support/system.py); .ci/run installs it.
test: lint ## lint, types and tests; skips tests whose programs or privileges are missing
	$(PYTEST) $(ARGS)

test-system: $(DEVELOP) ## all tests that need programs or privileges of the system, all faults included
	$(PYTEST) -m system $(ARGS)

test-faults: $(DEVELOP) ## a study on two hosts that suffers every fault; needs root
	$(PYTEST) -m system tests/system/test_faults.py $(ARGS)

lint: $(DEVELOP) ## ruff and mypy
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy study trainables analysis scripts tests benchmarks examples

.venv/installed-$(TORCH)-%: %
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" scripts/set_up.sh $<
	touch $@

# Known vulnerabilities of what is locked. It asks PyPI, or with AUDIT="--vulnerability-service osv" osv.dev: --strict fails
# where neither answers for a package, which would else count as one without any.
AUDIT ?=
audit: ## look for known vulnerabilities of what is locked
	uvx pip-audit --strict --disable-pip --require-hashes $(AUDIT) --requirement requirements.lock

# Keeps the versions that are locked, where they still fit; UPGRADE=--upgrade takes the newest.
lock: ## lock dependencies again
	uv pip compile $(UPGRADE) --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" --constraint scripts/lock_constraints.txt \
		pyproject.toml --output-file requirements.lock --quiet
	uv pip compile $(UPGRADE) --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" --constraint scripts/lock_constraints.txt \
		pyproject.toml --group dev --constraint requirements.lock --output-file requirements-dev.lock --quiet

clean: ## remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
