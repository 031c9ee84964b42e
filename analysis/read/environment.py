"""Group trials by environment. Only trials of the same environment may share a table.

The fingerprint of an environment holds what a trial's numbers depend on besides its fields: device, driver, CPU model,
versions, environment variables and the measuring code (`study.store.environment.measuring_code`). Hosts of the same
type have the same fingerprint. The commit, the lock file and the operating system are reported but not part of the
fingerprint, so a study can continue after a change to its documents, tests or tables, and on an updated host.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pandas as pd

from analysis.read.results import Results, device_name
from analysis.text import join

WHEN = ("before", "after")
"""When ranks read the state of their host and GPU: before and after the measuring windows."""

NONE = "none"

MEASURING_CODE = "measuring code"
_RECORDED_LATER = (MEASURING_CODE, "cudnn")
"""Parts of a fingerprint that trials of older versions lack."""


def fingerprint(trial: Mapping[str, Any] | pd.Series) -> dict[str, str]:
    """Return the environment of one trial (a row of `Results.trials`) as display names and values.

    Variables set by the trial's fields are left out: those in `set_by_study`, and OMP_NUM_THREADS if it equals the
    number of CPUs per rank, which is Ray's default.
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
    """Return the commit of a trial and whether it had local changes. None outside a git checkout."""
    git = environment.get("git") or {}
    name = git.get("commit")
    return f"{name[:10]}{' with local changes' if git.get('dirty') else ''}" if name else None


def used_nodes(environment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the nodes of trial.json's environment that ran a rank of the trial."""
    used = {rank.get("node_id") for rank in environment.get("ranks") or ()}
    return [node for node in environment.get("nodes") or () if node.get("node_id") in used]


def used_gpus(environment: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (rank, GPU) for each rank with a GPU, matched by UUID. The GPU's facts are empty if unknown."""
    known = {gpu.get("uuid"): gpu for node in used_nodes(environment) for gpu in node.get("gpus") or ()}
    return [(rank, known.get(rank["gpu_uuid"], {})) for rank in environment.get("ranks") or () if rank.get("gpu_uuid")]


def by_environment(results: Results) -> list[Results]:
    """Split results by environment: most done trials first, ties by the earliest start.

    Trials without a result have no numbers to mix, so they all go to the first environment, as do damaged ones.
    """
    done = results.trials[results.trials["status"] == "done"]
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for trial_id, values in comparable_fingerprints(done).items():
        groups.setdefault(tuple(sorted(values.items())), []).append(trial_id)
    if len(groups) < 2:
        return [results]
    started_at = done.set_index("trial_id")["started_at"]
    members = sorted(groups.values(), key=lambda ids: (-len(ids), started_at[ids].min()))
    not_done = set(results.trials["trial_id"]) - set(done["trial_id"])
    others = [replace(_restricted(results, set(ids)), damaged=()) for ids in members[1:]]
    return [_restricted(results, {*members[0], *not_done}), *others]


def comparable_fingerprints(trials: pd.DataFrame) -> dict[str, dict[str, str]]:
    """Return fingerprints by trial id, with gaps filled so that equal environments compare equal.

    If the fields of some trials set a variable and all other trials share one value, that value counts for all. What
    older trials lack is filled in likewise.
    """
    fingerprints = {trial["trial_id"]: fingerprint(trial) for _, trial in trials.iterrows()}
    set_by_study = {
        trial_id: set((environment or {}).get("set_by_study") or ())
        for trial_id, environment in zip(trials["trial_id"], trials["environment"], strict=True)
    }
    for name in set().union(*set_by_study.values()):
        others = {fingerprints[trial_id].get(name) for trial_id, names in set_by_study.items() if name not in names}
        if len(others) == 1 and (value := others.pop()) is not None:
            for trial_id, names in set_by_study.items():
                if name in names:
                    fingerprints[trial_id][name] = value
    for name in _RECORDED_LATER:
        known = {values[name] for values in fingerprints.values() if name in values}
        if len(known) == 1:
            fingerprints = {key: values | {name: min(known)} for key, values in fingerprints.items()}
    return fingerprints


def _restricted(results: Results, trial_ids: set[str]) -> Results:
    """Return `results` with every frame limited to these trials."""
    parts = {field.name: getattr(results, field.name) for field in fields(results)}
    frames: dict[str, Any] = {
        name: frame[frame["trial_id"].isin(trial_ids)].reset_index(drop=True)
        for name, frame in parts.items()
        if isinstance(frame, pd.DataFrame)
    }
    return replace(results, **frames)


def difference(actual: Mapping[str, str], reference: Mapping[str, str]) -> str:
    """Describe how two fingerprints differ: "torch 2.12.0 instead of 2.11.0 and driver 580 instead of 570"."""
    return join(
        [
            f"{name} {actual.get(name, NONE)} instead of {reference.get(name, NONE)}"
            for name in dict.fromkeys([*reference, *actual])
            if actual.get(name) != reference.get(name)
        ]
    )


def _joined(values: Any) -> str | None:
    return " + ".join(sorted({str(value) for value in values if value})) or None


def done_environments(trials: pd.DataFrame) -> list[tuple[str, dict[str, Any]]]:
    """Return (trial id, environment) of each done trial."""
    done = trials[trials["status"] == "done"]
    return list(zip(done["trial_id"], done["environment"], strict=True))


def reading(rank: dict[str, Any], when: str, name: str) -> Any:
    """Return what a rank read before or after its windows. None if it did not, as in older results."""
    return (rank.get(when) or {}).get(name)


def slowed_by(rank: dict[str, Any]) -> list[str] | None:
    """Return the throttle reasons of the rank's GPU before and after its windows. None if they could not be read."""
    readings = [reasons for when in WHEN if (reasons := reading(rank, when, "throttle_reasons")) is not None]
    return sorted({str(reason) for reasons in readings for reason in reasons}) if readings else None
