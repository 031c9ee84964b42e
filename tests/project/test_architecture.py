"""Structure of the code: which package may import which, sizes of folders and files, imports of `plan`."""

import ast
import dataclasses
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from trainables import registry

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("study", "trainables", "analysis")
REGISTRIES = ("MODELS", "DATASETS", "PRECISIONS", "PARALLEL", "OPTIMIZERS", "STORAGES", "DECODERS")
MOST_MODULES = 14
LARGEST_LINES = 400
FILES = sorted(path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py"))

LAYERS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "analysis": (
        ("analysis.two_way", "analysis.duration", "analysis.cause"),
        ("analysis.text", "analysis.statistics"),
        ("analysis.read",),
        ("analysis.measure",),
        ("analysis.compare",),
        ("analysis.checks",),
        ("analysis.study",),
        ("analysis.predict",),
        ("analysis.tables", "analysis.figures", "analysis.verdict"),
        ("analysis.answers",),
        ("analysis.report", "analysis.export"),
    ),
    "study": (
        ("study.bytecode", "study.errors", "study.capacity", "study.references"),
        ("study.studies",),
        ("study.options", "study.arguments"),
        ("study.plan",),
        ("study.store",),
        ("study.orchestrate",),
        ("study.cli", "study.help"),
        ("study.improve",),
        ("study.scaling",),
    ),
    "trainables": (
        ("trainables.messages", "trainables.facts", "trainables.batch", "trainables.clock", "trainables.scratch"),
        ("trainables.registry",),
        ("trainables.field_facts",),
        ("trainables.fields",),
        ("trainables.rule",),
        ("trainables.rules",),
        ("trainables.trial",),
        ("trainables.workload",),
        ("trainables.data",),
        ("trainables.models",),
        ("trainables.user_workload",),
        ("trainables.build",),
        ("trainables.step",),
        ("trainables.measure", "trainables.train"),
        ("trainables.probe",),
    ),
}
"""Packages and top-level modules per room, lowest first. A module imports from its own package and lower layers only.

Members of one layer do not import one another.
"""


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


def imported(path: Path) -> Iterator[str]:
    """Return the names of all modules that a file imports, also within functions."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield full if full in MODULES else module


IMPORTS = {name: set(imported(path)) - {name} for name, path in MODULES.items()}


def top(name: str) -> str:
    return name.partition(".")[0]


def test_no_import_is_relative() -> None:
    assert [name for name, targets in IMPORTS.items() if any(target.startswith(".") for target in targets)] == []


def test_each_room_imports_only_what_it_may() -> None:
    forbidden = {
        "study": set(),
        "trainables": {"study", "analysis", "ray"},
        "analysis": {"study", "trainables", "torch", "torchvision", "ray"},
    }
    offenders = [
        f"{name} imports {target}"
        for name, targets in IMPORTS.items()
        for target in sorted(targets)
        if top(target) in forbidden[top(name)]
    ]
    assert offenders == []


def test_only_the_orchestrate_package_imports_ray() -> None:
    using = {name for name, targets in IMPORTS.items() if any(top(target) == "ray" for target in targets)}
    assert using
    assert [name for name in sorted(using) if not name.startswith("study.orchestrate.")] == []


def layer_of(name: str, room: str) -> tuple[int, str] | None:
    """Return the number of a module's layer and the layer's member that it belongs to; None for the room itself."""
    for number, members in enumerate(LAYERS[room]):
        for member in members:
            if name == member or name.startswith(f"{member}."):
                return number, member
    return None


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_has_a_layer(room: str) -> None:
    assert [name for name in MODULES if top(name) == room and name != room and layer_of(name, room) is None] == []


@pytest.mark.parametrize("room", ROOMS)
def test_packages_import_from_lower_layers_only(room: str) -> None:
    offenders = []
    for name, targets in IMPORTS.items():
        if top(name) != room or (own := layer_of(name, room)) is None:
            continue
        for target in sorted(targets & MODULES.keys()):
            other = layer_of(target, room) if top(target) == room else None
            if other and other[1] != own[1] and other[0] >= own[0]:
                offenders.append(f"{name} imports {target}")
    assert offenders == []


def test_modules_do_not_import_one_another_in_a_circle() -> None:
    try:
        TopologicalSorter({name: targets & MODULES.keys() for name, targets in IMPORTS.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"circle of imports: {' -> '.join(error.args[1])}")


def test_no_folder_holds_more_modules_than_a_reader_can_survey() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in FILES:
        counts[str(path.parent)] += path.name != "__init__.py"
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_no_file_is_too_long_to_read() -> None:
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in FILES}
    assert {path: lines for path, lines in lengths.items() if lines > LARGEST_LINES} == {}


def test_every_package_says_what_comes_in_and_what_goes_out() -> None:
    offenders = []
    for name, path in MODULES.items():
        if path.name == "__init__.py" and "." in name:
            doc = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
            if "In:" not in doc or "Out:" not in doc:
                offenders.append(name)
    assert offenders == []


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
