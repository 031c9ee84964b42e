"""Checks that look at the data: what in a study's own numbers speaks against taking them at face value.

Each check is one function from `Data` to findings, and a line in `CHECKS`. It is a test of significance whose chance of
any finding in a study without that fault is at most `FALSE_ALARM`, however many trials, ranks or periods it looks at
(Bonferroni), and which stays silent about effects too small to matter. What the GPUs, hosts and instruments themselves say
is in `analysis.tables.environment` and `analysis.verdict.communication`.
"""

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from scipy import stats
from scipy.special import chdtrc

from analysis.checks.drift import change_point, drift
from analysis.checks.finding import FALSE_ALARM, MATTERS, Data, Finding
from analysis.load.step_shape import WINDOW
from analysis.text import number, percent

FEWEST_REPEATS = 3
LONGEST_PERIOD = 64


def findings(of: Data) -> list[Finding]:
    """What all checks find, in the order of `CHECKS`."""
    return [finding for check in CHECKS.values() for finding in check(of)]


def first_step(of: Data) -> list[Finding]:
    """Windows whose first step is the slowest far more often than one in the number of steps, which chance would give.

    A binomial test for the whole study and for each configuration; the chance is that of the shortest window among them.
    """
    rows = _shaped(of)
    groups = _groups(rows)
    slow = [
        group
        for group in groups
        if stats.binom.sf(group["first_is_slowest"].sum() - 1, len(group), 1 / group["steps"].min())
        < FALSE_ALARM / len(groups)
    ]
    rows = pd.concat(slow).drop_duplicates("trial_id") if slow else rows.iloc[:0]
    rows = rows[rows["first_is_slowest"].astype(bool)]
    share = (rows["first_s"] - rows["median_s"]) / (rows["median_s"] * rows["steps"])
    rows = rows[share >= MATTERS / 2]
    if rows.empty:
        return []
    ratio = (rows["first_s"] / rows["median_s"]).median()
    sentence = (
        f"In {_trials(rows)} the first step of the window takes {number(ratio, 1)} times the median of the others, up to "
        f"{percent(share.max(), 1)} of the window."
    )
    todo = "Medians are not touched by it; where throughput counts, add warm-up steps (--set warmup_steps=N) or steps."
    return [Finding("first_step", sentence, tuple(rows["trial_id"]), todo)]


def periodic_steps(of: Data) -> list[Finding]:
    """Slow steps that come at equal distances, as garbage collection, logging or a checkpoint does.

    For each period, how likely so many of a window's outliers fall on one phase of it by chance (hypergeometric), joined
    over the repeats of a configuration by Fisher's method; Bonferroni over phases, periods and configurations.
    """
    rows = _shaped(of)
    rows = rows[rows["outliers"].map(len) >= 3]
    groups = [group for _, group in rows.groupby("configuration")]
    concerned = []
    for group in groups:
        periods = np.arange(2, int(min(LONGEST_PERIOD, group["steps"].min() // 3)) + 1)
        each = [_on_one_phase(*row, periods) for row in zip(group["outliers"], group["steps"], strict=True)]
        p = chdtrc(2 * len(group), -2 * np.log(each).sum(axis=0))  # Fisher
        cost = (group["outliers_s"] / (group["median_s"] * group["steps"])).median()
        if len(p) and p.min() < FALSE_ALARM / len(p) / len(groups) and cost >= MATTERS / 2:
            concerned.append((group.assign(period=periods[p.argmin()]), cost))
    if not concerned:
        return []
    worst, cost = max(concerned, key=lambda pair: pair[1])
    all_rows = pd.concat([group for group, _ in concerned])
    sentence = (
        f"In {_trials(all_rows)} slow steps come at equal distances, most clearly every {int(worst['period'].iloc[0])} steps; they cost up "
        f"to {percent(cost, 1)} of a window."
    )
    todo = "Look for what recurs: garbage collection, logging, a checkpoint, a loader's worker that all batches wait for in turn."
    return [Finding("periodic_steps", sentence, tuple(all_rows["trial_id"]), todo)]


def _on_one_phase(outliers: tuple[int, ...], steps: int, periods: np.ndarray) -> np.ndarray:
    """For each period, how likely so many of these positions share their remainder by chance, whichever remainder it is."""
    most, places = np.empty(len(periods)), np.empty(len(periods))
    for i, period in enumerate(periods):
        counts = np.bincount(np.array(outliers) % period, minlength=period)
        most[i] = counts.max()
        places[i] = np.bincount(np.arange(1, steps) % period, minlength=period)[counts == most[i]].min()
    return np.minimum(1.0, periods * stats.hypergeom.sf(most - 1, steps - 1, places, len(outliers)))


def bimodal_steps(of: Data) -> list[Finding]:
    """Windows whose steps fall into two classes: Hartigan's dip test, Bonferroni over trials."""
    rows = _shaped(of)
    rows = rows[(rows["dip_p"] < FALSE_ALARM / max(1, len(rows))) & (rows["high_s"] >= (1 + MATTERS) * rows["low_s"])]
    if rows.empty:
        return []
    worst = rows.iloc[int((rows["high_s"] / rows["low_s"]).to_numpy().argmax())]
    sentence = (
        f"In {_trials(rows)} steps fall into two classes, most clearly in {worst['trial_id']}: {percent(worst['high_share'])} of them take "
        f"{number(1e3 * worst['high_s'], 2)} ms, the others {number(1e3 * worst['low_s'], 2)} ms (dip test)."
    )
    todo = "Their median may stand for neither class: look at the two in steps.parquet, for clocks that switch, or batches of two kinds."
    return [Finding("bimodal_steps", sentence, tuple(rows["trial_id"]), todo)]


def warm_up(of: Data) -> list[Finding]:
    """Windows that begin slower than they end: the first quarter after the first step against the last half.

    Mann and Whitney's U, summed over the repeats of a configuration (van Elteren); Bonferroni over configurations and the
    whole study.
    """
    rows = _shaped(of)
    groups = _groups(rows)
    slow = []
    for group in groups:
        spread = group["early_u_variance"].sum() ** 0.5
        z = (group["early_u"] - group["early_u_mean"]).sum() / spread
        excess = (group["early_s"] / group["late_s"]).median() - 1
        if stats.norm.sf(z) < FALSE_ALARM / len(groups) and excess >= MATTERS:
            slow.append(group)
    if not slow:
        return []
    rows = pd.concat(slow).drop_duplicates("trial_id")
    rows = rows[rows["early_s"] >= (1 + MATTERS) * rows["late_s"]]
    excess = (rows["early_s"] / rows["late_s"]).median() - 1
    sentence = (
        f"In {_trials(rows)} the window begins {percent(excess, 1)} slower than it ends: the warm-up was not over."
    )
    todo = "Add warm-up steps: --set warmup_steps=N, several times what it is."
    return [Finding("warm_up", sentence, tuple(rows["trial_id"]), todo)]


RANK_PHASES = {"load_wait_s": "wait for a batch", "forward_s": "forward pass", "backward_s": "backward pass"}


def slow_rank(of: Data) -> list[Finding]:
    """A rank that is the slowest of its trial, in one phase, far more often than one in the number of ranks.

    An exact test of the count over all trials on several ranks, each with its own chance 1/N (Poisson binomial); Bonferroni over ranks and
    phases. In the backward pass ranks wait for the one that is late, and so do not tell it; it counts only
    where the other phases tell nothing.
    """
    rows = of.windows[of.windows["window"] == WINDOW]
    rows = rows[rows.groupby("trial_id")["rank"].transform("size") > 1]
    if rows.empty:
        return []
    ranks = sorted(rows["rank"].unique())
    found: list[Finding] = []
    for phase, label in RANK_PHASES.items():
        if found and phase == "backward_s":
            break
        table = rows.pivot(index="trial_id", columns="rank", values=phase).reindex(columns=ranks)
        table = table[table.notna().sum(axis=1) > 1]
        table = table[table.max(axis=1) > table.min(axis=1)]
        if table.empty:
            continue
        step_s = rows.groupby("trial_id")["step_s"].median().reindex(table.index)
        slowest = table.idxmax(axis=1)
        for rank in ranks:
            there = table[table[rank].notna()]
            is_it = slowest.reindex(there.index) == rank
            p = _poisson_binomial_sf(int(is_it.sum()), (1 / there.notna().sum(axis=1)).to_numpy())
            others = there.drop(columns=rank).mean(axis=1)
            excess_s = there[rank] - others
            share = (excess_s / step_s.reindex(there.index)).median()
            if p >= FALSE_ALARM / len(ranks) / len(RANK_PHASES) or share < MATTERS:
                continue
            sentence = (
                f"Rank {rank} has the longest {label} in {int(is_it.sum())} of {len(there)} trials, by {number(1e3 * excess_s.median(), 1)} ms "
                f"in the median, {percent(share, 1)} of a step."
            )
            todo = (
                "All wait for the slowest: look at its GPU's clocks and link, its cores, and what else runs beside it."
            )
            found.append(Finding("slow_rank", sentence, tuple(there.index[is_it]), todo))
    return found


def _poisson_binomial_sf(count: int, chances: np.ndarray) -> float:
    """Probability of `count` or more successes where each trial has its own chance."""
    ways = np.ones(1)
    for chance in chances:
        ways = np.convolve(ways, [1 - chance, chance])
    return float(ways[count:].sum())


def few_repeats(of: Data) -> list[Finding]:
    """Configurations with two repeats: an interval, but of one degree of freedom. Those with one are in the verdict."""
    counts = of.trials.groupby("configuration")["trial_id"].transform("size")
    rows = of.trials[counts.between(2, FEWEST_REPEATS - 1)]
    if rows.empty:
        return []
    few = rows["configuration"].nunique()
    factor = stats.t.ppf(0.975, 1) / stats.t.ppf(0.975, 4) * (5 / 2) ** 0.5
    sentence = (
        f"{few} of {of.trials['configuration'].nunique()} configurations ran twice: their intervals are about {number(factor, 0)} times as wide as "
        "with 5 repeats."
    )
    return [
        Finding(
            "few_repeats",
            sentence,
            tuple(rows["trial_id"]),
            "Run the study again with --repeats 5: only what is missing runs.",
        )
    ]


CHECKS: Mapping[str, Callable[[Data], list[Finding]]] = {
    "drift": drift,
    "change_point": change_point,
    "first_step": first_step,
    "warm_up": warm_up,
    "periodic_steps": periodic_steps,
    "bimodal_steps": bimodal_steps,
    "slow_rank": slow_rank,
    "few_repeats": few_repeats,
}


def _shaped(of: Data) -> pd.DataFrame:
    return of.shapes.merge(of.trials[["trial_id", "configuration"]], on="trial_id")


def _groups(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """The whole study, and each configuration where there are several."""
    each = [group for _, group in rows.groupby("configuration")]
    return [rows, *each] if len(each) > 1 else each


def _trials(rows: pd.DataFrame) -> str:
    return f"{len(rows)} trial{'' if len(rows) == 1 else 's'}"
