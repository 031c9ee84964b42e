"""Build the rows of steps.parquet from the marks of a script's steps."""

import math
import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import pairwise

from trainables.probe.job import Row
from trainables.probe.spans import Span, StepSpans
from trainables.step.timing import Clock, Mark

EVALUATION = "evaluation"
"""window of steps that contain an evaluation pass; they belong to no measure"""

GAPS: Mapping[tuple[str, str], str] = {
    ("forward", "backward"): "loss",
    ("forward", "loss"): "loss",
    ("loss", "backward"): "loss",
    ("backward", "optimizer"): "optimizer",
    ("reduce", "optimizer"): "optimizer",
    ("optimizer", "optimizer"): "optimizer",
    ("backward", "reduce"): "reduce",
    ("reduce", "reduce"): "reduce",
}
"""Part to which the time between two parts belongs: a loss function; clipping and unscaling before the optimizer. The
time between all others is `other`."""


def part_times(step: StepSpans, start: Mark, end: Mark, clock: Clock) -> Row:
    """Return the seconds of each part of a step between two marks, which add up to `step_s`, and the bytes copied."""
    row: Row = {"step_s": clock.seconds(start, end)}
    edges = [Span("", start, 0.0, start), *step.spans, Span("", end, 0.0, end)]
    for before, after in pairwise(edges):
        gap = GAPS.get((before.name, after.name), "other")
        _add(row, gap, clock.seconds(before.end, after.start))
        if after.name:
            _add(row, after.name, clock.seconds(after.start, after.end))
    copies = [span for span in step.spans if span.name == "host_to_device"]
    row["host_to_device_bytes"] = step.copied_bytes if copies else None
    row["host_transfer_s"] = sum(span.end_s - span.start_s for span in copies) if copies else None
    loads = [span for span in step.spans if span.name == "load_wait"]
    row["host_load_s"] = sum(span.end_s - span.start_s for span in loads) if loads else None
    return row


def launch_times(step: StepSpans) -> Row:
    """Return the host's seconds to issue the parts of a step to an idle device, and their sum.

    The time between the parts is omitted, because that is where loops wait for the device (`loss.item()`).
    """
    row: Row = {}
    for span in step.spans:
        if span.name in ("forward", "loss", "backward", "reduce", "optimizer"):
            _add(row, f"{span.name}_launch", span.end_s - span.start_s)
    return row | ({"step_launch_s": sum(row.values())} if row else {})


def _add(row: Row, part: str, seconds: float) -> None:
    row[f"{part}_s"] = row.get(f"{part}_s", 0.0) + seconds


def evaluation_steps(
    signals: Mapping[Hashable, Collection[int]], windows: Sequence[str]
) -> tuple[set[int], set[Hashable]]:
    """Return the steps that contain an evaluation pass, and the signals that show none.

    signals: steps by signal, such as `eval` of a module. windows: window of each step. What is seen in more than half
    of the steps is part of a training step: a frozen module, a teacher, an accuracy.
    """
    timed = {step for step, window in enumerate(windows) if window != "warmup"}
    common = {signal for signal, steps in signals.items() if len(timed.intersection(steps)) * 2 > len(timed)}
    return {step for signal, steps in signals.items() if signal not in common for step in steps}, common


def label_evaluations(rows: Sequence[Row], evaluated: Collection[int]) -> list[Row]:
    """Return the rows of a rank with `evaluated` steps in a window of their own, and the seconds of each window.

    `window_s` is the sum of the other steps, so that a window is as long as its training steps. `evaluated` are those
    of any rank, because the others wait for it.
    """
    labelled = [
        row | {"window": EVALUATION} if row["step"] in evaluated and row["window"] != "warmup" else dict(row)
        for row in rows
    ]
    seconds: dict[str, float] = {}
    for row in labelled:
        if row["step_s"] is not None:
            seconds[row["window"]] = seconds.get(row["window"], 0.0) + row["step_s"]
    timed = ("plain", "phases", "communication")
    return [row | {"window_s": seconds.get(row["window"]) if row["window"] in timed else None} for row in labelled]


def usual(values: Sequence[int | None]) -> int | None:
    """Return the value of more than half of the steps; without one, the mean, as if batches are padded; or None.

    Unknown values do not count.
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    common = statistics.mode(known)
    return common if 2 * known.count(common) > len(known) else round(statistics.fmean(known))


def total(counts: Sequence[int | None]) -> int | None:
    """Return the sum of counts; None if there are none or one of them is unknown."""
    return sum(filter(None, counts)) if counts and None not in counts else None


def micro_batches(step: StepSpans) -> list[int | None]:
    """Return the samples of the forward passes of a step that see each sample once.

    A loop may call several modules with the same samples: an encoder and its heads, a generator and a discriminator,
    two critics and an actor. The passes are those of the module with the fewest, among the modules whose usual batch is
    that of most modules.
    """
    by_module: dict[int, list[int | None]] = {}
    for one in step.forward_passes:
        by_module.setdefault(one.module, []).append(one.samples)
    sizes = {module: usual(of_module) for module, of_module in by_module.items()}
    known = [size for size in sizes.values() if size is not None]
    common = statistics.mode(known) if known else None
    return min((by_module[module] for module, size in sizes.items() if size == common), key=len, default=[])


def computed_samples(steps: Sequence[StepSpans]) -> int | None:
    """Return the usual samples per step, from the inputs of the forward passes."""
    return usual([total(micro_batches(step)) for step in steps])


def tokens_of(step: StepSpans) -> int | None:
    """Return the tokens of a step: of the module that sees the most. None if no module's inputs are tokens."""
    by_module: dict[int, int] = {}
    for one in step.forward_passes:
        if one.tokens is not None:
            by_module[one.module] = by_module.get(one.module, 0) + one.tokens
    return max(by_module.values(), default=None)


def losses(steps: Sequence[StepSpans]) -> list[float | None]:
    """Return the mean loss per step, None if it is not finite; empty if no step shows one. Waits for the device."""
    if not any(step.losses for step in steps):
        return []
    means = [statistics.fmean(map(float, step.losses)) if step.losses else math.nan for step in steps]
    return [mean if math.isfinite(mean) else None for mean in means]


def reasons_for_nulls(steps: Sequence[StepSpans], batch: int | None, tokens: int | None) -> dict[str, str]:
    """Return why quantities are null, by quantity. batch, tokens: per step, None if unknown."""
    names = {span.name for step in steps for span in step.spans}
    reasons = {
        "load_wait_s": "no torch DataLoader was used" if "load_wait" not in names else None,
        "host_to_device_s": "no copy from host to device was seen" if "host_to_device" not in names else None,
        "forward_s": "no call of a module with trainable parameters was seen" if "forward" not in names else None,
        "backward_s": "no backward pass was seen" if "backward" not in names else None,
        "optimizer_s": "no optimizer was called outside the backward pass" if "optimizer" not in names else None,
        "samples_per_step": "neither a DataLoader's batches nor the model's inputs show it" if batch is None else None,
        "tokens_per_step": "the model has no integer inputs [samples, tokens]" if tokens is None else None,
    }
    return {name: reason for name, reason in reasons.items() if reason is not None and steps}
