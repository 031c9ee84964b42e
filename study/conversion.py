"""Image sets into another storage format, with progress on stderr."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from study.messages import ConfigurationError, near
from trainables.registry import STORAGES


def convert_set(source: str, destination: str, storage: str, image_size: int, *, quiet: bool) -> dict[str, Any]:
    """Converts and gives the manifest of what was made. Raises ConfigurationError, or DataError of the data."""
    if storage not in STORAGES:
        raise ConfigurationError(
            f"--storage {storage!r} is not known; allowed: {', '.join(STORAGES)}{near(storage, STORAGES)}"
        )
    from trainables.data.convert import convert  # imports torch

    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet) as progress:
        task = progress.add_task("opening", total=None)

        def report(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        return convert(Path(source).absolute(), Path(destination).absolute(), storage, image_size, report=report)
