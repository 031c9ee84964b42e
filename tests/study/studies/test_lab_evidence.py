"""The evidence for hpml-lab4: repetition follows from the samplers, and sent bytes equal those of the tensors."""

from pathlib import Path
from typing import cast

import pytest
import torch

from study.capacity import local_capacity
from study.cli.process import collect_evidence
from study.store.store import Store
from study.studies.basic import STUDIES
from study.studies.lab_evidence import BATCH, EPOCHS, measure_sent_bytes, repeats
from tests.support.gloo import on_ranks
from trainables.build import build_workload
from trainables.trial import Trial


def test_a_rank_sees_a_new_share_per_epoch_only_with_set_epoch() -> None:
    rows = repeats().set_index(["sampler", "ranks", "set_epoch"])
    for key, row in rows.iterrows():
        sampler, ranks, set_epoch = cast(tuple[str, int, str], key)
        if set_epoch == "no":
            assert row["seen"] == pytest.approx(1 / ranks, abs=BATCH / 10_000)
            assert row["batches"] == (1.0 if sampler == "DistributedSampler" else 0.0)
            assert row["neighbours"] > 0.99
        else:
            assert row["seen"] == pytest.approx(1 - (1 - 1 / ranks) ** EPOCHS, abs=0.02)
            assert row["batches"] == 0.0
            assert row["neighbours"] < 0.01


def sent_bytes_on_rank(rank: int, trials: list[Trial]) -> dict[str, float]:
    torch.set_num_threads(1)
    return measure_sent_bytes(trials)


def test_ddp_sends_the_bytes_of_its_tensors() -> None:
    trial = Trial(world_size=2, batch_per_gpu=2)
    first, _ = on_ranks(2, sent_bytes_on_rank, [trial, trial.but(broadcast_buffers=False)])
    model = build_workload(trial, torch.device("cpu")).model
    weights = sum(tensor.nbytes for tensor in model.parameters())
    buffers = sum(tensor.nbytes for tensor in model.buffers())
    assert first["initial"] == pytest.approx(weights + buffers, rel=0.01)
    assert first["step False"] == pytest.approx(weights, rel=0.01)
    assert first["step True"] - first["step False"] == pytest.approx(buffers, rel=0.3)


def test_a_study_keeps_the_evidence_that_no_trial_gives(tmp_path: Path) -> None:
    def opened() -> Store:
        return Store.open(
            str(tmp_path / "lab"), name="hpml-lab4", question="", configuration={}, versions={}, command=""
        )

    command = ("study.studies.lab_evidence", "--steps", "2", "--seeds", "1")
    collect_evidence(command, opened())
    found = opened().study()["evidence"]
    assert found["repeated_batches"] == 1.0
    assert found["gradient_bytes"] == pytest.approx(found["model_bytes"], rel=0.01)
    assert found["weights_distance"] == 0.0 and found["means_distance"] > found["means_distance_sent"]
    collect_evidence(("no.such.module",), opened())  # there is nothing left to collect
    assert opened().study()["evidence"] == found


def test_without_evidence_a_study_says_why_and_keeps_its_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open(str(tmp_path / "lab"), name="lab", question="", configuration={}, versions={}, command="")
    collect_evidence(("no.such.module",), store)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("warning: no evidence: ") and "No module named 'no'" in lines[-1]
    assert "evidence" not in store.study()


def test_the_lab_collects_evidence_unless_one_of_its_cases_is_chosen() -> None:
    lab = STUDIES["hpml-lab4"](local_capacity())
    assert lab.evidence and not lab.only(["timed"]).evidence
