"""The outcome of a search as plain values for study.json, which the report reads (`analysis.read.improvement`)."""

import math
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from study.help import MODULE
from study.improve.attempts import Attempt
from study.improve.evidence import Evidence, Ratio, Run
from study.improve.lever import changed_fields
from study.improve.rounds import Configuration, Settings
from study.improve.search import Search, shares_from
from study.options import OPTION_OF_FIELD
from trainables.fields import FIELD_FACTS
from trainables.probe.job import is_module
from trainables.trial import Trial

_SELF_SET = (
    "repeat",
    "nodes",
    "cpus_per_rank",
    "device",
    "warmup_steps",
    "steps",
    "window_limit_s",
    "communication_steps",
    "sweep_bytes",
)
"""Fields that `run` chooses itself."""


def record_of(
    settings: Settings, found: Search, evidence: Evidence, tokens: Callable[[str], float | None]
) -> dict[str, Any]:
    """Return the record of a search, finished or not. tokens: returns the tokens per sample of a trial."""
    used = [name for done in found.rounds for name in done.trial_ids]
    elapsed_s = evidence.elapsed_s(used)
    on_gpus = settings.base.device == "cuda"
    ranks = max((planned.trial.world_size for done in found.rounds for planned in done.planned), default=0)
    chosen = found.chosen if found.chosen is not None else found.best
    return {
        "goal": settings.goal,
        "ranks": settings.base.world_size,
        "on_gpus": on_gpus,
        "is_complete": found.chosen is not None,
        "problem": found.problem,
        "trials": len(used),
        "elapsed_s": elapsed_s,
        "gpu_hours": elapsed_s * ranks / 3600 if on_gpus else None,
        "price_per_gpu_hour": settings.price_per_gpu_hour,
        "target_accuracy": settings.base.target_accuracy,
        "baseline": _side(settings, found, evidence, (), tokens),
        "chosen": _side(settings, found, evidence, chosen, tokens),
        "kept": list(chosen),
        "gain": _numbers(found.final) if found.chosen else None,
        "gain_on_one": _numbers(found.final_on_one) if found.chosen else None,
        "gain_on_all": _numbers(found.final_on_all) if found.chosen else None,
        "levers": lever_rows(settings, found),
        "steps": [{"lever": names[-1], "gain": _numbers(gain)} for names, gain in found.steps],
        "loss": None
        if found.losses is None
        else {
            "difference": _number(found.losses.difference),
            "spread": _number(found.losses.spread),
            "is_beyond": found.losses.is_beyond,
        },
        "use": usage(settings, chosen),
    }


def lever_rows(settings: Settings, found: Search) -> list[dict[str, Any]]:
    """Return one row per lever that applied, in the order in which they were tried, and then those not tried.

    A lever that was tried twice has the numbers of its better attempt if it is kept, else of the last.
    """
    chosen = found.chosen if found.chosen is not None else found.best
    rows: dict[str, Attempt] = {}
    for attempt in found.attempts:
        before = rows.get(attempt.lever)
        rows[attempt.lever] = attempt if before is None or not before.is_gain else before
    listed = [_tried(settings, found, attempt, attempt.lever in chosen) for attempt in rows.values()]
    untried = {name: bound for name, bound in found.not_tried.items() if name not in rows}
    for name, bound in untried.items():
        listed.append(_row(settings, name, bound) | {"why": "not tried: the budget is spent"})
    return listed


def _row(settings: Settings, name: str, bound: float | None) -> dict[str, Any]:
    lever = settings.levers[name]
    return {
        "lever": name,
        "effect": lever.effect,
        "note": lever.note,
        "bound": _number(bound),
        "gain": None,
        "gain_on_one": None,
        "gain_on_all": None,
        "onto": [],
        "is_kept": False,
        "is_tried": False,
    }


def _tried(settings: Settings, found: Search, attempt: Attempt, is_kept: bool) -> dict[str, Any]:
    return _row(settings, attempt.lever, attempt.bound) | {
        "gain": _numbers(attempt.gain),
        "gain_on_one": _numbers(attempt.on_one),
        "gain_on_all": _numbers(attempt.on_all),
        "onto": list(attempt.onto),
        "is_kept": is_kept,
        "is_tried": True,
        "why": _why(settings, found, attempt, is_kept),
    }


def _why(settings: Settings, found: Search, attempt: Attempt, is_kept: bool) -> str:
    if is_kept:
        return "fixes scaling" if settings.goal == "efficiency" else "significant gain"
    if attempt.status != "done":
        return f"{attempt.status.replace('_', ' ')}: {attempt.reason}".removesuffix(": ")
    if attempt.lever in found.dropped and attempt.is_gain:
        return found.dropped[attempt.lever]
    if settings.goal == "efficiency" and (why := _scaling_effect(attempt)):
        return why
    if attempt.gain.high < 1:
        return {"efficiency": "scales worse", "cost": "costs more"}.get(settings.goal, "slower")
    if attempt.gain.low > 1:
        return "not significant after the correction for the number of comparisons"
    return "no significant gain"


def _scaling_effect(attempt: Attempt) -> str:
    """Say what a lever that does not fix scaling does on one rank and on all; empty if nothing is significant."""
    is_faster, one = attempt.on_all.low > 1, f"one rank by {attempt.on_one.value:.2f}x"
    if attempt.gain.low > 1 and not is_faster:
        slows = attempt.on_one.high < 1
        return f"only slows {one}" if slows else "scales better, but is not significantly faster on all ranks"
    if attempt.gain.high < 1 and is_faster:
        return f"speeds up all ranks by {attempt.on_all.value:.2f}x, but {one}"
    if is_faster and not attempt.gain.low > 1:
        return "speeds up one rank and all ranks alike"
    return ""


def _side(
    settings: Settings,
    found: Search,
    evidence: Evidence,
    configuration: Configuration,
    tokens: Callable[[str], float | None],
) -> dict[str, Any] | None:
    """Return throughput and bottleneck of a configuration in the last round that measured it; None if none did."""
    last = found.last_round_of(configuration)
    names = () if last is None else last.ids_of(configuration)
    runs = {name: run for name in names if (run := evidence.runs[name]).throughput_samples_per_s is not None}
    if not runs:
        return None
    shown = shares_from(settings, evidence, found.rounds, configuration)
    shares, bottleneck = evidence.shares(shown) if shown else ({}, None)
    return {
        "trial_ids": list(runs),
        "ranks": settings.sizes_of(configuration)[-1],
        "throughput_samples_per_s": _mean(runs, lambda run: run.throughput_samples_per_s),
        "time_to_target_s": _mean(runs, lambda run: run.time_to_target_s),
        "tokens_per_sample": tokens(next(iter(runs))),
        "bottleneck": bottleneck,
        "share": _number(shares.get(bottleneck or "")),
    }


def _mean(runs: Mapping[str, Run], value: Callable[[Run], float | None]) -> float | None:
    """Return the geometric mean of a value over runs; None if one does not have it."""
    values = [number for run in runs.values() if (number := value(run))]
    return math.exp(sum(map(math.log, values)) / len(values)) if len(values) == len(runs) else None


def usage(settings: Settings, configuration: Configuration) -> dict[str, Any]:
    """Return how to use a configuration: the changed fields, the command, and YAML or environment variables."""
    trial = settings.trial(configuration)
    assert trial is not None
    changes = changed_fields(settings.base, trial)
    if trial.door != "factory":
        return {"changes": changes, "command": _own_command(trial), "yaml": ""}
    options = _options(trial)
    words = [f"--{name} {shlex.quote(str(value))}" for name, value in options.items() if name != "set"]
    words += [f"--set {shlex.quote(f'{name}={_text(value)}')}" for name, value in options.get("set", {}).items()]
    return {"changes": changes, "command": f"{MODULE} run {' '.join(words)}", "yaml": _yaml(options)}


def _own_command(trial: Trial) -> str:
    """Return the command that starts the user's script with its flags and variables; empty for a train function."""
    if not trial.script:
        return ""
    script = ["-m", trial.script] if is_module(trial.script) else [trial.script]
    start = ["torchrun", f"--nproc-per-node={trial.world_size // trial.nodes}", *script, *trial.command_line]
    return " ".join(filter(None, [trial.script_env, shlex.join(start)]))


def _options(trial: Trial) -> dict[str, Any]:
    """Return the options of `run` for a trial's fields that are not its defaults, by name."""
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for name, value in trial.model_dump().items():
        is_default = value == Trial.model_fields[name].default and name not in ("world_size", "batch_per_gpu", "model")
        if is_default or name in _SELF_SET or name.endswith("_digest") or FIELD_FACTS[name].kind == "run":
            continue
        option = OPTION_OF_FIELD.get(name)
        if option is None:
            settings[name] = value
        else:
            options[option.name] = value
    if "workload" in options:
        options.pop("model", None)
    return options | ({"set": settings} if settings else {})


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _yaml(options: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(options), sort_keys=False, default_flow_style=False)


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _numbers(ratio: Ratio) -> list[float | None] | None:
    """Return value, low and high; None if the value is unknown."""
    return None if math.isnan(ratio.value) else [_number(value) for value in ratio]
