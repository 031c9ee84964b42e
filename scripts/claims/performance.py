"""Figures of docs/performance.md: small batches, two GPUs, the study itself, windows that stop early, CPU ranks."""

from statistics import median

from scripts.claims.sources import (
    Cell,
    Entries,
    Value,
    cell,
    figure,
    figures,
    frames,
    goal,
    number,
    on_page,
    one,
    samples,
    summary,
    table,
    yes_no,
)
from trainables.measure.matmul_limit import LIMIT_S

says, stated, shows = on_page("docs/performance.md")


# ------------------------------------------------------------------------------------------------------- small batches

STEMMED = "compile_graph with stem+pointwise"
SMALL_BATCH = (
    ("without DDP", "small-batch-2gpu", "compile_graph, none"),
    ("DDP, gradients copied back from its buckets", "small-batch-2gpu", "compile_graph, ddp"),
    ("the same, another host", "small-batch", "compile_graph, ddp"),
    ("DDP, gradients as views of the buckets, another host", "small-batch-views-gradients", "compile_graph, ddp"),
    ("DDP, gradients copied back, rewritten stem and block sizes by trial", "small-batch-stem", f"{STEMMED}, ddp"),
    ("the same, gradients as views", "small-batch-views-0", f"{STEMMED}, ddp, gradients as bucket views"),
    ("the same, buckets of 100 MiB", "small-batch-views-1", f"{STEMMED}, ddp, views + buckets of 100 MiB"),
)


def _small_step(folder: str, case: str) -> Value:
    return figure(folder, f"step, {case}, 1 cuda")


def _marks_us() -> Value:
    """Return how much longer our step takes than the bare one, without DDP, in microseconds."""
    ratio = figure("small-batch-2gpu", "ours/bare, compile_graph, none, 1 cuda")
    return number(1e6 * _small_step("small-batch-2gpu", "compile_graph, none").value * (1 - ratio.value))


SMALL: Entries = [
    says("a step of at most {} ms", 1e3 * goal("small-batch", "step, compile_graph, ddp, 1 cuda")),
    shows(
        "small-batch",
        ("case", "step, ms", "goal met", "ours / bare", "results"),
        [
            (
                label,
                cell("{:3}", 1e3 * _small_step(folder, case)),
                yes_no(_small_step(folder, case)),
                cell("{:3}", figure(folder, f"ours/bare, {case}, 1 cuda")),
                f"`{folder}`",
            )
            for label, folder, case in SMALL_BATCH
        ],
    ),
    says("This costs {} µs per step", _marks_us()),
    says(
        "by {} of their length, with views",
        figure("small-batch-views-gradients", "gradient's distance from fp32, resnet18, compile_graph, ddp, 1 cuda"),
    ),
]


# ---------------------------------------------------------------------------------------------------------- two GPUs

VARIANTS = (
    ("gradients copied back from buckets", "weak-scaling", "default"),
    ("gradients as views of the buckets, another host", "weak-scaling-views", "gradients as bucket views"),
    ("static graph, another host", "weak-scaling-views", "static graph"),
    ("gradients sent in bf16", "weak-scaling", "bf16 gradients"),
    *((f"buckets of {size} MiB", "weak-scaling", f"buckets of {size} MiB") for size in (10, 50, 100)),
)
NETWORKS = {
    "VGG-19, 256": "vgg19 batch 256",
    "ResNet-50, 256": "resnet50 batch 256",
    "ResNet-18, 512": "resnet18 batch 512",
}


def _weak(folder: str, network: str, variant: str) -> str | Cell:
    """Return efficiency and images/s of a variant on two GPUs."""
    case = f"{network}, 2 cuda, {variant}"
    if f"rate, {case}" not in summary(folder):
        return "not run"
    return cell("{:3}, {:0v}", figure(folder, f"weak efficiency, {case}"), figure(folder, f"rate, {case}"))


PEERS = {
    "timm, 1 H200": ("peers-1gpu-timm", "ours / timm, {}, 1 cuda"),
    "timm, 2 H200": ("peers-timm", "ours / timm, {}, 2 cuda"),
    "Ray Train, 1 H200": ("peers-1gpu-ray", "ours / ray, {}, 1 cuda"),
    "Ray Train, 2 H200": ("peers-2gpu-ray", "ours / ray, {}, 2 cuda"),
    "Ray Train, 4 H200": ("peers-4gpu-ray", "ours / ray, {}, 4 cuda"),
}

TWO_GPUS: Entries = [
    says(
        "The goals are {} for VGG-19 and {} for the ResNets",
        *(
            goal("weak-scaling", f"weak efficiency, {name} batch 256, 2 cuda, default")
            for name in ("vgg19", "resnet50")
        ),
    ),
    shows(
        "weak-scaling",
        ("option of DDP", *NETWORKS),
        [
            (label, *(_weak(folder, network, variant) for network in NETWORKS.values()))
            for label, folder, variant in VARIANTS
        ],
    ),
    stated("Buckets stay at 25 MiB", "setting"),
    shows(
        "peers",
        ("ours / peer, images/s", *PEERS),
        [
            (
                f"{label}, batch {batch}",
                *(
                    cell("{:3}", figure(folder, name.format(f"{model} batch {batch}")))
                    for folder, name in PEERS.values()
                ),
            )
            for label, model, batch in (("ResNet-50", "resnet50", 256), ("ResNet-18", "resnet18", 512))
        ],
    ),
    says(
        "the goal is missed: {} with ResNet-50 and {} with ResNet-18",
        *(
            figure("peers-timm", f"ours / timm, {case}, 1 cuda")
            for case in ("resnet50 batch 256", "resnet18 batch 512")
        ),
    ),
]


# ----------------------------------------------------------------------------------------------------- the study itself


def _clock(*names: str) -> Value:
    """Return the sum of figures of the clock, in seconds."""
    return number(sum(figure("clock-1gpu", name).value for name in names))


STARTS = (
    ("windows of the 12 trials", ("sum of windows, 12 trials on up to 1 cuda",)),
    ("from the command to the first warm-up step (goal: under 25)", ("command to first warm-up",)),
    ("of these: interpreter and imports", ("start: command to Ray asked for: interpreter and imports",)),
    ("Ray's own start", ("Ray's start",)),
    (
        "Ray Train, until the rank's process is there",
        ("start: keeper: to the worker group asked for", "start: Ray Train: to the last rank's process"),
    ),
    (
        "the rank: torch and other imports, default group",
        ("start: ranks: torch imported, default group made", "start: ranks: other imports, loaders' parent"),
    ),
    ("first step of each group (NCCL)", ("start: ranks: first step of each group (NCCL)",)),
    ("the first trial's model and data", ("start: to the first trial's warm-up: workload, model",)),
)


def _starts(name: str) -> list[float]:
    """Return the seconds from the request to the first trial, per worker group of a study in their order."""
    trials = frames(name).trials.sort_values("started_at").drop_duplicates("worker_group")
    return [row["group"]["opened_at"] - row["group"]["asked_at"] for row in trials["environment"]]


IN_STUDIES = ("averaging", "number-formats", "storage-order")
FIRST_STARTS = [_starts(name)[0] for name in IN_STUDIES]


def _changes() -> list[float]:
    """Return the seconds from the last trial of a worker group to the first of the next."""
    changes: list[float] = []
    for name in IN_STUDIES:
        trials = frames(name).trials.sort_values("started_at")
        pauses = trials["started_at"] - (trials["started_at"] + trials["duration_s"]).shift()
        changes += pauses[trials["worker_group"] != trials["worker_group"].shift()].dropna().tolist()
    return changes


def _start_rows() -> list[tuple[str | Cell, ...]]:
    rows: list[tuple[str | Cell, ...]] = []
    for label, name in (("command to first warm-up", FIRST), ("a further group", FURTHER)):
        median, slowest = figure(LATEST, f"{name}, median"), figure(LATEST, f"{name}, slowest")
        met = "met" if slowest.holds else "missed by the slowest"
        aim = cell("at most {:0} s, " + met, goal(LATEST, f"{name}, slowest"))
        rows.append((label, cell("{:1} s", median), cell("{:1} s", slowest), aim))
    return rows


LATEST, START, FIRST, FURTHER = "start-h200-later", "start-1gpu", "command to first warm-up", "a further group"


def _loop_after() -> list[float]:
    """Return the seconds from the request of each first group of `start-warm` to the loop of its rank."""
    return [row["loop_began_after_s"] for row in samples("start-warm") if row["group"].endswith("-1")]


STUDY: Entries = [
    shows("starts", ("from", "median", "slowest", "goal"), _start_rows()),
    says(
        "their first warm-up came after {} and {} s. The goal",
        *map(number, sorted(row["to_first_warmup_s"] for row in samples(LATEST) if row["group"].endswith("-1"))[:2]),
    ),
    stated("this, 12 s, was missed by one of them", "goal"),
    stated("It missed 25 s", "goal"),
    stated("on one H200 of a fresh host with 32 cores", "setting"),
    says(
        "took {} s to the first warm-up in the median, and {} s at most. A\nfurther group took {} s in the median, and "
        "the slowest {} s, so both goals were missed",
        *(figure(START, f"{name}, {which}") for name in (FIRST, FURTHER) for which in ("median", "slowest")),
    ),
    says("About {}\nof these seconds passed before the group was requested", number(2 * LIMIT_S)),
    says(
        "over NCCL, at most {} s after the request",
        number(max(row["rehearsed_after_s"] for row in samples(START) if row["process_began_after_s"] < 0)),
    ),
    says(
        "is {} between the commands and {} between the groups",
        figure(START, "spread between launches (sd of log throughput)"),
        figure(START, "spread between groups of a launch (sd of log throughput)"),
    ),
    says(
        "the first warm-up came after {} s in\nthe median and {} s at most, which misses the goal; a further group "
        "took {} s, and the slowest {} s",
        *(figure("start-h200", f"{name}, {which}") for name in (FIRST, FURTHER) for which in ("median", "slowest")),
    ),
    stated("On one H200 with 16 cores", "setting"),
    stated("on one H200 of a host with 64 cores", "setting"),
    stated("cache, 12 s, is missed", "goal"),
    says(
        "the first warm-up came after {} s in the median and {} s at most. The goal",
        *(figure("start-warm", f"{FIRST}, {which}") for which in ("median", "slowest")),
    ),
    says(
        "{} to {} s pass between the request",
        *(number(extreme(_loop_after())) for extreme in (min, max)),
    ),
    says("A further group took at most\n{} s, which meets", figure("start-warm", f"{FURTHER}, slowest")),
    says("imports then take {} times as long", figure("imports", "not compiled / compiled")),
    says(
        "while others ran there), {} s passed from the last trial of a group to the first of the next, in "
        "the median of {} changes; the slowest took {} s and missed the goal of {} s",
        number(median(_changes())),
        number(len(_changes())),
        number(max(_changes())),
        goal(START, f"{FURTHER}, slowest"),
    ),
    says("The first groups took {} to {} s to start", number(min(FIRST_STARTS)), number(max(FIRST_STARTS))),
    says(
        "the five worker groups of `default-2gpu` took {} to {} s each",
        number(min(_starts("default-2gpu"))),
        number(max(_starts("default-2gpu"))),
    ),
    stated("`benchmarks/results/clock-1gpu`): ResNet-50 at 64 px, 12 trials from 3", "setting"),
    shows(
        "clock",
        ("part", "seconds"),
        [(label, cell("{:1}", _clock(*names))) for label, names in STARTS],
    ),
    says(
        "The study took {} times as long as its windows. The goal of at most {} is for {} trials on 4 GPUs",
        figure("clock-1gpu", "wall-clock with Ray's start / windows, 12 trials on up to 1 cuda"),
        *(goal("clock-1gpu", "wall-clock with Ray's start / windows, 12 trials on up to 1 cuda", i) for i in (0, 1)),
    ),
    says("the start of the worker group, {} s", figure("clock-1gpu", "worker group, from asked for to open")),
]

GENERATED = {"independent": "0.0", "autocorrelation 0.5": "0.5", "autocorrelation 0.9": "0.9"}
RECORDED = "48 recorded windows"
OFTEN = "the 10 of these that stop early in 25% of their replays or more"


def _stopping_rows() -> list[tuple[str | Cell, ...]]:
    rows: list[tuple[str | Cell, ...]] = []
    for label, correlation in GENERATED.items():
        for spread, shown in (("0.003", "0.3 %"), ("0.01", "1 %"), ("0.03", "3 %")):
            case = f"generated, autocorrelation {correlation}, spread {spread}"
            share, covered, uncorrected = (
                figure("stopping", f"{name}, {case}")
                for name in ("steps run", "coverage where it stops", "the same, uncorrected")
            )
            cells = (cell("{:2}", share), cell("{:3}", covered), cell("{:3}", uncorrected))
            rows.append((f"generated, {label}", shown, *cells))
    share, covered = figure("stopping", f"steps run, {RECORDED}"), figure("stopping", f"coverage, {RECORDED}")
    rows.append(
        (f"{RECORDED}, stopped or not".replace("48 r", "r"), "", cell("{:2}", share), cell("{:3}", covered), "")
    )
    often = figure("stopping", f"coverage, {OFTEN}")
    rows.append(
        (
            "recorded, the 10 that stop early in a quarter of their replays or more",
            "resnet50-levers",
            "",
            cell("{:3}", often),
            "",
        )
    )
    return rows


STOPPING: Entries = [
    stated("the 95 % interval of its step time is narrower than 1 %", "setting"),
    stated("once the loaders have produced at least 90 % of the batches", "setting"),
    stated("at most 20 blocks", "setting"),
    stated("never ends before 10 times what their queues hold", "setting"),
    stated("share the 5 % that the interval may miss", "definition"),
    stated("replays this at 1 % with", "setting"),
    stated("drawn from 48 windows", "setting"),
    says("autocorrelation is {}.", figure("stopping", f"autocorrelation of steps, median of {RECORDED}")),
    shows(
        "stopping",
        ("series", "spread of steps", "steps run", "coverage where it stops", "uncorrected, checking after each block"),
        _stopping_rows(),
    ),
    says(
        "up to {} % of them are saved",
        number(100 * (1 - min(value.value for value in figures("stopping", "steps run, generated.*")))),
    ),
    says("The coverage goal of {} is met in every row", goal("stopping", f"coverage, {RECORDED}")),
    says(
        "The error is {} times that of a fixed count",
        figure("stopping", f"error / that of a fixed count with as many steps, {RECORDED}"),
    ),
    says(
        "this costs {} of a step, {} % of 40 steps",
        figure("stopping", f"what the start of a span costs, {OFTEN}"),
        number(100 / 40 * figure("stopping", f"what the start of a span costs, {OFTEN}").value),
    ),
]


def _ranks(batch: int, which: str) -> Value:
    folder = f"cpu-ranks{'-128' if batch == 128 else ''}"
    return figure(folder, f"2 gloo ranks, {which} / 2 independent ones, resnet18 batch {batch} at 64 px")


CPU_RANKS: Entries = [
    says(
        "the goal is {} with pinned cores",
        goal("cpu-ranks", "2 gloo ranks, pinned / 2 independent ones, resnet18 batch 32 at 64 px"),
    ),
    shows(
        "cpu-ranks",
        ("batch per rank", "free", "pinned", "goal met, pinned", "results"),
        [
            (
                str(batch),
                cell("{:3}", _ranks(batch, "free")),
                cell("{:3}", _ranks(batch, "pinned")),
                yes_no(_ranks(batch, "pinned")),
                f"`{folder}`",
            )
            for batch, folder in ((128, "cpu-ranks-128"), (32, "cpu-ranks"))
        ],
    ),
]

# --------------------------------------------------------------------------------------------------------- the mLSTM

EAGER = one(table("mlstm-executions", "host"), execution="eager")


def _gain(execution: str) -> Value:
    row = one(table("mlstm-executions", "execution"), execution=execution)
    return number(row["ratio"], row["ratio_low"], row["ratio_high"])


MLSTM: Entries = [
    says(
        "needs {} ms for what the GPU computes in {} ms", *(number(1e3 * EAGER[c]) for c in ("step_launch_s", "busy_s"))
    ),
    says("Compiled, it is {} times as fast, and as a CUDA graph {} times", _gain("compile"), _gain("graph")),
    stated("Each of the 256\ntime steps", "the length of a sequence"),
    stated("sees 16 time steps", "a setting"),
]

ENTRIES = [*SMALL, *MLSTM, *TWO_GPUS, *STUDY, *STOPPING, *CPU_RANKS]
