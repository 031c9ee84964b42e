"""Lines of the card on `improve`: the gain, the changes that are kept, the bottleneck, and how to use the result."""

import math

from analysis.compare.bottleneck import WORDS
from analysis.duration import duration
from analysis.read.study_record import Improvement, LeverRow, MeasuredGain, Side
from analysis.text import held_bounds, join, number, percent
from analysis.verdict.lines.trust import FAIR, GOOD, POOR
from analysis.verdict.lines.value import CardLine, Quantity, Trust

MOST_LISTED = 4

GOOD_INTERVAL = 0.02
"""Half the width of the interval up to which trust is good."""

_PER_COST = 1e6
"""Samples or tokens whose cost the card states."""


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
    text = f"{join(list(improvement.kept))}: measured {_percent(gain)} {improvement.raised}"
    return CardLine("do_next", "do next", text, (_quantity("measured_speed_up", gain),))


NONE_APPLIES = "unknown, since no known change applies"
MORE_CHANGES = "name values to try: --vary=FLAG=A,B, --env NAME=A,B, --bind FIELD=FLAG, or --set FIELD=A,B"
"""What to say if nothing was tried."""


def improve_lines(improvement: Improvement) -> list[CardLine]:
    """Return the lines of the card of an `improve` folder."""
    lines = [_gain(improvement), _kept(improvement), _lost(improvement), _bottleneck(improvement)]
    lines += [_loss(improvement), _bounds(improvement)]
    if none_applies(improvement):
        lines.append(CardLine("do_next", "do next", MORE_CHANGES))
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
    reason = f"{groups} separate starts each of baseline and result, ±{percent(half_width, 1)}"
    return Trust(level, reason, groups, half_width)


def none_applies(improvement: Improvement) -> bool:
    """Return True if the search ended without a change that it could try."""
    return improvement.is_complete and not improvement.levers


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
    if improvement.gain is None or after is None or not improvement.kept:
        unknown = NONE_APPLIES if none_applies(improvement) else "unknown, since no change was tried"
        found = "none" if _tried(improvement) else unknown
        return CardLine("gain", "gain", f"{found}: {_value(improvement, before)} as before; {cost}", ())
    quantities = [_quantity(_QUANTITIES.get(improvement.goal, "speed_up"), improvement.gain)]
    change = f"{_value(improvement, before, unit=False)} → {_value(improvement, after)}, {_ratio(improvement.gain)}"
    noun = _noun(improvement)
    if improvement.goal == "efficiency":
        all_ranks = improvement.gain_on_all or improvement.gain
        change = f"{_value(improvement, before, unit=False)} → {_value(improvement, after)}, {_ratio(all_ranks)}"
        change += f"; efficiency {_ratio(improvement.gain)}"
        quantities.insert(0, _quantity("speed_up", all_ranks))
        if improvement.gain_on_one is not None:
            change += f"; on one {noun} {_ratio(improvement.gain_on_one)}"
            quantities.append(_quantity("speed_up_on_one", improvement.gain_on_one))
    if improvement.goal == "cost" and before.ranks != after.ranks:
        change += f"; on {before.ranks} → {after.ranks} {noun}s"
    if improvement.goal in ("cost", "time-to-accuracy") and improvement.gain_on_all is not None:
        change += f"; throughput {_ratio(improvement.gain_on_all)}"
        quantities.append(_quantity("speed_up", improvement.gain_on_all))
    return CardLine("gain", "gain", f"{change}; {cost}", tuple(quantities))


_QUANTITIES = {"efficiency": "efficiency_ratio", "cost": "cost_ratio", "time-to-accuracy": "time_to_target_ratio"}
"""Names of the gain by the goal."""


def _noun(improvement: Improvement) -> str:
    return "GPU" if improvement.on_gpus else "CPU rank"


def _value(improvement: Improvement, side: Side, *, unit: bool = True) -> str:
    """Return what the goal is about: throughput per rank, cost, or time to the target accuracy."""
    what = "tokens" if side.tokens_per_sample else "samples"
    rate = side.throughput_samples_per_s * (side.tokens_per_sample or 1.0)
    if improvement.goal == "time-to-accuracy" and side.time_to_target_s is not None:
        start = (
            "" if improvement.target_accuracy is None or not unit else f" to accuracy {improvement.target_accuracy:g}"
        )
        return f"{number(side.time_to_target_s, 1)} s{start}"
    if improvement.goal == "cost":
        hours, price = side.ranks * _PER_COST / rate / 3600, improvement.price_per_gpu_hour
        cost = number(hours * (1.0 if price is None else price), 3)
        return f"{cost} {f'{_noun(improvement)}-hours ' * (price is None)}per million {what}" if unit else cost
    per_rank = rate / side.ranks
    text = number(per_rank, 0 if per_rank >= 100 else 1)
    return f"{text} {what}/s per {_noun(improvement)}" if unit else text


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
    text = f"differs by {difference:+.3g} over the same samples, "
    if spread is None:
        text += "but how much it varies with the seed is unknown: bind the seed (--bind seed=--seed)"
    else:
        text += f"{'beyond' if is_beyond else 'within'} the spread of seeds, {spread:.3g}"
    return CardLine("loss", "loss", text, (Quantity("loss_difference", difference, "1"),))


def _bounds(improvement: Improvement) -> CardLine | None:
    checked = improvement.checked_bounds
    if not checked:
        return None
    quantities = (
        Quantity("right_bounds", float(sum(held for _, held in checked)), "bounds"),
        Quantity("measured_bounds", float(len(checked)), "bounds"),
    )
    return CardLine("bounds", "bounds", held_bounds(checked), quantities)


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
