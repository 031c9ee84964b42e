"""Read a JSON file with limits on its size, its nesting and its numbers; make its texts printable."""

import json
import math
from typing import Any

import pyarrow.fs as pafs

from analysis.read.errors import ResultsError, line, printable

MAX_BYTES = 16 * 2**20
"""Largest study.json or trial.json. The record of a trial takes about 1 kB per rank."""

MAX_DEPTH = 32
MAX_VALUES = 1_000_000
"""Most values of such a file. Small ones take a hundred times as much memory as text."""


def read_json(system: pafs.FileSystem, path: str, fix: str) -> dict[str, Any]:
    """Return the mapping in a JSON file as `plain_json`. Raises ResultsError, with `fix` if the file is damaged."""
    try:
        with system.open_input_stream(path) as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read ({line(error)})") from None
    if len(content) > MAX_BYTES:
        raise ResultsError(f"{path}: larger than {MAX_BYTES // 2**20} MiB, the limit for such a file; {fix}")
    try:
        value = plain_json(parsed(content))
    except RecursionError:
        raise ResultsError(f"{path}: not valid JSON (nested too deeply); {fix}") from None
    except ValueError as error:
        raise ResultsError(f"{path}: not valid JSON ({line(error)}); {fix}") from None
    if not isinstance(value, dict):
        raise ResultsError(f"{path}: must be a mapping, got {type(value).__name__}; {fix}")
    return value


def parsed(text: bytes | str) -> Any:
    """Return the value of JSON. Raises ValueError if the text is too large or holds too many values to be read."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES // 2**20} MiB")
    if (text.count(b",") if isinstance(text, bytes) else text.count(",")) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    return json.loads(text)


def plain_json(value: Any, depth: int = 0) -> Any:
    """Return a JSON value with printable texts, and None for numbers that are not finite.

    Raises ValueError for numbers beyond 64 bits and for more than `MAX_DEPTH` levels.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): plain_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_json(item, depth + 1) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a number has more than 64 bits")
    return value
