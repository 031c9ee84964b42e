"""Figures of README.md and of the pages with few of them."""

from functools import partial

from scripts.claims.causes import remainders_met
from scripts.claims.evidence import largest, slow_links, trace_differences
from scripts.claims.outlook import CRITICAL_BATCHES, accuracy
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
    goal,
    missed,
    number,
    one,
    summary,
    unit_number,
    yes_no,
)

COMPLETED = "the same command completes exactly the planned trials: survived"
FOUND = "slow interconnect, reported as wire, resnet50 batch 256 on 2 cuda, socket (emulated)"
NAIVE = "error / naive error where efficiency < 0.9 (interconnect auto), 6 series"
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
    "README.md": (("(10,000 images, MIT", "size of the shipped sample"),),
    "docs/axes.md": (("is known to 1 %", "setting"),),
    "docs/large-batch.md": (
        ("the shipped sample of 10,000 images", "size of the shipped sample"),
        ("to 32,768 x each recipe", "setting"),
        ("above 16,384 samples per GPU", "setting"),
        ("sees 64 samples", "setting"),
        ("at most 1.02 times as long", "goal"),
        ("at most every 30 seconds", "setting"),
    ),
    "docs/measuring.md": (
        ("at least 90 % of the batches", "setting"),
        ("from 4 B to 1 GiB", "setting"),
        ("beyond the 1 % point of the others", "definition"),
        ("exceeds 10 % of the growth", "goal"),
        ("| 1 | a configuration is a regression: its complete interval lies more than 5 % below", "exit code"),
        ("(a loss of exactly 5 % does", "example of an option"),
        ("| 3 | no regression, but", "exit code"),
        ("more than 5 % below `A` |", "example of an option"),
        ("| 0 | neither |", "exit code"),
        ("contains a loss of 5 %", "example of an option"),
    ),
    "docs/monitoring.md": (
        ("polls every 5 minutes", "default of Prometheus: https://prometheus.io/docs/prometheus/latest/configuration"),
        ("for about 20 s", "Ray's agent: RAY_metrics_report_interval_ms and its time-out of a worker's metrics"),
    ),
    "docs/training.md": (
        ("at most every 30 seconds", "setting"),
        ("of the 10,000 test images", "size of the test set"),
    ),
}

PAGES: Entries = [
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
    claim("docs/training.md", "five seeds of it reached {} %", accuracy("nothing", 128)),
    *(Stated(page, text, what) for page, texts in STATED.items() for text, what in texts),
]

# --------------------------------------------------------------------------------------------- docs/studies/README.md

studies = partial(claim, "docs/studies/README.md")
GIB = 2**30


def _peak_gib(parallel: str) -> Value:
    """Return the peak memory of the lab at batch 8192 on two GPUs."""
    trial = one(frames("hpml-lab4").trials, parallel=parallel, batch_per_gpu=8192, world_size=2)
    return number(trial["peak_memory_bytes"] / GIB)


CORRECTED = one(
    frames("forum-phases").trials,
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

REAL_LINK = figures("prediction", r".*\(interconnect auto\).*")
readme = partial(claim, "README.md")
OVERHEAD = "plain/bare, resnet50 batch {} bf16 on {} cuda"
COVERED = figures("coverage", r"coverage of .*, (1\+1\+1|1x5) repeats, .*")
JUDGED = [value for value in COVERED if value.holds is not None]
FAULTS = figures("faults", ".*: survived")
SURVIVED = [value for name, value in zip(summary("faults"), FAULTS, strict=True) if name != COMPLETED]

README: Entries = [
    readme(
        "batch 256, bf16: {} on one H200 and {} on four.",
        figure("overhead-1gpu", OVERHEAD.format(256, 1)),
        figure("overhead", OVERHEAD.format(256, 4)),
    ),
    readme(
        "the goal of {} is **missed**: {} on one, and {} and {} on four.",
        goal("overhead", OVERHEAD.format(32, 4)),
        figure("overhead-1gpu", OVERHEAD.format(32, 1)),
        figure("overhead-small-batch-4gpu", OVERHEAD.format(32, 4)),
        figure("overhead", OVERHEAD.format(32, 4)),
    ),
    readme(
        "in {} to {} % of generated studies. The goal of {} to {} % is met in {} of {} cases and **missed** in {}",
        100 * min(COVERED, key=lambda value: value.value),
        100 * max(COVERED, key=lambda value: value.value),
        *(100 * goal("coverage", "coverage of speed-up, 1x5 repeats, equal groups", end) for end in (0, 1)),
        count([value for value in JUDGED if value.holds]),
        number(len(JUDGED)),
        count(missed(JUDGED)),
    ),
    readme(
        "by at most {} ms in {} cases on 2 and 4 H200",
        largest(trace_differences("account")),
        count(trace_differences("account")),
    ),
    readme("in {} of {} series that the host does not bound; the others **missed** this goal", *remainders_met()),
    Stated("README.md", "add up to within 10 % of it", "goal"),
    readme(
        "{} to {} % was attributed to communication in {} of {} cases; {} **missed** this goal",
        *(100 * goal("account", FOUND, end) for end in (0, 1)),
        count([link for link in slow_links("account") if link.holds]),
        number(len(slow_links("account"))),
        count(missed(slow_links("account"))),
    ),
    readme(
        "On the real link, {} of {} goals are **missed**: mean error {} % (goal {} %), largest {} % (goal {} %), and "
        "{} of the error of throughput x N (goal {})",
        count(missed(REAL_LINK)),
        count([value for value in REAL_LINK if value.holds is not None]),
        *(
            shown
            for name, factor in (
                ("mean absolute error (interconnect auto)", 100),
                ("largest error (interconnect auto)", 100),
                (NAIVE, 1),
            )
            for shown in (factor * figure("prediction", name), factor * goal("prediction", name))
        ),
    ),
    readme(
        "the mean error is {} % over {} series that the host does not bound, but {} % over all {} (goal **missed**)",
        100 * figure("prediction", "mean absolute error (not host-bound on 1 and 2)"),
        figure("prediction", "series (not host-bound on 1 and 2)"),
        100 * figure("prediction", "mean absolute error"),
        figure("prediction", "series"),
    ),
    readme(
        "{} out of {} times: no finished trial",
        min(SURVIVED, key=lambda value: value.value),
        unit_number("faults", "rank killed: survived"),
    ),
]

ENTRIES = [*CLUSTERS, *PAGES, *STUDIES, *README]
