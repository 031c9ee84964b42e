"""Lines of the card on `improve`: the gain, the changes that are kept, the bottleneck, and how to use the result."""

import math

from analysis.compare.bottleneck import WORDS
from analysis.duration import duration
from analysis.read.study_record import Improvement, LeverRow, MeasuredGain, Side
from analysis.text import join, number, percent
from analysis.verdict.lines.trust import FAIR, GOOD, POOR
from analysis.verdict.lines.value import CardLine, Quantity, Trust

MOST_LISTED = 4

GOOD_INTERVAL = 0.02
"""Half the width of the interval up to which trust is good."""


def measured_advice(improvement: Improvement | None) -> CardLine | None:
    """State the gain of the changes that `improve` kept; None if it has not run to its end."""
    if improvement is None or not improvement.is_complete:
        return None
    if improvement.gain is None or not improvement.kept:
        tried = _tried(improvement)
        if not tried:
            return None
        return CardLine("do_next", "do next", f"nothing: none of {tried} changes tried gains significantly (measured)")
    gain = improvement.gain
    what = "throughput" if improvement.goal == "throughput" else "scaling efficiency"
    text = f"{join(list(improvement.kept))}: measured {_percent(gain)} {what}"
    return CardLine("do_next", "do next", text, (_quantity("measured_speed_up", gain),))


def improve_lines(improvement: Improvement) -> list[CardLine]:
    """Return the lines of the card of an `improve` folder."""
    lines = [_gain(improvement), _kept(improvement), _lost(improvement), _bottleneck(improvement)]
    lines += [_loss(improvement), _bounds(improvement)]
    return [line for line in lines if line is not None]


def trust_in_improvement(improvement: Improvement) -> Trust:
    """Return how far the gain can be trusted."""
    gain = improvement.gain
    if not improvement.is_complete:
        return Trust(POOR, "the search has not ended")
    if gain is None and not _tried(improvement):
        return Trust(POOR, "no change was tried")
    if gain is None or gain.low is None or gain.high is None:
        return Trust(FAIR, "no change gained significantly")
    half_width = math.sqrt(gain.high / gain.low) - 1
    level = GOOD if half_width <= GOOD_INTERVAL else FAIR
    groups = min((len(side.trial_ids) for side in (improvement.baseline, improvement.chosen) if side), default=0)
    return Trust(level, f"{groups} separate starts each, ±{percent(half_width, 1)}", groups, half_width)


def _tried(improvement: Improvement) -> int:
    """Return how many changes were measured."""
    return sum(row.gain is not None for row in improvement.levers)


def _gain(improvement: Improvement) -> CardLine | None:
    """State `before → after per GPU, ratio [interval], trials, minutes, GPU-hours`."""
    before, after = improvement.baseline, improvement.chosen
    if before is None:
        return None
    trials = improvement.trials
    cost = f"{trials} trial{'' if trials == 1 else 's'}, {duration(improvement.elapsed_s)}"
    if improvement.gpu_hours is not None:
        cost += f", {number(improvement.gpu_hours, 1 if improvement.gpu_hours >= 0.1 else 2)} GPU-hours"
    unit = "tokens" if before.tokens_per_sample else "samples"
    noun = "GPU" if improvement.on_gpus else "CPU rank"
    start = _rate(before, improvement.ranks)
    if improvement.gain is None or after is None or not improvement.kept:
        found = "none" if _tried(improvement) else "unknown, since no change was tried"
        text = f"{found}: {start} {unit}/s per {noun} as before; {cost}"
        return CardLine("gain", "gain", text, ())
    all_ranks = improvement.gain_on_all or improvement.gain
    text = f"{start} → {_rate(after, improvement.ranks)} {unit}/s per {noun}, {_ratio(all_ranks)}"
    quantities = [_quantity("speed_up", all_ranks)]
    if improvement.goal == "efficiency":
        text += f"; efficiency {_ratio(improvement.gain)}"
        quantities.append(_quantity("efficiency_ratio", improvement.gain))
        if improvement.gain_on_one is not None:
            text += f"; on one {noun} {_ratio(improvement.gain_on_one)}"
            quantities.append(_quantity("speed_up_on_one", improvement.gain_on_one))
    return CardLine("gain", "gain", f"{text}; {cost}", tuple(quantities))


def _kept(improvement: Improvement) -> CardLine | None:
    if not improvement.kept:
        return None
    rows = {row.lever: row for row in improvement.levers}
    listed = [f"{name} {_ratio(gain)}" for name in improvement.kept if (gain := _own_gain(rows.get(name)))]
    return CardLine("kept", "kept", " · ".join(listed) or ", ".join(improvement.kept))


def _own_gain(row: LeverRow | None) -> MeasuredGain | None:
    return None if row is None else row.gain


def _lost(improvement: Improvement) -> CardLine | None:
    """Name the changes that were tried and not kept, with the reason."""
    lost = [
        row for row in improvement.levers if not row.is_kept and (row.gain is not None or "not tried" not in row.why)
    ]
    if not lost:
        return None
    listed = [f"{row.lever} ({row.why})" for row in lost[:MOST_LISTED]]
    more = [f"{len(lost) - MOST_LISTED} more"] if len(lost) > MOST_LISTED else []
    return CardLine("not_kept", "not kept", " · ".join([*listed, *more]))


def _bottleneck(improvement: Improvement) -> CardLine | None:
    before, after = (_bound(side) for side in (improvement.baseline, improvement.chosen))
    if before is None:
        return None
    text = before if after is None or not improvement.kept else f"{before} → {after}"
    return CardLine("bound_by", "bound by", text)


def _bound(side: Side | None) -> str | None:
    if side is None or side.bottleneck is None or side.bottleneck not in WORDS:
        return None
    share = "" if side.share is None else f" ({percent(side.share)} of the step)"
    return f"{WORDS[side.bottleneck].label}{share}"


def _loss(improvement: Improvement) -> CardLine | None:
    if improvement.loss is None:
        return None
    difference, spread, is_beyond = improvement.loss
    verdict = "beyond" if is_beyond else "within"
    text = f"differs by {difference:+.3g} over the same samples, {verdict} the spread of seeds, {spread:.3g}"
    return CardLine("loss", "loss", text, (Quantity("loss_difference", difference, "1"),))


def _bounds(improvement: Improvement) -> CardLine | None:
    right, measured = improvement.right_bounds
    if not measured:
        return None
    text = f"{right} of {measured} upper bounds held"
    quantities = (
        Quantity("right_bounds", float(right), "bounds"),
        Quantity("measured_bounds", float(measured), "bounds"),
    )
    return CardLine("bounds", "bounds", text, quantities)


def _rate(side: Side, ranks: int) -> str:
    rate = side.throughput_samples_per_s * (side.tokens_per_sample or 1.0) / ranks
    return number(rate, 0 if rate >= 100 else 1)


def _ratio(gain: MeasuredGain) -> str:
    text = f"{number(gain.value, 2)}x"
    return text if gain.low is None or gain.high is None else f"{text} [{number(gain.low, 2)}, {number(gain.high, 2)}]"


def _percent(gain: MeasuredGain) -> str:
    decimals = 0 if gain.value >= 1.1 else 1
    text = f"+{percent(gain.value - 1, decimals)}"
    if gain.low is None or gain.high is None:
        return text
    return f"{text} [{number(100 * (gain.low - 1), decimals)}, {number(100 * (gain.high - 1), decimals)}]"


def _quantity(name: str, gain: MeasuredGain) -> Quantity:
    return Quantity(name, gain.value, "1", gain.low, gain.high)
