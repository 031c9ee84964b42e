"""Searches for a shorter time to a target accuracy, with trainings on two real gloo ranks."""

from collections.abc import Sequence
from pathlib import Path

from analysis.read.study_record import StudyRecord
from analysis.report.card import as_text, card_at
from analysis.report.report import write_report
from study.capacity import NodeCapacity
from study.cli.configuration import Configuration
from study.improve.lever import Lever, Machine
from study.improve.observe import Observer
from study.improve.rounds import Settings
from study.improve.search import Search
from study.improve.session import Session, search_rounds
from study.improve.start import Request
from study.orchestrate.twin.in_process import local_cluster, run_trials
from study.orchestrate.twin.local_ranks import LocalProcesses
from study.store.store import Store
from trainables.trial import Trial

NODES = [NodeCapacity("node-a", "10.0.0.1", cpus=4, gpus=0)]
TARGET = 0.6
BASE = Trial(
    model="mlp", world_size=2, batch_per_gpu=64, epochs=10, target_accuracy=TARGET, learning_rate=1.5e-4,
    warmup_steps=2, steps=4, communication_steps=2, sweep_bytes=2**12,
)  # fmt: skip
LEVERS = [
    Lever("higher learning rate", ("compute",), "arithmetic", lambda trial, machine: {"learning_rate": 5e-3}),
    Lever("far too low", ("compute",), "arithmetic", lambda trial, machine: {"learning_rate": 1e-6}),
]
"""The sample of Fashion-MNIST is learned in fewer epochs at a higher rate, and not at all at a very low one."""


def searched(folder: Path) -> Search:
    """Run a search on two ranks."""
    settings = Settings(
        BASE, {lever.name: lever for lever in LEVERS}, Machine(NODES), goal="time-to-accuracy", trials=26
    )
    asked = Request(Configuration(study="improve-mlp", out=str(folder)), "", "time-to-accuracy", 26, None, False)
    session = Session(asked, settings, "python -m study.scaling improve", Observer(str(folder)))
    session.save(Search())

    def run(blocks: Sequence[Sequence[Trial]], store: Store) -> bool:
        return run_trials("improve-mlp", blocks, store, local_cluster(NODES), ranks=LocalProcesses())

    search_rounds(session, run, print)
    found, evidence = session.read()
    session.save(found, evidence)
    return found


def test_the_change_with_which_trainings_reach_the_target_earlier_is_kept(tmp_path: Path) -> None:
    found = searched(tmp_path)
    assert found.chosen == ("higher learning rate",)
    assert found.final.low > 1
    failed = next(attempt for attempt in found.attempts if attempt.lever == "far too low")
    assert (failed.status, failed.reason.startswith("best accuracy 0.")) == ("target_not_reached", True)
    records = Store.at(str(tmp_path)).records()
    assert {record["status"] for record in records} == {"done"}
    seeds = {record["trial"]["seed"] for record in records if record["trial"]["epochs"]}
    assert len(seeds) == sum(done.groups for done in found.rounds)

    search = StudyRecord.of(Store.at(str(tmp_path)).study()).search
    assert search is not None and search.baseline is not None and search.chosen is not None
    assert search.target_accuracy == TARGET
    times = (search.baseline.time_to_target_s, search.chosen.time_to_target_s)
    assert None not in times and times[0] > 1.3 * times[1]  # type: ignore[operator]
    assert search.baseline.bottleneck is not None

    write_report(tmp_path)
    card = card_at(tmp_path)
    assert card.form == "improve"
    gain = card.line("gain")
    assert gain is not None
    assert gain.quantities[0].name == "time_to_target_ratio"
    assert "to accuracy 0.6" in gain.text
    assert max(map(len, as_text(card).splitlines())) <= 80
