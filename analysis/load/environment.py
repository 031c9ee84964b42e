"""Which trials ran under the same environment: only those may share a table.

A fingerprint is what a trial's numbers depend on besides its own fields: the device, its driver, the CPU model, versions,
environment variables and the code that measures (`study.store.environment.measuring_code`). Hosts of equal kind have the same
fingerprint. The commit is told, and no part of it: a study goes on after a change of its documents, tests or tables.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pandas as pd

from analysis.load.results import Results, device_name
from analysis.text import join

WHEN = ("before", "after")
"""When ranks read the state of their host and GPU: before their windows, and after them."""

NONE = "none"

MEASURING_CODE = "measuring code"


def fingerprint(trial: Mapping[str, Any] | pd.Series) -> dict[str, str]:
    """The environment of one trial (a row of `Results.trials`): names and values as people read them.

    Variables that the trial's own fields set are left out: those listed in `set_by_study`, and OMP_NUM_THREADS where Ray
    made it the number of the rank's CPUs.
    """
    environment = trial["environment"] or {}
    set_by_fields = set(environment.get("set_by_study") or ())
    variables = {k: v for k, v in (environment.get("variables") or {}).items() if k not in set_by_fields}
    if variables.get("OMP_NUM_THREADS") == str(trial.get("cpus_per_rank")):
        del variables["OMP_NUM_THREADS"]
    nodes = used_nodes(environment)
    parts = {
        "device": device_name(environment),
        "driver": _joined(gpu.get("driver") for _, gpu in used_gpus(environment)),
        "CPU": _joined(node.get("cpu_model") for node in nodes),
        **(environment.get("versions") or {}),
        **variables,
        MEASURING_CODE: environment.get("measuring_code"),
    }
    return {name: str(value) for name, value in parts.items() if value not in (None, "")}


def commit(environment: Mapping[str, Any]) -> str | None:
    """The commit that a trial ran, and whether files had changes; None outside a checkout."""
    git = environment.get("git") or {}
    name = git.get("commit")
    return f"{name[:10]}{' with local changes' if git.get('dirty') else ''}" if name else None


def used_nodes(environment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The nodes of trial.json's environment that held a rank of the trial."""
    used = {rank.get("node_id") for rank in environment.get("ranks") or ()}
    return [node for node in environment.get("nodes") or () if node.get("node_id") in used]


def used_gpus(environment: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each rank that held a GPU, with the facts of that GPU, found by its UUID (empty where they are not known)."""
    known = {gpu.get("uuid"): gpu for node in used_nodes(environment) for gpu in node.get("gpus") or ()}
    return [(rank, known.get(rank["gpu_uuid"], {})) for rank in environment.get("ranks") or () if rank.get("gpu_uuid")]


def by_environment(results: Results) -> list[Results]:
    """The results of each environment that has a done trial, the one with most done trials first (then the earliest).

    Trials without a result have no number to mix: they are all in the first.
    """
    done = results.trials[results.trials["status"] == "done"]
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for trial_id, found in comparable(done).items():
        groups.setdefault(tuple(sorted(found.items())), []).append(trial_id)
    if len(groups) < 2:
        return [results]
    began = done.set_index("trial_id")["started_at"]
    members = sorted(groups.values(), key=lambda ids: (-len(ids), began[ids].min()))
    without = set(results.trials["trial_id"]) - set(done["trial_id"])
    return [_restricted(results, {*members[0], *without}), *(_restricted(results, set(ids)) for ids in members[1:])]


def comparable(trials: pd.DataFrame) -> dict[str, dict[str, str]]:
    """The fingerprint of each trial, by its id.

    A variable that some trials' fields set, and that has one value in all others, is no difference between the two. Nor is the
    measuring code, where trials older than its digest have none and all others the same.
    """
    found = {trial["trial_id"]: fingerprint(trial) for _, trial in trials.iterrows()}
    own = {
        trial_id: set((environment or {}).get("set_by_study") or ())
        for trial_id, environment in zip(trials["trial_id"], trials["environment"], strict=True)
    }
    for name in set().union(*own.values()):
        elsewhere = {found[trial_id].get(name) for trial_id, names in own.items() if name not in names}
        if len(elsewhere) == 1 and (value := elsewhere.pop()) is not None:
            for trial_id, names in own.items():
                if name in names:
                    found[trial_id][name] = value
    known = {values[MEASURING_CODE] for values in found.values() if MEASURING_CODE in values}
    if len(known) == 1:
        found = {trial_id: values | {MEASURING_CODE: min(known)} for trial_id, values in found.items()}
    return found


def _restricted(results: Results, trial_ids: set[str]) -> Results:
    """`results` with only these trials, in every frame."""
    parts = {field.name: getattr(results, field.name) for field in fields(results)}
    frames: dict[str, Any] = {
        name: frame[frame["trial_id"].isin(trial_ids)].reset_index(drop=True)
        for name, frame in parts.items()
        if isinstance(frame, pd.DataFrame)
    }
    return replace(results, **frames)


def difference(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """What is unlike in two fingerprints: "torch 2.12.0 instead of 2.11.0 and driver 580 instead of 570"."""
    return join(
        [
            f"{name} {own.get(name, NONE)} instead of {other.get(name, NONE)}"
            for name in dict.fromkeys([*other, *own])
            if own.get(name) != other.get(name)
        ]
    )


def _joined(values: Any) -> str | None:
    return " + ".join(sorted({str(value) for value in values if value})) or None


def done_environments(trials: pd.DataFrame) -> list[tuple[str, dict[str, Any]]]:
    """Trial and environment of each trial with a result."""
    done = trials[trials["status"] == "done"]
    return list(zip(done["trial_id"], done["environment"], strict=True))


def reading(rank: dict[str, Any], when: str, name: str) -> Any:
    """What a rank read before or after its windows; None where it did not, as in results older than such readings."""
    return (rank.get(when) or {}).get(name)


def slowed_by(rank: dict[str, Any]) -> list[str] | None:
    """What slowed the rank's GPU down when it was looked at; None where nobody could look."""
    seen = [reasons for when in WHEN if (reasons := reading(rank, when, "throttle_reasons")) is not None]
    return sorted({str(reason) for reasons in seen for reason in reasons}) if seen else None
