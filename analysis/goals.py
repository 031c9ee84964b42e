"""What a user may want most of a configuration; the names of `--goal`."""

from collections.abc import Mapping
from typing import Any

GOALS = ("throughput", "time-to-accuracy", "cost")
"""samples a second; seconds until the target accuracy; samples a GPU-hour"""


def goal_of(study: Mapping[str, Any]) -> str | None:
    """What --goal said when the study ran; None where it said nothing."""
    configuration = study.get("configuration")
    goal = configuration.get("goal") if isinstance(configuration, dict) else None
    return goal if goal in GOALS else None
