"""Does the breakdown recover known causes, and does it explain the committed GPU series?

    python -m benchmarks.truth.known_laws            # 20 noisy studies per case, and all committed series
    python -m benchmarks.truth.known_laws --small    # 2 studies per case

First part: results folders are generated from laws whose causes are known (`benchmarks/harness/known_law.py`; nothing
is measured). Without noise, every cause of the growth from 1 to N ranks must be recovered within 5 %. With 3 % noise
per step and group effects of 2 %, the median over studies must be within 5 % of the growth, if the step grows by more
than 5 %. The late rank must be named.

Second part: of the series of the folders in benchmarks/results with a breakdown, whose step grows by more than 5 %, the
remainder must be at most 10 % of the growth. Host-bound series have no remainder by definition, and count separately.
So do series on two CPU ranks, one on each of two hosts.

A series that misses the goal also has the range of its single steps with communication in the interleaved window,
without that window's first step. A range beyond the growth means that the steps varied more than they grew.
"""

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare.causes import CAUSES
from analysis.read.results import load, load_reduced
from analysis.study import analyses
from benchmarks.harness.common import RESULTS, figure, write_summary
from benchmarks.harness.known_law import KnownLaw, Noise, write_known_law

SIZES = (1, 2, 4, 8)
STUDIES = 20
NOISE = Noise(0.03, 0.03, (0.0, 0.02, 0.0))
GOAL, REMAINDER_GOAL, GROWTH_SHARE = 0.05, 0.10, 0.05
NEGLIGIBLE_S = 1e-9
COMMITTED = (
    "communication", "communication-first", "captured", "forum-phases", "hpml-lab4", "mlstm-scaling",
    "mlstm-scaling-32bit", "vgg-case-study", "interconnect/unlimited", "interconnect/1gbit", "interconnect/200mbit",
)  # fmt: skip

LAWS: Mapping[str, KnownLaw] = {
    "late rank": KnownLaw(late_rank=2),
    "late rank of two": KnownLaw(late_rank=1),
    "late rank, slows those that wait": KnownLaw(late_rank=1, slowed_waiting_s=0.004),
    "no late rank": KnownLaw(),
    "exposed ring": KnownLaw(bandwidth=8e9),
    "exposed ring, late rank": KnownLaw(bandwidth=8e9, late_rank=2, late_s=0.003),
    "two nodes": KnownLaw(ranks_per_node=4),
    "host": KnownLaw(host_s=0.034),
    "host, late rank": KnownLaw(host_s=0.034, late_rank=2),
    "load": KnownLaw(load_s=0.004),
    "slower kernels": KnownLaw(slower_compute_s=0.005),
    "compute slowed by all-reduces": KnownLaw(contention_s=0.003),
    "everything": KnownLaw(
        bandwidth=8e9, late_rank=1, late_s=0.004, load_s=0.002, slower_compute_s=0.003, contention_s=0.002
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=STUDIES, help="noisy studies per case")
    parser.add_argument("--small", action="store_true", help="2 studies per case")
    parser.add_argument("--name", default="known-laws", help="folder under benchmarks/results")
    options = parser.parse_args()
    studies = 2 if options.small else options.studies
    samples = [sample for case in LAWS for sample in recovered(case, studies)]
    series = list(committed())
    write_summary(options.name, [*law_figures(samples), *series_figures(series)], [*samples, *series])


def true_causes(law: KnownLaw, ranks: int) -> dict[str, float]:
    """Return the causes of the growth from 1 to `ranks`, in seconds. They add up to it.

    transfer_s, queueing_s: what follows the last gradient of the late rank. wait_s, load_s: those of the law.
    slower_compute_s: slower kernels, and compute slowed by all-reduces, unless they wait for the late rank. If a host
    is slower than that, communication and lateness only cost what they add to the host's time, and the host the rest.
    """
    step = law.step(ranks)
    growth_s = step.step_s - law.step(1).step_s
    queueing_s = max(0.0, float(step.end_s[-2] - step.last_gradient_s.max()))
    causes = {
        "transfer_s": float(step.end_s[-1] - step.last_gradient_s.max()) - queueing_s,
        "queueing_s": queueing_s,
        "wait_s": law.late_s if law.late_rank is not None and law.late_rank < ranks else 0.0,
        "host_s": 0.0,
        "load_s": law.load_s,
        "slower_compute_s": law.slower_compute_s + law.contention_s,
    }
    if law.host_s is not None:
        left_s = step.step_s - law.host_s
        for name in ("transfer_s", "queueing_s", "wait_s"):
            causes[name] = min(causes[name], left_s)
            left_s -= causes[name]
    causes["host_s"] = growth_s - sum(causes.values())
    return causes


def recovered(case: str, studies: int) -> Iterator[dict[str, Any]]:
    """Yield the true and the reported causes of one case: a study without noise, then noisy ones."""
    law = LAWS[case]
    for seed in range(1 + studies):
        noise = NOISE if seed else Noise()
        with tempfile.TemporaryDirectory(prefix="known-law-") as folder:
            write_known_law(Path(folder) / "results", law, SIZES, noise=noise, seed=seed)
            [analysis] = analyses(load_reduced(Path(folder) / "results"))
        ranks = analysis.communication.exposed["waited_for_rank"]
        for _, row in analysis.communication.slowdown.iterrows():
            size = int(row["world_size"])
            named = ranks[int(row["configuration"])]
            yield {
                "case": case,
                "seed": seed,
                "world_size": size,
                "alone_s": law.step(1).step_s,
                "growth_s": float(row["growth_s"]),
                "remainder_s": float(row["remainder_s"]),
                "true": true_causes(law, size),
                "reported": {name: float(row[name]) for name in CAUSES},
                "late_rank": law.late_rank if law.late_rank is not None and law.late_rank < size else None,
                "reported_late_rank": None if pd.isna(named) else int(named),
            }


def law_figures(samples: list[dict[str, Any]], cases: Iterable[str] = LAWS) -> list[dict[str, Any]]:
    """Return, per case, the largest error of a cause, without and with noise, and how often the late rank is named."""
    found = []
    for case in cases:
        of_case = [sample for sample in samples if sample["case"] == case]
        exact, noisy = (
            [sample for sample in of_case if (sample["seed"] > 0) == is_noisy] for is_noisy in (False, True)
        )
        error = max(
            abs(sample["reported"][name] - true) / true
            for sample in exact
            for name, true in sample["true"].items()
            if true > NEGLIGIBLE_S
        )
        found.append(figure(f"{case}, no noise: largest error", error, None, "of a cause", f"<= {GOAL}", error <= GOAL))
        error = max(noisy_errors(noisy), default=float("nan"))
        name = f"{case}, noisy: largest error of a cause, median of studies"
        found.append(figure(name, error, None, "of the growth", f"<= {GOAL}", bool(error <= GOAL)))
        named = float(np.mean([sample["late_rank"] == sample["reported_late_rank"] for sample in of_case]))
        found.append(figure(f"{case}: late rank named", named, None, "of pairs", ">= 0.95", named >= 0.95))
    return found


def noisy_errors(samples: list[dict[str, Any]]) -> Iterator[float]:
    """Yield |median reported - true| / true growth of each cause and number of ranks whose step grows by over 5 %."""
    for size in sorted({sample["world_size"] for sample in samples}):
        of_size = [sample for sample in samples if sample["world_size"] == size]
        true = of_size[0]["true"]
        growth_s = sum(true.values())
        for name in CAUSES:
            if growth_s > GROWTH_SHARE * of_size[0]["alone_s"]:
                yield abs(float(np.median([sample["reported"][name] for sample in of_size])) - true[name]) / growth_s


def committed(folders: tuple[str, ...] = COMMITTED, results: Path = RESULTS) -> Iterator[dict[str, Any]]:
    """Yield causes and remainder of every series in the folders whose step grows by more than 5 %."""
    for folder in folders:
        single_steps = load(results / folder).steps
        for analysis in analyses(load_reduced(results / folder)):
            step_s = analysis.configurations["step_s"]
            for _, row in analysis.communication.slowdown.iterrows():
                if row["growth_s"] <= GROWTH_SHARE * step_s[row["reference"]]:
                    continue
                configuration = analysis.configurations.loc[row["configuration"]]
                fields = [name for name in (*analysis.axes, "model", "batch_per_gpu") if name != "profile_ranks"]
                yield {
                    "folder": folder,
                    "series": ", ".join(f"{name} {configuration[name]}" for name in dict.fromkeys(fields)),
                    "trial_ids": list(configuration["trial_ids"]),
                    "device": str(configuration["device"]),
                    "host_bound": bool(row["host_bound"]),
                    "growth_s": float(row["growth_s"]),
                    "causes": {name: float(row[name]) for name in CAUSES},
                    "remainder_s": float(row["remainder_s"]),
                    "step_range_s": step_range_s(single_steps, configuration["trial_ids"]),
                }


def step_range_s(steps: pd.DataFrame, trial_ids: Sequence[str]) -> float:
    """Return the longest minus the shortest step with communication of the trials' interleaved window but its first."""
    chosen = steps[steps["trial_id"].isin(trial_ids) & (steps["window"] == "synchronised")]
    later = chosen[chosen["step"] > chosen.groupby(["trial_id", "rank"])["step"].transform("min")]["step_s"]
    return float(later.max() - later.min())


def series_figures(series: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how many committed series meet the goal, and each that misses it."""
    found = []
    kinds = (
        ("", "cuda", False),
        (", host-bound (no remainder by definition)", "cuda", True),
        (", two CPU ranks", "cpu", False),
    )
    for label, device, is_bound in kinds:
        of_kind = [row for row in series if (row["device"], row["host_bound"]) == (device, is_bound)]
        missing = [row for row in of_kind if abs(row["remainder_s"]) > REMAINDER_GOAL * row["growth_s"]]
        met = (len(of_kind) - len(missing)) / len(of_kind)
        name = f"committed series that grow by more than 5 %{label}: remainder at most 10 % of the growth"
        found.append(figure(name, met, None, f"of {len(of_kind)} series", "1", not missing))
        for row in missing:
            share = row["remainder_s"] / row["growth_s"]
            unit = f"of a growth of {1e3 * row['growth_s']:.2f} ms"
            title = f"remainder of {row['folder']}: {row['series']} ({row['trial_ids'][0]})"
            found.append(figure(title, share, None, unit, f"<= {REMAINDER_GOAL}", False))
            spread = row["step_range_s"] / row["growth_s"]
            found.append(figure(title.replace("remainder", "range of steps", 1), spread, None, unit, "none", None))
    return found


if __name__ == "__main__":
    main()
