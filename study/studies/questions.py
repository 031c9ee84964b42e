"""The questions of the published studies, as their sources ask them, and of our own. Reports answer each.

Keys name the functions in `analysis/answers` that compute the answers.
"""

from collections.abc import Mapping
from typing import Any

QUESTIONS: Mapping[str, Mapping[str, str]] = {
    "forum-phases": {
        "forum.parts": "What do loading, transfer and processing of a batch take?",
        "forum.per_rank": "Why does the processing time per GPU change with more GPUs, and when can it not fall?",
        "forum.non_blocking": "What does non_blocking do without pinned memory?",
        "forum.hidden": "Where does the transfer hide, and what does a synchronisation reveal?",
        "forum.pageable": "What does unpinned memory do to loading, transfer and step?",
        "threads.gil": "Do threads of one process or one process per GPU launch faster (GIL)?",
    },
    "hpml-lab4": {
        "lab.epoch_time": "Q1: Does an epoch take longer or shorter with a larger batch, and why?",
        "lab.scaling_kind": "Q2: Is this weak or strong scaling, and what is the data point of the other kind?",
        "lab.separated": "Q3.1: How were compute and communication separated, and how long are they?",
        "lab.bandwidth": "Q3.2: Which bandwidth do the all-reduces reach, by which formula?",
        "lab.fifth_epoch": "Q4.1: What are loss and accuracy of the fifth epoch with the largest batch?",
        "lab.recipes": "Q4.2: How do two recipes change them?",
        "lab.set_epoch": "Q5: What happens without set_epoch?",
        "lab.sent": "Q6: What do the ranks send?",
        "lab.gradients_only": "Q7: Is it enough to communicate gradients?",
    },
    "fifth-epoch": {
        "lab.fifth_epoch": "What are loss and accuracy of the fifth epoch with the largest batch?",
        "lab.recipes": "How do two recipes change them?",
    },
    "acceleration-ladder": {
        "ladder.steps": "What does each step change, and what does it gain?",
        "ladder.total": "What do all steps gain together, and what did the published ladders gain?",
        "ladder.precision": "What does each number format cost in accuracy?",
    },
    "number-formats": {
        "formats.cost": "What does each number format cost in accuracy, and what does it gain in speed?",
    },
    "loader-grid": {
        "loader.workers": "How many CPU cores and loader workers are enough, and how many are too many?",
    },
    "storage-order": {
        "storage.cost": "What do storage format, order, page cache and shared memory change?",
    },
    "averaging": {
        "averaging.ways": "What do other ways to average gradients cost next to DDP?",
        "averaging.held": "What does DataParallel gain with more GPUs if the global batch is held?",
    },
    "sharding": {
        "sharding.cost": "What does sharding cost or gain in speed and memory?",
        "sharding.fits": "Which is the largest model that fits with each strategy?",
    },
    "real-ranks": {
        "ranks.divided": (
            "Does a large global batch divided over several GPUs reach the accuracy of the same batch on one?"
        ),
    },
    "vgg-case-study": {
        "vgg.accuracy": "Does the accuracy change with the number of GPUs?",
        "vgg.best_batch": "Which batch is the best?",
        "vgg.one_is_better": "When is one GPU better than several?",
        "vgg.memory": "Why does memory end on one GPU first?",
    },
    "mlstm-scaling": {
        "mlstm.linear": "Is the scaling near-linear?",
        "mlstm.interconnects": "Which interconnect is the fastest, and by how much?",
        "mlstm.larger_model": "Does the larger model scale better on each interconnect, and why?",
        "threads.gil": "Do threads of one process or one process per GPU launch faster (GIL)?",
        "mlstm.predicted": "How would it scale to 128 GPUs?",
    },
}


def asked(name: str) -> dict[str, Any]:
    """Return the entry of study.json with the questions of a study."""
    return {"questions": [{"key": key, "question": text} for key, text in QUESTIONS[name].items()]}
