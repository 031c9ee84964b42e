"""Files and folders that a user names, checked before anything starts: data, and workloads of their own."""

import ast
import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from study.errors import ConfigurationError, near, one_line, shown
from trainables.data.image_layout import kind_of, read_manifest, storages_in
from trainables.registry import DATASETS

_KINDS = {stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}


def data_dir_path(value: Any, source: str) -> str:
    """The absolute path of a folder that can be read."""
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
    """Refuses a named pipe, which may wait for ever for a writer, and a device, which may never end.

    What a shell pipes into this process has a writer. Raises OSError where there is nothing.
    """
    mode = os.stat(path).st_mode
    is_piped_in = stat.S_ISFIFO(mode) and path.startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/"))
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_piped_in):
        raise ConfigurationError(
            f"{source}: {path} is a {_KINDS.get(stat.S_IFMT(mode), 'device')}; give a regular file"
        )


def dataset_in(folder: str) -> str:
    """The data set whose files lie in a folder: in torchvision's layout, image files by class, a converted set, or
    reviews as JSON Lines."""
    found = [name for name, facts in DATASETS.items() if any(Path(folder, entry).exists() for entry in facts.found_by)]
    sets = storages_in(Path(folder))
    if sets:  # whose manifest is a JSON file too
        kinds = {kind_of(path) for path in sets.values() if read_manifest(path) is None}
        found.append(kinds.pop() or "image_folder" if kinds else "image_folder")
    elif not Path(folder, "study.json").exists():
        found += [
            name
            for name, facts in DATASETS.items()
            if any(any(Path(folder).glob(pattern)) for pattern in facts.file_patterns)
        ]
    if len(found) > 1:
        raise ConfigurationError(
            f"--data-dir: {folder} holds several data sets; choose one: --set dataset={' or --set dataset='.join(found)}"
        )
    if not found:
        raise ConfigurationError(
            f"--data-dir: {folder} holds no data set that is known; expected for {_expected()}; or a converted set"
        )
    return found[0]


def _expected() -> str:
    """What a folder of each data set holds that needs one."""
    held = {
        name: facts.layout or ", ".join([*(f"DIR/{entry}" for entry in facts.found_by), *facts.file_patterns])
        for name, facts in DATASETS.items()
        if facts.needs_data_dir
    }
    return "; ".join(f"{name}: {what}" for name, what in held.items())


def storage_axis(folder: str) -> dict[str, tuple[str, ...]]:
    """The storage format of a folder's images where it is no other than one; empty: the trial's own default."""
    storages = tuple(storages_in(Path(folder)))
    return {"storage": storages} if len(storages) == 1 and storages != ("jpeg",) else {}


def workload_spec(value: Any, source: str) -> tuple[str, str]:
    """`FILE.py:NAME` with an absolute path, and the file's digest. The file is parsed, not run."""
    text, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not text.endswith(".py") or not name.isidentifier():
        raise ConfigurationError(f"{source} {shown(value)}: give path/to/file.py:name")
    path = _path(text, source)
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
        raise ConfigurationError(f"{source}: {path} is not Python: {one_line(error)}") from None
    names, complete = _defined_names(module.body)
    if complete and name not in names:
        functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
        raise ConfigurationError(
            f"{source}: {path} defines no {name!r}{near(name, functions)}; its functions: {', '.join(functions) or 'none'}"
        )
    return f"{path}:{name}", hashlib.sha256(content).hexdigest()[:8]


def _defined_names(body: Iterable[ast.stmt]) -> tuple[set[str], bool]:
    """Names that a module's top level binds, and whether these are all: after `import *` nobody knows."""
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
