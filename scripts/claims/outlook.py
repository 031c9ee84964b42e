"""Figures of docs/evidence.md and docs/prediction.md: predictions, and what a large batch does."""

import re
from statistics import fmean
from typing import Any

from scripts.claims.sources import (
    Cell,
    Entries,
    Value,
    cell,
    claim,
    count,
    figure,
    figures,
    frames,
    goal,
    missed,
    number,
    on_page,
    one,
    samples,
    summary,
    table,
    yes_no,
)

says, stated, shows = on_page("docs/evidence.md")

# ------------------------------------------------------------------------------------------------------- predictions

KINDS = {
    "all {} series": "",
    "{} not host-bound": " (not host-bound on 1 and 2)",
    "{} on the real link (`auto`)": " (interconnect auto)",
}
MEASURES = (
    ("mean absolute error of the step", "mean absolute error", 100, 1, " %"),
    ("largest error", "largest error", 100, 0, " %"),
    ("error / naive error if efficiency is below 0.9", "error / naive error where efficiency < 0.9", 1, 2, ""),
    ("steps within their interval", "share of measured steps in their 95 % prediction interval", 100, 0, " %"),
)


def _full_name(name: str, kind: str) -> str:
    """Return the name of a figure of `prediction`. Some end with the number of series."""
    pattern = rf"{re.escape(name + KINDS[kind])}(, \d+ series)?"
    return next(full for full in summary("prediction") if re.fullmatch(pattern, full))


GOALS = [figure("prediction", _full_name(name, kind)) for _, name, *_ in MEASURES for kind in KINDS]


def _prediction_row(label: str, name: str, factor: int, decimals: int, unit: str) -> tuple[str | Cell, ...]:
    """Return a measure of each kind of series, with its goal, and whether the goals are met."""
    names = [_full_name(name, kind) for kind in KINDS]
    cells = [
        cell(
            f"{{:{decimals}}}{unit} (goal {{:g}}{unit})",
            factor * figure("prediction", full),
            factor * goal("prediction", full),
        )
        for full in names
    ]
    answers = [yes_no(figure("prediction", full)) for full in names]
    return label, *cells, Cell(", ".join(map(str, answers)), tuple(figure("prediction", full) for full in names))


def _series(**fields: Any) -> list[dict[str, Any]]:
    return [row for row in samples("prediction") if all(row[name] == value for name, value in fields.items())]


def _errors(rows: list[dict[str, Any]]) -> list[float]:
    """Return the absolute errors of series in percent, in increasing order."""
    return sorted(abs(100 * row["error"]) for row in rows)


def _is_within(row: dict[str, Any]) -> bool:
    low, high = row["interval_s"]
    return bool(low <= row["step_s"]["4"] <= high)


LATER_NAIVE = next(name for name in summary("prediction-later") if name.startswith("error / naive error"))
LATER, LATER_REFUSED = (
    [row for row in samples("prediction-later") if row["host_bound"] is refused] for refused in (False, True)
)
OUTSIDE = [row for row in samples("prediction") if not _is_within(row)]
REAL_LINK = [row for row in _series(host_bound=False) if row["fields"].get("interconnect", "auto") == "auto"]
HOST_BOUND = _series(host_bound=True)
VGG_SOCKET = {"batch_per_gpu": 256, "model": "vgg19", "workload": "", "interconnect": "socket"}


def _socket_difference() -> Value:
    """Return by how many percent equal trials over `socket` differ between the two hosts, at most."""
    steps = {
        folder: [
            row["step_s"][ranks]
            for row in _series(folder=folder, host_bound=False)
            if row["fields"]["interconnect"] == "socket"
            for ranks in ("2", "4")
        ]
        for folder in ("communication", "communication-first")
    }
    ratios = [a / b for a, b in zip(steps["communication"], steps["communication-first"], strict=True)]
    return number(100 * (max(max(ratio, 1 / ratio) for ratio in ratios) - 1))


def _spread(name: str) -> Value:
    [value] = figures("prediction", rf"{name}, \d+ .*")
    return 100 * value


HOST_SPREAD, SOCKET_SPREAD = (
    _spread(f"spread of a run, {kind}") for kind in ("host-bound", "not host-bound, over socket")
)
GENERATED = {
    "a rank that is 6 ms late": "slow rank",
    "no slow rank": "no slow rank",
    "no slow rank, only 1 and 2 ranks": "only 1 and 2 ranks",
    "slow rank, 5 repeats": "slow rank, 5 repeats",
    "host-bound from 2 ranks on (refused)": "host-bound from 2 ranks on",
    "host-bound and slow rank (refused)": "host-bound and slow rank",
    "4 ranks per node, 8 on two nodes": "4 ranks per node, 8 on 2 nodes",
    "exposed ring": "exposed ring",
    "exposed ring and slow rank": "exposed ring and slow rank",
    "exposed ring, only 1, 2 and 4 ranks": "exposed ring, only 1, 2 and 4",
    "groups differ by configuration": "groups differ by configuration",
    "one repeat": "one repeat",
}
UNSEEN = "slow rank, only 1 and 2 ranks without it"


def _law(name: str, case: str) -> Value:
    return figure("prediction-laws", f"{name}: {case}")


def _law_row(label: str, case: str) -> tuple[str | Cell, ...]:
    within = (_law("law in its interval", case), _law("new run in its interval", case))
    return (
        label,
        cell("{:1} %", 100 * _law("mean absolute error", case)),
        cell("{:2}", _law("median width", case)),
        cell("{:0} %, {:0} %", *(100 * value for value in within)),
    )


BLIND_SERIES = figures("blind", ".*: error of the step")
BLIND = f"mean absolute error, {len(BLIND_SERIES)} series"
MLSTM_SERIES = figures("blind-mlstm", ".*: error of the step")
IN_LAW, IN_NEW_RUN = (f"{what} in its 95 % interval, 12 cases" for what in ("law", "new run"))
PREDICTION: Entries = [
    claim(
        "docs/prediction.md",
        "(a run {} % not host-bound, {} % host-bound; laws {} % per doubling)",
        _spread("spread of a run, not host-bound"),
        HOST_SPREAD,
        _spread("error of the laws beyond the spread of runs"),
    ),
    says("Its {} series:", number(len(samples("prediction")))),
    says(
        "{} from `communication` and `communication-first`",
        number(len(_series(folder="communication")) + len(_series(folder="communication-first"))),
    ),
    says("{} from `captured`", number(len(_series(folder="captured")))),
    says("{} from `default-4gpu`", number(len(_series(folder="default-4gpu")))),
    says("refuses the {} series that are host-bound", number(len(HOST_BOUND))),
    shows(
        "prediction",
        (
            "what",
            *(kind.format(f"{figure('prediction', _full_name('series', kind)):0}") for kind in KINDS),
            "goals met, in this order",
        ),
        [_prediction_row(*measure) for measure in MEASURES],
    ),
    says("Of the {} goals, {} are missed.", count(GOALS), count(missed(GOALS))),
    says(
        "The {} host-bound series have a mean error of {} %. One run of such a step spreads by {} %",
        number(len(HOST_BOUND)),
        number(fmean(_errors(HOST_BOUND))),
        HOST_SPREAD,
    ),
    says(
        "the {} series there that are not host-bound have a mean error of {} %, at most {} %",
        number(len(REAL_LINK)),
        number(fmean(_errors(REAL_LINK))),
        number(_errors(REAL_LINK)[-1]),
    ),
    says("The {} series that are outside of their intervals", number(len(OUTSIDE))),
    says("spread by {} % there, up to {} % between the two hosts", SOCKET_SPREAD, _socket_difference()),
    says("{} % for VGG-19 at batch 256.", number(_errors(_series(folder="communication", fields=VGG_SOCKET))[-1])),
    says(
        "The mean absolute error of {} series is {} % (goal: {} %)",
        count(BLIND_SERIES),
        100 * figure("blind", BLIND),
        100 * goal("blind", BLIND),
    ),
    says(
        "the naive estimate {} %, and {} of the intervals hold",
        100 * figure("blind", "mean absolute error of the naive estimate"),
        figure("blind", f"intervals that hold, of {len(BLIND_SERIES)}"),
    ),
    says(
        "The mean absolute error of {} series is {} %, which\nmisses the goal",
        count(MLSTM_SERIES),
        100 * figure("blind-mlstm", f"mean absolute error, {len(MLSTM_SERIES)} series"),
    ),
    says("the naive estimate's is {} %", 100 * figure("blind-mlstm", "mean absolute error of the naive estimate")),
    says("{} % too slow, within its interval. That of the larger one is off by {} %", *(100 * v for v in MLSTM_SERIES)),
    says(
        "`benchmarks/results/prediction-later`, {} series\nof seven studies",
        number(len(samples("prediction-later"))),
    ),
    stated("(five of the blind test among them)", "a count of the blind test's series"),
    says(
        "Of the {} that are not host-bound, the mean error is {} %,\nthe largest {} %",
        *(number(value) for value in (len(LATER), fmean(_errors(LATER)), _errors(LATER)[-1])),
    ),
    says("The {} others are refused", number(len(LATER_REFUSED))),
    says(
        "all three goals are missed: a mean\nerror of {} % (goal: {} %), the largest {} % (goal: {} %)",
        *(
            100 * value("prediction-later", name)
            for name in ("mean absolute error", "largest error")
            for value in (figure, goal)
        ),
    ),
    says(
        "and {} of the naive error if the efficiency is low, which misses its goal of {}.",
        *(value("prediction-later", LATER_NAIVE) for value in (figure, goal)),
    ),
    stated("took\n0.9 of its span on an idle device, and now also if it takes 0.9 of the plain step", "a rule"),
    shows(
        "prediction-laws",
        ("case", "mean error", "high / low", "true step, new run within"),
        [_law_row(label, case) for label, case in GENERATED.items()],
    ),
    says(
        "in {} % of 240 studies (goal: {} to {} %)",
        100 * figure("prediction-laws", IN_NEW_RUN),
        *(100 * goal("prediction-laws", IN_NEW_RUN, end) for end in (0, 1)),
    ),
    says("The true step is within it in {} % of them: that goal is missed", 100 * figure("prediction-laws", IN_LAW)),
    says("It is underestimated by {} %", 100 * _law("mean absolute error", UNSEEN)),
    stated("of 240 studies", "setting"),
]


# --------------------------------------------------------------------------------------------------------- large batch

RECIPES = {
    "no recipe": "plain",
    "linear": "linear",
    "linear + gradual warm-up": "linear + gradual warm-up",
    "square root + gradual warm-up + LARS": "square root + gradual warm-up + LARS",
    "linear + gradual warm-up + no decay of norms and biases + zero gamma": (
        "linear + warm-up, no decay of norms and biases, zero gamma"
    ),
}
BATCHES = (128, 512, 2_048, 8_192, 16_384, 32_768)


def accuracy(recipe: str, batch: int, column: str = "top1") -> Value:
    """Return an accuracy, or a difference in accuracy, in percent or points, of a recipe at a global batch."""
    row = one(table("large-batch", "accuracy"), recipe=recipe, global_batch=batch, is_chosen=True)
    return 100 * number(*(row[f"{column}{end}"] for end in ("", "_low", "_high")))


def _accuracy_cell(recipe: str, batch: int) -> Cell:
    """Return an accuracy with as many decimals as its interval is worth."""
    value = accuracy(recipe, batch)
    low, high = value.interval or (value.value, value.value)
    return cell("{:2v}" if high - low < 1 else "{:1v}" if high - low < 5 else "{:0v}", value)


def _fifth_epoch(recipe: str, batch: int) -> tuple[Value, Value]:
    """Return training loss, and training accuracy in percent."""
    row = one(table("fifth-epoch", "report_epoch"), recipe=recipe, global_batch=batch)
    return number(row["epoch_loss"]), number(row["epoch_top1_percent"])


LARS, WARM_UP = "square root + gradual warm-up + LARS", "linear + gradual warm-up"
LOSSLESS_BATCH = table("large-batch", "lossless_batch").iloc[0]
CRITICAL_BATCHES = [
    number(*(LOSSLESS_BATCH[f"critical_batch_{third}{end}"] for end in ("", "_low", "_high")))
    for third in ("first", "middle", "last")
]
LARGE_BATCH: Entries = [
    says("({} training trials;", number(len(frames("large-batch").trials))),
    stated("epochs at rate 0.05", "setting"),
    shows(
        "large-batch",
        ("recipe", *(f"{batch:,}" for batch in BATCHES)),
        [(label, *(_accuracy_cell(recipe, batch) for batch in BATCHES)) for recipe, label in RECIPES.items()],
    ),
    says("plain training loses {} points, and", -1 * accuracy("no recipe", 512, "difference")),
    says("not significantly different from the reference ({})", accuracy(WARM_UP, 512, "difference")),
    says("{} points below the plain reference at", -1 * accuracy(LARS, 2_048, "plain_difference")),
    stated("2,048. The gradient noise scale", "setting"),
    says(
        "the critical batch at {} samples in the first third of the epochs, {} in the middle and {} in the last",
        *CRITICAL_BATCHES,
    ),
    says("a training loss of {} and {} % training accuracy", *_fifth_epoch("no recipe", 128)),
    says("two steps per epoch, has {} and {} %", *_fifth_epoch("no recipe", 32_768)),
    says("with LARS {} and {} %", *_fifth_epoch(LARS, 32_768)),
    says("it diverges ({} and {} %)", *_fifth_epoch(WARM_UP, 32_768)),
]

ENTRIES: Entries = [*PREDICTION, *LARGE_BATCH]
