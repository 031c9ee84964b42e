"""The `convert` command: convert an image set to another storage format, with progress on stderr."""

import contextlib
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from study.errors import ConfigurationError, clipped, near, one_line
from trainables.registry import STORAGES


def convert_set(source: str, destination: str, storage: str, image_size: int, *, quiet: bool) -> dict[str, Any]:
    """Convert an image set and return the manifest of the new one. Raises ConfigurationError or DataError."""
    if storage not in STORAGES:
        raise ConfigurationError(
            f"--storage {storage!r} is not known; allowed: {', '.join(STORAGES)}{near(storage, STORAGES)}"
        )
    if not os.path.exists(source):
        raise ConfigurationError(f"SRC {source!r} does not exist; give an image folder or a converted set")
    from trainables.data.images.convert import convert  # imports torch

    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, disable=quiet)
    task = progress.add_task("", total=None)
    with contextlib.ExitStack() as until_done:

        def report(description: str, done: int, total: int) -> None:
            if not progress.live.is_started:  # not before, so that a user's mistake prints no bar
                until_done.enter_context(progress)
            progress.update(task, description=description, completed=done, total=total)

        try:
            return convert(Path(source).absolute(), Path(destination).absolute(), storage, image_size, report=report)
        except OSError as error:
            raise ConfigurationError(
                f"{clipped(source)} cannot be converted into {clipped(destination)} ({one_line(error)}): fix that and "
                "run the same command again"
            ) from error


def converted_lines(manifest: Mapping[str, Any], destination: str, storage: str) -> list[str]:
    """Return one line per split of a converted data set, and one that says how to use it."""
    lines = [
        f"{destination}: {name}: {split['count']:,} images in {storage}, verified, sha256 {split['sha256']}"
        for name, split in manifest["splits"].items()
    ]
    return [*lines, f"use it with: --data-dir {shlex.quote(destination)} --set storage={storage}"]
