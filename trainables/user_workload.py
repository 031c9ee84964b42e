"""Load a workload from a user's Python file."""

import contextlib
import hashlib
import importlib.util
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from trainables.trial import Trial
from trainables.workload import Workload, WorkloadError


def load_user_workload(spec: str, source: str | None = None) -> Callable[[Trial], Workload]:
    """The function that `FILE.py:NAME` names.

    The file is imported as a module of its own name with its folder on the path, so that loader processes, which
    import it again, find it and what lies beside it. Where the file does not exist, `source` is written to a
    temporary folder and stands in for it. Raises WorkloadError.
    """
    file_name, _, name = spec.rpartition(":")
    path = Path(file_name)
    if not path.is_file():
        if source is None:
            raise WorkloadError(f"workload file {file_name} does not exist; give --workload path/to/file.py:name")
        path = _stand_in(path.name, source)
    if not path.stem.isidentifier():
        raise WorkloadError(
            f"workload file {path} cannot be imported under the name {path.stem!r}; rename it to letters, digits and underscores"
        )
    digest = hashlib.sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()
    module = sys.modules.get(path.stem)
    if module is None or vars(module).get("_workload_digest") != digest:
        if module is not None and "_workload_digest" not in vars(module):
            _refuse_another(path, module)
        module = _import(path)
        _refuse_another(path, module)
        vars(module)["_workload_digest"] = digest
    function = getattr(module, name, None)
    if not callable(function):
        offered = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        raise WorkloadError(
            f"workload file {path} has no function {name!r}; it defines: {', '.join(offered) or 'none'}"
        )
    return function


def _stand_in(file_name: str, source: str) -> Path:
    """The file with this text, in a temporary folder of this user; other ranks of the host may write it at the same time."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    path = Path(tempfile.gettempdir()) / f"scaling-study-workload-{os.getuid()}-{digest}" / file_name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    owner = path.parent.lstat()
    if owner.st_uid != os.getuid() or stat.S_IMODE(owner.st_mode) & 0o022 or path.parent.is_symlink():
        raise WorkloadError(f"{path.parent} can be written by others, and code would be run from it: remove it")
    partial = path.with_name(f".{file_name}.{os.getpid()}.partial")
    partial.write_text(source)
    partial.replace(path)
    return path


def _import(path: Path) -> ModuleType:
    """Imports a user's file anew, under its own name."""
    sys.modules.pop(path.stem, None)
    folder = str(path.parent)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    importlib.invalidate_caches()
    with contextlib.suppress(OSError):
        # compiled files are told apart by size and whole seconds only
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
    try:
        return importlib.import_module(path.stem)
    except (Exception, SystemExit) as error:  # whatever a user's file raises is the user's to see, in one line
        line = next(iter(str(error).strip().splitlines()), "")
        kind = type(error).__name__
        raise WorkloadError(f"workload file {path} does not import: {f'{kind}: {line}' if line else kind}") from error


def _refuse_another(path: Path, module: ModuleType) -> None:
    """A module of that name which is not this file must stay what it is: others import it too."""
    where = getattr(module, "__file__", None)
    if where is None or Path(where).resolve() != path.resolve():
        raise WorkloadError(
            f"workload file {path}: another module named {path.stem!r} is found first ({where}); rename the file"
        )
