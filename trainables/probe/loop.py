"""`for batch in steps(loader):` marks the steps of a training loop. Imports nothing, so that any script can use it."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

PROBE_MODULE = "_scaling_study_probe"
"""Entry of `sys.modules` whose attribute `probe` is the active probe. A script's `trainables` may be another copy of
this package than the probe's, or its own module of that name."""


def steps(loader: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over `loader` whose iterations are training steps.

    In a study, each iteration is one timed step, and the loop ends when the study has measured enough. Outside a study
    it iterates over `loader` unchanged.
    """
    module = sys.modules.get(PROBE_MODULE)
    return iter(loader) if module is None else module.probe.iterate(loader)
