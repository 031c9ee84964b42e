"""One run at a time per results folder.

    DIR/.lock     on a local file system: locked by the run with flock, so that it ends with the run even if that is
                  killed. Elsewhere: a lease, which the run renews, and which expires.

Commands that only read the folder ignore it.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil
import pyarrow as pa
from pyarrow import fs

from analysis.read.errors import printable
from study.store.spool import flush
from study.store.store import Store, StoreError, store_errors
from trainables.scratch import open_regular, user_folder

NAME = ".lock"
LEASE_S = 120.0
"""time after which a lease that is not renewed expires, by the clocks of the hosts"""
MOST_LEASE_S = 3600.0
"""a lease that ends later is damaged: not even clocks of hosts that differ explain it"""
RENEW_S = 30.0
SETTLE_S = 0.5
"""time in which a second run that saw no lease either has written its own"""

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def hold(out: str, held: contextlib.ExitStack) -> None:
    """Hold the folder `out` until `held` closes. Raises StoreError if another run holds it."""
    held.enter_context(one_run(Store.locate(out)))


def hold_existing(out: str, held: contextlib.ExitStack) -> bool:
    """Hold the folder `out` if it has results. Return whether it does. Raises StoreError like `hold`.

    Doing so before a plan is made ensures that the plan knows all that another run has measured, and what an earlier
    run could not save.
    """
    if ("://" not in out and not os.path.lexists(out)) or Store.existing(out) is None:
        return False
    hold(out, held)
    flush(Store.locate(out), user_folder())
    return True


@contextlib.contextmanager
def one_run(store: Store) -> Iterator[None]:
    """Hold the folder for a run that writes trials. Raises StoreError if another run holds it."""
    with contextlib.ExitStack() as held:
        with store_errors(f"{store.out} cannot be used"):
            if not (store.is_local and _lock_file(store, held)):
                held.enter_context(_lease(store))
        yield


def _lock_file(store: Store, held: contextlib.ExitStack) -> bool:
    """Lock the file until `held` closes. Return False if the file system has no locks. Raises StoreError."""
    path = Path(store.root) / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = held.enter_context(open_regular(path, os.O_RDWR | os.O_CREAT, mode=0o666))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(store, _holder(file)) from None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # else the last holder has removed this file
                break
    file.truncate()
    file.write(json.dumps(_this_run()).encode())
    file.flush()
    held.callback(path.unlink, missing_ok=True)
    return True


@contextlib.contextmanager
def _lease(store: Store) -> Iterator[None]:
    """Hold and renew a lease. Raises StoreError if another run has one that has not expired."""
    path, run = f"{store.root}/{NAME}", _this_run()

    def read() -> dict[str, Any]:
        if store.filesystem.get_file_info(path).type != fs.FileType.File:
            return {}
        with store.filesystem.open_input_stream(path) as file:
            return _holder(file)

    def write() -> None:
        with store.filesystem.open_output_stream(path) as file:
            file.write(json.dumps(run | {"expires": time.time() + LEASE_S}).encode())

    def refuse_others() -> None:
        holder = read()
        if holder.get("id") != run["id"] and _is_valid(holder):
            raise _in_use(store, holder)

    refuse_others()
    store.filesystem.create_dir(store.root, recursive=True)
    write()
    time.sleep(SETTLE_S)
    refuse_others()  # of two runs that start at the same time, the last one to write goes on
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_S):
            with contextlib.suppress(OSError, pa.ArrowException):  # the storage may be back for the next renewal
                write()

    thread = threading.Thread(target=renew, name="lease of the results folder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(OSError, pa.ArrowException):
            store.filesystem.delete_file(path)


def _this_run() -> dict[str, Any]:
    process = psutil.Process()
    return {
        "id": secrets.token_hex(8),
        "pid": process.pid,
        "process_started_at": process.create_time(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _holder(file: IO[bytes]) -> dict[str, Any]:
    """Return what a run has written about itself, {} if it is damaged."""
    try:
        holder = json.loads(file.read(1000))
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_valid(lease: Mapping[str, Any]) -> bool:
    """Return True if the run of a lease goes on, as far as this host can tell."""
    expires, pid = lease.get("expires"), lease.get("pid")
    if not isinstance(expires, (int, float)) or not time.time() <= expires <= time.time() + MOST_LEASE_S:
        return False
    if lease.get("host") != socket.gethostname() or not isinstance(pid, int):
        return True
    try:
        return bool(psutil.Process(pid).create_time() == lease.get("process_started_at"))
    except (psutil.Error, ValueError):  # ValueError: no process has such a number
        return False


def _in_use(store: Store, holder: Mapping[str, Any]) -> StoreError:
    known = {"pid": "?", "host": "?", "since": "?"} | dict(holder)
    who = printable("pid {pid} on host {host}, since {since}".format_map(known))
    waiting = "wait until it ends"
    if isinstance(expires := holder.get("expires"), (int, float)) and math.isfinite(expires):
        waiting += f" (its lease expires in {max(0.0, expires - time.time()):.0f} s unless it is renewed)"
    return StoreError(f"{store.out}: another run writes into it: {who}; fix: {waiting}, or choose another --out")
