"""Figures of docs/evidence.md: predictions, and what a large batch does."""

from functools import partial
from statistics import fmean
from typing import Any

from scripts.claims.sources import (
    Cell,
    Entries,
    Stated,
    Table,
    Value,
    cell,
    claim,
    count,
    figure,
    figures,
    frames,
    missed,
    number,
    one,
    samples,
    summary,
    table,
)

PAGE = "docs/evidence.md"
says, stated, shows = partial(claim, PAGE), partial(Stated, PAGE), partial(Table, PAGE)

# ------------------------------------------------------------------------------------------------------- predictions

KINDS = {"all": "", "not host-bound on 1 and 2": " (not host-bound on 1 and 2)", "`auto`": " (interconnect auto)"}


def _prediction(name: str, kind: str, counted: bool = False) -> Value:
    """Return a figure of `prediction`; `counted` ones end with the number of series."""
    if not counted:
        return figure("prediction", name + KINDS[kind])
    ending = KINDS[kind].replace("(", r"\(").replace(")", r"\)")
    return figures("prediction", rf"{name}{ending}, \d+ series")[0]


def _prediction_rows() -> list[tuple[str | Cell, ...]]:
    naive = "error / naive error where efficiency < 0.9"
    covered = "share of measured steps in their 95 % prediction interval"
    measures = (
        ("series", "series", False, 1, "{:0}", "at least 12"),
        ("mean absolute error of the step", "mean absolute error", False, 100, "{:1} %", "3 %"),
        ("largest error", "largest error", False, 100, "{:0} %", "8 %"),
        ("error / naive error if efficiency is below 0.9", naive, True, 1, "{:2}", "0.5"),
        ("steps in their 95 % prediction interval", covered, True, 100, "{:0} %", "at least 93 %"),
    )
    rows: list[tuple[str | Cell, ...]] = []
    for label, name, counted, factor, form, target in measures:
        values = [_prediction(name, kind, counted) for kind in KINDS]
        answers = ", ".join("yes" if value.holds else "no" for value in values)
        rows.append((label, *(cell(form, factor * value) for value in values), target, Cell(answers, tuple(values))))
    return rows


def _series(**fields: Any) -> list[dict[str, Any]]:
    return [row for row in samples("prediction") if all(row[name] == value for name, value in fields.items())]


def _errors(rows: list[dict[str, Any]]) -> list[float]:
    return sorted(abs(100 * row["error"]) for row in rows)


def _host_bound_step_ms(world_size: int) -> Value:
    """Return the step of the small ResNet-18 at batch 32, fp32, in milliseconds."""
    rows = _series(folder="default-4gpu", fields={"batch_per_gpu": 32, "precision": "fp32"})
    return number(1e3 * rows[0]["step_s"][str(world_size)])


FIRST = _errors(_series(folder="account-first", host_bound=False))
PREDICTION: Entries = [
    says("Its {} series:", number(len(samples("prediction")))),
    says(
        "{} from `account` and `account-first`",
        number(len(_series(folder="account")) + len(_series(folder="account-first"))),
    ),
    says("{} from `captured`", number(len(_series(folder="captured")))),
    says("{} from `default-4gpu`", number(len(_series(folder="default-4gpu")))),
    shows("prediction", ("what", *KINDS, "goal", "goal met, in this order"), _prediction_rows()),
    says(
        "On the real link (`auto`), {} of 5 goals are missed",
        count(missed(figures("prediction", r".*\(interconnect auto\).*"))),
    ),
    says("is over {} series", number(int(next(name for name in summary("prediction") if "6 series" in name)[-8]))),
    says("The {} % is VGG-19 at batch 256", number(_errors(_series(host_bound=False))[-1])),
    says("The next largest error is {} %", number(_errors(_series(host_bound=False))[-2])),
    says(
        "{} series that are not host-bound, {} %, worst {} %",
        number(len(FIRST)),
        number(fmean(FIRST)),
        number(FIRST[-1]),
    ),
    says("the same small model took {} ms on 1 GPU and {} ms on 2", _host_bound_step_ms(1), _host_bound_step_ms(2)),
]


# --------------------------------------------------------------------------------------------------------- large batch

RECIPES = {
    "nothing": "plain",
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
    row = one(table("large-batch", "accuracy"), remedy=recipe, global_batch=batch, is_chosen=True)
    return 100 * number(*(row[f"{column}{end}"] for end in ("", "_low", "_high")))


def _accuracy_cell(recipe: str, batch: int) -> Cell:
    """Return an accuracy with as many decimals as its interval is worth."""
    value = accuracy(recipe, batch)
    low, high = value.interval or (value.value, value.value)
    return cell("{:2v}" if high - low < 1 else "{:1v}" if high - low < 5 else "{:0v}", value)


def _fifth_epoch(recipe: str, batch: int) -> tuple[Value, Value]:
    """Return training loss, and training accuracy in percent."""
    row = one(table("fifth-epoch", "report_epoch"), remedy=recipe, global_batch=batch)
    return number(row["epoch_loss"]), number(row["epoch_top1_percent"])


LARS, WARM_UP = "square root + gradual warm-up + LARS", "linear + gradual warm-up"
ELBOW = table("large-batch", "elbow").iloc[0]
CRITICAL_BATCHES = [
    number(*(ELBOW[f"critical_batch_{third}{end}"] for end in ("", "_low", "_high")))
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
    says("plain training loses {} points, and", -1 * accuracy("nothing", 512, "difference")),
    says("not significantly different from the reference ({})", accuracy(WARM_UP, 512, "difference")),
    says("{} points below the plain reference at", -1 * accuracy(LARS, 2_048, "plain_difference")),
    stated("2,048. The gradient noise scale", "setting"),
    says(
        "the critical batch at {} samples in the first third of the epochs, {} in the middle and {} in the last",
        *CRITICAL_BATCHES,
    ),
    says("a training loss of {} and {} % training accuracy", *_fifth_epoch("nothing", 128)),
    says("two steps per epoch, has {} and {} %", *_fifth_epoch("nothing", 32_768)),
    says("with LARS {} and {} %", *_fifth_epoch(LARS, 32_768)),
    says("it diverges ({} and {} %)", *_fifth_epoch(WARM_UP, 32_768)),
]

ENTRIES: Entries = [*PREDICTION, *LARGE_BATCH]
