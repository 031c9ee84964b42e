"""The rooms and which way the data flows, held by reading the imports; and what the command line must not import."""

import ast
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainables import registry

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("study", "trainables", "analysis")
MAY_IMPORT_RAY = {"study/orchestrate/tune.py", "study/orchestrate/worker_group.py", "study/orchestrate/cluster.py"}
LARGEST_LINES = 400
FILES = sorted(path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py"))
REGISTRIES = ("MODELS", "DATASETS", "PRECISIONS", "PARALLEL", "OPTIMIZERS", "STORAGES", "DECODERS")


def imported(path: Path) -> Iterator[str]:
    """Names of all modules that a file imports, also within functions, as packages from the top."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: relative imports hide which room they reach"
            yield str(node.module)


def packages(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


FORBIDDEN: dict[str, set[str]] = {
    "study": set(),
    "trainables": {"study", "analysis"},
    "analysis": {"study", "trainables", "torch", "torchvision"},
}


def test_rooms_import_only_what_they_may() -> None:
    offenders = {}
    for path in FILES:
        forbidden = FORBIDDEN[path.parts[0]] | (set() if str(path) in MAY_IMPORT_RAY else {"ray"})
        if found := packages(path) & forbidden:
            offenders[str(path)] = found
    assert not offenders


def test_the_files_that_may_import_ray_do() -> None:
    assert {str(path) for path in FILES if "ray" in packages(path)} == MAY_IMPORT_RAY


def test_a_file_is_short_enough_to_read() -> None:
    lines = {str(path): len((ROOT / path).read_text().splitlines()) for path in FILES}
    assert not {path: count for path, count in lines.items() if count >= LARGEST_LINES}


def test_every_registered_name_loads_a_function_or_a_value() -> None:
    targets = [target for name in REGISTRIES for facts in getattr(registry, name).values() for target in facts.targets]
    loaded = {target: registry.load(target) for target in targets}
    assert not [
        target for target, value in loaded.items() if not callable(value) and not dataclasses.is_dataclass(value)
    ]


HEAVY = {"torch", "ray", "pandas", "matplotlib", "seaborn", "scipy"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["convert", "--help"], ["list"], ["plan", "default"]]
)
def test_commands_that_only_look_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "study.scaling", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ""}
    run = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60
    )
    assert run.returncode == 0, run.stderr[-2_000:]
    modules = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    assert "study.scaling" in modules or len(modules) > 50, "the imports were not seen"
    assert not {module.partition(".")[0] for module in modules} & HEAVY


def run_pytest(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, body: str, forbid: bool = True
) -> pytest.RunResult:
    """A test file run beside this project's conftest.py, with FORBID_SKIPS or without."""
    monkeypatch.setenv("FORBID_SKIPS", str(int(forbid)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest((ROOT / "tests/conftest.py").read_text())
    pytester.makepyfile(body)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider")


SKIPS = {
    "in the test": "import pytest\ndef test_it():\n    pytest.skip('no chromium here')\n",
    "by a mark": "import pytest\n@pytest.mark.skipif(True, reason='no chromium here')\ndef test_it():\n    pass\n",
    "of the module": "import pytest\npytest.skip('no chromium here', allow_module_level=True)\n",
}


@pytest.mark.parametrize("body", SKIPS.values(), ids=SKIPS)
def test_a_skip_fails_where_skips_are_forbidden(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    assert run_pytest(pytester, monkeypatch, body, forbid=False).ret in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    result = run_pytest(pytester, monkeypatch, body)
    assert result.ret not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    result.stdout.fnmatch_lines(["*FORBID_SKIPS=1, but: *no chromium here*"])


def test_an_expected_failure_is_no_skip(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "import pytest\n@pytest.mark.xfail\ndef test_it():\n    assert False\n"
    assert run_pytest(pytester, monkeypatch, body).ret == 0
