"""How often do the report's 95 % intervals contain the true value?

    python -m benchmarks.truth.coverage

Studies are generated, then analysed by the product's own functions from trials to the scaling table: 1 and 4 ranks,
log-normal repeats with a standard deviation of 1 %, and a true speed-up of 3.8. In some cases worker groups also
differ. No training is measured. Goal: 94 to 96 % with 5 repeats in one group.
"""

import argparse

import numpy as np
import pandas as pd
from scipy import stats

from analysis.compare.scaling import scaling_rows
from analysis.measure.configurations import configurations
from analysis.measure.measures import MEASURES
from analysis.read.fields import fields_of
from benchmarks.harness.common import figure, write_summary
from study.options import recorded_fields

TRUE_SPEED_UP, SIZE = 3.8, 4
LOW, HIGH = 0.94, 0.96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=20_000, help="studies per case")
    parser.add_argument("--name", default="coverage", help="folder under benchmarks/results")
    options = parser.parse_args()
    figures, samples = [], []
    cases = [(n, 1, 0.0) for n in (2, 3, 5, 10)] + [(n, 2, 0.0) for n in (3, 5, 10)] + [(5, 2, 0.01), (10, 5, 0.01)]
    for repeats, groups, between in cases:
        for name, count in covered(options.studies, repeats, groups, between).items():
            share = count / options.studies
            interval = stats.binomtest(count, options.studies).proportion_ci(0.95, "wilson")
            where = "one worker group" if groups == 1 else f"{groups} worker groups"
            label = f"coverage of {name.replace('_', '-')}, {repeats} repeats, {where}"
            label += f", which spread by {100 * between:.0f} % besides" if between else ""
            judged = repeats == 5 and groups == 1
            figures.append(
                figure(
                    label,
                    share,
                    (interval.low, interval.high),
                    "share",
                    f"{LOW} to {HIGH}" if judged else "none",
                    LOW <= share <= HIGH if judged else None,
                )
            )
            samples.append(
                {"interval_of": name, "repeats": repeats, "groups": groups, "between": between, "covered": count}
                | {"studies": options.studies}
            )
    write_summary(options.name, figures, samples)


def covered(studies: int, repeats: int, groups: int = 1, between: float = 0.0) -> dict[str, int]:
    """Return in how many generated studies the intervals of speed_up and efficiency contain the true value."""
    rows = scaling_rows(
        configurations(trials(studies, repeats, groups, between)), fields_of({"fields": recorded_fields()})
    )
    rows = rows[rows["world_size"] == SIZE]
    return {
        name: int(((rows[f"{name}_low"] <= true) & (rows[f"{name}_high"] >= true)).sum())
        for name, true in (("speed_up", TRUE_SPEED_UP), ("efficiency", TRUE_SPEED_UP / SIZE))
    }


def trials(studies: int, repeats: int, groups: int, between: float, spread: float = 0.01) -> pd.DataFrame:
    """Return one row per trial, as `measures.summaries` does. Studies differ in their seed, like any other field.

    A worker group contains every `groups`-th repeat of both sizes of a study, and has its own speed at each size.
    """
    rng = np.random.default_rng([studies, repeats, groups, int(1e6 * between)])
    study, size, repeat = (
        part.ravel() for part in np.meshgrid(np.arange(studies), [1, SIZE], np.arange(repeats), indexing="ij")
    )
    group = repeat % groups
    of_group = between * rng.standard_normal((studies, 2, groups))[study, (size > 1).astype(int), group]
    true = np.where(size > 1, 100.0 * TRUE_SPEED_UP, 100.0)
    throughput = true * np.exp(spread * rng.standard_normal(len(study)) + of_group)
    frame = pd.DataFrame(
        {
            "trial_id": [f"{s}-{n}-{r}" for s, n, r in zip(study, size, repeat, strict=True)],
            "status": "done",
            "worker_group": [f"{s}-{g}" for s, g in zip(study, group, strict=True)],
            "device": "cuda",
            "world_size": size,
            "nodes": 1,
            "batch_per_gpu": 32,
            "seed": study,
            "repeat": repeat,
            "throughput_samples_per_s": throughput,
            "step_s": 32 * size / throughput,
        }
    )
    return frame.reindex(columns=list(dict.fromkeys([*frame.columns, *MEASURES])))


if __name__ == "__main__":
    main()
