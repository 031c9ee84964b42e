"""Write the page of all questions and answers, from packed results.

    python -m scripts.study_answers docs/studies/answers.md

`--refresh` first writes today's questions, and the published figures next to them, into the study.json of the packed
results: results measured before a question was asked then answer it too. Nothing measured changes.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from analysis.answers.registry import Answer, answers
from scripts.claims.sources import committed_inputs
from study.capacity import NodeCapacity
from study.studies.basic import STUDIES
from study.studies.questions import QUESTIONS

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"

FOLDERS: Mapping[str, tuple[str, ...]] = {
    "forum-phases": ("forum-phases", "forum-phases-h200", "forum-phases-batch-256"),
    "hpml-lab4": (
        "hpml-lab4",
        "hpml-lab4-dp",
        "hpml-lab4-h200",
        "hpml-lab4-4gpu",
        "hpml-lab4-memory",
        "hpml-lab4-memory-2gpu",
        "fifth-epoch",
    ),
    "acceleration-ladder": ("acceleration-ladder", "acceleration-ladder-300", "acceleration-ladder-1gpu"),
    "vgg-case-study": ("vgg-case-study", "vgg-case-study-h200", "vgg-case-study-4gpu", "vgg-accuracy"),
    "number-formats": ("number-formats",),
    "loader-grid": ("loader-grid", "loader-grid-128"),
    "storage-order": ("storage-order",),
    "averaging": ("averaging-4gpu", "averaging"),
    "sharding": ("sharding",),
    "real-ranks": ("real-ranks",),
    "mlstm-scaling": ("mlstm-scaling", "mlstm-scaling-4gpu", "mlstm-threads"),
}
"""Packed results per study, in the order in which they are asked; the first one that can answers a question."""

FURTHER: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "hpml-lab4": {"hpml-lab4-memory": ("lab.epoch_time",), "hpml-lab4-memory-2gpu": ("lab.epoch_time",)},
    "acceleration-ladder": {"acceleration-ladder-nodes": ("ladder.steps", "ladder.total")},
    "vgg-case-study": {
        "vgg-case-study-batches": ("vgg.best_batch", "vgg.one_is_better"),
        "vgg-case-study-4gpu": ("vgg.one_is_better",),
        "vgg-case-study-h200": ("vgg.best_batch", "vgg.one_is_better", "vgg.memory"),
    },
    "averaging": {"averaging-horovod-2gpu": ("averaging.ways",)},
    "mlstm-scaling": {
        "mlstm-scaling-32bit": ("mlstm.linear", "mlstm.interconnects", "mlstm.larger_model", "mlstm.predicted"),
    },
}
"""Packed results that answer questions for cases that the others lack, or differently, with the keys of these."""

_GPU_HOST = [NodeCapacity("host", "", cpus=32, gpus=2)]
_REFRESHED = ("questions", "reference_ladders", "predict_to", "report_epoch", "documents")


def refresh(folder: str) -> None:
    """Write the entries of its study for the report into the study.json of packed results."""
    file = RESULTS / folder / "study.json"
    record = json.loads(file.read_text())
    report = STUDIES[record["name"]](_GPU_HOST).report
    record["configuration"] |= {key: report[key] for key in _REFRESHED if key in report}
    file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def study_answers(name: str) -> list[tuple[str, Answer]]:
    """Return the answers to a study's questions, each with its folder. Further results follow the first answer."""
    found: dict[str, tuple[str, Answer]] = {}
    for folder in FOLDERS[name]:
        for reply in answers(committed_inputs(folder)[0]):
            known = found.get(reply.key)
            if known is None or (reply.is_answered, len(reply.text)) > (known[1].is_answered, len(known[1].text)):
                found[reply.key] = known if known and known[1].is_answered else (folder, reply)
    further = [
        (folder, reply)
        for folder, keys in FURTHER.get(name, {}).items()
        for reply in answers(committed_inputs(folder)[0])
        if reply.is_answered and reply.key in keys and found.get(reply.key, ("",))[0] != folder
    ]
    asked = [key for key in QUESTIONS[name] if key in found]
    return [pair for key in asked for pair in (found[key], *(pair for pair in further if pair[1].key == key))]


def section(name: str) -> str:
    """Return a study's questions with their answers as Markdown. Each answer states the folder of other results."""
    parts = [f"## {name}"]
    known = ""
    for folder, reply in study_answers(name):
        if reply.key == known:
            devices = committed_inputs(folder)[0].results.trials["device_name"].dropna().unique()
            parts.append(f"Further results, `{folder}` ({', '.join(sorted(devices))}): {reply.text}")
        else:
            source = "" if folder == name else f" (results: `{folder}`)"
            parts.append(f"**{reply.question}** {reply.text}{source}")
        known = reply.key
    return "\n\n".join(parts)


def page() -> str:
    """Return all questions with their answers as Markdown."""
    parts = [
        "# Questions and answers",
        "Each question of the published studies, with the answer that reports compute from the committed results. "
        "Generated by `python -m scripts.study_answers`; never edited by hand. [What cannot be measured here]"
        "(not-here.md) is listed with the command that would do it.",
    ]
    return "\n\n".join([*parts, *map(section, FOLDERS)]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="file to write")
    parser.add_argument("--refresh", action="store_true", help="write today's questions into the packed results first")
    options = parser.parse_args()
    if options.refresh:
        for packed in (folder for folders in (*FOLDERS.values(), *FURTHER.values()) for folder in folders):
            refresh(packed)
    options.page.write_text(page())
