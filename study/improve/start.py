"""Where a search starts: its baseline, its levers and its budget, from the options of `improve`."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from pydantic import ValidationError

from study.capacity import NodeCapacity
from study.cli.configuration import Configuration, resolve
from study.cli.inputs import script_or_module, workload_spec
from study.errors import DOES_NOT_FIT, ConfigurationError, clipped, near, shown
from study.improve import factory_levers, own_code_levers
from study.improve.budget import FINAL_BREAKDOWNS, GROUPS, LOSS_TRIALS
from study.improve.lever import Lever, Machine, size_levers
from study.improve.rounds import Goal, Settings
from study.improve.search import LEAST_FINAL_GROUPS
from study.options import explicit_options
from study.plan.trials import fit, plan_trials
from study.store.redaction import secret_in
from study.studies.own_code import own_code_study, workload_study
from trainables.data.image_layout import storages_in
from trainables.fields import explain
from trainables.rules import unmet_requirement
from trainables.trial import Trial

GOALS: tuple[str, ...] = get_args(Goal)

DEFAULT_TRIALS = 40
"""Trials of a search without a budget."""

WINDOW_LIMIT_S = 3.0
"""Longest window of steps. A naive start may take a second per step, and is measured in many worker groups."""

_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "": 1.0}


class DoesNotFit(ConfigurationError):
    """A baseline that does not fit the cluster."""

    exit_code = DOES_NOT_FIT


@dataclass(frozen=True)
class Request:
    """What a user asks `improve` for. directory: results of the study to improve; empty for a workload."""

    configuration: Configuration
    directory: str
    goal: Goal
    trials: int | None
    budget_s: float | None
    keep_arithmetic: bool


def request(
    options: Mapping[str, Any],
    directory: str | None,
    goal: str | None,
    budget: str | None,
    trials: int | None,
    keep_arithmetic: bool,
) -> Request:
    """Return what a user asks for. options: those that `improve` shares with `run`. Raises ConfigurationError."""
    goal = goal or "throughput"
    if goal not in GOALS:
        raise ConfigurationError(f"--goal {shown(goal)} is not known; allowed: {', '.join(GOALS)}{near(goal, GOALS)}")
    configuration = resolve(explicit_options(dict(options)), options["config"])
    given = {"model", "workload", "script", "train_function"} & set(configuration.axes)
    if directory is not None and given - {"model"}:
        raise ConfigurationError(f"give either a results folder or --{min(given)}, not both")
    if directory is None and not given:
        raise ConfigurationError(
            "nothing to improve; give a results folder, or one of --model, --workload, --script, --train-func"
        )
    name = _name(configuration, directory)
    out = str(options["out"] or f"results/improve-{name}")
    if directory is not None and os.path.realpath(directory) == os.path.realpath(out):
        raise ConfigurationError(f"--out {out} is the folder to improve; give another --out")
    budget_s = None if budget is None else seconds_of(budget)
    if trials is None and budget_s is None:
        trials = DEFAULT_TRIALS
    least = _least_trials(configuration, goal, keep_arithmetic)
    if trials is not None and trials < least:
        raise ConfigurationError(
            f"--trials {trials} is too few: one lever and the final comparison take {least}; give at least {least}"
        )
    configuration = configuration.model_copy(update={"study": f"improve-{name}", "out": out})
    return Request(configuration, directory or "", cast(Goal, goal), trials, budget_s, keep_arithmetic)


def _least_trials(configuration: Configuration, goal: str, keep_arithmetic: bool) -> int:
    """Return the trials of the baseline, of a round with one lever, and of the final round."""
    sizes = 2 if goal == "efficiency" else 1
    timed = 1 + (2 * GROUPS + 2 * LEAST_FINAL_GROUPS) * sizes
    if goal == "time-to-accuracy":
        return timed + 2 + FINAL_BREAKDOWNS  # the first two rounds have a breakdown each
    has_seed = not configuration.has_own_code or any(entry.startswith("seed=") for entry in configuration.bind)
    return timed + (0 if keep_arithmetic or not has_seed else LOSS_TRIALS)


def seconds_of(budget: str) -> float:
    """Parse a time such as 90s, 20m or 1.5h. Raises ConfigurationError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|min|h|)", budget.strip())
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if seconds <= 0:
        raise ConfigurationError(f"--budget {shown(budget)} is no time; allowed: such as 90s, 20m or 1.5h")
    return seconds


def _name(configuration: Configuration, directory: str | None) -> str:
    if directory is not None:
        from study.store.store import Store

        return (Store.at(directory).name() or "study").removeprefix("improve-")
    if configuration.has_own_code or "workload" in configuration.axes:
        return configuration.study
    return str(configuration.axes["model"][0])


def settings_for(asked: Request, nodes: Sequence[NodeCapacity]) -> Settings:
    """Return the search on these nodes. Raises ConfigurationError, or DoesNotFit if the baseline does not fit them."""
    axes, is_training = asked.configuration.axes, asked.goal == "time-to-accuracy"
    single = ["nodes", "repeat", "seed", "cpus_per_rank", "device", *(["world_size"] if asked.goal != "cost" else [])]
    for name in single:
        if len(axes.get(name, ())) > 1:
            raise ConfigurationError(f"{name}: improve starts from one configuration; give one value")
    varied = {name: values for name, values in axes.items() if len(values) > 1}
    sizes = varied.pop("world_size", ())
    overrides = {name: values[0] for name, values in axes.items()}
    base = _of_folder(asked, overrides, nodes) if asked.directory else _of_options(asked, overrides, nodes)
    if is_training and not (base.epochs and base.target_accuracy):
        raise ConfigurationError("--goal time-to-accuracy trains; give --epochs N and --target-accuracy A")
    if base.epochs and not is_training:
        raise ConfigurationError("improve times steps; omit --epochs, or give --goal time-to-accuracy")
    for value in base.model_dump().values():
        if isinstance(value, str) and (found := secret_in(value)):
            raise ConfigurationError(f"a value has {found}, and would be stored in the results; pass it in a variable")
    if asked.goal == "efficiency" and base.world_size == 1:
        raise ConfigurationError("--goal efficiency compares N ranks with one; give --gpus 2 or more")
    if base.door == "factory":  # the limit of a study is longer
        usual = None if "steps" in axes else WINDOW_LIMIT_S
        base = base.but(window_limit_s=overrides.get("window_limit_s", usual))
    known = factory_levers.LEVERS if base.door == "factory" else own_code_levers.LEVERS
    levers = [
        *size_levers(sizes[1:], "GPU" if base.device == "cuda" else "CPU rank"),
        *own_code_levers.varied_levers(varied),
        *known,
    ]
    machine = Machine(nodes, tuple(storages_in(Path(base.data_dir))) if base.data_dir else ())
    price = asked.configuration.price_per_gpu_hour
    allowed = _allowed(levers, asked.keep_arithmetic)
    return Settings(base, allowed, machine, asked.goal, asked.trials, asked.budget_s, price)


def _allowed(levers: Sequence[Lever], keep_arithmetic: bool) -> dict[str, Lever]:
    """Return the levers by name. Values that the user gave are always allowed; they concern no known part of a step."""
    return {x.name: x for x in levers if not (keep_arithmetic and x.parts and x.effect == "arithmetic")}


def _of_options(asked: Request, overrides: Mapping[str, Any], nodes: Sequence[NodeCapacity]) -> Trial:
    """Return the baseline that the options describe; what they leave open is as in `run`."""
    configuration = asked.configuration
    make = own_code_study if configuration.has_own_code else workload_study
    study = make(nodes, configuration.study)
    largest = {"world_size": (max(study.axes["world_size"]),)}
    study = study.with_overrides(largest | {name: (value,) for name, value in overrides.items()}, 1)
    row = plan_trials(study, nodes)[0]
    if row.trial is None:
        raise ConfigurationError(clipped(row.reason))
    if row.status == "infeasible":
        raise DoesNotFit(f"does not fit: {row.reason}")
    return row.trial


def _of_folder(asked: Request, overrides: Mapping[str, Any], nodes: Sequence[NodeCapacity]) -> Trial:
    """Return the configuration that the answer of a study is about, or that a search chose, with changed fields."""
    from study.store.store import Store

    directory = asked.directory
    trial_id = _trial_to_improve(directory, asked.goal)
    record = next(record for record in Store.at(directory).scan()[0] if record["trial_id"] == trial_id)
    fields = record["trial"] | {"repeat": 0, "profile_ranks": ""} | dict(overrides)
    for name, read in (("script", script_or_module), ("workload", workload_spec), ("train_function", workload_spec)):
        if fields.get(name):  # the file may have changed since
            fields[name], fields[f"{name}_digest"] = read(fields[name], directory)
    fields["nodes"], does_not_fit = fit(
        {k: v for k, v in fields.items() if k != "nodes" or "nodes" in overrides}, nodes
    )
    if does_not_fit:
        raise DoesNotFit(f"does not fit: {does_not_fit}; give --gpus N")
    try:
        trial = Trial.model_validate(fields)
    except ValidationError as error:
        raise ConfigurationError(f"{directory}: {clipped('; '.join(explain(error)))}") from None
    if reason := unmet_requirement(trial):
        raise DoesNotFit(f"does not fit: {reason}")
    return trial


def _trial_to_improve(directory: str, goal: Goal) -> str:
    """Return the id of the trial to start from: of a search its result, of trainings the fastest to its target."""
    from analysis.measure.training import reached_target, training_runs
    from analysis.read.results import load_reduced, nothing_timed
    from analysis.study import analyses

    found = analyses(load_reduced(directory))[0]
    searched = found.record.search
    if searched is not None and searched.chosen is not None:
        return searched.chosen.trial_ids[0]
    if goal == "time-to-accuracy":
        trainings = training_runs(found.results.trials, found.results.epochs)
        if trainings.empty:
            raise ConfigurationError(f"{directory}: nothing to improve: it has no training; give --model and --epochs")
        reached = reached_target(found.results.epochs, trainings, None)["time_to_target_s"]
        return str(trainings["trial_id"].iloc[0] if reached.empty else reached.idxmin())
    if found.headline is None:
        raise ConfigurationError(f"{directory}: nothing to improve: {nothing_timed(found.results.trials)}")
    return str(found.configurations.loc[[found.headline], "trial_ids"].iloc[0][0])
