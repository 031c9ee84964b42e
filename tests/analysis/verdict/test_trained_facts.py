"""Accuracies name the model that they are of, and trainings without held-out samples report their loss."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.predict.inputs import ReportInputs, with_models
from analysis.read.results import load
from analysis.report.report import write_report
from analysis.study import analyse
from analysis.verdict.accuracy import sentences, trust
from analysis.verdict.facts import facts
from analysis.verdict.lines.training import accuracy_line
from tests.support.frames import FIELDS, grid, record, steps, write_study, write_trial
from tests.support.trainings import TRAINING, epochs, write_training

VGG = FIELDS | {"device": "cuda", "model": "vgg19", "image_size": 32}
PERCEPTRON = TRAINING | {"model": "mlp", "image_size": 28}


def study(directory: Path, trained: dict[str, Any], **columns: Any) -> ReportInputs:
    write_study(directory, configuration={"small_form": "on CPU ranks."})
    for fields in grid(VGG, batch_per_gpu=[2, 4]):
        write_trial(directory, record(fields), steps(fields, 0.1))
    for seed in range(2):
        write_training(
            directory, trained | {"seed": seed, "repeat": seed}, epochs(trained, 0.75 + seed / 100, **columns)
        )
    return with_models(analyse(load(directory)))


def test_the_accuracy_of_another_model_names_that_model(tmp_path: Path) -> None:
    analysis = study(tmp_path, PERCEPTRON)
    assert sentences(analysis)[0].startswith("Plain training of mlp on fashion_mnist_sample at global batch 128 ")
    assert "no accuracy of vgg19 was measured" in trust(analysis)[0]


def test_the_accuracy_of_the_timed_model_is_not_qualified(tmp_path: Path) -> None:
    analysis = study(tmp_path, TRAINING | {"model": "vgg19", "image_size": 32})
    assert sentences(analysis)[0].startswith("Plain training at global batch 128 ")
    line = accuracy_line(analysis)
    assert line is not None and line.text.endswith(f"(in {TRAINING['precision']})"), "the timed trials compute in bf16"
    assert not any("vgg19" in line for line in trust(analysis))


def test_timed_and_trained_trials_have_facts_of_their_own(tmp_path: Path) -> None:
    timed, trained = facts(study(tmp_path, PERCEPTRON))
    assert (timed.kind, trained.kind) == ("Timed trials", "Trained trials")
    assert dict(timed.constant)["model"] == "vgg19" and dict(trained.constant)["model"] == "mlp"
    assert [value for _, value in timed.varied] == ["2, 4"]
    assert "sequence length" not in dict(timed.constant), "it has no effect on images"
    of_timed, of_trained = ({**dict(part.constant), **dict(part.default)} for part in (timed, trained))
    assert "lr rule" in of_trained and "lr rule" not in of_timed
    assert "sweep bytes" in of_timed and "sweep bytes" not in of_trained
    assert timed.default and {"model", "global batch", "GPUs"}.isdisjoint(dict(timed.default))
    assert not set(timed.constant) & set(timed.default)


@pytest.mark.parametrize(
    ("data", "unread", "read"),
    [
        ("synthetic", {"storage", "decode", "page cache", "order", "prefetch batches"}, {"optimizer"}),
        ("fashion_mnist_sample", {"storage", "decode", "page cache"}, {"order", "prefetch batches"}),
        ("image_folder", set[str](), {"storage", "decode", "order", "prefetch batches"}),
    ],
)
def test_defaults_that_the_data_set_does_not_read_are_left_out(
    tmp_path: Path, data: str, unread: set[str], read: set[str]
) -> None:
    write_study(tmp_path)
    for fields in grid(VGG | {"dataset": data}, batch_per_gpu=[2, 4]):
        write_trial(tmp_path, record(fields), steps(fields, 0.1))
    [found] = facts(with_models(analyse(load(tmp_path))))
    shown = set(dict(found.default))
    assert read <= shown and not unread & shown


@pytest.mark.usefixtures("no_figures")
def test_a_small_form_has_a_banner_in_both_reports(tmp_path: Path) -> None:
    study(tmp_path, PERCEPTRON)
    write_report(tmp_path)
    for name in ("report.md", "index.html"):
        assert "Small form: on CPU ranks." in (tmp_path / "report" / name).read_text()


@pytest.mark.parametrize("workload", ["", "/home/me/mine.py:build"])
def test_without_a_validation_set_the_training_loss_is_reported_and_the_fix(tmp_path: Path, workload: str) -> None:
    unknown = {name: np.nan for name in ("validation_top1", "validation_top5", "validation_loss")}
    analysis = study(tmp_path, PERCEPTRON | {"workload": workload}, **unknown, train_loss=1.25)
    [sentence] = sentences(analysis)
    assert "1.250 [1.250, 1.250] (mean of 2 trainings)" in sentence
    assert ("give Workload(validation=...)" in sentence) == bool(workload)
    assert not any("accuracies come from one seed" in line for line in trust(analysis))
