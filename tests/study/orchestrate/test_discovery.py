"""A command finds the cluster it uses, names it, and sends Ray's token to nobody else. No test here starts Ray."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from study.orchestrate.cluster import find_cluster
from study.orchestrate.discovery import address, gcs
from study.orchestrate.discovery.address import ClusterError, Target, listeners
from study.orchestrate.local_ray import LONGEST_SOCKET, SOCKET_PATH_LIMIT, make_token, temporary_folder
from study.scaling import main
from tests.support.system import needs

NOBODY = 65534
TOKEN = "0123456789abcdef"


@dataclass
class Gcs:
    """A server that answers like a cluster's GCS. `token` is the token it wants, empty for none."""

    token: str = ""
    port: int = 0
    received: list[str] = field(default_factory=list)

    def __call__(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        sent = dict(context.invocation_metadata()).get("authorization", "")
        self.received.append(str(sent))
        if self.token and sent != f"Bearer {self.token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""


@pytest.fixture
def cluster() -> Iterator[Gcs]:
    gcs_server = Gcs()
    handler = grpc.method_handlers_generic_handler(
        "ray.rpc.NodeInfoGcsService", {"CheckAlive": grpc.unary_unary_rpc_method_handler(gcs_server)}
    )
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(handler,))
    gcs_server.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield gcs_server
    server.stop(None)


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which `ray start` would store an address, and hide all other addresses and tokens."""
    path = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(address, "BOOTSTRAP_FILE", path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return path


def ignore(line: str) -> None:
    pass


# ------------------------------------------------------------------------------------- the address of `ray start`


@needs("root")
def test_an_address_that_another_user_stored_is_not_used(stored: Path, cluster: Gcs) -> None:
    stored.write_text(f"127.0.0.1:{cluster.port}")
    os.chown(stored, NOBODY, NOBODY)
    found = find_cluster(None, ignore)
    assert found.address is None
    assert f"belongs to another user (uid {NOBODY})" in found.ignored
    with pytest.raises(ClusterError, match="belongs to another user"):
        find_cluster("auto", ignore)
    assert cluster.received == []


def test_an_address_that_other_users_can_change_is_not_used(stored: Path, cluster: Gcs) -> None:
    stored.write_text(f"127.0.0.1:{cluster.port}")
    stored.chmod(0o646)
    assert "other users can write to" in find_cluster(None, ignore).ignored
    stored.unlink()
    os.mkfifo(stored, 0o600)
    assert "not a regular file" in find_cluster(None, ignore).ignored
    stored.unlink()
    (stored.parent / "target").write_text(f"127.0.0.1:{cluster.port}")
    stored.symlink_to(stored.parent / "target")
    assert "cannot be opened" in find_cluster(None, ignore).ignored
    assert cluster.received == []


@needs("root")
def test_a_listener_of_another_user_gets_no_token(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    os.seteuid(NOBODY)  # a socket belongs to the user who creates it
    try:
        listener = socket.create_server(("127.0.0.1", 0))
    finally:
        os.seteuid(0)
    with listener:
        stored.write_text(f"127.0.0.1:{listener.getsockname()[1]}")
        assert main(["plan", "smoke", "--gpus", "1"]) == 0
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert f"another user (uid {NOBODY}) listens" in capsys.readouterr().err


def test_listeners_are_read_from_the_tables_of_the_kernel(tmp_path: Path) -> None:
    table = tmp_path / "tcp6"
    table.write_text(
        "  sl  local_address  rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 00000000000000000000000000000000:18EB 0000:0000 0A 00:00 00:0 00000000  1000 0 17 1 0 100\n"
        "   1: 0100007F:18EB 0100007F:9C40 01 00:00 00:0 00000000  1001 0 18 1 0 20\n"
        "   2: 0100007F:18EC 00000000:0000 0A 00:00 00:0 00000000  1002 0 19 1 0 100\n"
    )
    assert listeners(0x18EB, [table, tmp_path / "missing"]) == {1000}
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listeners(server.getsockname()[1]) == {os.geteuid()}


def test_an_address_where_no_ray_answers_is_ignored_and_reported(stored: Path) -> None:
    assert find_cluster(None, ignore) == Target()
    for content in ("127.0.0.1:1", "nonsense", ""):
        stored.write_text(content)
        found = find_cluster(None, ignore)
        assert (found.address, f"in {stored}" in found.ignored) == (None, True)


# ------------------------------------------------------------------------------------------------ what answers there


def test_a_cluster_is_named_before_it_gets_the_token(cluster: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.token = TOKEN
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    tokens_sent_when_named: list[int] = []

    def say(line: str) -> None:
        if f"127.0.0.1:{cluster.port}" in line:
            tokens_sent_when_named.append(sum(map(bool, cluster.received)))

    assert find_cluster(f"127.0.0.1:{cluster.port}", say).address == f"127.0.0.1:{cluster.port}"
    assert tokens_sent_when_named == [0]
    assert cluster.received == ["", f"Bearer {TOKEN}"]


def test_a_missing_or_wrong_token_is_an_error_with_a_fix(cluster: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.token = TOKEN
    where = f"127.0.0.1:{cluster.port}"
    with pytest.raises(ClusterError, match="there is none here; fix: copy"):
        find_cluster(where, ignore)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    with pytest.raises(ClusterError, match="refuses the token in RAY_AUTH_TOKEN; fix: copy"):
        find_cluster(where, ignore)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ClusterError, match="fix: export RAY_AUTH_MODE=token"):
        find_cluster(where, ignore)


@pytest.mark.parametrize("command", [["plan", "smoke"], ["doctor"], ["run", "smoke"]])
def test_every_command_says_the_same_of_a_cluster_without_authentication(
    command: list[str],
    stored: Path,
    cluster: Gcs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    stored.write_text(f"127.0.0.1:{cluster.port}")
    assert main(command) == 4
    output = "".join(capsys.readouterr())
    assert "runs without authentication" in output
    assert "RAY_AUTH_MODE=token ray start --head" in output
    assert "RAY_AUTH_MODE=disabled" in output
    assert cluster.received == [""], "it gets no token"


def test_a_cluster_without_authentication_is_used_with_a_warning_if_the_user_accepts_it(
    cluster: Gcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    lines: list[str] = []
    assert find_cluster(f"127.0.0.1:{cluster.port}", lines.append).address
    assert "warning: " in lines[-1] and "without authentication" in lines[-1]


def test_a_server_that_is_no_ray_is_an_error_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(server: socket.socket) -> None:
        connections = []
        while True:
            try:
                connections.append(server.accept()[0])
            except OSError:
                return
            connections[-1].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        with pytest.raises(ClusterError, match="not the GCS of a Ray cluster .*; fix: "):
            find_cluster(f"127.0.0.1:{server.getsockname()[1]}", ignore)
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("command", [["plan", "smoke"], ["doctor"], ["run", "smoke"]])
def test_a_server_that_does_not_answer_is_reported_within_the_limit(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gcs, "ANSWER_TIMEOUT_S", 1.0)
    monkeypatch.setattr(gcs, "SAY_AFTER_S", 0.2)
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        started_s = time.monotonic()
        assert main([*command, "--address", where]) == 4
        assert time.monotonic() - started_s < 5
    out, err = capsys.readouterr()
    assert err.startswith("waiting up to 1 s for an answer of the Ray cluster at " + where)
    assert f"no Ray cluster answers at {where}" in out + err
    assert "fix: start it with" in out + err


@pytest.mark.parametrize("command", [["plan", "smoke"], ["doctor"], ["run", "smoke"]])
def test_ctrl_c_while_waiting_for_a_cluster_says_interrupted(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def press(line: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gcs, "SAY_AFTER_S", 0.1)
    monkeypatch.setattr("study.cli.commands.print_to_stderr", press)
    monkeypatch.setattr("study.cli.doctor.say", press)
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert main([*command, "--address", f"127.0.0.1:{server.getsockname()[1]}"]) == 130
    assert "interrupted" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ a Ray of this host


def test_the_folder_of_a_local_ray_is_private_and_short_enough_for_its_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SCALING_STUDY_SCRATCH", raising=False)
    for length in (10, 200):
        parent = tmp_path / ("x" * length)
        parent.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(parent))
        folder = temporary_folder()
        folder.chmod(0o777)  # as Ray does
        assert temporary_folder() == folder
        assert len(f"{folder}{LONGEST_SOCKET}") <= SOCKET_PATH_LIMIT
        assert folder.parent.stat().st_mode & 0o777 == 0o700


def test_a_temporary_folder_that_cannot_be_used_is_an_error_with_a_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SCALING_STUDY_SCRATCH", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(ClusterError, match="missing.*; fix: set TMPDIR to a folder that you can write to"):
        temporary_folder()


def test_without_a_writable_home_the_token_is_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))  # no folder can be created in it, even by root
    make_token()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    del os.environ["RAY_AUTH_TOKEN"]
