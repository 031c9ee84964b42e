"""Files derived from a data set, built once per host and kept in $XDG_CACHE_HOME/scaling-study.

Without XDG_CACHE_HOME, the folder is ~/.cache/scaling-study.
"""

import fcntl
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from trainables.data.source import DataError


def build_once(name: str, source: str, build: Callable[[Path], object]) -> Path:
    """Return the cached file or folder `name`, and call `build(path)` first if it does not exist.

    Other ranks of the host wait meanwhile. `build` writes to a temporary path that is then renamed, so an entry under
    its final name is complete. `source` describes the input in error messages. Raises DataError if the cache cannot be
    written, and the errors of `build`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scaling-study"
    target = cache / name
    partial = cache / f"{name}.{platform.node()}.partial"  # hosts may share the folder, but not the lock
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also if the process is killed
            if target.exists():
                return target
            try:
                _remove(partial)
                build(partial)
                # Another host may have finished first. A file is then replaced; a folder cannot be.
                if not (target.is_dir() and partial.is_dir()):
                    partial.replace(target)
            finally:
                _remove(partial)
    except OSError as error:
        raise DataError(
            f"cannot convert {source} into {target}: {error}; use another cache folder: XDG_CACHE_HOME=DIR"
        ) from error
    return target


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
