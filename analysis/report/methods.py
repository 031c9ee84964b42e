"""The methods paragraph of a study, ready to paste into a paper, with the BibTeX entry of this program."""

from pathlib import Path
from typing import Any

import yaml

from analysis.predict.inputs import ReportInputs
from analysis.read.environment import done_environments, used_nodes
from analysis.statistics import CONFIDENCE
from analysis.study import Analysis, study_ranks
from analysis.text import GIB, join, number, percent
from analysis.verdict.facts import dates, trained

CITATION = Path(__file__).resolve().parent.parent.parent / "CITATION.cff"

_VERSIONS = {"torch": "PyTorch", "cuda": "CUDA", "cudnn": "cuDNN", "nccl": "NCCL", "ray": "Ray", "python": "Python"}


def methods(analysis: ReportInputs) -> str:
    """Return report/methods.md. What old results do not record is left out."""
    sentences = [
        _what(analysis),
        *_repeats(analysis),
        *_training(analysis),
        *_windows(analysis),
        *_intervals(analysis),
        *_prediction(analysis),
        *_hardware(analysis),
        _software(analysis),
    ]
    entry = f"\n```bibtex\n{bibtex()}\n```\n" if CITATION.exists() else ""
    return f"# Methods\n\n{' '.join(sentence for sentence in sentences if sentence)}\n{entry}"


def _what(analysis: Analysis) -> str:
    count = int((analysis.results.trials["status"] == "done").sum())
    models, data, devices = trained(analysis, in_prose=True)
    subject = f"{models or 'a program'}{f' on {data}' if data else ''}"
    name = f"scaling-study {version()} [scaling-study]" if CITATION.exists() else "scaling-study"
    return f"We trained {subject}, with {devices}, in {_counted(count, 'trial')} of {name}."


def _repeats(analysis: Analysis) -> list[str]:
    configurations = analysis.configurations
    if configurations.empty:
        return []
    fewest, most = int(configurations["n"].min()), int(configurations["n"].max())
    repeats = "once" if most == 1 else f"{fewest} times" if fewest == most else f"{fewest} to {most} times"
    own_groups = most > 1 and (configurations["throughput_group_names"].map(len) == configurations["n"]).all()
    processes = ", each time in newly started processes" if own_groups else ""
    subject = "The configuration" if len(configurations) == 1 else f"Each of the {len(configurations)} configurations"
    return [f"{subject} ran {repeats}{processes}."]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _training(analysis: Analysis) -> list[str]:
    accuracy = analysis.accuracy
    if accuracy is None:
        return []
    seeds = accuracy.cells["n"][accuracy.cells["n"] > 0]
    if seeds.empty:
        return []
    noun = "seed" if seeds.max() == 1 else "seeds"
    return [
        f"Accuracies are those of held-out samples after the last epoch, means over {_range(seeds)} {noun}, with "
        f"{percent(CONFIDENCE)} intervals of differences by Welch's t, or of pairs with equal seeds at "
        "the same global batch."
    ]


def _windows(analysis: Analysis) -> list[str]:
    trials = analysis.results.trials
    if analysis.configurations.empty or "warmup_steps" not in trials:
        return []
    windows = analysis.results.windows
    steps, warm_up = windows.loc[windows["window"] == "plain", "steps"], trials["warmup_steps"].dropna()
    if steps.empty or warm_up.empty:
        return []
    least_steps, least_warm_up = (number(float(values.min()), 0) for values in (steps, warm_up))
    return [
        f"Throughput is that of at least {least_steps} steps without any measurement inside, after at least "
        f"{least_warm_up} warm-up steps; phases and communication were timed in separate windows on the same ranks."
    ]


def _range(values: Any) -> str:
    low, high = number(float(values.min()), 0), number(float(values.max()), 0)
    return low if low == high else f"{low} to {high}"


def _intervals(analysis: Analysis) -> list[str]:
    if analysis.configurations.empty or not (analysis.configurations["n"] > 1).any():
        return []
    one, several = study_ranks(analysis)
    return [
        f"We report geometric means over worker groups with {percent(CONFIDENCE)} intervals from a two-way variance "
        f"(group and configuration) that is shrunk to that of the study. Efficiency is the throughput per {one} "
        f"relative to that on the fewest {several} of the same series."
    ]


def _prediction(analysis: ReportInputs) -> list[str]:
    if not any(not model.series.host_bound for model in analysis.models):
        return []
    _, several = study_ranks(analysis)
    return [
        f"Predictions for more {several} are Akaike-weighted averages of analytical laws fitted to the measured sizes; "
        "their error is that of the largest measured size, predicted without it."
    ]


def _hardware(analysis: Analysis) -> list[str]:
    nodes = {
        (
            node.get("cpu_model"),
            node.get("cpu_count"),
            round((node.get("memory_bytes") or 0) / GIB),
            len(node.get("gpus") or ()),
            node.get("os"),
        )
        for _, environment in done_environments(analysis.results.trials)
        for node in used_nodes(environment)
    }
    device = analysis.environment.get("device")
    described = []
    for cpu, cores, memory_gib, gpus, system in sorted(nodes, key=str):
        parts = [f"{gpus} {device}" if gpus and device else "", f"{cpu} ({cores} cores, {memory_gib} GiB)"]
        described.append(" and ".join(part for part in parts if part) + (f", running {system}" if system else ""))
    return [f"Each node has {join(described, 'or')}."] if described else []


def _software(analysis: Analysis) -> str:
    environment = analysis.environment
    versions = [f"{name} {environment[key]}" for key, name in _VERSIONS.items() if key in environment]
    if "driver" in environment:
        versions.append(f"driver {environment['driver']}")
    locks = {trial.get("lock_file") for trial in analysis.results.trials["environment"]} - {None}
    if len(locks) == 1:
        versions.append(f"dependencies pinned by a lock file with SHA-256 {min(locks)}")
    when = f" The trials ran on {dates(analysis)[0]} (UTC)." if dates(analysis) else ""
    return (f"Software: {join(versions)}." if versions else "") + when


def version() -> str:
    """Return the version of this program from CITATION.cff."""
    return str(_citation()["version"])


def bibtex() -> str:
    """Return the BibTeX entry of this program from CITATION.cff."""
    citation = _citation()
    authors = " and ".join(
        f"{{{author['name']}}}" if "name" in author else f"{author['family-names']}, {author['given-names']}"
        for author in citation["authors"]
    )
    entries = {
        "author": authors,
        "title": f"{{{citation['title']}}}",
        "year": str(citation["date-released"])[:4],
        "version": citation["version"],
        "url": citation.get("repository-code") or citation.get("url"),
        "note": f"Licence: {citation['license']}",
    }
    lines = [f"  {name} = {{{value}}}," for name, value in entries.items() if value]
    return "\n".join(["@software{scaling-study,", *lines, "}"])


def _citation() -> dict[str, Any]:
    return dict(yaml.safe_load(CITATION.read_text()))
