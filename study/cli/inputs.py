"""Check the files and folders that a user names (data sets, workload files) before anything starts."""

import ast
import hashlib
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from study.errors import ConfigurationError, near, one_line, shown
from trainables.data.image_layout import kind_of, read_manifest, storages_in
from trainables.probe.job import is_module
from trainables.registry import DATASETS

_MAX_LISTED = 5

_NOT_PYTHON = {
    ".ipynb": "a notebook; fix: convert it with jupyter nbconvert --to script",
    ".sh": "a shell script; fix: give the Python script that it starts, and its arguments after --",
}
"""what people start their trainings with, by suffix"""

_KINDS = {stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}


def results_folder(directory: str | None, quiet: bool = False) -> str:
    """Return the folder, or the most recent results folder below results/ if it is None, and name it on stderr.

    Raises ConfigurationError if there is none.
    """
    if directory is not None:
        return existing_results(directory)
    studies = _studies_here()
    if not studies:
        raise ConfigurationError("no results folder below results/ here; give one as DIR")
    newest = max(studies, key=lambda path: max(path.stat().st_mtime, path.parent.stat().st_mtime)).parent
    if not quiet:
        print(f"results folder: {newest} (the most recent below results/)", file=sys.stderr)
    return str(newest)


def existing_results(directory: str) -> str:
    """Return a results folder that the user names, or its URI. Raises ConfigurationError if nothing has that path."""
    if not directory or "://" in directory or os.path.lexists(directory):
        return directory
    known = [str(path.parent) for path in _studies_here()]
    found = near(directory, known) or (f"; results here: {', '.join(known[:_MAX_LISTED])}" if known else "")
    raise ConfigurationError(
        f"{one_line(directory)} does not exist{found or '; give the folder that a study was run into'}"
    )


def _studies_here() -> list[Path]:
    return sorted([*Path("results").glob("*/study.json"), *Path("results").glob("*/*/study.json")])


def data_dir_path(value: Any, source: str) -> str:
    """Return the absolute path of a readable folder. Raises ConfigurationError."""
    path = _path(value, source)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ConfigurationError(f"{source}: folder {one_line(path)} does not exist") from None
    except OSError as error:
        raise ConfigurationError(f"{source}: folder {one_line(path)} cannot be read: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise ConfigurationError(f"{source}: {path} is not a folder")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ConfigurationError(f"{source}: folder {path} cannot be read; check its permissions")
    return str(path)


def refuse_endless(path: str, source: str) -> None:
    """Refuse named pipes, which may wait forever for a writer, and devices, which may never end.

    Input that a shell pipes into this process has a writer and is allowed. Raises ConfigurationError, or OSError if the
    path does not exist.
    """
    mode = os.stat(path).st_mode
    is_piped_in = stat.S_ISFIFO(mode) and path.startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/"))
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_piped_in):
        raise ConfigurationError(
            f"{source}: {path} is a {_KINDS.get(stat.S_IFMT(mode), 'device')}; give a regular file"
        )


def dataset_in(folder: str) -> str:
    """Return the name of the data set in a folder. Raises ConfigurationError unless there is exactly one.

    Known are torchvision's layouts, image files by class, converted sets, and reviews as JSON Lines.
    """
    datasets = [
        name for name, facts in DATASETS.items() if any(Path(folder, entry).exists() for entry in facts.found_by)
    ]
    sets = storages_in(Path(folder))
    if sets:  # checked first: their manifests are JSON files too
        kinds = {kind_of(path) for path in sets.values() if read_manifest(path) is None}
        datasets.append(kinds.pop() or "image_folder" if kinds else "image_folder")
    elif not Path(folder, "study.json").exists():
        datasets += [
            name
            for name, facts in DATASETS.items()
            if any(any(Path(folder).glob(pattern)) for pattern in facts.file_patterns)
        ]
    if len(datasets) > 1:
        raise ConfigurationError(
            f"--data-dir: {folder} contains several data sets; choose one: "
            f"--set dataset={' or --set dataset='.join(datasets)}"
        )
    if not datasets:
        raise ConfigurationError(
            f"--data-dir: {folder} contains no known data set; expected for {_expected()}; or a converted set"
        )
    return datasets[0]


def _expected() -> str:
    """Describe the expected folder of each data set that needs one."""
    layouts = {
        name: facts.layout or ", ".join([*(f"DIR/{entry}" for entry in facts.found_by), *facts.file_patterns])
        for name, facts in DATASETS.items()
        if facts.needs_data_dir
    }
    return "; ".join(f"{name}: {layout}" for name, layout in layouts.items())


def storage_axis(folder: str) -> dict[str, tuple[str, ...]]:
    """Return the storage axis if a folder has images in one format only, other than JPEG. Else the default applies."""
    storages = tuple(storages_in(Path(folder)))
    return {"storage": storages} if len(storages) == 1 and storages != ("jpeg",) else {}


def workload_spec(value: Any, source: str) -> tuple[str, str]:
    """Return `FILE.py:NAME` with an absolute path, and the digest of the file. The file is parsed, not run.

    Instead of the file, its name as a module may be given: `package.train:NAME`.
    """
    text, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if is_module(text) and (file := _file_of_module(text)):
        text = str(file)
    if not text.endswith(".py") or not name.isidentifier():
        raise ConfigurationError(f"{source} {shown(value)}: expected path/to/file.py:name, or package.module:name")
    path, module, digest = _parsed(text, source)
    names, complete = _defined_names(module.body)
    if complete and name not in names:
        functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
        raise ConfigurationError(
            f"{source}: {path} does not define {name!r}{near(name, functions)}; "
            f"functions: {', '.join(functions) or 'none'}"
        )
    return f"{path}:{name}", digest


def script_or_module(value: Any, source: str) -> tuple[str, str]:
    """Return the absolute path of a script, or the name of a module, and the digest of its file, which is not run."""
    if isinstance(value, str) and is_module(value) and not os.path.exists(value):
        path = _file_of_module(value)
        if path is None:
            raise ConfigurationError(
                f"{source}: no file {value} and no module of that name here; give the path of a script, or the name of "
                "a module as after `torchrun -m`"
            )
        return value, _parsed(str(path), source)[2]
    path, _, digest = _parsed(value, source)
    return str(path), digest


def _file_of_module(name: str) -> Path | None:
    """Return the file of a module, which `python -m NAME` runs in this folder. Imports nothing."""
    for folder in (os.getcwd(), *sys.path):
        base = Path(folder, *name.split("."))
        for path in (base / "__main__.py", base.with_name(f"{base.name}.py")):
            if path.is_file():
                return path
    return None


def _parsed(value: Any, source: str) -> tuple[Path, ast.Module, str]:
    """Return the path of a Python file, its syntax tree and the digest of its content. Raises ConfigurationError."""
    path = _path(value, source)
    if path.suffix in _NOT_PYTHON:
        raise ConfigurationError(f"{source}: {one_line(str(path))} is {_NOT_PYTHON[path.suffix]}")
    try:
        refuse_endless(str(path), source)
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigurationError(f"{source}: file {one_line(str(path))} does not exist") from None
    except OSError as error:
        raise ConfigurationError(f"{source}: {path} cannot be read: {error.strerror}") from None
    try:
        module = ast.parse(content)
    except SyntaxError as error:
        raise ConfigurationError(f"{source}: {path} line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigurationError(f"{source}: {path} is not valid Python: {one_line(error)}") from None
    return path, module, hashlib.sha256(content).hexdigest()[:8]


def _defined_names(body: Iterable[ast.stmt]) -> tuple[set[str], bool]:
    """Return the names bound at a module's top level. The flag is False if there may be more, after `import *`."""
    names: set[str] = set()
    complete = True
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(statement.name)
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.alias):
                complete = complete and node.name != "*"
                names.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names, complete


def _path(value: Any, source: str) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigurationError(f"{source} {shown(value)} is not a path")
    return Path(os.path.abspath(os.path.expanduser(value)))
