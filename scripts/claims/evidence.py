"""Figures of docs/evidence.md."""

from functools import partial
from statistics import fmean
from typing import Any

from scripts.claims.sources import (
    Cell,
    Claim,
    Stated,
    Table,
    Value,
    cell,
    claim,
    count,
    figure,
    figures,
    frames,
    goal,
    number,
    one,
    samples,
    summary,
    table,
    unit_number,
    yes_no,
)

PAGE = "docs/evidence.md"
says, stated, shows = partial(claim, PAGE), partial(Stated, PAGE), partial(Table, PAGE)

OVERHEAD = (
    ("ResNet-50, batch 256, 1 GPU", "overhead-1gpu", "plain/bare, resnet50 batch 256 bf16 on 1 cuda"),
    ("ResNet-50, batch 256, 1 GPU, another host", "overhead", "plain/bare, resnet50 batch 256 bf16 on 1 cuda"),
    ("ResNet-50, batch 256, 4 GPUs", "overhead", "plain/bare, resnet50 batch 256 bf16 on 4 cuda"),
    ("ResNet-18, batch 512, 1 GPU", "overhead-1gpu", "plain/bare, resnet18 batch 512 bf16 on 1 cuda"),
    ("ResNet-18, batch 512, 4 GPUs", "overhead", "plain/bare, resnet18 batch 512 bf16 on 4 cuda"),
    ("ResNet-50, batch 32, 1 GPU", "overhead-1gpu", "plain/bare, resnet50 batch 32 bf16 on 1 cuda"),
    ("the same, a second host", "overhead-small-batch-1gpu", "plain/bare, resnet50 batch 32 bf16 on 1 cuda"),
    (
        "the same, a third host, blocks of 5 steps with the models of one trial, 3 starts",
        "overhead-in-turn",
        "plain/bare, resnet50 batch 32 bf16 on 1 cuda",
    ),
    (
        "the same, a fourth host, one start, 50 quadruples of blocks",
        "overhead-in-turn-starts",
        "plain/bare, resnet50 batch 32 bf16 on 1 cuda",
    ),
    (
        "the same, a fifth host, bare blocks between the study's, in its own process",
        "overhead-same-process",
        "plain/bare of the same process, resnet50 batch 32 bf16 on 1 cuda",
    ),
    ("ResNet-50, batch 32, 4 GPUs", "overhead-small-batch-4gpu", "plain/bare, resnet50 batch 32 bf16 on 4 cuda"),
    ("the same, 2 quadruples", "overhead", "plain/bare, resnet50 batch 32 bf16 on 4 cuda"),
)


def _bare_rates() -> tuple[Value, Value]:
    """Return the lowest and highest rate of a bare block of ResNet-50 at batch 32, within one run."""
    rates = [
        row["plain"]
        for row in samples("overhead-small-batch-1gpu")
        if row["side"] == "bare" and row["batch_per_gpu"] == 32
    ]
    return number(min(rates)), number(max(rates))


OVERHEAD_ENTRIES: list[Claim | Table | Stated] = [
    says(
        "Goal: the lower end of plain / bare is at least {}.",
        goal("overhead", "plain/bare, resnet50 batch 32 bf16 on 4 cuda"),
    ),
    shows(
        "overhead",
        ("case", "plain / bare [95 %]", "goal met", "results"),
        [
            (case, cell("{:3}", figure(folder, name)), yes_no(figure(folder, name)), f"`{folder}`")
            for case, folder, name in OVERHEAD
        ],
    ),
    says("the bare loop alone ran at {} to {} samples/s within one run on one H200", *_bare_rates()),
    says(
        "{} over three starts",
        figure("overhead-control", "bare/bare beside plain, resnet50 batch 32 bf16 on 1 cuda"),
    ),
    says(
        "took a median of {} s and at most {} s",
        figure("turnaround-4gpu", "median turnaround in a warm group"),
        figure("turnaround-4gpu", "longest turnaround in a warm group"),
    ),
    says("({} pairs of trials on 1, 2 and 4 H200;", number(len(samples("turnaround-4gpu")))),
    says(
        "the median is {} s and the maximum {} s; with `--isolate` it is {} s",
        figure("turnaround", "median turnaround in a warm group"),
        figure("turnaround", "longest turnaround in a warm group"),
        figure("turnaround", "median turnaround with --isolate"),
    ),
    says(
        "has a step-time ratio of {} ({} of 4 planned pairs ran;",
        figure("warm-cold", "step time warm / cold, resnet50 on one cuda"),
        number(len(samples("warm-cold"))),
    ),
]

FAULTS: list[Claim | Table | Stated] = [
    shows(
        "faults",
        ("fault, while a study runs on two nodes", "survived"),
        [
            (
                name.removesuffix(": survived"),
                cell("{:0} of {:0}", figure("faults", name), unit_number("faults", name)),
            )
            for name in summary("faults")
        ],
    ),
    stated("link cut for 30 s", "setting"),
]

CHECKS: list[Claim | Table | Stated] = [
    stated("in 20,000 generated studies per case", "setting"),
    says(
        "{} % with 2 repeats, {} % with 3, {} % with 5 (goal: {} to {}) and {} % with 10",
        *(100 * figure("coverage", f"coverage of speed-up, {n} repeats, one worker group") for n in (2, 3, 5)),
        *(100 * goal("coverage", "coverage of speed-up, 5 repeats, one worker group", end) for end in (0, 1)),
        100 * figure("coverage", "coverage of speed-up, 10 repeats, one worker group"),
    ),
    says(
        "5 repeats cover only {} %",
        100 * figure("coverage", "coverage of speed-up, 5 repeats, 2 worker groups, which spread by 1 % besides"),
    ),
    stated("at most one of twenty studies of 100 trials", "limit of the test"),
    says(
        "takes {} s on two quiet cores ({} s of CPU time; goal: {} s)",
        figure("analysis", "report of 2,000 trials, 19,977,500 rows"),
        figure("analysis", "report of 2,000 trials, 19,977,500 rows: CPU time"),
        goal("analysis", "report of 2,000 trials, 19,977,500 rows"),
    ),
    stated("The report of 2,000 trials with 20 million rows", "setting"),
    says(
        "{} times as long as that of a tenth of the trials",
        figure("analysis", "its time over that of a tenth of the trials"),
    ),
    says(
        "a peak of {} GB of memory (goal: {} GB;",
        figure("analysis", "report of 2,000 trials, 19,977,500 rows: peak memory"),
        goal("analysis", "report of 2,000 trials, 19,977,500 rows: peak memory"),
    ),
]


# ------------------------------------------------------------------------------------------- communication breakdown

SLOW = "slow interconnect, reported as wire, {} on {} cuda, socket (emulated)"


def _slow_links(folder: str) -> list[Value]:
    """Return the judged shares of a slow interconnect's cost that are reported as exposed transfer."""
    return [value for value in figures(folder, r"slow interconnect, reported as wire, .*") if value.holds is not None]


def _largest(values: list[Value]) -> Value:
    return max(values, key=lambda value: abs(value.value))


def _smallest(values: list[Value]) -> Value:
    return min(values, key=lambda value: abs(value.value))


def _trace_differences(folder: str) -> list[Value]:
    return figures(folder, r"exposed, live - trace, .*")


def _missed(values: list[Value]) -> list[Value]:
    return [value for value in values if value.holds is False]


def _breakdown_rows() -> list[tuple[str | Cell, ...]]:
    differences = _trace_differences("account")
    ratios = [figures("account", rf"busbw of our sweep / bare, .*, {n} cuda")[0] for n in (2, 4)]
    bus = "busbw at 1073741824 B, 4 cuda"
    late = figures("account", r"late rank, reported as wait for rank 1, .*")[0]
    slow = figures("account", r"slow loader, reported as load wait of the latest rank, .*")[0]
    links = _slow_links("account")
    found, lost = [link for link in links if link.holds], _missed(links)
    return [
        (
            cell("exposed time, live vs. trace, worst rank: {:0} cases", count(differences)),
            cell("{:2} to {:2} ms", _smallest(differences), _largest(differences)),
            "5 % or 0.1 ms",
            yes_no(*differences),
        ),
        (
            "busbw of 1 GiB, 4 GPUs",
            cell("{:0} GB/s", figure("account", bus)),
            cell("{:0} GB/s", goal("account", bus)),
            yes_no(figure("account", bus)),
        ),
        (
            "busbw, ours / bare, lowest from 16 MiB on: 2 and 4 GPUs",
            cell("{:2}, {:2}", *ratios),
            "0.97",
            yes_no(*ratios),
        ),
        (
            "20 ms delay of one rank, attributed to waiting for that rank: 4 GPUs",
            cell("{:0} %", 100 * late),
            "80 to 125 %",
            yes_no(late),
        ),
        (
            "50 ms delay of every batch's loading, attributed to load wait of the slowest rank: 4 GPUs",
            cell("{:0} %", 100 * slow),
            "80 to 125 %",
            yes_no(slow),
        ),
        (
            cell("cost of `socket` (emulated), attributed to exposed transfer: {:0} cases", count(found)),
            cell("{:0} to {:0} %", 100 * _smallest(found), 100 * _largest(found)),
            "80 to 125 %",
            yes_no(*found),
        ),
        (
            "the same, ResNet-50: batch 256 on 2 GPUs, batch 32 on 4 GPUs",
            cell("{:0} %, {:0} %", *(100 * link for link in sorted(lost, key=lambda link: link.value))),
            "80 to 125 %",
            yes_no(*lost),
        ),
    ]


def _no_sync_ms(interconnect: str) -> Value:
    """Return the median step without all-reduce of the traced ResNet-50, batch 256, 2 GPUs."""
    trials, steps, _ = frames("account")
    trial = one(
        trials, model="resnet50", batch_per_gpu=256, world_size=2, interconnect=interconnect, profile_ranks="all"
    )
    mine = steps[(steps["trial_id"] == trial["trial_id"]) & (steps["window"] == "no_sync")]
    return number(1e3 * mine["step_s"].median())


def _communication_overheads(model: str, batch: int) -> list[Value]:
    """Return by how many percent communication windows are longer than plain ones, without a trace, on two hosts."""
    pattern = rf"communication/plain, {model} batch {batch} on . cuda"
    ratios = [value for folder in ("account", "account-first") for value in figures(folder, pattern)]
    return sorted((number(100 * (ratio.value - 1)) for ratio in ratios), key=lambda value: value.value)


def _traced_overhead(**fields: Any) -> Value:
    """Return by how many percent the communication window of a traced trial is longer than its plain one."""
    row = one(frames("account").trials, profile_ranks="all", **fields)
    return number(100 * (float(row["communication_ratio"]) - 1))


def _launch_us(run: int) -> Value:
    """Return the median duration of a bare all-reduce of at most 4 KiB on 2 GPUs, in microseconds."""
    rows = [row for row in samples("account") if row["kind"] == "bare sweep" and row["world_size"] == 2]
    seconds = sorted(row["seconds"] for row in rows if row["run"] == run and row["bytes"] <= 4096)
    return number(1e6 * seconds[len(seconds) // 2])


SMALL, LARGE = (SLOW.format(f"resnet50 batch {batch}", n) for batch, n in ((256, 2), (32, 4)))
BREAKDOWN: list[Claim | Table | Stated] = [
    shows("breakdown", ("what", "measured", "goal", "goal met"), _breakdown_rows()),
    says(
        "{} % is {} ms of transfer for a step that is {} ms longer, so that goal is missed too.",
        100 * figure("account", LARGE),
        figure("account", LARGE).value * unit_number("account", LARGE),
        unit_number("account", LARGE),
    ),
    says("What is missing of the {} ms", unit_number("account", SMALL)),
    says("takes {} ms there and {} ms on `auto`", _no_sync_ms("socket"), _no_sync_ms("auto")),
    says(
        "misses the first goal in {} of {} cases, by {} and {} ms (ResNet-50 at 32, `no_p2p`), and the last in {} of {}: "
        "{} and {} % (ResNet-50 at 32)",
        count(_missed(_trace_differences("account-first"))),
        count(_trace_differences("account-first")),
        *(-1 * value for value in sorted(_missed(_trace_differences("account-first")), key=lambda value: -value.value)),
        count(_missed(_slow_links("account-first"))),
        count(_slow_links("account-first")),
        *(100 * value for value in sorted(_missed(_slow_links("account-first")), key=lambda value: value.value)),
    ),
    says(
        "{} to {} % longer at batch 256 (ResNet-50 and VGG-19), and {} to {} % longer with VGG-19 at 32",
        min((_communication_overheads(model, 256)[0] for model in ("resnet50", "vgg19")), key=lambda v: v.value),
        max((_communication_overheads(model, 256)[-1] for model in ("resnet50", "vgg19")), key=lambda v: v.value),
        _communication_overheads("vgg19", 32)[0],
        _communication_overheads("vgg19", 32)[-1],
    ),
    says(
        "from {} % less to {} % more",
        -1 * _communication_overheads("resnet50", 32)[0],
        _communication_overheads("resnet50", 32)[-1],
    ),
    says(
        "up to {} % more (ResNet-50 at 32, `no_p2p` on 2 GPUs) and {} % (VGG-19 at 32, `socket` on 4)",
        _traced_overhead(model="resnet50", batch_per_gpu=32, interconnect="no_p2p", world_size=2),
        _traced_overhead(model="vgg19", batch_per_gpu=32, interconnect="socket", world_size=4),
    ),
    says("took {} µs per call in one process and {} µs in the next", _launch_us(0), _launch_us(1)),
    stated("Messages below 16 MiB", "limit of the benchmark"),
]


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
PREDICTION: list[Claim | Table | Stated] = [
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
        count(_missed(figures("prediction", r".*\(interconnect auto\).*"))),
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


def _accuracy(recipe: str, batch: int, column: str = "top1") -> Value:
    """Return an accuracy, or a difference in accuracy, in percent or points, of a recipe at a global batch."""
    row = one(table("large-batch", "accuracy"), remedy=recipe, global_batch=batch, is_chosen=True)
    return 100 * number(*(row[f"{column}{end}"] for end in ("", "_low", "_high")))


def _accuracy_cell(recipe: str, batch: int) -> Cell:
    """Return an accuracy with as many decimals as its interval is worth."""
    value = _accuracy(recipe, batch)
    low, high = value.interval or (value.value, value.value)
    return cell("{:2v}" if high - low < 1 else "{:1v}" if high - low < 5 else "{:0v}", value)


def _fifth_epoch(recipe: str, batch: int) -> tuple[Value, Value]:
    """Return training loss, and training accuracy in percent."""
    row = one(table("fifth-epoch", "report_epoch"), remedy=recipe, global_batch=batch)
    return number(row["epoch_loss"]), number(row["epoch_top1_percent"])


LARS, WARM_UP = "square root + gradual warm-up + LARS", "linear + gradual warm-up"
NOISE = table("large-batch", "time_to_target").dropna(subset="noise_batch").iloc[0]
LARGE_BATCH: list[Claim | Table | Stated] = [
    says("({} training trials;", number(len(frames("large-batch").trials))),
    stated("epochs at rate 0.05", "setting"),
    shows(
        "large-batch",
        ("recipe", *(f"{batch:,}" for batch in BATCHES)),
        [(label, *(_accuracy_cell(recipe, batch) for batch in BATCHES)) for recipe, label in RECIPES.items()],
    ),
    says("plain training loses {} points, and", -1 * _accuracy("nothing", 512, "difference")),
    says("not significantly different from the reference ({})", _accuracy(WARM_UP, 512, "difference")),
    says("{} points below the plain reference at", -1 * _accuracy(LARS, 2_048, "plain_difference")),
    stated("2,048. The gradient noise scale", "setting"),
    says(
        "puts the critical batch at {}, but it grows from {} in the first epoch to {} in the last",
        *(number(NOISE[f"noise_batch{which}"]) for which in ("", "_first", "_last")),
    ),
    says("a training loss of {} and {} % training accuracy", *_fifth_epoch("nothing", 128)),
    says("two steps per epoch, has {} and {} %", *_fifth_epoch("nothing", 32_768)),
    says("with LARS {} and {} %", *_fifth_epoch(LARS, 32_768)),
    says("it diverges ({} and {} %)", *_fifth_epoch(WARM_UP, 32_768)),
]

ENTRIES = [*OVERHEAD_ENTRIES, *FAULTS, *CHECKS, *BREAKDOWN, *PREDICTION, *LARGE_BATCH]
