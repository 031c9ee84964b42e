"""A results folder belongs to one run at a time; readers and the next run after a kill are not hindered."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs

from study.scaling import main
from study.store import lock
from study.store.lock import NAME, hold_existing, one_run
from study.store.store import Store, StoreError
from tests.study.store.test_store import STUDY, open_store, result_of, steps_table
from trainables.trial import Trial

HOST = socket.gethostname()
ROOT = Path(__file__).parents[3]
HOLD = """
import sys
from study.store.lock import one_run
from study.store.store import Store
with one_run(Store.locate(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def another_run(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout and run.stdout.readline() == "held\n"
        try:
            yield run
        finally:
            run.kill()


def test_a_second_run_is_refused_with_who_holds_the_folder_and_since_when(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    out = tmp_path / "out"
    open_store(out, name="smoke").save(result_of(Trial()))
    with another_run(out) as run:
        assert main(["run", "smoke", "--address", "local", "--out", str(out)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(
            f"error: {out}: another run writes into it: pid {run.pid} on host {socket.gethostname()}"
        )
        assert ", since 20" in line and "fix: " in line
        assert main(["status", str(out), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["counts"] == {"done": 1}


def test_a_killed_run_holds_its_folder_no_longer(tmp_path: Path) -> None:
    with another_run(tmp_path) as run:
        with pytest.raises(StoreError), one_run(Store.locate(str(tmp_path))):
            pass
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert (tmp_path / NAME).exists()
        with one_run(Store.locate(str(tmp_path))):
            pass
    assert not (tmp_path / NAME).exists()


def test_a_folder_that_does_not_exist_or_has_no_results_is_not_held(tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        assert not hold_existing(str(tmp_path / "absent"), held)
        assert not hold_existing(str(tmp_path), held)
        open_store(tmp_path)
        assert hold_existing(str(tmp_path), held)
        assert (tmp_path / NAME).exists()
    assert not (tmp_path / NAME).exists()


def test_of_many_runs_at_the_same_time_exactly_one_holds_the_folder(tmp_path: Path) -> None:
    together, most, inside, outcomes = threading.Barrier(8), [0], [0], []
    guard = threading.Lock()

    def run() -> None:
        together.wait()
        for _ in range(20):
            try:
                with one_run(Store.locate(str(tmp_path))):
                    with guard:
                        inside[0] += 1
                        most[0] = max(most[0], inside[0])
                    time.sleep(0.001)
                    with guard:
                        inside[0] -= 1
                outcomes.append(True)
            except StoreError:
                outcomes.append(False)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and len(outcomes) == 160 and any(outcomes)


@pytest.mark.timeout(30)
def test_a_lock_that_is_a_link_or_a_pipe_is_not_opened(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for number, make in enumerate((lambda path: path.symlink_to(precious), os.mkfifo)):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / NAME)
        with pytest.raises(StoreError), one_run(Store.locate(str(folder))):
            pass
    assert precious.read_text() == "mine"


# ---------------------------------------------------------------------------------------- without locks: a lease


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(lock, "SETTLE_S", 0.05)
    filesystem = fs.PyFileSystem(fs.FSSpecHandler(MemoryFileSystem(skip_instance_cache=True)))
    return Store.locate(f"results-{os.urandom(4).hex()}", filesystem)


def lease(store: Store) -> dict[str, Any]:
    return dict(json.loads(store.read_file(NAME)))


def write_lease(store: Store, **changes: Any) -> None:
    process = {"pid": os.getpid(), "process_started_at": lock._this_run()["process_started_at"]}
    holder = {"id": "other", "host": "elsewhere", "since": "then", "expires": time.time() + 60} | process
    store.filesystem.create_dir(store.root, recursive=True)
    store.replace_file(NAME, json.dumps(holder | changes).encode())


def test_a_lease_is_renewed_and_removed_at_the_end(remote: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEW_S", 0.05)
    with one_run(remote):
        first = lease(remote)
        assert (first["pid"], first["host"]) == (os.getpid(), socket.gethostname())
        assert first["expires"] > time.time() + lock.LEASE_S / 2
        ends_at_s = time.monotonic() + 20
        while lease(remote)["expires"] == first["expires"]:
            assert time.monotonic() < ends_at_s
        with pytest.raises(StoreError, match=f"pid {os.getpid()} on host .*lease expires in"), one_run(remote):
            pass
    assert not remote.has_file(NAME)


@pytest.mark.parametrize(
    ("changes", "is_held"),
    [
        ({}, True),
        ({"expires": 0}, False),
        ({"host": socket.gethostname()}, True),
        ({"host": socket.gethostname(), "pid": 2**22 + 1}, False),
        ({"host": socket.gethostname(), "process_started_at": 1.0}, False),
        ({"expires": "never"}, False),
        ({"expires": float("nan")}, False),
        ({"expires": 1e12}, False),
        ({"host": socket.gethostname(), "pid": -1}, False),
        ({"host": socket.gethostname(), "pid": 2**70}, False),
    ],
)
def test_a_lease_is_respected_until_it_expires_or_its_process_is_gone(
    remote: Store, changes: dict[str, Any], is_held: bool
) -> None:
    write_lease(remote, **changes)
    if is_held:
        with pytest.raises(StoreError, match="another run writes into it"), one_run(remote):
            pass
        assert lease(remote)["id"] == "other"
    else:
        with one_run(remote):
            assert lease(remote)["id"] != "other"


@pytest.mark.parametrize("content", [b"[" * 300, b"[" * 1000, b"\xff", b"1", b'{"expires": 1' + b"0" * 900])
def test_a_damaged_lease_hinders_no_run(remote: Store, content: bytes) -> None:
    write_lease(remote)
    remote.replace_file(NAME, content)
    with one_run(remote):
        assert lease(remote)["pid"] == os.getpid()


def test_what_a_lease_says_reaches_the_terminal_without_control_characters(remote: Store) -> None:
    write_lease(remote, host="\x1b[2Ja", pid="1\n2", since="\u202eb")
    with pytest.raises(StoreError, match="pid 1 2 on host .2Ja, since b;") as refusal, one_run(remote):
        pass
    assert str(refusal.value).isprintable()


# --------------------------------------------------------------------------------------------- what is never replaced


@pytest.mark.parametrize("status", ["done", "failed"])
def test_a_done_trial_is_never_replaced(tmp_path: Path, remote: Store, status: str) -> None:
    for store in (open_store(tmp_path), Store.open(remote.out, filesystem=remote.filesystem, **STUDY)):
        trial = Trial()
        store.save(result_of(trial))
        later = {"steps": steps_table(step_s=0.7)} if status == "done" else {"log": "Traceback"}
        store.save(result_of(trial, status, worker_group="later", **later))
        [record] = store.records()
        assert (record["status"], record["worker_group"]) == ("done", "group-1")
        assert store.has_file(f"trials/{trial.trial_id}/steps.parquet")
        assert not store.has_file(f"trials/{trial.trial_id}/error.log")


def test_of_studies_that_open_a_new_folder_at_the_same_time_one_is_accepted(tmp_path: Path) -> None:
    for number in range(10):
        together = threading.Barrier(4)
        accepted: list[str] = []

        def open_as(name: str, out: Path, together: threading.Barrier, accepted: list[str]) -> None:
            together.wait()
            with contextlib.suppress(StoreError):
                open_store(out, name=name)
                accepted.append(name)

        arguments = (tmp_path / str(number), together, accepted)
        threads = [threading.Thread(target=open_as, args=(f"study-{k}", *arguments)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert accepted == [Store.at(str(tmp_path / str(number))).study()["name"]]
