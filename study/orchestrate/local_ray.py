"""Start a Ray on this host only, for one study: its folder, its token, and what Ray reads from the environment."""

import atexit
import importlib
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from study.bytecode import keep_bytecode
from study.capacity import count_cpus, count_gpus
from study.orchestrate.discovery.address import ClusterError
from study.orchestrate.processes.ray_init import started_sooner
from study.orchestrate.processes.reaper import kill_session
from study.store.redaction import token_path
from trainables.scratch import (
    SOCKET_PATH_LIMIT,
    private_folder,
    scratch_folder,
    temporary_files_in,
    user_folder,
    variables_set,
)

LONGEST_SOCKET = "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
"""the longest socket of Ray below its temporary folder"""

TOO_BUSY = "The current node timed out during startup"
"""Ray's message if a node has not started within 30 s"""

MOST_STARTS = 3
"""times that a local Ray is started if the host is too busy for that limit"""


def set_environment() -> None:
    """Set variables that Ray reads when it is imported or started, unless the user has set them."""
    if "ray" not in sys.modules:  # Ray reads it on import; by default only local clusters require a token
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Ray's default of 15 gives every other process of a host priority over the ranks; torchrun's ranks have 0
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else each worker resolves its own environment
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "1")
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
    # Ray's processes import it before they become the controller or workers of Ray Train, which then start sooner
    os.environ.setdefault("RAY_preload_python_modules", "ray.train.v2._internal.execution.controller")
    # workers import this project, whatever the working directory of the command
    root = str(Path(__file__).resolve().parent.parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    keep_bytecode()


def start_local(variables: Mapping[str, str], say: Callable[[str], None]) -> Any:
    """Start a local Ray whose processes have these variables. Return Ray's context. Raises ClusterError.

    A busy host can exceed the 30 s that Ray gives a node, which no variable changes in Ray 2.60. The processes of such
    a start are killed, and Ray starts again. say: is called with a warning then.
    """
    make_token()
    within = os.environ.get("RAY_TMPDIR")
    folder = Path(within) / "ray" if within else temporary_folder()  # as Ray chooses
    threading.Thread(target=_import_tune, name="import", daemon=True).start()
    for number in range(1, MOST_STARTS + 1):
        try:
            with _temporary_files_of_servers(), variables_set(variables):
                return _started(folder)
        except Exception as error:  # Ray raises bare Exceptions
            if TOO_BUSY not in str(error) or number == MOST_STARTS:
                raise
            say("warning: Ray did not start within its limit, perhaps because this host is busy; it starts again")
            for session in folder.glob(f"session_*_{os.getpid()}"):
                kill_session(str(session))


def _import_tune() -> None:
    """Import Ray Tune, which a run needs next, while this process waits for Ray. Errors are left to its own import."""
    with suppress(ImportError):
        importlib.import_module("ray.tune")


def _started(folder: Path) -> Any:
    import ray

    with started_sooner() as wait_for_dashboard:
        context = ray.init(
            address="local",
            num_cpus=count_cpus(),
            num_gpus=count_gpus(),
            include_dashboard=True,  # Ray Train frees a stopped trial's resources through the dashboard's state API
            dashboard_host="127.0.0.1",
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
        )
    try:
        url = wait_for_dashboard()
    except BaseException:
        ray.shutdown()
        raise
    context.address_info["webui_url"] = url
    return context


@contextmanager
def _temporary_files_of_servers() -> Iterator[None]:
    """Let the servers that start meanwhile put their temporary files where they are removed.

    The dashboard is killed and leaves a socket behind. The folder is removed when this process ends, or by the next
    study if it is killed.
    """
    held = ExitStack()
    try:
        files: AbstractContextManager[None] = temporary_files_in(held.enter_context(scratch_folder("ray-servers")))
    except OSError:  # RAY_TMPDIR is set, and TMPDIR cannot be used
        files = nullcontext()
    atexit.register(held.close)
    with files:
        yield


def kill_local() -> None:
    """Kill all processes of the Ray that this process has started, if it has."""
    import ray

    node = ray._private.worker._global_node
    if node is not None and node.head:
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        kill_session(node.get_session_dir_path())


def temporary_folder() -> Path:
    """Return a folder for Ray's sessions that nobody else can enter. Ray makes its own accessible to everybody.

    It is in the user's scratch folder, or in that below /tmp if the path would be too long for a socket. Raises
    ClusterError.
    """
    try:
        parent = user_folder()
        if len(os.fsencode(parent / "ray")) + len(LONGEST_SOCKET) > SOCKET_PATH_LIMIT:
            parent = private_folder(Path("/tmp") / f"scaling-study-{os.getuid()}")
        folder = parent / "ray"  # Ray makes it accessible to everybody, but nobody else can enter its parent
        folder.mkdir(exist_ok=True)
        return folder
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.strerror else str(error)
        raise ClusterError(
            f"a local Ray has no place for its files ({reason}); fix: set TMPDIR to a folder that you can write to, "
            f"with a path of at most {SOCKET_PATH_LIMIT - len(LONGEST_SOCKET) - len('/scaling-study-00000/ray')} bytes"
        ) from error


def make_token() -> None:
    """Create a token for a local Ray unless there is one. Only its owner can read it, unlike a token of Ray.

    If the home folder cannot be written, the token is in the environment of this process and of those it starts.
    """
    is_set = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if is_set or os.environ.get("RAY_AUTH_MODE") != "token":
        return
    path, token = token_path(os.environ), secrets.token_hex(32)
    try:
        with suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
        with suppress(FileExistsError), open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(token)
    except OSError:
        os.environ["RAY_AUTH_TOKEN"] = token
