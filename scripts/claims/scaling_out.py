"""Figures of docs/scaling-out.md. All are simulated."""

from scripts.claims.sources import Entries, Value, cell, figure, number, on_page

says, stated, shows = on_page("docs/scaling-out.md")
RANKS = (2, 8, 32, 64, 128, 256, 512)


def _trial(ranks: int, kind: str, part: str) -> Value:
    return figure("scaling-out", f"trial on {ranks} {kind}, {part}")


def _opens(ranks: int, kind: str) -> Value:
    return figure("scaling-out", f"worker group of {ranks} {kind} opens")


def _growth(name: str) -> Value:
    return figure("growth", name)


ONE_TRIAL = [_growth(f"trials: trial_s at {trials}").value for trials in (1, 100, 1000, 5000)]

ENTRIES: Entries = [
    shows(
        "scaling-out",
        ("ranks (threads)", "opening the group", "complete trial", "ranks' part", "tables", "saving", "stored"),
        [
            (
                str(ranks),
                cell("{:2} s", _opens(ranks, "threads")),
                cell("{:2} s", _trial(ranks, "threads", "in all")),
                cell("{:2} s", _trial(ranks, "threads", "ranks")),
                cell("{:0} ms", 1e3 * _trial(ranks, "threads", "tables")),
                cell("{:0} ms", 1e3 * _trial(ranks, "threads", "saving")),
                cell("{:2} MB", _trial(ranks, "threads", "stored")),
            )
            for ranks in RANKS
        ],
    ),
    says(
        "2 ranks open in {} s (the first start imports torch), and a trial takes {} s. 8 ranks open in {} s, and a "
        "trial takes {} s. 32 ranks open in {} s, and a trial takes {} s.",
        *(
            value
            for ranks in (2, 8, 32)
            for value in (_opens(ranks, "processes"), _trial(ranks, "processes", "in all"))
        ),
    ),
    says("the exponent {}.", figure("scaling-out", "exponent of a trial's time over threads, from 8")),
    stated("64, 512 and 4,096 GPUs", "setting"),
    stated("1 MB | about 10 MB | about 100 MB", "estimate: bytes per row times rows"),
    stated("64 x 63 / 2 connections per group", "arithmetic"),
    stated("below 1 MB | a few MB | tens of MB per trial", "estimate from the simulated results"),
    stated("about 30 series of the study", "number of metrics"),
    stated("131,000 per group, 511 sockets per rank", "arithmetic: 512 x 511 / 2 connections"),
    stated("4,095 sockets per rank and group", "arithmetic"),
    stated("| one core | one core, 1 GB |", "estimate from the simulated driver"),
    stated("world sizes 1 to 4,096 need 13 groups", "arithmetic"),
    stated("costs with 1, 100, 1,000 and 5,000 trials, and a trial with 100 to 10,000 steps", "setting"),
    says(
        "takes {} to {} s, with one trial or with 5,000; {} s with 100 steps and {} s with 10,000",
        number(min(ONE_TRIAL)),
        number(max(ONE_TRIAL)),
        _growth("steps: trial_s at 100"),
        _growth("steps: trial_s at 10000"),
    ),
    stated("with one trial or with 5,000;", "setting"),
    stated("s with 10,000.", "setting"),
    says(
        "Planning takes {} s at 5,000 trials (exponent {} from 100 on)",
        _growth("trials: plan_s at 5000"),
        _growth("trials: exponent of plan_s"),
    ),
    stated("s at 5,000 trials", "setting"),
    says(
        "Checking what a folder holds takes {} s (exponent {})",
        _growth("trials: look_s at 5000"),
        _growth("trials: exponent of look_s"),
    ),
    says(
        "Memory is {} GB at one trial and {} GB at 5,000,",
        1e-3 * _growth("trials: memory_bytes at 1"),
        1e-3 * _growth("trials: memory_bytes at 5000"),
    ),
    stated("GB at 5,000,", "setting"),
    says(
        "is {} s for 10 trials, {} s for 40 and {} s for 160",
        *(_growth(f"tune: tune_s at {trials}") for trials in (10, 40, 160)),
    ),
    stated("s for 10 trials", "setting"),
]
