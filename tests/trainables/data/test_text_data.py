"""Text streams, the text sample, and the conversion of reviews."""

import gzip
import json
import pickle
import re
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.gloo import preload_loader_processes
from tests.support.trials import text_trial
from trainables.build import build_workload
from trainables.data.amazon_reviews import amazon_reviews, convert_reviews, read_bytes
from trainables.data.loader import endless_batches
from trainables.data.source import DataError
from trainables.data.text import Streams, TextDataset, next_token_loss, read_topics, sample

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for converted reviews."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "scaling-study"


def count_up(path: str) -> np.ndarray:
    """Return a text whose bytes are their own positions, modulo 256. `path` is its length."""
    return np.arange(int(path), dtype=np.uint8)


def error_message(folder: Path) -> str:
    """Return the error of converting a folder, which must be one line."""
    with pytest.raises(DataError) as error:
        convert_reviews(folder)
    message = str(error.value)
    assert "\n" not in message
    return message


# --------------------------------------------------------------------------------------------------------- streams

streams_of = {
    "sequence": st.integers(1, 12),
    "batch": st.integers(1, 6),
    "world_size": st.integers(1, 4),
    "sequences": st.integers(1, 6),
    "left_over": st.integers(0, 20),
}


@given(**streams_of)
def test_no_two_rows_of_any_rank_share_a_byte(
    sequence: int, batch: int, world_size: int, sequences: int, left_over: int
) -> None:
    length = world_size * batch * (sequence * sequences + 1) + left_over
    read: list[set[int]] = []
    for rank in range(world_size):
        batches = list(islice(Streams(length, batch, rank, world_size, sequence), 3 * sequences))
        for row in range(batch):
            starts = [starts[row] for starts in batches]
            read.append({byte for start in starts for byte in range(start, start + sequence + 1)})
    assert len(set().union(*read)) == sum(map(len, read))
    assert set().union(*read) <= set(range(length))


@given(**streams_of)
def test_each_row_continues_where_it_stopped_and_restarts_at_its_end(
    sequence: int, batch: int, world_size: int, sequences: int, left_over: int
) -> None:
    length = world_size * batch * (sequence * sequences + 1) + left_over
    streams = Streams(length, batch, world_size - 1, world_size, sequence)
    steps = (length // (world_size * batch) - 1) // sequence
    assert steps >= sequences
    batches = list(islice(streams, 2 * steps))
    for row in range(batch):
        starts = [starts[row] for starts in batches]
        assert starts[:steps] == starts[steps:] == list(range(starts[0], starts[0] + steps * sequence, sequence))
    assert list(islice(streams, 3)) == list(islice(streams, 3))


@pytest.mark.parametrize(("world_size", "rows"), [(1, "4 rows"), (3, "3 ranks of 4 rows")])
def test_a_text_too_short_for_its_rows_is_an_error(world_size: int, rows: str) -> None:
    enough = world_size * 4 * 17
    assert Streams(enough, 4, 0, world_size, 16).stream_bytes == 17
    with pytest.raises(DataError) as error:
        Streams(enough - 1, 4, 0, world_size, 16)
    assert str(error.value).startswith(f"the text has a length of {enough - 1}, too few for {rows} of 17 each")


def test_targets_are_the_bytes_that_follow() -> None:
    inputs, targets = TextDataset(count_up, "200", "train", 5).__getitems__([0, 100])
    assert inputs.dtype == targets.dtype == torch.uint8
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [100, 101, 102, 103, 104]]
    assert targets.tolist() == [[1, 2, 3, 4, 5], [101, 102, 103, 104, 105]]
    assert TextDataset(count_up, "200", "train", 5)[7][1].tolist() == [8, 9, 10, 11, 12]


def test_the_last_twentieth_is_the_test_split() -> None:
    train, test = (TextDataset(count_up, "200", split, 3) for split in ("train", "test"))
    assert (len(train), len(test)) == (190, 10)
    assert train[186][1].tolist() == [187, 188, 189]
    assert test[0][0].tolist() == [190, 191, 192]


def test_the_loss_is_the_cross_entropy_in_nats_per_byte() -> None:
    logits = torch.zeros(2, 3, 256)
    targets = torch.tensor([[0, 255, 7], [1, 1, 1]], dtype=torch.uint8)
    assert next_token_loss(logits, targets).item() == pytest.approx(np.log(256))
    logits[0, 1, 255] = 1e3
    assert next_token_loss(logits, targets).item() == pytest.approx(np.log(256) * 5 / 6)


# --------------------------------------------------------------------------------------------------- the sample text


def test_the_sample_is_english_text_of_the_standard_library() -> None:
    text = bytes(read_topics("")).decode()
    assert len(text) > 300_000
    assert "Assert statements are a convenient way to insert debugging assertions" in text
    assert len(sample(text_trial()).dataset) + len(sample(text_trial(), "test").dataset) == len(text.encode())  # type: ignore[arg-type]


def test_a_python_without_help_topics_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    read_topics.cache_clear()
    with pytest.raises(DataError) as error:
        sample(text_trial())
    message = str(error.value)
    assert message.startswith("dataset 'text_sample' needs Python's help topics") and "pydoc_data.topics" in message
    assert "'synthetic'" in message


def test_the_dataset_stays_small_when_pickled_after_reading() -> None:
    assert len(pickle.dumps(sample(text_trial()).dataset)) < 1_000


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rows_of_all_ranks_are_consecutive_text(workers: int) -> None:
    preload_loader_processes()
    text = bytes(read_topics(""))
    seen = set()
    for rank in range(2):
        trial = text_trial(world_size=2, loader_workers=workers)
        batches = list(islice(endless_batches(trial, build_workload(trial, CPU), rank), 5))
        inputs = torch.cat([inputs for inputs, _ in batches], dim=1)
        targets = torch.cat([targets for _, targets in batches], dim=1)
        assert inputs.shape == (4, 80) and torch.equal(inputs[:, 1:], targets[:, :-1])
        for row in inputs.numpy():
            assert row.tobytes() in text
            seen.add(text.index(row.tobytes()))
    assert len(seen) == 8


# --------------------------------------------------------------------------------------------------------- reviews


def write_reviews(path: Path, *reviews: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{json.dumps(review)}\n" for review in reviews).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_reviews_become_one_text_in_the_order_of_file_names(tmp_path: Path) -> None:
    write_reviews(tmp_path / "b.jsonl", {"text": "third"}, {"text": "fourth"})
    write_reviews(tmp_path / "a.json.gz", {"reviewText": "first", "overall": 5.0}, {"reviewText": "second"})
    write_reviews(tmp_path / "c.json", {"reviewText": "fifth"})
    write_reviews(tmp_path / "d.jsonl.gz", {"text": "sixth"})
    assert (
        bytes(read_bytes(str(convert_reviews(tmp_path)))) == b"\n first \n second \n third \n fourth \n fifth \n sixth "
    )


def test_a_review_is_one_line_without_entities(tmp_path: Path) -> None:
    reviews = [
        {"reviewText": "  two\r\nlines &amp; an&#39;entity \n"},
        {"overall": 5.0},
        {"reviewText": None, "text": ""},
        {"reviewText": "  \n &#32; "},
        {"text": "caf\u00e9 \ud800"},
    ]
    write_reviews(tmp_path / "reviews.json", *reviews)
    with (tmp_path / "reviews.json").open("a") as file:
        file.write("\n")  # an empty line is not a review
    assert bytes(read_bytes(str(convert_reviews(tmp_path)))) == "\n two lines & an'entity \n caf\u00e9 ? ".encode()


def test_a_trial_reads_reviews_from_a_memory_mapped_file(tmp_path: Path, cache: Path) -> None:
    write_reviews(tmp_path / "reviews.jsonl.gz", *({"text": f"review number {number}"} for number in range(100)))
    trial = text_trial(dataset="amazon_reviews", data_dir=str(tmp_path))
    target = convert_reviews(tmp_path)
    assert target.parent == cache and isinstance(read_bytes(str(target)).base, np.memmap)
    inputs, _ = next(endless_batches(trial, build_workload(trial, CPU), rank=0))
    assert bytes(inputs[0].numpy()) == b"\n review number 0 \n review"[:16]
    assert len(amazon_reviews(trial, "test").dataset) == target.stat().st_size // 20  # type: ignore[arg-type]


def test_files_are_converted_once_until_they_change(tmp_path: Path, cache: Path) -> None:
    path = write_reviews(tmp_path / "reviews.json", {"text": "one"})
    first = convert_reviews(tmp_path)
    written = first.stat().st_mtime_ns
    assert convert_reviews(tmp_path) == first and first.stat().st_mtime_ns == written
    write_reviews(path, {"text": "other"})
    second = convert_reviews(tmp_path)
    assert second != first and second.read_bytes() == b"\n other "
    assert sorted(entry.suffix for entry in cache.iterdir()) == [".bin", ".bin", ".lock", ".lock"]


def test_ranks_that_start_together_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainables.data import amazon_reviews as module

    write_reviews(tmp_path / "reviews.json", *({"text": f"review number {number}"} for number in range(2_000)))
    calls = []
    write_all = module._write_all

    def record_call(sources: Any, target: Path) -> None:
        calls.append(target)
        write_all(sources, target)

    monkeypatch.setattr(module, "_write_all", record_call)
    paths: list[Path] = []
    ranks = [threading.Thread(target=lambda: paths.append(convert_reviews(tmp_path))) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(calls) == 1 and len(paths) == 4 and len(set(paths)) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "{'reviewText': 'a Python literal'}",
            "is not JSON: Expecting property name .* \\(column 2\\); expected JSON Lines",
        ),
        ('{"text": "cut', "is not JSON: Unterminated string .* \\(column 10\\); expected JSON Lines"),
        ("[1, 2]", "is of type list; expected .* reviewText"),
        ('{"text": 5}', "the review text is of type int; expected a string"),
    ],
)
def test_a_damaged_line_is_reported_by_file_and_number(tmp_path: Path, cache: Path, line: str, problem: str) -> None:
    path = write_reviews(tmp_path / "reviews.json", {"text": "whole"}, {"text": "whole"})
    path.write_text(f"{path.read_text()}{line}\n")
    message = error_message(tmp_path)
    assert message.startswith(f"{path} line 3") and re.search(problem, message)
    assert [entry.suffix for entry in cache.iterdir()] == [".lock"], "no partial file remains"


@given(line=st.binary(max_size=30))
def test_any_line_is_a_review_or_a_data_error(tmp_path_factory: pytest.TempPathFactory, line: bytes) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "reviews.json").write_bytes(b'{"text": "whole"}\n' + line.replace(b"\n", b"") + b"\n")
    try:
        assert convert_reviews(folder).read_bytes().startswith(b"\n whole ")
    except DataError as error:
        assert f"{folder}/reviews.json line 2" in str(error) and "\n" not in str(error)


def test_a_truncated_gzip_file_is_reported(tmp_path: Path) -> None:
    path = write_reviews(tmp_path / "reviews.json.gz", *({"text": f"number {number}"} for number in range(50)))
    path.write_bytes(path.read_bytes()[:-20])
    assert re.fullmatch(
        rf"{path} is damaged after line [1-9]\d?: Compressed file ended before .*; download it again",
        error_message(tmp_path),
    )
    path.write_bytes(b"no gzip")
    assert error_message(tmp_path).startswith(f"{path} is damaged after line 0: Not a gzipped file (b'no')")


def test_a_file_without_reviews_is_reported(tmp_path: Path) -> None:
    write_reviews(tmp_path / "a.json", {"text": "whole"})
    path = write_reviews(tmp_path / "meta.json", {"title": "a product"})
    message = error_message(tmp_path)
    assert message.startswith(f"{path} has no reviews") and "reviewText or text" in message


def test_a_folder_without_reviews_lists_the_expected_files(tmp_path: Path) -> None:
    patterns = "*.json, *.jsonl, *.json.gz, *.jsonl.gz"
    assert error_message(tmp_path).startswith(f"no reviews in {tmp_path}: expected JSON Lines in {patterns}")
    with pytest.raises(DataError) as error:
        amazon_reviews(text_trial(dataset="amazon_reviews"))
    message = str(error.value)
    assert message.startswith("dataset 'amazon_reviews' needs --data-dir DIR") and patterns in message
    assert "'text_sample'" in message


def test_an_unwritable_cache_is_reported_with_the_variable_that_moves_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_reviews(tmp_path / "reviews.json", {"text": "whole"})
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    message = error_message(tmp_path)
    assert f"the reviews in {tmp_path} into {tmp_path}/file/scaling-study/amazon-" in message
    assert "Not a directory" in message and message.endswith("XDG_CACHE_HOME=DIR")


def test_a_script_converts_reviews_before_a_study(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.convert_reviews", "--source", str(tmp_path)]
    failed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (failed.returncode, failed.stderr) == (1, f"error: {error_message(tmp_path)}\n")
    write_reviews(tmp_path / "reviews.json", {"text": "whole"})
    succeeded = subprocess.run(command, check=True, capture_output=True, text=True)
    assert succeeded.stdout == f"{convert_reviews(tmp_path)}: 8 bytes\n"
