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

PYTEST := .venv/bin/python -m pytest -q -n 3 --no-loadscope-reorder

.PHONY: study test test-system lint lock audit clean

study: $(RUN)
	.venv/bin/python -m study.scaling $(ARGS)

# The third process runs what mostly waits: a study that suffers faults (tests/conftest.py).
# Tests that need something from the system, such as a browser, are skipped without it (tests/system.py); .ci/run installs it.
test: lint
	$(PYTEST) $(ARGS)

# Only the tests that need something from the system.
test-system: $(DEVELOP)
	$(PYTEST) -m system $(ARGS)

lint: $(DEVELOP)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy study trainables analysis scripts tests $(wildcard benchmarks/*.py examples/*.py)

.venv/installed-$(TORCH)-%: %
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" scripts/set_up.sh $<
	touch $@

# Known vulnerabilities of what is locked. It asks PyPI, or with AUDIT="--vulnerability-service osv" osv.dev: --strict fails
# where neither answers for a package, which would else count as one without any.
AUDIT ?=
audit:
	uvx pip-audit --strict --disable-pip --require-hashes $(AUDIT) --requirement requirements.lock

# Keeps the versions that are locked, where they still fit; UPGRADE=--upgrade takes the newest.
lock:
	uv pip compile $(UPGRADE) --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" --constraint scripts/lock_constraints.txt \
		pyproject.toml --output-file requirements.lock --quiet
	uv pip compile $(UPGRADE) --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" --constraint scripts/lock_constraints.txt \
		pyproject.toml --group dev --constraint requirements.lock --output-file requirements-dev.lock --quiet

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
