"""Do prediction intervals hold the truth? Predict 16 ranks of results folders that follow known laws.

    python -m benchmarks.truth.prediction_laws

Nothing is measured: the folders are generated (`benchmarks.harness.known_law`), on 1, 2, 4 and 8 ranks unless a case
says otherwise, with three worker groups of one repeat. Every step spreads by 3 %, and groups differ by up to 2 %. One
study per seed and case. The law is the step on 16 ranks without the spread of steps; a new run is one more trial there.

If the host bounds 1 or 2 GPUs, `predict` refuses. The laws of such cases are evaluated all the same. One more case has
no solution and is reported apart: rank 2 is slow, and the study has ranks 0 and 1 only.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from analysis.predict.model import interval, models
from analysis.read.results import load
from analysis.study import analyse
from benchmarks.harness.common import figure, write_summary
from benchmarks.harness.known_law import KnownLaw, Noise, write_known_law

TARGET = 16
STEP_SPREAD = 0.03
EFFECTS = (0.0, 0.02, 0.01)
LEAST_COVERAGE, MOST_COVERAGE = 0.90, 0.99
WIDEST_RATIO = 4.0
"""largest high / low of an interval that is printed: a factor of 2 in either direction"""


@dataclass(frozen=True)
class Case:
    """A law, the numbers of ranks of its study, and the effects of its worker groups, one repeat each."""

    law: KnownLaw
    sizes: tuple[int, ...] = (1, 2, 4, 8)
    effects: tuple[float, ...] = EFFECTS
    noise: Mapping[str, Any] = field(default_factory=dict)

    @property
    def true_s(self) -> float:
        """Return the step on `TARGET` ranks, the mean over worker groups."""
        return self.law.step(TARGET).step_s * float(np.mean([1 + effect for effect in self.effects]))


PLAIN = KnownLaw()
EXPOSED = KnownLaw(bandwidth=8e9)
HOST_BOUND = KnownLaw(host_s=0.034)


def slow(law: KnownLaw) -> KnownLaw:
    """Return the law with a forward pass of rank 2 that takes 6 ms longer."""
    return replace(law, late_rank=2, late_s=0.006)


CASES: dict[str, Case] = {
    "slow rank": Case(slow(PLAIN)),
    "no slow rank": Case(PLAIN),
    "only 1 and 2 ranks": Case(PLAIN, (1, 2)),
    "slow rank, 5 repeats": Case(slow(PLAIN), effects=(*EFFECTS, 0.0, 0.02)),
    "host-bound from 2 ranks on": Case(HOST_BOUND),
    "host-bound and slow rank": Case(slow(HOST_BOUND)),
    "4 ranks per node, 8 on 2 nodes": Case(KnownLaw(ranks_per_node=4)),
    "exposed ring": Case(EXPOSED),
    "exposed ring and slow rank": Case(slow(EXPOSED)),
    "exposed ring, only 1, 2 and 4": Case(EXPOSED, (1, 2, 4)),
    "groups differ by configuration": Case(PLAIN, noise={"by_configuration": True}),
    "one repeat": Case(PLAIN, effects=(0.0,)),
}
UNSEEN: dict[str, Case] = {"slow rank, only 1 and 2 ranks without it": Case(slow(PLAIN), (1, 2))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="studies per case")
    options = parser.parse_args()
    samples = [sample for name in (*CASES, *UNSEEN) for sample in studies(name, range(options.seeds))]
    write_summary("prediction-laws", figures(samples), samples)


def studies(name: str, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the prediction of one generated study of a case per seed."""
    case = (CASES | UNSEEN)[name]
    for seed in seeds:
        noise = Noise(compute=STEP_SPREAD, communication=STEP_SPREAD, group_effects=case.effects, **case.noise)
        with TemporaryDirectory() as directory:
            folder = write_known_law(
                Path(directory) / "results", case.law, case.sizes, (1,) * len(case.effects), noise, seed=seed
            )
            yield {"case": name, "seed": seed} | predicted(folder, case, np.random.default_rng([seed, 1]))


def predicted(folder: Path, case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Return the prediction of the one series of a folder for `TARGET` ranks, with the truth and a new run."""
    [model] = models(analyse(load(folder)))
    points = model.series.at([TARGET], [case.law.nodes(TARGET)])
    low, high = (float(np.exp(end[0])) for end in interval(model, points))
    steps = [case.law.step(TARGET, *np.exp(STEP_SPREAD * rng.standard_normal(2))).step_s for _ in range(20)]
    return {
        "true_s": case.true_s,
        "run_s": float(np.mean(steps)) * (1 + rng.choice(case.effects)),
        "predicted_s": float(np.exp(model.log_step(points)[0])),
        "interval_s": [low, high],
        "held_out_error": None if np.isnan(model.held_out_error) else model.held_out_error,
        "refused": model.series.host_bound,
        "weights": {name: round(weight, 3) for name, weight in model.weights.items()},
    }


def figures(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the coverage of all cases together, then error, coverage and width of each case."""
    known = [sample for sample in samples if sample["case"] in CASES]
    found = []
    for what, key in (("law", "true_s"), ("new run", "run_s")):
        share = _coverage(known, key)
        goal = f"{LEAST_COVERAGE} to {MOST_COVERAGE}"
        holds = LEAST_COVERAGE <= share <= MOST_COVERAGE
        found.append(figure(f"{what} in its 95 % interval, {len(CASES)} cases", share, None, "share", goal, holds))
    ratio = max(sample["interval_s"][1] / sample["interval_s"][0] for sample in known)
    found.append(
        figure("widest interval", ratio, None, "high / low", f"<= {WIDEST_RATIO:g}", bool(ratio <= WIDEST_RATIO))
    )
    for name in dict.fromkeys(sample["case"] for sample in samples):
        of_case = [sample for sample in samples if sample["case"] == name]
        error = float(np.mean([abs(sample["predicted_s"] / sample["true_s"] - 1) for sample in of_case]))
        width = float(np.median([sample["interval_s"][1] / sample["interval_s"][0] for sample in of_case]))
        share = _coverage(of_case, "true_s")
        has_goal = name in CASES
        found += [
            figure(f"mean absolute error: {name}", error, None, "share of the step", "none", None),
            figure(
                f"law in its interval: {name}",
                share,
                None,
                "share",
                f">= {LEAST_COVERAGE}" if has_goal else "none",
                share >= LEAST_COVERAGE if has_goal else None,
            ),
            figure(f"new run in its interval: {name}", _coverage(of_case, "run_s"), None, "share", "none", None),
            figure(f"median width: {name}", width, None, "high / low", "none", None),
        ]
    return found


def _coverage(samples: Sequence[dict[str, Any]], key: str) -> float:
    return float(np.mean([s["interval_s"][0] <= s[key] <= s["interval_s"][1] for s in samples]))


if __name__ == "__main__":
    main()
