"""Token files in the formats of nanoGPT and llm.c, their errors, and the bundled sample."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainables.data.source import DataError
from trainables.data.tokens import Shards, files, read_files, sample
from trainables.registry import SAMPLE_VOCABULARY
from trainables.trial import Trial


def token_trial(**fields: Any) -> Trial:
    return Trial(**{"model": "gpt2", "dataset": "token_files", "batch_per_gpu": 4, "sequence_length": 16} | fields)


def write_nanogpt(path: Path, ids: np.ndarray) -> None:
    """As nanoGPT's data/openwebtext/prepare.py does."""
    ids.astype(np.uint16).tofile(path)


def write_llm_c(path: Path, ids: np.ndarray, model: str = "gpt-2") -> None:
    """As `write_datafile` in llm.c's dev/data/data_common.py does."""
    magic, version, type_ = {"gpt-2": (20240520, 1, np.uint16), "llama-3": (20240801, 7, np.uint32)}[model]
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + ids.astype(type_).tobytes())


def tokens_in(folder: Path, split: str = "train", **fields: Any) -> list[int]:
    read_files.cache_clear()
    source = files(token_trial(data_dir=str(folder), **fields), split)
    inputs, targets = source.dataset.__getitems__(list(range(0, len(source.dataset) - 16, 16)))  # type: ignore[attr-defined, arg-type]
    assert inputs[:, 1:].tolist() == targets[:, :-1].tolist()
    return [int(id_) for id_ in inputs.flatten()]


def test_files_of_nanogpt_are_read(tmp_path: Path) -> None:
    ids = np.arange(50_000, 50_257)
    write_nanogpt(tmp_path / "train.bin", ids)
    write_nanogpt(tmp_path / "val.bin", ids[::-1][:100])
    assert tokens_in(tmp_path) == ids[:256].tolist()
    assert tokens_in(tmp_path, "test") == ids[::-1][:96].tolist()


def test_shards_of_llm_c_are_read_as_one_text_in_the_order_of_their_names(tmp_path: Path) -> None:
    ids = np.arange(300)
    write_llm_c(tmp_path / "fineweb_train_000002.bin", ids[130:])
    write_llm_c(tmp_path / "fineweb_train_000001.bin", ids[:130])
    write_llm_c(tmp_path / "fineweb_val_000000.bin", ids[:40])
    assert tokens_in(tmp_path) == ids[:288].tolist()


def test_ids_of_32_bits_are_read(tmp_path: Path) -> None:
    ids = np.arange(128_000, 128_200)
    write_llm_c(tmp_path / "tiny_train.bin", ids, "llama-3")
    assert tokens_in(tmp_path, model="llama_1b") == ids[:192].tolist()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "0 bytes"),
        (b"abc", "3 bytes"),
        (np.array([20240520, 1, 7], dtype=np.int32).tobytes() + bytes(1012), "states 7 tokens"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(DataError) as error:
        tokens_in(tmp_path)
    assert expected in str(error.value) and "train.bin" in str(error.value) and "\n" not in str(error.value)


def test_ids_that_the_model_does_not_know_are_refused(tmp_path: Path) -> None:
    write_llm_c(tmp_path / "tiny_train.bin", np.arange(128_000, 128_200), "llama-3")
    with pytest.raises(DataError, match="token id 128192, but the model's vocabulary has 50304 ids"):
        tokens_in(tmp_path)


def test_a_folder_without_token_files_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\*train\*\.bin"):
        tokens_in(tmp_path)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_any_slice_of_shards_is_that_of_the_text(lengths: list[int], data: st.DataObject) -> None:
    text = np.arange(sum(lengths), dtype=np.uint16)
    shards = Shards(np.split(text, np.cumsum(lengths)[:-1]))
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    assert shards[start:stop].tolist() == text[start:stop].tolist()
    assert len(shards) == len(text)


def test_the_sample_has_ids_of_its_vocabulary_and_two_splits() -> None:
    trial = token_trial(model="gpt2_tiny", dataset="token_sample")
    train, test = (sample(trial, split).dataset for split in ("train", "test"))
    assert len(train) > 500_000 and len(test) > 20_000  # type: ignore[arg-type]
    inputs, _ = train.__getitems__(list(range(0, 500_000, 1000)))  # type: ignore[attr-defined]
    assert SAMPLE_VOCABULARY * 0.9 < int(inputs.max()) < SAMPLE_VOCABULARY
