# Set-up runs once, and again when a lock file changes. README.md has the same commands without make.
PYTHON ?= python3
# cuda or cpu: the build of torch. An installed build stays until the other one is requested.
TORCH ?= $(if $(wildcard .venv/installed-cpu-*),cpu,cuda)
# Options for the command that a target runs: make study ARGS="--gpus 1,2", make test ARGS="-k store"
ARGS ?=

# Every rank of every group imports torch; without cached bytecode that takes seconds longer each time.
export PYTHONDONTWRITEBYTECODE :=

RUN := .venv/installed-$(TORCH)-requirements.lock
DEVELOP := .venv/installed-$(TORCH)-requirements-dev.lock

# Three processes on two cores: tests that start Ray or hosts mostly wait. A process that dies ends the run: xdist would
# start another, and then wait for ever for tests of the first one's group.
PYTEST := .venv/bin/python -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder --max-worker-restart=0

.PHONY: help study test test-system test-faults lint docs lock audit clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

study: $(RUN) ## run the default study, or the one that ARGS selects
	.venv/bin/python -m study.scaling $(ARGS)

# Tests that need something from the system, such as a browser, are skipped without it (tests/support/system.py).
# .ci/run installs what they need.
test: lint ## lint, types and tests; skips tests whose programs or privileges are missing
	$(PYTEST) $(ARGS)

test-system: $(DEVELOP) ## all tests that need programs or privileges of the system, including all faults
	$(PYTEST) -m system $(ARGS)

test-faults: $(DEVELOP) ## inject every fault into a study on two hosts; needs root
	$(PYTEST) -m system tests/system/test_faults.py $(ARGS)

lint: $(DEVELOP) ## ruff and mypy
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy study trainables analysis scripts tests benchmarks examples

docs: $(DEVELOP) ## build the documentation in site/ (python3 -m http.server --directory site shows it)
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

.venv/installed-$(TORCH)-%: %
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" scripts/set_up.sh $<
	touch $@

# Asks PyPI, or with AUDIT="--vulnerability-service osv" osv.dev. --strict fails if the service has no answer for a package,
# which would otherwise count as free of vulnerabilities.
AUDIT ?=
audit: ## check the locked packages for known vulnerabilities
	uvx pip-audit --strict --disable-pip --require-hashes $(AUDIT) --requirement requirements.lock

# Keeps the locked versions if they still fit; UPGRADE=--upgrade selects the newest.
lock: ## lock dependencies again
	uv pip compile $(UPGRADE) --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" --constraint scripts/lock_constraints.txt \
		pyproject.toml --output-file requirements.lock --quiet
	uv pip compile $(UPGRADE) --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" --constraint scripts/lock_constraints.txt \
		pyproject.toml --group dev --constraint requirements.lock --output-file requirements-dev.lock --quiet

clean: ## remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
