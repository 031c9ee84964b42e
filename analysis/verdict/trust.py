"""Caveats about the numbers: measurement overhead, the state of hosts and GPUs, and those of other modules."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from analysis.compare.scaling import NEITHER, WEAK
from analysis.measure.hardware import beyond_peak
from analysis.read.environment import WHEN, commit, done_environments, reading, slowed_by, used_nodes
from analysis.read.own_code import COMMAND_COLUMN
from analysis.study import Analysis, study_ranks
from analysis.text import GIB, join, named, number, part_of, percent
from analysis.verdict import accuracy as accuracy_verdict
from analysis.verdict.bottleneck import NOISE
from analysis.verdict.communication import audit
from analysis.verdict.efficiency import compared_series, efficiency_text, series_label
from analysis.verdict.own_code import slowed_traces, without_exchange
from analysis.verdict.repeats import outlying, repeats

CLOCK_FALL = 0.05
"""Relative drop of a GPU's clock from before a trial's windows to after them, above which the trial is listed."""

MOST_STUDIES = 8
"""Maximum concurrent studies that are listed."""

TOO_GOOD = 0.05
"""Efficiency above 1 by more than this is suspicious, with all of its interval if it has one."""


def commits(analysis: Analysis) -> str | None:
    """Warn if trials ran under several commits and the measuring code is not known to be the same."""
    done = done_environments(analysis.results.trials)
    counts = Counter(name for _, environment in done if (name := commit(environment)))
    if len(counts) < 2 or all(environment.get("measuring_code") for _, environment in done):
        return None
    listed = join([f"{name} ({count})" for name, count in counts.most_common()])
    return (
        f"The trials ran under {len(counts)} commits of this program: {listed}. Some trials lack a digest of the "
        "measuring code, so it may have changed between them."
    )


@dataclass
class HostCaveats:
    """Trials whose hosts or GPUs were in a bad state; pairs are (before, after) in MHz and (load, cores)."""

    throttle_reasons: Counter[str] = field(default_factory=Counter)
    throttled_trials: list[str] = field(default_factory=list)
    clock_drop_trials: list[str] = field(default_factory=list)
    worst_clock_drop: tuple[float, float] = (1.0, 1.0)
    overloaded: int = 0
    worst_load: tuple[float, float] = (0.0, 1.0)
    niced: int = 0
    accompanied: Counter[str] = field(default_factory=Counter)
    """Other studies that measured on the same host, with the number of trials."""
    accompanied_trials: int = 0

    def add(self, trial_id: str, environment: dict[str, Any]) -> None:
        """Add one done trial."""
        ranks = environment.get("ranks") or []
        self.accompanied.update(environment.get("other_studies") or ())
        self.accompanied_trials += bool(environment.get("other_studies"))
        self.niced += any((rank.get("niceness") or 0) > 0 for rank in ranks)
        reasons = {reason for rank in ranks for reason in slowed_by(rank) or ()}
        self.throttle_reasons.update(reasons)
        self.throttled_trials += [trial_id] * bool(reasons)
        cores = {node.get("node_id"): node.get("cpu_count") for node in used_nodes(environment)}
        loads = [
            (float(load), float(count))
            for rank in ranks
            for when in WHEN
            if (load := reading(rank, when, "load_average_1min")) is not None
            and (count := cores.get(rank.get("node_id")))
        ]
        self.overloaded += any(load > count for load, count in loads)
        self.worst_load = max([self.worst_load, *loads], key=lambda pair: pair[0] / pair[1])
        clocks = [
            (float(before), float(after))
            for rank in ranks
            for name in ("sm_clock_mhz", "memory_clock_mhz")
            if (before := reading(rank, "before", name)) and (after := reading(rank, "after", name))
        ]
        self.clock_drop_trials += [trial_id] * any(after < (1 - CLOCK_FALL) * before for before, after in clocks)
        self.worst_clock_drop = min([self.worst_clock_drop, *clocks], key=lambda pair: pair[1] / pair[0])

    def labels(self) -> list[str]:
        """Return the kinds of caveats that occurred, in a few words each."""
        kinds = {
            "another study on the host": self.accompanied,
            "host overloaded": self.overloaded,
            "ranks were niced": self.niced,
            "GPU throttled": self.throttled_trials,
            "GPU clock dropped": self.clock_drop_trials,
        }
        return [label for label, trials in kinds.items() if trials]

    def sentences(self, trial_count: int) -> list[str]:
        """Return one sentence per kind of caveat that occurred in the `trial_count` done trials."""
        lines = []
        if self.throttled_trials:
            listed = join([f"{reason} ({count})" for reason, count in self.throttle_reasons.most_common()])
            lines.append(
                f"In {len(self.throttled_trials)} of {trial_count} trials a GPU was throttled: {listed}. Such results "
                f"depend on power and cooling as much as on the code. Trials: {named(self.throttled_trials)}."
            )
        if self.clock_drop_trials:
            before, after = self.worst_clock_drop
            lines.append(
                f"In {len(self.clock_drop_trials)} of {trial_count} trials a GPU clock dropped by more than "
                f"{percent(CLOCK_FALL)}, at most from {number(before, 0)} to {number(after, 0)} MHz: use a longer "
                f"warm-up, or lock the clocks. Trials: {named(self.clock_drop_trials)}."
            )
        if self.accompanied:
            listed = join([f"{study} ({count})" for study, count in self.accompanied.most_common(MOST_STUDIES)])
            lines.append(
                f"During {self.accompanied_trials} of {trial_count} trials another study ran on the same host: "
                f"{listed}. Each disturbed the other: measure again, one study after the other."
            )
        if self.overloaded:
            load, cores = self.worst_load
            lines.append(
                f"In {self.overloaded} of {trial_count} trials the load average of a host exceeded its number of "
                f"cores, at most {number(load, 1)} on {number(cores, 0)}: processes had to wait for a core."
            )
        if self.niced:
            lines.append(
                f"In {self.niced} of {trial_count} trials ranks ran with a niceness above 0, Ray's default for "
                "workers: every other process on the host took precedence. "
                "Start Ray with RAY_worker_niceness=0 in its environment."
            )
        return lines


def caveats(analysis: Analysis) -> list[str]:
    """Return caveats about commits, mixed nodes, throttling, clocks, load and niceness of the done trials."""
    done = done_environments(analysis.results.trials)
    hosts = HostCaveats()
    for trial_id, environment in done:
        hosts.add(trial_id, environment)
    lines = [line for line in (commits(analysis), _mixed_nodes(done)) if line]
    return lines + hosts.sentences(len(done))


def _mixed_nodes(done: list[tuple[str, dict[str, Any]]]) -> str | None:
    """Warn about trials on different kinds of nodes, and list the differences; None if all nodes were alike.

    Memory counts as different from 5 % on, since hosts of the same kind reserve slightly different amounts.
    """
    differences: dict[str, str] = {}
    affected = 0
    for _, environment in done:
        nodes = used_nodes(environment)
        gib = [round((node.get("memory_bytes") or 0) / GIB) for node in nodes]
        if gib and max(gib) <= 1.05 * min(gib):
            gib = gib[:1] * len(gib)
        facts: list[dict[str, Any]] = [
            {
                "CPU": node.get("cpu_model"),
                "cores": node.get("cpu_count"),
                "memory": f"{memory_gib} GiB",
                "GPUs": join(sorted({str(gpu.get("name")) for gpu in node.get("gpus") or ()})) or "none",
                "driver": join(sorted({str(gpu.get("driver")) for gpu in node.get("gpus") or ()})) or "none",
                **(node.get("versions") or {}),
            }
            for node, memory_gib in zip(nodes, gib, strict=True)
        ]
        names = dict.fromkeys(name for node_facts in facts for name in node_facts)
        differing = [name for name in names if len({node_facts.get(name) for node_facts in facts}) > 1]
        affected += bool(differing)
        for name in differing:
            by_value = {str(values.get(name)): node.get("host") for node, values in zip(nodes, facts, strict=True)}
            differences.setdefault(name, join([f"{value} on {host}" for value, host in by_value.items()]))
    if not affected:
        return None
    listed = "; ".join(f"{name}: {values}" for name, values in differences.items())
    return (
        f"In {affected} of {len(done)} trials the nodes differed ({listed}). The slowest node sets the pace, so these "
        "results hold for this mixture only."
    )


def superlinear(analysis: Analysis) -> str | None:
    """Warn about weak scaling that is better than ideal by more than `TOO_GOOD`."""
    rows = compared_series(analysis, WEAK)
    rows = rows[(rows["efficiency_low"].fillna(rows["efficiency"]) > 1 + TOO_GOOD) & ~(rows["efficiency_more"] > 0)]
    if rows.empty:
        return None
    best_row = rows.sort_values("efficiency").iloc[-1]
    rank = study_ranks(analysis)[0]
    return (
        f"In {len(rows)} case{'' if len(rows) == 1 else 's'} weak scaling is better than ideal by more than "
        f"{percent(TOO_GOOD)}, at best {efficiency_text(best_row)} ({series_label(analysis, best_row, WEAK)}). Adding "
        f"{rank}s does not speed up a single one. Either the reference was slow (clocks, noise, too few cores for its "
        "loaders), or the two configurations compute different things. Find the cause before using these results."
    )


def without_throughput(analysis: Analysis) -> str | None:
    """Warn about timed trials that are excluded from all comparisons because a rank's time is unknown."""
    trained = set(analysis.accuracy.runs["trial_id"]) if analysis.accuracy else set()
    rows = analysis.measured[analysis.measured["throughput_samples_per_s"].isna()]
    trial_ids = [trial_id for trial_id in rows["trial_id"] if trial_id not in trained]
    if not trial_ids:
        return None
    verb = "has" if len(trial_ids) == 1 else "have"
    return (
        f"{len(trial_ids)} of {len(analysis.measured)} trials {verb} no throughput because the time of a rank is "
        f"unknown, and are excluded from all comparisons: check the steps of {named(trial_ids)}."
    )


def impossible_rates(analysis: Analysis) -> str | None:
    """Warn about trials that compute faster than their devices can."""
    ratios = beyond_peak(analysis.measured)
    if ratios.empty:
        return None
    return (
        f"{len(ratios)} of {len(analysis.measured)} trials compute faster than their devices can, up to "
        f"{number(float(ratios.max()), 1)} times their peak: the clock or the count of operations is wrong, so do not "
        f"use these results. Trials: {named([str(trial_id) for trial_id in ratios.index])}."
    )


def non_finite_losses(analysis: Analysis) -> str | None:
    """Warn about timed trials whose loss is not finite, throughout or in some steps.

    A user's own script shows no loss.
    """
    losses = analysis.results.losses
    own = analysis.results.trials.set_index("trial_id")[COMMAND_COLUMN].notna()
    losses = losses[~losses["trial_id"].map(own).fillna(True).astype(bool)]
    by_trial = losses.groupby("trial_id", observed=True)
    bad = by_trial["non_finite_losses"].agg(lambda counts: int((counts > 0).sum()))
    bad = bad[bad > 0]
    if bad.empty:
        return None
    throughout = int((bad == by_trial.size()[bad.index]).sum())
    shown = named([f"{trial_id} ({count} steps)" for trial_id, count in bad.items()])
    return (
        f"In {len(bad)} of {len(by_trial)} trials the loss is not a finite number, in {throughout} of them in every "
        "step: the model does not learn, and steps with such numbers may take another time. Lower the learning rate, "
        f"or check the workload. Trials: {shown}."
    )


def unread_fields(analysis: Analysis) -> list[str]:
    """Return a sentence per field that varies although the workload never reads it."""
    return [
        f"The workload never reads {name}: trials with {name} {join([str(value) for value in values])} are identical, "
        "so they count as repeats and are not compared."
        for name, values in analysis.unread.items()
    ]


def left_out(analysis: Analysis) -> list[str]:
    """Return a sentence about damaged trials, which are in no table, with the first reasons."""
    damaged = analysis.results.damaged
    if not damaged:
        return []
    subject = "1 damaged trial is" if len(damaged) == 1 else f"{len(damaged)} damaged trials are"
    return [f"{subject} left out: {named(damaged)}."]


def trust(analysis: Analysis) -> list[str]:
    """Return all caveats about the numbers of the study."""
    configurations = analysis.configurations
    lines = [*left_out(analysis), *analysis.record.notes, *unread_fields(analysis), *accuracy_verdict.trust(analysis)]
    lines += [
        line
        for caveat in (without_throughput, non_finite_losses, impossible_rates, without_exchange, slowed_traces)
        if (line := caveat(analysis))
    ]
    if configurations.empty:
        return [*lines, *caveats(analysis)]
    lines += repeats(configurations, is_search=analysis.record.search is not None)
    if line := outlying(analysis):
        lines.append(line)
    lines += [line for line in (superlinear(analysis), audit(analysis)) if line]
    gain = 1 - configurations["instruments_ratio"]
    if (gain > NOISE).any():
        lines.append(
            f"In {int((gain > NOISE).sum())} of {len(configurations)} configurations a step took up to "
            f"{percent(gain.max(), 1)} longer without measurement than with it, which must be noise: use more steps, "
            "or a quieter machine."
        )
    lines += [f"{finding.sentence} {finding.what_to_do}" for finding in analysis.findings]
    lines += caveats(analysis)
    unscaled = int((analysis.scaling["scaling"] == NEITHER).sum())
    if unscaled:
        lines.append(
            f"{part_of(unscaled, len(configurations), 'configurations')} part of neither weak nor strong scaling: "
            "no matching configuration ran on another number of ranks."
        )
    return lines
