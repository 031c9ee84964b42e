"""What is made once a host from a data set's files, and kept: $XDG_CACHE_HOME/scaling-study (~/.cache without that variable)."""

import fcntl
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from trainables.data.source import DataError


def made_once(name: str, source: str, make: Callable[[Path], object]) -> Path:
    """The file or folder `name` of the cache; where it is not there, `make` writes it. Other ranks of the host wait for it.

    `make` is given a path beside, which is renamed: what has the name is whole. `source` says in words what it is made
    from. Raises DataError where it cannot be written, and what `make` raises.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scaling-study"
    target = cache / name
    partial = cache / f"{name}.{platform.node()}.partial"  # hosts may share the folder, not the lock
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed, also by the end of a killed process
            if target.exists():
                return target
            try:
                _remove(partial)
                make(partial)
                if not (target.is_dir() and partial.is_dir()):  # another host was sooner, and a folder is not replaced
                    partial.replace(target)
            finally:
                _remove(partial)
    except OSError as error:
        raise DataError(
            f"{source} cannot be converted into {target}: {error}; XDG_CACHE_HOME=DIR names another place for the cache"
        ) from error
    return target


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
