"""Tables that compare one field, the ladder, bandwidths and the list of trials: complete, of hand-made studies."""

import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle
from scipy.stats import ttest_rel

from analysis.compare.ladder import reference_rows
from analysis.compare.one_field import against_reference
from analysis.figures.batch_size import ladder as ladder_figure
from analysis.figures.steps import communication_spans
from analysis.figures.steps import loss as loss_figure
from analysis.figures.steps import timeline as timeline_figure
from analysis.predict.inputs import ReportInputs, with_models
from analysis.read.results import load
from analysis.read.study_record import StudyRecord
from analysis.report.sections import TABLES
from analysis.study import analyse
from analysis.tables.trials import STATED, again
from analysis.verdict.answer import answer
from study.capacity import NodeCapacity
from study.cli.configuration import resolve
from study.plan.trials import plan_trials
from study.studies.basic import STUDIES
from study.studies.published import PUBLISHED_LADDERS
from tests.support.frames import (
    DECLARED,
    FIELDS,
    MIB,
    cpu_study,
    grid,
    record,
    steps,
    trial_id,
    write_results,
    write_study,
    write_trial,
)
from tests.support.trainings import TRAINING, epochs, write_training

GPU = FIELDS | {"device": "cuda", "steps": 20}
BYTES = 50 * MIB


def timed(directory: Path, trials: list[dict[str, Any]], step_s: Any) -> ReportInputs:
    """Return a study whose plain steps take exactly `step_s(fields)`."""
    return with_models(
        analyse(load(write_results(directory, trials, lambda fields: {"step_s": step_s(fields)}, spread=0.0)))
    )


# ------------------------------------------------------------------------------------------- one field at a time


def test_each_strategy_is_compared_with_ddp_on_the_same_number_of_gpus(tmp_path: Path) -> None:
    seconds = {("ddp", 1): 0.1, ("ddp", 2): 0.125, ("fsdp2", 2): 0.1, ("none", 1): 0.08, ("dp", 4): 0.3}
    trials = [GPU | {"parallel": name, "world_size": size} for name, size in seconds]
    found = timed(tmp_path / "results", trials, lambda t: seconds[t["parallel"], t["world_size"]])
    cells = TABLES["parallel"](found).cells()
    assert cells[
        ["GPUs", "parallel", "reference", "relative throughput", "step time (ms)", "n"]
    ].to_numpy().tolist() == [
        ["1", "ddp", "ddp", "1.000", "100.0", "1"],
        ["1", "none", "ddp", "1.250", "80.0", "1"],
        ["2", "ddp", "ddp", "1.000", "125.0", "1"],
        ["2", "fsdp2", "ddp", "1.250", "100.0", "1"],  # dp on 4 GPUs has no counterpart
    ]


def test_a_ratio_of_two_configurations_has_the_interval_of_the_paired_test(tmp_path: Path) -> None:
    noise = {0: 1.0, 1: 1.02, 2: 0.97}
    trials = grid(GPU, storage=["jpeg", "arrow_raw"], repeat=range(3))

    def step_s(fields: dict[str, Any]) -> float:
        return (0.1 if fields["storage"] == "jpeg" else 0.05 * noise[fields["repeat"]]) * noise[fields["repeat"]]

    analysis = timed(tmp_path / "results", trials, step_s)
    frame = TABLES["storage"](analysis).frame.set_index("storage")
    logs = {name: [math.log(32 / step_s(t)) for t in trials if t["storage"] == name] for name in ("jpeg", "arrow_raw")}
    interval = ttest_rel(logs["arrow_raw"], logs["jpeg"]).confidence_interval(0.95)
    row = frame.loc["arrow_raw"]
    assert (row["ratio_low"], row["ratio_high"]) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))
    assert row["ratio"] == pytest.approx(math.exp(np.mean(logs["arrow_raw"]) - np.mean(logs["jpeg"])))
    assert frame.loc["jpeg", ["ratio_low", "ratio_high"]].isna().all()


def test_where_the_usual_reference_was_not_measured_the_next_one_is(tmp_path: Path) -> None:
    found = timed(tmp_path / "results", grid(GPU, execution=["compile", "graph"]), lambda t: 0.1)
    assert TABLES["execution"](found).cells()["reference"].tolist() == ["compile", "compile"]


def test_configurations_that_differ_in_two_fields_are_not_compared(tmp_path: Path) -> None:
    trials = [GPU | {"storage": "jpeg"}, GPU | {"storage": "arrow_raw", "batch_per_gpu": 64}]
    analysis = timed(tmp_path / "results", trials, lambda t: 0.1)
    assert len(against_reference(analysis.configurations, "storage")) == 0
    assert TABLES["storage"](analysis).frame.empty


def test_trials_older_than_a_field_are_only_excluded_from_its_comparison(tmp_path: Path) -> None:
    new = grid(GPU | {"parallel": "ddp"}, storage=["jpeg", "arrow_raw"])
    old = [GPU | {"batch_per_gpu": 64, "world_size": size} for size in (1, 2)]
    analysis = timed(tmp_path / "results", [*new, *old], lambda t: 0.1)
    assert TABLES["storage"](analysis).frame["storage"].tolist() == ["jpeg", "arrow_raw"]
    assert TABLES["speed_up_weak"](analysis).frame["speed_up_2"].tolist() == pytest.approx([2.0])


def test_all_other_settings_share_one_table(tmp_path: Path) -> None:
    trials = [GPU, GPU | {"loader_workers": 2}, GPU | {"non_blocking": False, "world_size": 2}, GPU | {"world_size": 2}]
    trials[2] |= {"repeat": 1}  # so that ids differ
    found = timed(tmp_path / "results", trials, lambda t: 0.1 if t["loader_workers"] == 0 else 0.08)
    cells = TABLES["settings"](found).cells()
    assert cells[["setting", "value", "GPUs", "reference", "relative throughput"]].to_numpy().tolist() == [
        ["loader workers", "0", "1", "0", "1.000"],
        ["loader workers", "2", "1", "0", "1.250"],
        ["non blocking", "no", "2", "no", "1.000"],
        ["non blocking", "yes", "2", "no", "1.000"],
    ]


def test_emulated_interconnects_are_labelled_as_such(tmp_path: Path) -> None:
    fast, slow = grid(GPU | {"world_size": 2}, interconnect=["auto", "socket"])
    trials = [fast, slow | {"repeat": 1}]  # so that ids differ
    cells = TABLES["interconnects"](timed(tmp_path / "results", trials, lambda t: 0.1)).cells()
    assert cells["interconnect"].tolist() == ["auto", "socket (emulated)"]


def test_precision_shows_loss_skipped_steps_and_non_finite_losses(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    for fields in grid(GPU | {"warmup_steps": 2}, precision=["fp32", "fp16"], repeat=range(2)):
        frame = steps(fields, 0.1 if fields["precision"] == "fp32" else 0.05)
        if fields["precision"] == "fp16":
            scale = pd.Series(65536.0, index=frame.index)
            scale /= 2  # step 0 overflowed: the scale after each step is recorded
            scale[frame["step"] >= 5 + 3 * fields["repeat"]] /= 2
            frame["loss_scale"] = scale
            frame.loc[frame["step"] == 10, "loss"] = None
        frame.loc[frame["step"].isin([20, 21]), "loss"] = [0.5, 0.7]  # the last tenth of 20 plain steps
        write_trial(directory, record(fields), frame)
    analysis = with_models(analyse(load(directory)))
    cells = TABLES["precision"](analysis).cells()
    names = ["precision", "relative throughput", "final loss", "skipped steps", "non-finite losses", "n"]
    assert cells[names].to_numpy().tolist() == [
        ["fp32", "1.000", "0.600", "–", "0", "2"],
        ["fp16", "2.000 [2.000, 2.000]", "0.600", "4", "2", "2"],
    ]
    figure = loss_figure(analysis)
    assert figure is not None
    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in figure.axes[0].lines]
    assert [len(line) for line in drawn] == [42, 42]
    assert sum(np.isnan(line).sum() for line in drawn) == 1  # the line of fp16 has a gap


# ----------------------------------------------------------------------------------------------------- the ladder


REFERENCES = StudyRecord.of({"configuration": {"reference_ladders": PUBLISHED_LADDERS}})


def test_published_ladders_are_reproduced_and_labelled_as_another_machine() -> None:
    rows = reference_rows(REFERENCES.reference_ladders)
    assert rows["batches_s"].tolist() == [336.5, 88.0, 70.1, 161.0, 81.7, 60.2, 41.6, 38.8, 22.1]
    assert rows["machine"].tolist() == ["another machine's, batch 256"] * 3 + ["another machine's, batch 512"] * 6
    assert rows["cumulative_ratio"].round(2).tolist() == [1.0, 3.82, 4.8, 1.0, 1.97, 2.67, 3.87, 4.15, 7.29]
    assert rows["throughput_samples_per_s"].round(1).tolist()[:3] == [228.2, 872.7, 1095.6]
    assert rows[["cumulative_ratio_low", "n"]].isna().all(axis=None)


def ladder_study(directory: Path, ladder_steps: Any) -> ReportInputs:
    seconds = {"fp32": 0.2, "tf32": 0.1, "bf16": 0.04}
    trials = grid(GPU, precision=list(seconds), repeat=range(2))
    analysis = timed(directory, trials, lambda t: seconds[t["precision"]])
    configuration = {"ladder_steps": ladder_steps, "reference_ladders": PUBLISHED_LADDERS}
    return replace(
        analysis, results=replace(analysis.results, study=analysis.results.study | {"configuration": configuration})
    )


def test_each_ladder_step_is_compared_with_the_previous_and_the_first(tmp_path: Path) -> None:
    ids = {name: [f"resnet18_small-{name}-1-32-0-{k}" for k in range(2)] for name in ("fp32", "tf32", "bf16")}
    ladder_steps = [
        {"name": "plain", "trial_ids": ids["fp32"]},
        {"name": "TF32", "trial_ids": ids["tf32"]},
        {"name": "never ran", "trial_ids": ["another"]},
        {"name": "bf16", "trial_ids": ids["bf16"]},
    ]
    analysis = ladder_study(tmp_path / "results", ladder_steps)
    cells = TABLES["ladder"](analysis).cells()
    assert cells.head(3).to_numpy().tolist() == [
        ["this study", "plain", "32", "60.0", "160", "1.00", "plain", "1.00", "2"],
        ["this study", "TF32", "32", "30.0", "320", "2.00 [2.00, 2.00]", "plain", "2.00 [2.00, 2.00]", "2"],
        ["this study", "bf16", "32", "12.0", "800", "2.50 [2.50, 2.50]", "TF32", "5.00 [5.00, 5.00]", "2"],
    ]
    assert cells["machine"].tolist()[3:] == reference_rows(REFERENCES.reference_ladders)["machine"].tolist()
    assert "published study" in TABLES["ladder"](analysis).note
    figure = ladder_figure(analysis)
    assert figure is not None
    bars = [patch.get_width() for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    # microseconds per sample, then the saving of each step
    assert bars == pytest.approx([6250, 3125, 1250, 0, 3125, 1875])


def test_a_ladder_step_is_compared_with_the_step_from_which_it_differs_least(tmp_path: Path) -> None:
    raw = {"storage": "arrow_raw"}
    several = raw | {"world_size": 2, "batch_per_gpu": 16, "parallel": "dp"}
    steps_s: dict[str, tuple[dict[str, Any], float]] = {
        "JPEG, fp32": ({}, 0.4),
        "raw": (raw, 0.2),
        "raw, fp16": (raw | {"precision": "fp16"}, 0.1),
        "DataParallel, fp32": (several, 0.16),
        "DDP, fp32": (several | {"parallel": "ddp"}, 0.08),
    }
    trials = {name: grid(GPU | fields)[0] for name, (fields, _) in steps_s.items()}
    ladder_steps = [{"name": name, "trial_ids": [trial_id(fields)]} for name, fields in trials.items()]
    directory = write_study(tmp_path / "results", configuration={"ladder_steps": ladder_steps})
    for name, fields in trials.items():
        write_trial(directory, record(fields), steps(fields, steps_s[name][1]))
    rows = analyse(load(directory)).ladder.set_index("step")
    assert rows["against"].dropna().to_dict() == {
        "raw": "JPEG, fp32", "raw, fp16": "raw", "DataParallel, fp32": "raw",
        "DDP, fp32": "DataParallel, fp32",
    }  # fmt: skip
    assert rows["step_ratio"].iloc[1:].tolist() == pytest.approx([2.0, 2.0, 0.2 / 0.16, 2.0], rel=0.02)


def test_a_ladder_step_shows_the_accuracy_of_its_number_format(tmp_path: Path) -> None:
    ladder_steps = [{"name": name, "trial_ids": [f"resnet18_small-{name}-1-32-0-0"]} for name in ("fp32", "bf16")]
    directory = tmp_path / "results"
    ladder_study(directory, ladder_steps)
    for precision, top1 in (("fp32", 0.90), ("bf16", 0.85)):
        fields = TRAINING | {"precision": precision}
        write_training(directory, fields, epochs(fields, top1))
    found = with_models(analyse(load(directory)))
    configuration = {"ladder_steps": ladder_steps}
    found = replace(found, results=replace(found.results, study=found.results.study | {"configuration": configuration}))
    table = TABLES["ladder"](found)
    assert table.cells()["accuracy (%)"].tolist()[:2] == ["90.00", "85.00"]
    assert "resnet18_small on " in next(c.meaning for c in table.columns if c.name == "trained_percent")
    told = answer(found)
    assert "over fp32 (" in told[0] and told[1].startswith(
        "Training with fp32 at global batch 128 reaches a held-out accuracy of 90.00"
    )
    compared = TABLES["precision"](found).cells()
    shown = dict(zip(compared["precision"], compared["accuracy (%)"], strict=True))
    assert shown == {"fp32": "90.00", "bf16": "85.00", "tf32": "–"}


@pytest.mark.parametrize("ladder_steps", [None, [], "ladder_steps", [{"name": "x"}], [3]])
def test_a_study_without_ladder_steps_has_no_ladder(tmp_path: Path, ladder_steps: Any) -> None:
    assert StudyRecord.of({"configuration": {"ladder_steps": ladder_steps}}).ladder_steps == ()
    analysis = ladder_study(tmp_path / "results", ladder_steps)
    assert TABLES["ladder"](analysis).frame.empty
    assert ladder_figure(analysis) is None


# ------------------------------------------------------------------------------------ communication and bandwidth


def communicating(directory: Path) -> ReportInputs:
    """Return a study with one bucket of 50 MiB, ready at the same time as the gradient.

    Its all-reduce takes 10 ms alone and 12.5 ms in training; the step takes 100 ms on one rank and 125 ms on two.
    """
    measured = {
        "last_gradient_s": 0.1,
        "bucket_bytes": [BYTES],
        "latency_s": 0.0,
        "bandwidth": BYTES / 0.01,
        "tail_s": 0.004,
    }

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": 0.1 if fields["world_size"] == 1 else 0.125, "communication": measured}

    return with_models(analyse(load(write_results(directory, grid(GPU, world_size=[1, 2]), law, spread=0.0))))


def test_bandwidth_shows_its_bytes_ranks_and_time(tmp_path: Path) -> None:
    table = TABLES["bandwidth"](communicating(tmp_path / "results"))
    rate = BYTES / 0.0125 / 1e9  # 4.19 GB/s, and 2(N-1)/N is 1 on two GPUs
    assert table.cells().to_dict("list") == {
        "GPUs": ["2"],
        "S (MiB)": ["50.0"],
        "buckets": ["1"],
        "t (ms)": ["12.50"],
        "S/t (GB/s)": [f"{rate:.2f}"],
        "bus bandwidth (GB/s)": [f"{rate:.2f}"],
        "t, otherwise idle (ms)": ["10.00"],
        "measured all-reduce limit (GB/s)": [f"{BYTES / 0.01 / 1e9:.2f}"],
        "utilisation (%)": ["80.0"],
        "by N minus 1 GPU (GB/s)": [f"{BYTES / 0.025 / 1e9:.2f}"],
        "n": ["1"],
    }
    assert "2(N-1)/N · S/t" in table.note


def test_compute_and_communication_are_separated_by_three_methods(tmp_path: Path) -> None:
    cells = TABLES["exposed_cost"](communicating(tmp_path / "results")).cells()
    assert cells.drop(columns=["GPUs", "n", "largest reason for the difference"]).to_dict("list") == {
        "step (ms)": ["125.0"],
        "rest, live (ms)": ["112.5"],
        "live (ms)": ["12.5"],
        "rest, no_sync (ms)": ["104.0"],
        "by difference (ms)": ["12.5"],
        "rest, 1 GPU (ms)": ["100.0"],
        "N minus 1 GPU (ms)": ["25.0"],
    }


def test_the_timeline_starts_at_the_start_of_each_rank_s_step(tmp_path: Path) -> None:
    analysis = communicating(tmp_path / "results")
    rows = analysis.timeline
    first = rows[rows["rank"] == 0]
    assert first[["lane", "kind"]].to_numpy().tolist() == [
        ["compute", "compute"],
        ["compute", "optimizer"],
        ["all-reduce", "exposed"],
    ]
    assert first[["begin_s", "end_s"]].to_numpy().ravel().tolist() == pytest.approx(
        [0, 0.1, 0.1125, 0.1165, 0.1, 0.1125]
    )
    figure = timeline_figure(analysis)
    assert figure is not None
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]


def test_the_timeline_omits_long_times_without_an_all_reduce() -> None:
    def rows(*spans: tuple[float, float]) -> pd.DataFrame:
        computed = [{"lane": "compute", "begin_s": 0.0, "end_s": 1.0}]
        return pd.DataFrame([*computed, *({"lane": "all-reduce", "begin_s": b, "end_s": e} for b, e in spans)])

    separate = communication_spans(rows((0.40, 0.41), (0.405, 0.42), (0.95, 0.98)))
    assert np.ravel(separate) == pytest.approx([0.395, 0.425, 0.945, 0.985])
    contiguous = communication_spans(rows((0.40, 0.60), (0.70, 0.98)))
    assert np.ravel(contiguous) == pytest.approx([0.342, 1.0])


def test_a_single_process_on_several_gpus_has_its_own_phase_columns(tmp_path: Path) -> None:
    fields = GPU | {"parallel": "dp", "world_size": 2}
    frame = steps(fields, 0.1, instruments=1.0)
    frame = frame[frame["rank"] == 0].assign(samples=64)
    timed_rows = frame["window"] == "phases"
    for i, name in enumerate(("scatter_s", "replicate_s", "gather_s", "reduce_s"), 1):
        frame.loc[timed_rows, name] = i / 1000
    directory = write_study(tmp_path / "results")
    trial = record(fields)
    del trial["environment"]["ranks"][1:]
    write_trial(directory, trial, frame)
    cells = TABLES["phases"](with_models(analyse(load(directory)))).cells()
    assert [name for name in cells if "(ms)" in str(name)] == [
        "step (ms)", "load wait (ms)", "host to device (ms)", "scatter (ms)", "replicate (ms)", "forward (ms)",
        "gather (ms)", "loss (ms)", "backward (ms)", "reduce (ms)", "optimizer (ms)", "host (ms)",
    ]  # fmt: skip
    assert cells["reduce (ms)"].tolist() == ["4.0 (4\u00a0%)"]


# ------------------------------------------------------------------------------------------------------ all trials


def test_every_trial_is_listed_with_outcome_and_command(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results", name="weak")
    write_trial(directory, record(GPU), steps(GPU, 0.1))
    write_trial(directory, record(GPU | {"batch_per_gpu": 64, "world_size": 2}, "out_of_memory", "too large"))
    cells = TABLES["trials"](with_models(analyse(load(directory)))).cells()
    *cells_of_first, command = cells.iloc[0].tolist()
    assert cells_of_first == ["1", "0", "done", "320", "100", "resnet18_small-fp32-1-32-0-0"]
    assert command.startswith("python -m study.scaling run default --gpus 1 --nodes 1 --batch-per-gpu 32 ")
    assert "--set device=cuda" in command
    assert command.endswith(" --repeats 1 --out results/again")
    assert cells["status"].tolist() == ["done", "out of memory"]
    assert "--batch-per-gpu 64" in cells["rerun its configuration"].iloc[1]


def test_the_command_plans_the_same_trial_for_any_study(tmp_path: Path) -> None:
    host = [NodeCapacity("", "localhost", cpus=2, gpus=0)]
    options = {
        "gpus": "1,2",
        "batch-per-gpu": "4,8",
        "precision": "bf16",
        "set": ["learning_rate=0.05", "pin_memory=false"],
    }
    configuration = resolve({"study": "smoke", **options})
    study = STUDIES["smoke"](host).with_overrides(configuration.axes, 2)
    rows = plan_trials(study, host, {}, [])
    directory = write_study(
        tmp_path / "results", name="communication", command="python -m benchmarks.truth.communication --gpus 1,2"
    )
    planned = {row.trial.trial_id: row.trial for row in rows if row.trial is not None}
    for trial in planned.values():
        fields = trial.model_dump()
        write_trial(
            directory,
            record(FIELDS | fields) | {"trial_id": trial.trial_id, "trial": fields},
            steps(FIELDS | fields, 0.1),
        )
    frame = TABLES["trials"](with_models(analyse(load(directory)))).frame
    assert len(frame) == 8
    for row in frame.itertuples():
        options = _options(shlex.split(str(row.command))[4:])
        resolved = resolve(options)
        study_again = STUDIES[resolved.study](host).with_overrides(resolved.axes, resolved.repeats)
        (trial_again,) = plan_trials(study_again, host, {}, [])
        assert trial_again.trial == planned[str(row.trial_id)].but(repeat=0)


@pytest.mark.parametrize(("cpus", "gpus"), [(2, 0), (64, 0), (16, 1), (64, 8)])
def test_the_default_study_keeps_the_defaults_that_commands_leave_out(cpus: int, gpus: int) -> None:
    for hosts in (1, 2):
        nodes = [NodeCapacity(str(number), "host", cpus=cpus, gpus=gpus) for number in range(hosts)]
        trials = [row.trial for row in plan_trials(STUDIES["default"](nodes), nodes, {}, []) if row.trial]
        assert trials
        fields = [name for name in DECLARED.facts if name not in STATED | {"repeat"}]
        changed = {name for trial in trials for name in fields if getattr(trial, name) != DECLARED[name].default}
        assert not changed


def test_the_command_sets_a_field_with_a_changed_default_if_the_strategy_has_it() -> None:
    old = {"gradient_as_bucket_view": False}
    commands = [again(old | {"parallel": name}, ["parallel", *old], DECLARED) for name in ("ddp", "dp")]
    assert ["gradient_as_bucket_view=false" in command for command in commands] == [True, False]


def _options(words: list[str]) -> dict[str, Any]:
    """Return the options that the command line passes on for `STUDY --option value ...`."""
    options: dict[str, Any] = {"study": words[0], "set": []}
    for option, value in zip(words[1::2], words[2::2], strict=True):
        name = option.removeprefix("--")
        if name == "set":
            options["set"].append(value)
        else:
            options[name] = int(value) if name == "repeats" else value
    return options


def test_cpu_ranks_have_the_same_tables_labelled_as_cpu_ranks(tmp_path: Path) -> None:
    analysis = with_models(analyse(load(cpu_study(tmp_path / "results"))))
    assert TABLES["speed_up_weak"](analysis).title == "Speed-up at each batch per CPU rank (weak scaling)"
    assert TABLES["batch_size"](analysis).title == "Batch size on one CPU rank"
    for name in ("speed_up_weak", "batch_size", "settings", "precision", "bandwidth", "exposed_cost"):
        table = TABLES[name](analysis)
        assert len(table.frame)
        assert "GPU" not in table.to_markdown()
