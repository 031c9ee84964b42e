"""Writes docs/fields.md: every field of a trial, with what is allowed and what it is when nothing is said.

python -m scripts.field_table
"""

from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo
from tabulate import tabulate

from trainables.registry import NAMES
from trainables.trial import Trial

PAGE = Path(__file__).resolve().parent.parent / "docs" / "fields.md"

TEXT = """# Fields of a trial

Each may be varied: `--set FIELD=a,b`, or `set:` in a `--config` file; those that have an option of their own (`--gpus` is `world_size`)
also by that. Defaults are those of a trial; a study may set others, which `plan STUDY --print-config` shows. What does not go
together is refused with the reason. Made by `python -m scripts.field_table`.
"""

NOT_SET = {"workload_digest", "repeat"}
"""the study's own"""


def page() -> str:
    """The page as Markdown."""
    rows = [
        (f"`{name}`", _allowed(name, field), _default(field.default), field.description)
        for name, field in Trial.model_fields.items()
        if name not in NOT_SET
    ]
    return f"{TEXT}\n{tabulate(rows, ['field', 'allowed', 'default', 'what it is'], tablefmt='github')}\n"


def _allowed(name: str, field: FieldInfo) -> str:
    if name in NAMES:
        return ", ".join(NAMES[name])
    annotation: Any = field.annotation
    if annotation is bool:
        return "true, false"
    if values := [value for value in get_args(annotation) if isinstance(value, str)]:
        return ", ".join(values)
    kind = next((each for each in (*get_args(annotation), annotation) if each in (int, float, str)), str)
    limits = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    told = [
        f"{words} {getattr(limit, key)}"
        for limit in field.metadata
        for key, words in limits.items()
        if hasattr(limit, key)
    ]
    return ", ".join([{int: "whole number", float: "number", str: "text"}[kind], *told])


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return {None: "none", "": "empty"}.get(value, str(value))


if __name__ == "__main__":
    PAGE.write_text(page())
