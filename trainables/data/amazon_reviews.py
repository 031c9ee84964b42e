"""Amazon product reviews as text (McAuley et al. 2015, https://arxiv.org/abs/1506.04757; Ni, Li and McAuley 2019).

The published files are JSON Lines, a review a line with its text under "reviewText" (in newer ones "text"). They are made
once a host into one file of bytes in a cache folder, which may be larger than memory: it is mapped, not read.

A review's text is written as Radford et al. 2017 (https://arxiv.org/abs/1704.01444) do: HTML entities resolved, on one line,
without white space at its ends, then a line break and a space before it and a space after it. Reviews without text are left
out, and the order is that of the files' names and of the lines in them.
"""

import gzip
import hashlib
import html
import json
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import IO

import numpy as np

from trainables.data.cache import made_once
from trainables.data.files import REVIEW_FILES, lacking_reviews, review_files
from trainables.data.source import DataError
from trainables.data.text import VOCABULARY, TextDataset, TextSource
from trainables.trial import Trial

TEXT_KEYS = ("reviewText", "text")
FORMAT = "2"
"""changes where the same reviews would be written as other bytes"""


def amazon_reviews(trial: Trial, split: str = "train") -> TextSource:
    """The reviews in `trial.data_dir`, its files plain or gzip. The first trial on a host waits until they are converted.

    Raises DataError where there are none, or a file is damaged.
    """
    if not trial.data_dir:
        raise DataError(
            f"dataset 'amazon_reviews' needs --data-dir DIR with reviews as JSON Lines ({', '.join(REVIEW_FILES)}); "
            "dataset 'text_sample' needs none"
        )
    path = converted(Path(trial.data_dir))
    return TextSource(TextDataset(read_bytes, str(path), split, trial.sequence_length), VOCABULARY)


@lru_cache(maxsize=2)
def read_bytes(path: str) -> np.ndarray:
    """A converted file, memory-mapped: uint8 [N]. Raises DataError."""
    try:
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)  # slices of its own type are slow to make
    except OSError as error:
        raise DataError(f"converted reviews {path} cannot be read: {error.strerror}") from error


def converted(folder: Path) -> Path:
    """The file of bytes of a folder's reviews, made where it is not there yet; other ranks of the host wait for it.

    It lies in the cache (see `trainables.data.cache`) under a name made from the paths, sizes and
    times of the reviews' files, so that changed files are converted again. Raises DataError.
    """
    if reason := lacking_reviews(folder):
        raise DataError(reason)
    sources = review_files(folder)
    name = f"amazon-reviews-{_identity(sources)}.bin"
    return made_once(name, f"the reviews in {folder}", partial(_convert, sources))


def _identity(sources: Sequence[Path]) -> str:
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    return hashlib.sha256(json.dumps([FORMAT, facts]).encode()).hexdigest()[:16]


def _convert(sources: Sequence[Path], target: Path) -> None:
    """Writes all reviews."""
    with target.open("wb") as file:
        for source in sources:
            if not _write_reviews(source, file):
                raise DataError(
                    f"{source} holds no review: none of its lines has {' or '.join(TEXT_KEYS)}; take it out of the folder"
                )


def _write_reviews(source: Path, file: IO[bytes]) -> int:
    """How many bytes of text the source gave."""
    return sum(file.write(_as_bytes(text)) for text in _texts(source))


def _as_bytes(text: str) -> bytes:
    line = " ".join(html.unescape(text).splitlines()).strip()
    return f"\n {line} ".encode(errors="replace")


def _texts(source: Path) -> Iterator[str]:
    """The text of each review that has any. Raises DataError with the number of a damaged line."""
    number = 0
    try:
        with gzip.open(source) if source.suffix == ".gz" else source.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and (text := _text_of(line, source, number)):
                    yield text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{source} is damaged after line {number}: {error}; download it again") from error


def _text_of(line: bytes, source: Path, number: int) -> str | None:
    """The text of a review; None where it has none, or nothing but white space."""
    try:
        review = json.loads(line.strip())
    except (ValueError, RecursionError) as error:
        what = " ".join(str(error).split())
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg} (column {error.colno})"
        raise DataError(
            f"{source} line {number} is not JSON: {what}; expected JSON Lines, one review a line"
        ) from error
    if not isinstance(review, dict):
        raise DataError(f"{source} line {number} is of type {type(review).__name__}, not a review with {TEXT_KEYS[0]}")
    text = next((review[key] for key in TEXT_KEYS if review.get(key) is not None), None)
    if text is not None and not isinstance(text, str):
        raise DataError(f"{source} line {number}: the review's text is of type {type(text).__name__}, not a string")
    return text if text and html.unescape(text).strip() else None
