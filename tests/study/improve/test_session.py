"""Searches with a real store and simulated ranks: rounds, resume, the record, the card and the report."""

import json
import math
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.predict.inputs import report_inputs
from analysis.read.results import load
from analysis.read.study_record import Improvement, StudyRecord
from analysis.report.card import as_text, card_at
from analysis.report.report import write_report
from analysis.report.sentences import improvement
from analysis.verdict.lines.improve import MORE_CHANGES, NONE_APPLIES, measured_advice
from study.capacity import NodeCapacity
from study.cli.configuration import Configuration
from study.errors import ConfigurationError
from study.improve.lever import Lever, Machine, size_levers
from study.improve.observe import Observer
from study.improve.rounds import Settings
from study.improve.search import Search
from study.improve.session import Session, search_rounds
from study.improve.start import Request, request, settings_for
from study.orchestrate.protocol import Job, KeeperProxy, Payload
from study.orchestrate.twin.in_process import local_cluster, run_trials
from study.orchestrate.twin.simulated_ranks import SimulatedRanks, payload_of
from study.store.store import Store
from tests.support.cards import ROOT
from tests.support.improving import null_lever
from tests.support.trials import quick_trial
from trainables.trial import Trial

NODES = [NodeCapacity("node-a", "10.0.0.1", cpus=4, gpus=0)]
SPEED_UP = 1.5
FAST = Lever(
    "large buckets", ("compute",), "arithmetic", lambda trial, machine: {"bucket_mb": 50.0}, "check the accuracy"
)
BROKEN = Lever("unused", ("compute",), "order", lambda trial, machine: {"find_unused_parameters": True})
ONE_RANK = quick_trial()
LEVERS = [null_lever("prefetch", "prefetch_batches", 4), BROKEN, FAST]


def play(job: Job, keeper: KeeperProxy) -> Sequence[Payload]:
    """Simulate ranks: `FAST` gains `SPEED_UP`, `BROKEN` runs out of memory, and the loss depends on the seed.

    A step on two ranks takes 1.25 times as long as on one.
    """
    trial = job.trial
    if trial.find_unused_parameters:
        raise MemoryError("no room for 8 GiB")
    noise = 1 + 0.002 * (zlib.crc32(trial.trial_id.encode()) % 100 / 50 - 1)
    step_s = 0.1 / (SPEED_UP if trial.bucket_mb > 25 else 1.0) * noise * (1.25 if trial.world_size > 1 else 1.0)
    phases = {"load_wait_s": 0.1, "host_to_device_s": 0.0, "forward_s": 0.3, "backward_s": 0.5, "optimizer_s": 0.1}
    rows = [
        {"window": window, "step": step, "samples": trial.batch_per_gpu, "window_s": 10 * step_s}
        | {"step_s": step_s, "loss": 2.0 + 0.01 * trial.seed}
        | {name: share * step_s for name, share in phases.items()}
        for window in ("warmup", "plain", "phases")
        for step in range(10)
    ]
    return [payload_of(trial, {"steps": [{"rank": rank} | row for row in rows]}) for rank in range(trial.world_size)]


def session_in(
    folder: Path, trials: int = 40, base: Trial = ONE_RANK, levers: Sequence[Lever] = LEVERS, **goal: Any
) -> Session:
    settings = Settings(base, {lever.name: lever for lever in levers}, Machine(NODES), trials=trials, **goal)
    configuration = Configuration(study="improve-mlp", out=str(folder))
    asked = Request(configuration, "", "throughput", trials, None, keep_arithmetic=False)
    return Session(asked, settings, "python -m study.scaling improve", Observer(str(folder)))


def run_search(session: Session, most_rounds: int = 100) -> list[str]:
    """Run a search with simulated ranks, at most so many rounds. Return the lines that it prints."""
    lines: list[str] = []
    rounds = 0

    def run(blocks: Sequence[Sequence[Trial]], store: Store) -> bool:
        nonlocal rounds
        rounds += 1
        if rounds > most_rounds:
            return True
        return run_trials("improve-mlp", blocks, store, local_cluster(NODES), ranks=SimulatedRanks(play))

    session.save(
        *(session.read() if Path(session.asked.configuration.out, "study.json").exists() else (Search(), None))
    )
    search_rounds(session, run, lines.append)
    session.save(*session.read())
    return lines


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a search that was interrupted after its first round, and then resumed."""
    folder = tmp_path_factory.mktemp("search")
    run_search(session_in(folder), most_rounds=1)
    before = {record["trial_id"]: record["started_at"] for record in Store.at(str(folder)).records()}
    assert card_at(folder).is_partial
    lines = run_search(session_in(folder))
    after = {record["trial_id"]: record["started_at"] for record in Store.at(str(folder)).records()}
    assert before.items() <= after.items()
    assert next(line for line in lines if line.startswith("round")).startswith(
        "round 2: try prefetch, unused, large buckets (8 trials"
    )
    return folder


def improvement_of(folder: Path) -> Improvement:
    found = StudyRecord.of(Store.at(str(folder)).study()).improvement
    assert found is not None
    return found


def test_a_resumed_search_keeps_what_gains_and_records_what_does_not(finished: Path) -> None:
    found = improvement_of(finished)
    assert found.is_complete
    assert found.kept == ("large buckets",)
    assert found.gain is not None and found.gain.low is not None and found.gain.high is not None
    assert found.gain.low < SPEED_UP < found.gain.high
    rows = {row.lever: row for row in found.levers}
    assert rows["unused"].gain is None
    assert rows["unused"].why.startswith("out of memory")
    assert not rows["prefetch"].is_kept
    assert found.loss == (0.0, pytest.approx(0.0608, abs=1e-4), False), "4.303 (t, 2 degrees) x 0.01 x sqrt(2)"
    assert found.trials == len(Store.at(str(finished)).records())
    assert [held for _, held in found.checked_bounds] == [True, True]


def test_the_card_names_the_change_whose_gain_exceeds_its_upper_bound() -> None:
    folder = ROOT / "benchmarks/results/improve-fp8"
    assert dict(improvement_of(folder).checked_bounds)["batch 2x"] is False
    line = card_at(folder).line("bounds")
    assert line is not None
    assert line.text.endswith("(not batch 2x)")
    assert [quantity.value for quantity in line.quantities] == [3, 4]


def test_the_card_and_the_report_have_the_form_of_improve(finished: Path) -> None:
    report = write_report(finished)
    assert report.card.form == "improve"
    assert report.card.facts["batch_per_gpu"] == 32
    gain = report.card.line("gain")
    assert gain is not None
    assert gain.quantities[0].value == pytest.approx(SPEED_UP, rel=0.01)
    assert max(map(len, as_text(report.card).splitlines())) <= 80
    assert (finished / "report/figures/improvement.svg").exists()
    assert "large buckets" in (finished / "report/tables/levers.csv").read_text()


def test_the_study_that_was_improved_gives_the_measured_advice(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    run_search(session_in(folder), most_rounds=1)
    store = Store.at(str(folder))
    store.set_entry("improve", Store.at(str(finished)).study()["improve"] | {"measured_in": str(finished)})
    card = card_at(folder)
    assert card.form == "one_size"
    advice = measured_advice(improvement_of(folder))
    assert advice is not None
    assert advice.quantities[0].value == pytest.approx(SPEED_UP, rel=0.01)


def test_a_search_can_start_from_the_result_of_another_but_not_in_its_folder(finished: Path, tmp_path: Path) -> None:
    options = {"config": None, "out": str(tmp_path / "next")}
    found = settings_for(request(options, str(finished), None, None, None, False), NODES)
    assert found.base.bucket_mb == 50.0
    with pytest.raises(ConfigurationError, match="--out"):
        request(options | {"out": str(finished)}, str(finished), None, None, None, False)


def test_a_search_that_could_try_nothing_does_not_say_that_nothing_gains(tmp_path: Path) -> None:
    run_search(session_in(tmp_path, trials=5))
    card = card_at(tmp_path)
    assert (card.trust.level, card.trust.reason) == ("poor", "no change was tried")
    gain = card.line("gain")
    assert gain is not None
    assert gain.text.startswith("unknown")
    assert card.line("do_next") is None


def test_a_search_without_a_change_that_applies_says_how_to_name_some(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    study = json.loads((tmp_path / "study.json").read_text())
    study["improve"] |= {"levers": [], "kept": [], "gain": None}
    (tmp_path / "study.json").write_text(json.dumps(study))
    card = card_at(tmp_path)
    gain, advice = card.line("gain"), card.line("do_next")
    assert gain is not None and advice is not None
    assert gain.text.startswith(NONE_APPLIES) and advice.text == MORE_CHANGES
    assert improvement(report_inputs(load(tmp_path))[0]) == [f"No known change applies. To go on, {MORE_CHANGES}."]


@pytest.mark.parametrize("price", [None, 2.5])
def test_the_cost_of_a_sample_falls_on_fewer_ranks(tmp_path: Path, price: float | None) -> None:
    pair, levers = quick_trial(world_size=2), list(size_levers([1], "CPU rank"))
    run_search(session_in(tmp_path, 30, pair, levers, goal="cost", price_per_gpu_hour=price))
    found = improvement_of(tmp_path)
    assert found.kept == ("1 CPU rank",)
    assert found.baseline is not None and found.chosen is not None
    assert (found.baseline.ranks, found.chosen.ranks, found.price_per_gpu_hour) == (2, 1, price)
    gain = card_at(tmp_path).line("gain")
    assert gain is not None
    values = {quantity.name: quantity.value for quantity in gain.quantities}
    assert values == {"cost_ratio": pytest.approx(1.25, rel=0.01), "speed_up": pytest.approx(0.625, rel=0.01)}
    unit = "CPU rank-hours " if price is None else ""
    assert f" {unit}per million samples, 1.25x" in gain.text
    assert "on 2 → 1 CPU ranks" in gain.text
    assert "--gpus 1" in found.command


def test_with_the_goal_efficiency_the_card_has_the_gains_on_one_rank_and_on_all(tmp_path: Path) -> None:
    run_search(session_in(tmp_path, 40, quick_trial(world_size=2), [FAST], goal="efficiency"))
    found = improvement_of(tmp_path)
    assert found.kept == ()
    [row] = found.levers
    assert row.gain_on_one is not None and row.gain_on_all is not None
    assert (row.gain_on_one.value, row.gain_on_all.value) == pytest.approx((SPEED_UP, SPEED_UP), rel=0.02)
    assert row.why == "speeds up one rank and all ranks alike"


def test_the_loss_of_a_script_is_the_mean_over_its_ranks(tmp_path: Path) -> None:
    """As the probe reports it; null on a rank is a loss that is not finite."""

    def play_script(job: Job, keeper: KeeperProxy) -> Sequence[Payload]:
        losses = [[2.0, 1.0, 0.5], [4.0, None, 1.5]]
        return [
            replace(payload, evidence=replace(payload.evidence, probe={"losses": losses[rank]}))
            for rank, payload in enumerate(play(job, keeper))
        ]

    trial = quick_trial(world_size=2)
    store = Store.open(str(tmp_path), name="s", question="", configuration={}, versions={}, command="")
    run_trials("s", [[trial]], store, local_cluster(NODES), ranks=SimulatedRanks(play_script))
    assert Observer(str(tmp_path)).evidence().losses(trial.trial_id) == pytest.approx([3.0, math.nan, 1.0], nan_ok=True)
