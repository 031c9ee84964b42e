"""Checks of the steps: signs in the measurements themselves that they should not be taken at face value.

Each check is a function from `CheckData` to findings, and an entry of `CHECKS`. It is a significance test. In a study
without the problem, the probability of any finding is at most `FALSE_ALARM`, however many trials, ranks or periods are
tested (Bonferroni). Effects too small to matter are not reported. Data from GPUs, hosts and instruments is checked in
`analysis.tables.environment` and `analysis.verdict.communication`.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from scipy import stats
from scipy.special import chdtrc

from analysis.checks.drift import change_point, drift
from analysis.checks.finding import FALSE_ALARM, MATTERS, CheckData, Finding
from analysis.checks.pause import PAUSED, paused_rank
from analysis.read.step_shape import WINDOW
from analysis.text import number, percent
from analysis.two_way import PRIOR_DEGREES

MIN_REPEATS = 3
LONGEST_PERIOD = 64
RARE_MATTERS, FEWEST_RARE = 0.05, 10
"""Share of a plain window from which one rare step matters, and the rare steps that a window should contain."""


def findings(data: CheckData) -> list[Finding]:
    """Return the findings of all checks, in the order of `CHECKS`."""
    return [finding for check in CHECKS.values() for finding in check(data)]


def first_step(data: CheckData) -> list[Finding]:
    """Find windows whose first step is the slowest more often than expected by chance.

    Binomial test for the entire study and for each configuration. The chance is 1 / steps of the shortest window.
    """
    rows = _step_shapes(data)
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
        f"In {_trial_count(rows)} the first step of the window takes {number(ratio, 1)} times the median of the "
        f"others, up to {percent(share.max(), 1)} of the window."
    )
    fix = "Use more warm-up steps (--set warmup_steps=N), or more steps. Throughput includes that step; medians do not."
    return [Finding("first_step", sentence, tuple(rows["trial_id"]), fix)]


def periodic_steps(data: CheckData) -> list[Finding]:
    """Find slow steps at regular intervals, as caused by garbage collection, logging or a checkpoint.

    For each period: the probability that as many of a window's outliers share one phase by chance (hypergeometric),
    combined over the repeats of a configuration by Fisher's method. Bonferroni over phases, periods and configurations.
    """
    rows = _step_shapes(data)
    rows = rows[rows["outliers"].map(len) >= 3]
    groups = [group for _, group in rows.groupby("configuration")]
    affected = []
    for group in groups:
        periods = np.arange(2, int(min(LONGEST_PERIOD, group["steps"].min() // 3)) + 1)
        probabilities = [_on_one_phase(*row, periods) for row in zip(group["outliers"], group["steps"], strict=True)]
        p = chdtrc(2 * len(group), -2 * np.log(probabilities).sum(axis=0))  # Fisher
        cost = (group["outliers_s"] / (group["median_s"] * group["steps"])).median()
        if len(p) and p.min() < FALSE_ALARM / len(p) / len(groups) and cost >= MATTERS / 2:
            affected.append((group.assign(period=periods[p.argmin()]), cost))
    if not affected:
        return []
    worst, cost = max(affected, key=lambda pair: pair[1])
    all_rows = pd.concat([group for group, _ in affected])
    sentence = (
        f"In {_trial_count(all_rows)} slow steps recur at regular intervals, most clearly every "
        f"{int(worst['period'].iloc[0])} steps; they cost up to {percent(cost, 1)} of a window."
    )
    fix = "Look for recurring work: garbage collection, logging, a checkpoint, or one slow loader worker."
    return [Finding("periodic_steps", sentence, tuple(all_rows["trial_id"]), fix)]


def _on_one_phase(outliers: tuple[int, ...], steps: int, periods: np.ndarray) -> np.ndarray:
    """Return, per period, the probability that as many of these positions share a remainder by chance."""
    largest, phase_sizes = np.empty(len(periods)), np.empty(len(periods))
    for i, period in enumerate(periods):
        counts = np.bincount(np.array(outliers) % period, minlength=period)
        largest[i] = counts.max()
        phase_sizes[i] = np.bincount(np.arange(1, steps) % period, minlength=period)[counts == largest[i]].min()
    return np.minimum(1.0, periods * stats.hypergeom.sf(largest - 1, steps - 1, phase_sizes, len(outliers)))


def rare_steps(data: CheckData) -> list[Finding]:
    """Find plain windows whose throughput depends on how many rare, long steps fell into them.

    This is no significance test: chance does not bring a step of this length into most windows.
    """
    rows = _step_shapes(data)
    rare = rows[rows["rare_share"].astype(float) >= RARE_MATTERS]
    if len(rare) < max(2, len(rows) / 2):
        return []
    worst = rare.iloc[int(rare["rare_share"].to_numpy(float).argmax())]
    steps, count = int(worst["plain_steps"]), int(worst["rare"])
    enough = 10 * math.ceil(FEWEST_RARE * steps / count / 10)
    sentence = (
        f"In {_trial_count(rare)} the throughput depends on how many rare, long steps are in the window: at worst "
        f"{count} of {steps} steps, {number(worst['rare_times'], 1)} times as long as the median step, each "
        f"{percent(worst['rare_share'])} of the window."
    )
    fix = (
        f"If they recur, as rollouts, logging and checkpoints do, use windows with at least {FEWEST_RARE}: "
        f"--steps {enough}. If they are evaluations, call eval() of the model in them, and they are left out."
    )
    return [Finding("rare_steps", sentence, tuple(rare["trial_id"]), fix)]


def bimodal_steps(data: CheckData) -> list[Finding]:
    """Find windows whose steps fall into two classes: Hartigan's dip test, Bonferroni over trials."""
    rows = _step_shapes(data)
    rows = rows[(rows["dip_p"] < FALSE_ALARM / max(1, len(rows))) & (rows["high_s"] >= (1 + MATTERS) * rows["low_s"])]
    if rows.empty:
        return []
    worst = rows.iloc[int((rows["high_s"] / rows["low_s"]).to_numpy().argmax())]
    sentence = (
        f"In {_trial_count(rows)} steps fall into two classes, most clearly in {worst['trial_id']}: "
        f"{percent(worst['high_share'])} of them take {number(1e3 * worst['high_s'], 2)} ms, the others "
        f"{number(1e3 * worst['low_s'], 2)} ms (dip test)."
    )
    fix = (
        "The median may represent neither class. Compare both in steps.parquet; "
        "look for clocks that switch, or two kinds of batches."
    )
    return [Finding("bimodal_steps", sentence, tuple(rows["trial_id"]), fix)]


def warm_up(data: CheckData) -> list[Finding]:
    """Find windows that start slower than they end: the first quarter after the first step against the last half.

    Standardised Mann-Whitney U of each trial, summed over the repeats of a configuration. On a host that drifts, early
    steps are slower in some trials and faster in others. The sum is then compared with how much repeats differ
    (overdispersion, McCullagh and Nelder: Generalized Linear Models, section 4.5). Bonferroni over configurations and
    the entire study.
    """
    rows = _step_shapes(data)
    rows = rows.assign(early_z=(rows["early_u"] - rows["early_u_mean"]) / rows["early_u_variance"] ** 0.5)
    groups = _groups(rows)
    by_configuration = rows.groupby("configuration")["early_z"]
    degrees = len(rows) - by_configuration.ngroups
    deviations = rows["early_z"] - by_configuration.transform("mean")
    dispersion = max(1.0, (deviations**2).sum() / degrees) if degrees else 1.0
    slow = []
    for group in groups:
        z = group["early_z"].sum() / (len(group) * dispersion) ** 0.5
        excess = (group["early_s"] / group["late_s"]).median() - 1
        chance = stats.t.sf(z, degrees) if dispersion > 1 else stats.norm.sf(z)
        if chance < FALSE_ALARM / len(groups) and excess >= MATTERS:
            slow.append(group)
    if not slow:
        return []
    rows = pd.concat(slow).drop_duplicates("trial_id")
    rows = rows[rows["early_s"] >= (1 + MATTERS) * rows["late_s"]]
    excess = (rows["early_s"] / rows["late_s"]).median() - 1
    sentence = (
        f"In {_trial_count(rows)} the window starts {percent(excess, 1)} slower than it ends; "
        "the warm-up was too short."
    )
    fix = "Increase the warm-up several times (--set warmup_steps=N)."
    return [Finding("warm_up", sentence, tuple(rows["trial_id"]), fix)]


RANK_PHASES = {"load_wait_s": "wait for a batch", "forward_s": "forward pass", "backward_s": "backward pass"}


def slow_rank(data: CheckData) -> list[Finding]:
    """Find a rank that is the slowest of its trial in one phase more often than expected by chance.

    Exact test of the count over all trials with several ranks, each with its own probability 1/N (Poisson binomial).
    Bonferroni over ranks and phases. In the backward pass all ranks wait for a late one, which hides it. That phase is
    therefore only tested if the other phases have no finding.
    """
    rows = data.windows[data.windows["window"] == WINDOW]
    rows = rows[rows.groupby("trial_id")["rank"].transform("size") > 1]
    if rows.empty:
        return []
    ranks = sorted(rows["rank"].unique())
    result: list[Finding] = []
    for phase, label in RANK_PHASES.items():
        if result and phase == "backward_s":
            break
        table = rows.pivot(index="trial_id", columns="rank", values=phase).reindex(columns=ranks)
        table = table[table.notna().sum(axis=1) > 1]
        table = table[table.max(axis=1) > table.min(axis=1)]
        if table.empty:
            continue
        step_s = rows.groupby("trial_id")["step_s"].median().reindex(table.index)
        slowest = table.idxmax(axis=1)
        for rank in ranks:
            measured = table[table[rank].notna()]
            is_slowest = slowest.reindex(measured.index) == rank
            p = _poisson_binomial_sf(int(is_slowest.sum()), (1 / measured.notna().sum(axis=1)).to_numpy())
            others = measured.drop(columns=rank).mean(axis=1)
            excess_s = measured[rank] - others
            share = (excess_s / step_s.reindex(measured.index)).median()
            if p >= FALSE_ALARM / len(ranks) / len(RANK_PHASES) or share < MATTERS:
                continue
            sentence = (
                f"Rank {rank} has the longest {label} in {int(is_slowest.sum())} of {len(measured)} trials, by "
                f"{number(1e3 * excess_s.median(), 1)} ms in the median, {percent(share, 1)} of a step."
            )
            fix = "All ranks wait for the slowest. Check its GPU clocks, link, cores and other processes on its host."
            result.append(Finding("slow_rank", sentence, tuple(measured.index[is_slowest]), fix))
    return result


def _poisson_binomial_sf(count: int, chances: np.ndarray) -> float:
    """Return the probability of `count` or more successes if each trial has its own probability."""
    ways = np.ones(1)
    for chance in chances:
        ways = np.convolve(ways, [1 - chance, chance])
    return float(ways[count:].sum())


def few_repeats(data: CheckData) -> list[Finding]:
    """Find configurations with two repeats, and how much wider that makes their intervals.

    The verdict reports configurations without repeats.
    """
    counts = data.trials.groupby("configuration")["trial_id"].transform("size")
    rows = data.trials[counts.between(2, MIN_REPEATS - 1)]
    if rows.empty:
        return []
    few, others = rows["configuration"].nunique(), data.trials["configuration"].nunique() - 1
    half_width = {n: stats.t.ppf(0.975, n - 1 + min(PRIOR_DEGREES, others * (n - 1))) / n**0.5 for n in (2, 5)}
    factor = half_width[2] / half_width[5]
    sentence = (
        f"{few} of {data.trials['configuration'].nunique()} configurations ran twice: their intervals are about "
        f"{number(factor, 1)} times as wide as with 5 repeats."
    )
    fix = "Rerun the study with --repeats 5; only the missing trials run."
    return [Finding("few_repeats", sentence, tuple(rows["trial_id"]), fix)]


CHECKS: Mapping[str, Callable[[CheckData], list[Finding]]] = {
    PAUSED: paused_rank,
    "drift": drift,
    "change_point": change_point,
    "first_step": first_step,
    "warm_up": warm_up,
    "periodic_steps": periodic_steps,
    "rare_steps": rare_steps,
    "bimodal_steps": bimodal_steps,
    "slow_rank": slow_rank,
    "few_repeats": few_repeats,
}


def _step_shapes(data: CheckData) -> pd.DataFrame:
    return data.shapes.merge(data.trials[["trial_id", "configuration"]], on="trial_id")


def _groups(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the entire study and, if there are several configurations, each of them."""
    configurations = [group for _, group in rows.groupby("configuration")]
    return [rows, *configurations] if len(configurations) > 1 else configurations


def _trial_count(rows: pd.DataFrame) -> str:
    return f"{len(rows)} trial{'' if len(rows) == 1 else 's'}"
