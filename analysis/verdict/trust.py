"""Caveats about the machines: commits, nodes, clocks, throttling and load of the trials, in words."""

from collections import Counter
from typing import Any

from analysis.compare.scaling import NEITHER, WEAK
from analysis.load.environment import WHEN, commit, done_environments, reading, slowed_by, used_nodes
from analysis.study import Analysis, study_ranks
from analysis.text import GIB, join, named, number, percent
from analysis.verdict import accuracy as accuracy_verdict
from analysis.verdict.bottleneck import NOISE
from analysis.verdict.communication import audit
from analysis.verdict.efficiency import compared_series, efficiency_text, series_label

CLOCK_FALL = 0.05
"""Part of its clock by which a GPU may be slower after a trial's windows than before them."""


def commits(analysis: Analysis) -> str | None:
    """A sentence where trials of several commits are compared whose measuring code is not known to be the same."""
    done = done_environments(analysis.results.trials)
    seen = Counter(name for _, environment in done if (name := commit(environment)))
    if len(seen) < 2 or all(environment.get("measuring_code") for _, environment in done):
        return None
    listed = join([f"{name} ({count})" for name, count in seen.most_common()])
    return (
        f"The trials ran under {len(seen)} commits of this program: {listed}. Not all have a digest of the code that measures, "
        "so whether it was the same is not known."
    )


def caveats(analysis: Analysis) -> list[str]:
    """Sentences on trials whose hosts or GPUs were not in the state that a measurement wants."""
    slowed: Counter[str] = Counter()
    slowed_trials: list[str] = []
    fallen_trials: list[str] = []
    loaded_trials = yielding_trials = 0
    most_loaded, most_fallen = (0.0, 1.0), (1.0, 1.0)
    done = done_environments(analysis.results.trials)
    for trial_id, environment in done:
        own = environment.get("ranks") or []
        yielding_trials += any((rank.get("niceness") or 0) > 0 for rank in own)
        reasons = {reason for rank in own for reason in slowed_by(rank) or ()}
        slowed.update(reasons)
        slowed_trials += [trial_id] * bool(reasons)
        cores = {node.get("node_id"): node.get("cpu_count") for node in used_nodes(environment)}
        loads = [
            (float(load), float(count))
            for rank in own
            for when in WHEN
            if (load := reading(rank, when, "load_average_1min")) is not None
            and (count := cores.get(rank.get("node_id")))
        ]
        loaded_trials += any(load > count for load, count in loads)
        most_loaded = max([most_loaded, *loads], key=lambda pair: pair[0] / pair[1])
        clocks = [
            (float(before), float(after))
            for rank in own
            for name in ("sm_clock_mhz", "memory_clock_mhz")
            if (before := reading(rank, "before", name)) and (after := reading(rank, "after", name))
        ]
        fallen_trials += [trial_id] * any(after < (1 - CLOCK_FALL) * before for before, after in clocks)
        most_fallen = min([most_fallen, *clocks], key=lambda pair: pair[1] / pair[0])
    lines = [line for line in (commits(analysis), _unlike_nodes(done)) if line]
    if slowed_trials:
        listed = join([f"{reason} ({count})" for reason, count in slowed.most_common()])
        lines.append(
            f"In {len(slowed_trials)} of {len(done)} trials a GPU was slowed down: {listed}. Such numbers say as much about power and "
            f"cooling as about the code. Seen in {named(slowed_trials)}."
        )
    if fallen_trials:
        lines.append(
            f"In {len(fallen_trials)} of {len(done)} trials a GPU's clock fell by more than {percent(CLOCK_FALL)} between before and after, at "
            f"most from {number(most_fallen[0], 0)} to {number(most_fallen[1], 0)} MHz: warm it up longer, or lock its clocks. "
            f"Seen in {named(fallen_trials)}."
        )
    if loaded_trials:
        lines.append(
            f"In {loaded_trials} of {len(done)} trials the load average of a host was above its number of cores, at most {number(most_loaded[0], 1)} "
            f"on {number(most_loaded[1], 0)}: processes waited for a core, those of the study among them."
        )
    if yielding_trials:
        lines.append(
            f"In {yielding_trials} of {len(done)} trials ranks ran at a higher niceness than 0, as Ray's workers do by default: every other "
            "process of the host came before them. Start Ray with RAY_worker_niceness=0 in its environment."
        )
    return lines


def _unlike_nodes(done: list[tuple[str, dict[str, Any]]]) -> str | None:
    """One sentence on trials whose nodes were not of one kind, naming in what and how; None where all were.

    Memory counts as unlike from 5 % on: hosts of one kind reserve a little more or less of it.
    """
    unlike: dict[str, str] = {}
    concerned = 0
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
        names = dict.fromkeys(name for each in facts for name in each)
        differing = [name for name in names if len({each.get(name) for each in facts}) > 1]
        concerned += bool(differing)
        for name in differing:
            by_value = {str(each.get(name)): node.get("host") for node, each in zip(nodes, facts, strict=True)}
            unlike.setdefault(name, join([f"{value} on {host}" for value, host in by_value.items()]))
    if not concerned:
        return None
    listed = "; ".join(f"{name}: {values}" for name, values in unlike.items())
    return (
        f"In {concerned} of {len(done)} trials the nodes were unlike ({listed}): the slowest of them sets the pace of all, so such "
        "numbers hold for this mixture only."
    )


WIDE_INTERVAL = 0.05
"""Half-width of a throughput's interval, relative to it, from which repeats do not suffice for a close comparison."""


MOST_REASONS, LONGEST_REASON = 8, 120
"""that trials without a result are named with, and the characters of one"""


TOO_GOOD = 0.05
"""Efficiency above 1 of weak scaling, from which it is not believed without a reason."""


def superlinear(analysis: Analysis) -> str | None:
    """A doubt about weak scaling that is better than ideal, by more than its interval where there is one."""
    rows = compared_series(analysis, WEAK)
    rows = rows[rows["efficiency_low"].fillna(rows["efficiency"]) > 1 + TOO_GOOD]
    if rows.empty:
        return None
    best_row = rows.sort_values("efficiency").iloc[-1]
    rank = study_ranks(analysis)[0]
    return (
        f"In {len(rows)} place{'' if len(rows) == 1 else 's'} weak scaling is better than ideal, at best {efficiency_text(best_row)} "
        f"({series_label(analysis, best_row, WEAK)}). More {rank}s do not make each of them faster: either the reference was slowed "
        "(clocks, noise, too few cores for its loaders) or the two do not compute the same. Find out which before you use it."
    )


def without_throughput(analysis: Analysis) -> str | None:
    """Timed trials that are done and stand in no comparison, for the time of one of their ranks is not known."""
    trained = set(analysis.accuracy.runs["trial_id"]) if analysis.accuracy else set()
    rows = analysis.measured[analysis.measured["throughput_samples_per_s"].isna()]
    names = [name for name in rows["trial_id"] if name not in trained]
    if not names:
        return None
    verb = "has" if len(names) == 1 else "have"
    return (
        f"{len(names)} of {len(analysis.measured)} trials {verb} no throughput, for the time of a rank is unknown, and no part in any "
        f"comparison: look at the steps of {named(names)}."
    )


def trust(analysis: Analysis) -> list[str]:
    """Whether to believe the numbers: notes of the study, repeats, spread, worker groups, instruments, hosts and GPUs, rows left out."""
    found = analysis.configurations
    lines = [*analysis.record.notes, *accuracy_verdict.trust(analysis)]
    if line := without_throughput(analysis):
        lines.append(line)
    if found.empty:
        return [*lines, *caveats(analysis)]
    lone = int((found["n"] == 1).sum())
    fewest, most = int(found["n"].min()), int(found["n"].max())
    repeats = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    if lone:
        lines.append(
            f"{lone} of {len(found)} configurations ran once, so they have no interval: run the study with more repeats."
        )
    columns = ["throughput_samples_per_s_low", "throughput_samples_per_s_high"]
    half = (found[columns[1]] - found[columns[0]]) / 2 / found["throughput_samples_per_s"]
    if half.notna().any():
        wide = int((half > WIDE_INTERVAL).sum())
        advice = (
            f"{wide} of {len(found)} are wider than ±{percent(WIDE_INTERVAL)}: compare those with care, or add repeats."
            if wide
            else f"None is wider than ±{percent(WIDE_INTERVAL)}."
        )
        count = f"{repeats} repeat{'' if repeats == '1' else 's'} of each configuration"
        lines.append(f"{count}; the middle one's 95 % interval of throughput is ±{percent(half.median(), 1)}. {advice}")
    differ = int(found["groups_differ"].sum())
    if differ:
        lines.append(
            f"In {differ} of {len(found)} configurations worker groups differ by more than chance, so their intervals count groups, "
            "not repeats, and are wide; more groups would narrow them."
        )
    if unlikely := superlinear(analysis):
        lines.append(unlikely)
    cost = found["instruments_ratio"] - 1
    if costly := audit(analysis):
        lines.append(costly)
    if (cost < -NOISE).any():
        lines.append(
            f"In {int((cost < -NOISE).sum())} of {len(found)} configurations a step took up to {percent(-cost.min(), 1)} "
            "longer without instruments than with them, which only noise can do: use more steps, or a quieter machine."
        )
    lines += [f"{finding.sentence} {finding.what_to_do}" for finding in analysis.findings]
    lines += caveats(analysis)
    alone = int((analysis.scaling["scaling"] == NEITHER).sum())
    if alone:
        lines.append(
            f"{alone} of {len(found)} configurations are neither weak nor strong scaling: nothing like them ran on other sizes."
        )
    return lines
