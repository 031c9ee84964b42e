"""Figures of README.md and of the pages with few of them."""

from functools import partial

from scripts.claims.causes import remainders_met
from scripts.claims.evidence import largest, slow_links, trace_differences
from scripts.claims.language_models import GPT2_ON_FOUR
from scripts.claims.outlook import CRITICAL_BATCHES, accuracy
from scripts.claims.reliability import TESTED
from scripts.claims.sources import (
    Cell,
    ClaimError,
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
    goal,
    number,
    one,
    samples,
    summary,
    table,
    unit_number,
    yes_no,
)
from study.references import REFERENCES

COMPLETED = "the same command completes exactly the planned trials: survived"
LINKS = {"unlimited": "unlimited", "1 Gbit/s = 125 MB/s": "1gbit", "200 Mbit/s = 25 MB/s": "200mbit"}

# ----------------------------------------------------------------------------------------------------- docs/clusters.md

clusters, shown_on_clusters = partial(claim, "docs/clusters.md"), partial(Table, "docs/clusters.md")


def _link(name: str, link: str) -> Value:
    return figure("interconnect", f"{name}, {link}")


def _link_row(label: str, link: str) -> tuple[str | Cell, ...]:
    bandwidth, transfer = _link("fitted bandwidth", link), _link("wire time of resnet18_small", link)
    weak, strong = (_link(f"{kind} efficiency of resnet18_small / mlp", link) for kind in ("weak", "strong"))
    ideal = goal("interconnect", f"wire time of resnet18_small, {link}") if transfer.holds is not None else None
    return (
        label,
        cell("{:1} MB/s", bandwidth),
        cell("{:1} and {:0} ms", _link("wire time of mlp", link), transfer),
        cell("{:0} ms", ideal) if ideal else "",
        cell("{:1}", weak),
        cell("{:1}", strong),
        yes_no(bandwidth, transfer, weak, strong),
    )


CLUSTERS: Entries = [
    shown_on_clusters(
        "interconnect",
        (
            "link",
            "fitted bandwidth",
            "transfer time of a step, `mlp` and `resnet18_small`",
            "gradients / rate, `resnet18_small`",
            "weak efficiency, `resnet18_small` / `mlp`",
            "strong",
            "goals met",
        ),
        [_link_row(label, link) for label, link in LINKS.items()],
    ),
    clusters(
        "is {} MB/s at {} MB/s and {} MB/s at {} MB/s",
        _link("fitted bandwidth", "1gbit"),
        goal("interconnect", "fitted bandwidth, 1gbit"),
        _link("fitted bandwidth", "200mbit"),
        goal("interconnect", "fitted bandwidth, 200mbit"),
    ),
    Stated("docs/clusters.md", "signal 120 s early", "setting"),
]

# ---------------------------------------------------------------------------------------------------- few figures each

STATED = {
    "docs/axes.md": (("is known to 1 %", "setting"),),
    "docs/large-batch.md": (
        ("the shipped sample of 10,000 images", "size of the shipped sample"),
        ("to 32,768 x each recipe", "setting"),
        ("above 16,384 samples per GPU", "setting"),
        ("sees 64 samples", "setting"),
        ("at most 1.02 times as long", "goal"),
        ("at most every 30 seconds", "setting"),
    ),
    "docs/compare.md": (
        ("| 1 | a configuration is a regression: its complete interval lies more than 5 % below", "exit code"),
        ("(a loss of exactly 5 % does", "example of an option"),
        ("| 3 | no regression, but", "exit code"),
        ("more than 5 % below `A` |", "example of an option"),
        ("| 0 | neither |", "exit code"),
        ("contains a loss of 5 %", "example of an option"),
        (
            "rate on 1 rank is 0.83 times the reference's, and your scaling to 4 ranks is 0.97 times",
            "example of an answer",
        ),
    ),
    "docs/index.md": (("(10,000 images, MIT", "size of the shipped sample"),),
    "docs/measuring.md": (
        ("at least 90 % of the batches", "setting"),
        ("from 4 B to 1 GiB", "setting"),
        ("exceeds 10 % of the growth", "goal"),
    ),
    "docs/monitoring.md": (
        ("polls every 5 minutes", "default of Prometheus: https://prometheus.io/docs/prometheus/latest/configuration"),
        ("for about 20 s", "Ray's agent: RAY_metrics_report_interval_ms and its time-out of a worker's metrics"),
    ),
    "docs/report.md": (("beyond the 1 % point of the others", "definition"),),
    "docs/training.md": (
        ("at most every 30 seconds", "setting"),
        ("of the 10,000 test images", "size of the test set"),
    ),
}

AVERAGED = table("averaging-horovod-2gpu", "throughput").set_index("parallel")["throughput_samples_per_s"]
THROUGH_HOROVOD, ON_GPUS = (
    one(table(name, "parallel"), parallel="horovod", world_size=2)
    for name in ("averaging-horovod", "averaging-horovod-2gpu")
)


def _equal_losses() -> tuple[Value, Value]:
    """Return how many losses of trials under Horovod are bit for bit those of DDP, and the number of these trials.

    Raises ClaimError if one differs.
    """
    found = frames("averaging-horovod")
    keys = ["world_size", "repeat", "rank", "window", "step"]
    trials = found.trials[["trial_id", "parallel", "world_size", "repeat"]]
    rows = found.steps[["trial_id", "rank", "window", "step", "loss"]].merge(trials, on="trial_id")
    rows = rows[rows["window"].isin(["warmup", "plain"]) & (rows["rank"] == 0)].set_index(keys)
    ours, theirs = (rows[rows["parallel"] == name]["loss"].sort_index() for name in ("ddp", "horovod"))
    if not ours.equals(theirs):
        raise ClaimError("losses under Horovod differ from those of DDP")
    return number(len(theirs)), number(len(trials[trials["parallel"] == "horovod"]))


PAGES: Entries = [
    claim("docs/axes.md", "all {} losses of {} trials are bit for bit those of DDP", *_equal_losses()),
    claim(
        "docs/axes.md",
        "bit for bit those of DDP, at {} of its",
        number(*(THROUGH_HOROVOD[name] for name in ("ratio", "ratio_low", "ratio_high"))),
    ),
    claim(
        "docs/axes.md",
        "trains {} images/s, DDP {}, and one all-reduce after the backward pass {}",
        *(number(AVERAGED[name]) for name in ("horovod", "ddp", "ddp_delayed")),
    ),
    claim(
        "docs/axes.md",
        "Horovod has {} of DDP's throughput",
        number(*(ON_GPUS[name] for name in ("ratio", "ratio_low", "ratio_high"))),
    ),
    claim(
        "docs/axes.md",
        "{} times the images/s of ResNet-50 at batch 1,024",
        figure("resnet50-stem", "ours/bare, compile_graph:1024:stem+pointwise, ABBA"),
    ),
    claim(
        "docs/large-batch.md",
        "{} samples in epochs 1 to 6, {} in 7 to 12 and {} in 13 to 18",
        *CRITICAL_BATCHES,
    ),
    claim("docs/training.md", "five seeds of it reached {} %", accuracy("no recipe", 128)),
    *(Stated(page, text, what) for page, texts in STATED.items() for text, what in texts),
]

# --------------------------------------------------------------------------------------------- docs/studies/README.md

studies = partial(claim, "docs/studies/README.md")
GIB = 2**30


def _peak_gib(parallel: str) -> Value:
    """Return the peak memory of the lab at batch 8192 on two GPUs."""
    trial = one(frames("hpml-lab4-h200").trials, parallel=parallel, batch_per_gpu=8192, world_size=2)
    return number(trial["peak_memory_bytes"] / GIB)


CORRECTED = one(
    frames("forum-phases-h200").trials,
    model="resnet50",
    parallel="dp",
    precision="bf16",
    batch_per_gpu=1024,
    world_size=2,
    pin_memory=True,
)
STUDIES: Entries = [
    studies("the result is the {} of the page", number(CORRECTED["throughput_samples_per_s"])),
    studies(
        "peaks at {} GiB, while `dp`, which runs without these trials, takes {}.", _peak_gib("ddp"), _peak_gib("dp")
    ),
]

# --------------------------------------------------------------------------------------------------------- README.md

COVERED = figures("coverage", r"coverage of .*, (1\+1\+1|1x5) repeats, .*")
FAULTS = figures("faults", ".*: survived")
SURVIVED = [value for name, value in zip(summary("faults"), FAULTS, strict=True) if name != COMPLETED]
OVERHEAD = "plain/bare, resnet50 batch {} bf16 on {} cuda"
DOORS = [figures(run, r"(factory|script|loop|function) / .*") for run in ("doors-2gpu", "doors-1gpu-256", "doors-1gpu")]
"""on two H200; on one H200; the same, but the host bounds the step"""
FOUND = [
    figures(folder, f"{cause}: share .*")[0]
    for folder, cause in (("doors", "slow loader"), ("doors-2gpu", "late rank"), ("doors-2gpu", "no P2P"))
]
PROFILER = figures("others", ".*: exposed, ours / profiler")


def _evidence(page: str, heading: str) -> str:
    return f"[{page}](docs/{page}.md#{heading})"


def _range(template: str, values: list[Value]) -> Cell:
    """Return a cell with the smallest and the largest value. It answers for all of them."""
    return _ranges(template, [values])


def _ranges(template: str, lists: list[list[Value]]) -> Cell:
    """Return a cell with the smallest and the largest value of each list."""
    ends = [number(end(value.value for value in values)) for values in lists for end in (min, max)]
    return cell("; ".join([template] * len(lists)), *ends)


def _met(values: list[Value]) -> Cell:
    """Return a cell with how many of the judged figures meet their goals."""
    judged = [value for value in values if value.holds is not None]
    held = [value for value in judged if value.holds]
    return Cell("yes" if len(held) == len(judged) else "no, {:0} of {:0}", (number(len(held)), count(judged)))


def _remainders() -> tuple[str | Cell, ...]:
    """Return the row of series whose causes add up, most of which do."""
    met, judged = remainders_met()
    return cell("{:0} of {:0} series that the host does not bound", met, judged), "no" if met != judged else "yes"


def _overhead(batch: int, *runs: tuple[str, int]) -> tuple[Cell, Cell]:
    values = [figure(folder, OVERHEAD.format(batch, gpus)) for folder, gpus in runs]
    return cell("; ".join(["{:3}"] * len(values)), *values), yes_no(*values)


def _errors(kinds: tuple[str, ...]) -> tuple[Cell, Cell]:
    values = [figure("prediction", f"mean absolute error{kind}") for kind in kinds]
    return cell("; ".join(["{:1v} %"] * len(values)), *(100 * value for value in values)), yes_no(*values)


STEM = figure("resnet50-stem", "best mode (compile_graph:1024:stem+pointwise)")
README: Entries = [
    Table(
        "README.md",
        "readme",
        ("claim", "measured", "goal met", "evidence"),
        [
            (
                "Measuring does not slow the training: study / bare loop, ResNet-50, batch 256, on one and four H200",
                *_overhead(256, ("overhead-1gpu", 1), ("overhead", 4)),
                _evidence("evidence", "measurement-overhead"),
            ),
            (
                "the same at batch 32, which the host bounds: one, four and four H200",
                *_overhead(32, ("overhead-1gpu", 1), ("overhead-small-batch-4gpu", 4), ("overhead", 4)),
                _evidence("evidence", "measurement-overhead"),
            ),
            (
                "95 % intervals contain the true value: share of generated studies, goal 94 to 97 %",
                _range("{:1} to {:1} %", [100 * value for value in COVERED]),
                _met(COVERED),
                _evidence("evidence", "whether-the-intervals-and-checks-are-right"),
            ),
            (
                "Exposed communication is that of profiler traces: largest difference, 2 and 4 H200",
                cell("{:2v} ms", largest(trace_differences("communication"))),
                _met(trace_differences("communication")),
                _evidence("evidence", "whether-the-communication-breakdown-is-true"),
            ),
            (
                "and of torch's profiler: ours / theirs, two H100",
                _range("{:2} to {:2}", PROFILER),
                _met(PROFILER),
                _evidence("evidence", "whether-other-tools-see-the-same"),
            ),
            (
                "The cost of an emulated slow link is attributed to communication: share of it",
                _range("{:0} to {:0} %", [100 * share for share in slow_links("communication")]),
                _met(slow_links("communication")),
                _evidence("evidence", "whether-the-communication-breakdown-is-true"),
            ),
            (
                "The causes of a slowdown add up to within 10 % of it",
                *_remainders(),
                _evidence("evidence", "whether-the-communication-breakdown-is-true"),
            ),
            (
                "Script, loop, train function, factory and a bare script measure the same: ratios of throughputs, two "
                "H200; one H200; one H200 at a smaller batch, where the host bounds the step",
                _ranges("{:3} to {:3}", DOORS),
                _met([value for values in DOORS for value in values]),
                _evidence("evidence", "whether-all-four-entries-measure-the-same"),
            ),
            (
                "A script finds an injected slow loader, late rank and slow link: share of the cost, goal 0.8 to 1.2",
                cell("; ".join(["{:2}"] * len(FOUND)), *FOUND),
                yes_no(*FOUND),
                _evidence("evidence", "whether-all-four-entries-measure-the-same"),
            ),
            (
                "Four GPUs are predicted from one and two, mean error: not host-bound; all series; on the real link",
                *_errors((" (not host-bound on 1 and 2)", "", " (interconnect auto)")),
                _evidence("evidence", "whether-predictions-come-true"),
            ),
            (
                f"A study survives each of {len(SURVIVED)} kinds of faults without losing or repeating a finished "
                f"trial; tests inject {len(TESTED)} more",
                cell(
                    "{:0} of {:0} times",
                    min(SURVIVED, key=lambda value: value.value),
                    unit_number("faults", "rank killed: survived"),
                ),
                _met(FAULTS),
                _evidence("evidence", "what-a-study-survives"),
            ),
            (
                "GPT-2 124M on four H100: efficiency with 64 sequences per GPU; with 524,288 tokens per step",
                cell("{:3}; {:3}", *(value for value, _ in GPT2_ON_FOUR)),
                ", ".join("yes" if value.value >= aim else "no" for value, aim in GPT2_ON_FOUR),
                _evidence("language-models", "how-gpt-2-scales-on-four-h100"),
            ),
            (
                "ResNet-50 trains at this rate on one H200",
                cell("{:0v} images/s", STEM),
                yes_no(STEM),
                _evidence("performance", "resnet-50-on-one-h200"),
            ),
        ],
    ),
    Stated("README.md", "(10,000 images, MIT", "size of the shipped sample"),
]

COMPARE: Entries = [
    claim(
        "docs/compare.md",
        f"| `@{name}` | {{}} |",
        number(frames(reference.folder).trials["repeat"].nunique()),
    )
    for name, reference in REFERENCES.items()
]

own_code = partial(claim, "docs/own-code.md")
ADDED = samples("doors-added")


def _largest_spread() -> float:
    """Return by how many percent the fastest start of a form exceeds its slowest."""
    rates = [[row["samples_per_s"] for row in ADDED if row["door"] == form] for form in ("added", "plain")]
    return max(100 * (max(of_form) / min(of_form) - 1) for of_form in rates)


OWN_CODE: Entries = [
    own_code("ran at {} times the rate", figure("doors-added", "added / plain on 2, 3 rounds")),
    own_code("starts differed by up to {} %", number(_largest_spread())),
]

monitoring = partial(claim, "docs/monitoring.md")
MONITORING: Entries = [
    monitoring("additional actor of {} MiB", figure("tracking", "memory of the actor")),
    monitoring(
        "came after {} times as long, and throughput was {} times as high",
        *(figure("tracking", f"{name}, tracking / none") for name in ("first warm-up", "throughput")),
    ),
]

ENTRIES = [*MONITORING, *OWN_CODE, *CLUSTERS, *PAGES, *STUDIES, *README, *COMPARE]
