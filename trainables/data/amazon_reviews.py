"""Amazon product reviews as text (McAuley et al. 2015, https://arxiv.org/abs/1506.04757; Ni, Li and McAuley 2019).

The published files are JSON Lines: one review per line, with its text under "reviewText" (newer files: "text"). They
are converted once per host into one file of bytes in the cache folder. The file may be larger than memory: it is
mapped.

Each review is written as in Radford et al. 2017 (https://arxiv.org/abs/1704.01444): HTML entities are resolved, the
text is put on one line and stripped, then preceded by a line break and a space and followed by a space. Reviews without
text are skipped. Files are read in the order of their names.
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

from trainables.data.cache import build_once
from trainables.data.files import REVIEW_FILES, missing_reviews, review_files
from trainables.data.source import DataError
from trainables.data.text import VOCABULARY, TextDataset, TextSource
from trainables.trial import Trial

TEXT_KEYS = ("reviewText", "text")
FORMAT = "2"
"""version of the output; must change if the same reviews would be written as different bytes"""


def amazon_reviews(trial: Trial, split: str = "train") -> TextSource:
    """Return the reviews in `trial.data_dir`, plain or gzip. The first trial on a host waits for the conversion.

    Raises DataError if there are none, or if a file is damaged.
    """
    if not trial.data_dir:
        raise DataError(
            f"dataset 'amazon_reviews' needs --data-dir DIR with reviews as JSON Lines ({', '.join(REVIEW_FILES)}); "
            "dataset 'text_sample' needs no files"
        )
    path = convert_reviews(Path(trial.data_dir))
    return TextSource(TextDataset(read_bytes, str(path), split, trial.sequence_length), VOCABULARY)


@lru_cache(maxsize=2)
def read_bytes(path: str) -> np.ndarray:
    """Memory-map a converted file: uint8 [N]. Raises DataError."""
    try:
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)  # slicing np.memmap itself is slow
    except OSError as error:
        raise DataError(f"cannot read the converted reviews {path}: {error.strerror}") from error


def convert_reviews(folder: Path) -> Path:
    """Return the cached file of bytes of a folder's reviews, and build it if missing. Other ranks of the host wait.

    Its name contains a digest of the source files' paths, sizes and times, so changed files are converted again. See
    `trainables.data.cache`. Raises DataError.
    """
    if reason := missing_reviews(folder):
        raise DataError(reason)
    sources = review_files(folder)
    name = f"amazon-reviews-{_digest(sources)}.bin"
    return build_once(name, f"the reviews in {folder}", partial(_write_all, sources))


def _digest(sources: Sequence[Path]) -> str:
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    return hashlib.sha256(json.dumps([FORMAT, facts]).encode()).hexdigest()[:16]


def _write_all(sources: Sequence[Path], target: Path) -> None:
    with target.open("wb") as file:
        for source in sources:
            if not _write_reviews(source, file):
                raise DataError(
                    f"{source} has no reviews: no line has {' or '.join(TEXT_KEYS)}; remove the file from the folder"
                )


def _write_reviews(source: Path, file: IO[bytes]) -> int:
    """Append the reviews of one source, and return the number of bytes written."""
    return sum(file.write(_as_bytes(text)) for text in _texts(source))


def _as_bytes(text: str) -> bytes:
    line = " ".join(html.unescape(text).splitlines()).strip()
    return f"\n {line} ".encode(errors="replace")


def _texts(source: Path) -> Iterator[str]:
    """Yield the text of each review that has one. Raises DataError with the number of a damaged line."""
    number = 0
    try:
        with gzip.open(source) if source.suffix == ".gz" else source.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and (text := _text_of(line, source, number)):
                    yield text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{source} is damaged after line {number}: {error}; download it again") from error


def _text_of(line: bytes, source: Path, number: int) -> str | None:
    """Return the text of a review, or None if it is missing or blank."""
    try:
        review = json.loads(line.strip())
    except (ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())
        if isinstance(error, json.JSONDecodeError):
            problem = f"{error.msg} (column {error.colno})"
        raise DataError(
            f"{source} line {number} is not JSON: {problem}; expected JSON Lines, one review per line"
        ) from error
    if not isinstance(review, dict):
        raise DataError(
            f"{source} line {number} is of type {type(review).__name__}; expected an object with {TEXT_KEYS[0]}"
        )
    text = next((review[key] for key in TEXT_KEYS if review.get(key) is not None), None)
    if text is not None and not isinstance(text, str):
        raise DataError(f"{source} line {number}: the review text is of type {type(text).__name__}; expected a string")
    return text if text and html.unescape(text).strip() else None
