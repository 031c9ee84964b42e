"""Load a workload from a user's Python file."""

import contextlib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from trainables import clock  # noqa: F401 - taken before code of the user can replace it
from trainables.messages import type_and_line
from trainables.scratch import ScratchError, private_folder, user_folder
from trainables.trial import Trial
from trainables.workload import Workload, WorkloadError


def load_user_workload(spec: str, source: str | None = None) -> Callable[[Trial], Workload]:
    """Import the function given as `FILE.py:NAME`.

    The file is imported as a top-level module, or as a module of its package if `__init__.py` is next to it, so that
    relative imports work. Its folder and that of its package are put on `sys.path`. Loader processes, which import it
    again, then find it and the modules next to it. If the file does not exist, `source` is written to a temporary
    folder and imported instead. Raises WorkloadError.
    """
    file_name, _, name = spec.rpartition(":")
    path = Path(file_name)
    if not path.is_file():
        if source is None:
            raise WorkloadError(f"file {file_name} does not exist; give --workload path/to/file.py:name")
        path = _write_source(path.name, source)
    if not path.stem.isidentifier():
        raise WorkloadError(
            f"file {path} cannot be imported: {path.stem!r} is no module name; "
            "rename the file, using letters, digits and underscores"
        )
    digest = hashlib.sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()
    module_name, folder = _module_of(path)
    module = sys.modules.get(module_name)
    if module is None or vars(module).get("_workload_digest") != digest:
        if module is not None and "_workload_digest" not in vars(module):
            _check_same_file(path, module)
        module = _import(path, module_name, folder)
        _check_same_file(path, module)
        vars(module)["_workload_digest"] = digest
    function = getattr(module, name, None)
    if not callable(function):
        defined = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        raise WorkloadError(f"file {path} has no function {name!r}; it defines: {', '.join(defined) or 'none'}")
    return function


def _write_source(file_name: str, source: str) -> Path:
    """Write the source to a temporary folder of this user. Other ranks on the host may do so at the same time."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    try:
        path = private_folder(user_folder() / f"workload-{digest}") / file_name
    except ScratchError as error:
        raise WorkloadError(f"code of the workload is not run from a shared folder: {error}") from None
    partial = path.with_name(f".{file_name}.{os.getpid()}.partial")
    partial.write_text(source)
    partial.replace(path)
    return path


def _module_of(path: Path) -> tuple[str, Path]:
    """Return the name under which a user's file is imported, and the folder to import it from.

    A package whose name belongs to another one that is in use, such as `study`, is left out of the name.
    """
    folder, parts = path.resolve().parent, [path.stem]
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    package = sys.modules.get(parts[0]) if len(parts) > 1 else None
    if package is not None and str(folder / parts[0]) not in map(os.path.realpath, getattr(package, "__path__", ())):
        return path.stem, path.parent
    return ".".join(parts), folder if len(parts) > 1 else path.parent


def _import(path: Path, name: str, package_folder: Path) -> ModuleType:
    """Import a user's file afresh."""
    sys.modules.pop(name, None)
    folders = list(dict.fromkeys([str(package_folder), str(path.parent)]))
    sys.path[:] = [*folders, *(entry for entry in sys.path if entry not in folders)]
    importlib.invalidate_caches()
    with contextlib.suppress(OSError):
        # Python distinguishes .pyc files only by source size and modification time in whole seconds
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise WorkloadError(f"file {path} does not import: {type_and_line(error)}") from error


def _check_same_file(path: Path, module: ModuleType) -> None:
    """Raise WorkloadError if `module` was loaded from another file, whose importers must keep it."""
    location = getattr(module, "__file__", None)
    if location is None or Path(location).resolve() != path.resolve():
        raise WorkloadError(
            f"file {path} is shadowed by another module named {module.__name__!r} ({location}); rename the file"
        )
