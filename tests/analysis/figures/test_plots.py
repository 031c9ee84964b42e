"""Figures draw the computed values."""

import warnings
from itertools import pairwise, product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from analysis.figures.accuracy import accuracy_batch, lr_schedules, training_curves
from analysis.figures.answers import gains, lost_ranks, lost_rows, work_rows
from analysis.figures.bars import MOST_COMMON, MOST_LABEL_LINES, stacked_bars
from analysis.figures.batch_size import batch_size
from analysis.figures.scaling import phases, scaling_strong, scaling_weak
from analysis.figures.steps import loss
from analysis.figures.style import (
    COLOURS,
    LINE_INCHES,
    MAX_FACETS,
    MOST_INTERVAL,
    NARROW_INCHES,
    LineEnd,
    brief,
    filled,
    grid_of_axes,
    label_ends,
    legend,
    limits,
    narrow,
    render,
)
from analysis.predict.inputs import ReportInputs, with_models
from analysis.read.results import load
from analysis.report.sections import PLOTS
from analysis.study import analyse
from analysis.text import MOST_FIELDS, PHASE_LABELS, brief_label, telling_fields, telling_label
from scripts.claims.sources import committed_inputs
from tests.support.cards import RESULTS
from tests.support.frames import cpu_study, gpu_study, grid, write_results, write_study

pytestmark = pytest.mark.xdist_group("committed studies")

TRAININGS = ("accuracy_batch", "training_curves", "lr_schedules")
"""Figures of studies that train to an accuracy, tested in tests/analysis/compare/test_accuracy.py."""


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> ReportInputs:
    return with_models(analyse(load(cpu_study(tmp_path_factory.mktemp("cpu") / "results"))))


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> ReportInputs:
    return with_models(analyse(load(gpu_study(tmp_path_factory.mktemp("gpu") / "results"))))


@pytest.mark.parametrize("name", [name for name in PLOTS if name not in ("ladder", "improvement", *TRAININGS)])
def test_large_grid_is_drawn_without_warnings(gpu: ReportInputs, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = PLOTS[name](gpu)
        assert figure is not None
        svg, png = render(figure)
    assert svg.rstrip().endswith("</svg>")
    assert png.startswith(b"\x89PNG")


def test_study_without_results_has_no_figures(tmp_path: Path) -> None:
    empty = with_models(analyse(load(write_study(tmp_path / "results"))))
    assert [draw(empty) for draw in PLOTS.values()] == [None] * len(PLOTS)


def test_svg_is_deterministic(cpu: ReportInputs) -> None:
    first, second = (render(figure)[0] for _ in range(2) if (figure := scaling_weak(cpu)) is not None)
    assert first == second


def test_scaling_figure_shows_efficiency_ideal_and_final_speed_up(tmp_path: Path) -> None:
    trials = grid({"device": "cuda", "steps": 4}, world_size=[1, 2, 4])
    law = {1: 0.1, 2: 0.125, 4: 0.2}
    directory = write_results(tmp_path / "results", trials, lambda t: {"step_s": law[t["world_size"]]}, spread=0.0)
    figure = scaling_weak(with_models(analyse(load(directory))))
    assert figure is not None
    (axis,) = figure.axes
    drawn = [np.asarray(line.get_xydata()) for line in axis.lines]
    assert any(np.allclose(line[:, 1], 100) for line in drawn if len(line) == 2)  # the ideal
    measured = np.array([[1, 100], [2, 80], [4, 50]])
    assert any(np.allclose(line, measured) for line in drawn if len(line) == 3)
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("GPUs", "efficiency (%)")
    assert any(text.get_text().endswith(": 2.00×") for text in axis.texts)


def test_an_axis_shows_both_ends_of_every_interval() -> None:
    points = pd.Series([80.0, 90.0, 100.0])
    low, high = limits(points, points - 5, points + 5)
    assert (low, high) == pytest.approx((75 - 1.8, 105 + 1.8))
    points, widest = pd.Series([99.0, 100.0]), pd.Series([86.7, np.nan])
    low, high = limits(points, widest, pd.Series([113.1, np.nan]))
    assert low < 86.7 and high > 113.1
    assert pytest.approx(MOST_INTERVAL * (high - low)) == 113.1 - 86.7


def test_labels_of_line_ends_keep_their_order_and_do_not_overlap() -> None:
    figure, (axis,) = grid_of_axes(1, sharey=True)
    axis.set_ylim(0, 100)
    axis.set_xlim(1, 8)
    label_ends(axis, [LineEnd(8, y, f"at {y}") for y in (97.0, 97.5, 98.0, 99.9, 20.0)])
    figure.canvas.draw()
    boxes = sorted((text.get_window_extent() for text in axis.texts), key=lambda box: box.y0)
    assert all(upper.y0 - lower.y0 >= 0.9 * LINE_INCHES * figure.dpi for lower, upper in pairwise(boxes))
    heights = {text.get_text(): text.get_window_extent().y0 for text in axis.texts}
    assert sorted(heights, key=lambda name: heights[name]) == ["at 20.0", "at 97.0", "at 97.5", "at 98.0", "at 99.9"]


def test_narrow_figures_stack_their_panels(gpu: ReportInputs) -> None:
    wide = scaling_weak(gpu)
    with narrow():
        stacked = scaling_weak(gpu)
    assert wide is not None and stacked is not None
    assert wide.get_figwidth() > 7 > 5 > stacked.get_figwidth()
    cells = [cell for axis in stacked.axes if (cell := axis.get_subplotspec())]
    columns = {cell.colspan.start for cell in cells}
    assert columns == {0}


def test_panels_of_bars_are_as_high_as_their_bars() -> None:
    with narrow():
        figure = phases(committed_inputs("sharding-2gpu")[0])
    assert figure is not None
    heights = [round(max(axis.get_ylim()) + 0.5) for axis in figure.axes if axis.get_visible()]
    assert heights == [6, 2]
    assert all(len(axis.get_yticks()) == height for axis, height in zip(figure.axes, heights, strict=False))


def test_lost_ranks_add_up_to_the_work_that_is_missing(gpu: ReportInputs) -> None:
    assert gpu.headline is not None
    rows = lost_rows(gpu)
    assert rows["cause"].iloc[-1] == "total"
    assert rows["lost"].iloc[:-1].sum() == pytest.approx(rows["lost"].iloc[-1])
    configuration = gpu.configurations.loc[gpu.headline]
    assert configuration["world_size"] == gpu.configurations["world_size"].max()
    work = work_rows(gpu)
    measured = work[work["kind"] == "measured"].iloc[-1]
    assert measured["work"] == pytest.approx(configuration["world_size"] - rows["lost"].iloc[-1], abs=0.0005)
    figure = lost_ranks(gpu)
    assert figure is not None
    bars = [bar for bar in figure.axes[0].patches if isinstance(bar, Rectangle)]
    assert [bar.get_width() for bar in bars] == pytest.approx(rows["lost"].tolist())
    ends = [bar.get_x() + bar.get_width() for bar in bars[:-1]]
    assert [bar.get_x() for bar in bars[1:-1]] == pytest.approx(ends[:-1])  # a waterfall
    assert ends[-1] == pytest.approx(rows["lost"].iloc[-1])


def test_causes_that_round_to_zero_are_part_of_the_remainder() -> None:
    rows = lost_rows(committed_inputs("hpml-lab4")[0])
    assert (rows["lost"].iloc[:-2].abs() >= 0.0005).all()
    assert "exposed transfer" not in set(rows["cause"])
    assert rows["lost"].iloc[:-1].sum() == pytest.approx(rows["lost"].iloc[-1])


def test_gains_are_those_of_the_comparisons_and_of_the_largest_parts(tmp_path: Path) -> None:
    trials = grid({"device": "cuda", "steps": 4}, precision=["fp32", "bf16"], repeat=range(2))
    law = {"fp32": 0.1, "bf16": 0.04}
    directory = write_results(
        tmp_path / "results",
        trials,
        lambda t: {"step_s": law[t["precision"]], "shares": (0.25, 0.05, 0.25, 0.05, 0.3, 0.1)},
        spread=0.0,
    )
    analysis = with_models(analyse(load(directory)))
    rows = analysis.gains.set_index("change")
    assert rows.loc["bf16", "gain"] == pytest.approx(2.5)
    assert rows.loc["no waiting for a batch", "gain"] == pytest.approx(1 / 0.75, rel=0.02)
    assert rows["is_measured"].to_dict()["bf16"] and not rows["is_measured"].to_dict()["no waiting for a batch"]
    figure = gains(analysis)
    assert figure is not None
    bars = [bar.get_width() for bar in figure.axes[0].patches if isinstance(bar, Rectangle)]
    assert bars == pytest.approx((100 * (analysis.gains["gain"] - 1)).tolist())


def test_a_figure_of_one_colour_is_not_drawn(tmp_path: Path) -> None:
    trials = grid({"device": "cuda", "steps": 4, "communication_steps": 0}, world_size=[1, 2])
    directory = write_results(
        tmp_path / "results", trials, lambda t: {"step_s": 0.1, "shares": (0, 0, 1.0, 0, 0, 0)}, spread=0.0
    )
    assert phases(with_models(analyse(load(directory)))) is None


def test_phase_bars_are_as_long_as_the_step(cpu: ReportInputs) -> None:
    figure = phases(cpu)
    assert figure is not None
    bars = [[bar for bar in axis.patches if isinstance(bar, Rectangle)] for axis in figure.axes]
    ends = [max(bar.get_x() + bar.get_width() for bar in panel) for panel in bars]
    longest = 1e3 * cpu.configurations.groupby("batch_per_gpu")["phases_step_s"].max()
    assert ends == pytest.approx(longest.tolist(), rel=0.02)  # medians of parts add up only nearly
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[:2] == ["1 loader worker, bf16, 1 CPU rank", "1 loader worker, bf16, 2 CPU ranks"]


def test_exposed_all_reduces_are_apart_from_the_backward_pass() -> None:
    analysis = committed_inputs("default-resnet50-4gpu")[0]
    figure = phases(analysis)
    assert figure is not None
    [legend] = figure.legends
    handles = zip(legend.texts, legend.get_patches(), strict=True)
    colours = {text.get_text(): patch.get_facecolor() for text, patch in handles}
    bars = [bar for bar in figure.axes[0].patches if isinstance(bar, Rectangle)]
    backward, exposed = (
        [bar.get_width() for bar in bars if bar.get_facecolor() == colours[name]]
        for name in ("backward", "exposed all-reduces")
    )
    rows = analysis.configurations[analysis.configurations["batch_per_gpu"] == 64].sort_values("world_size")
    assert np.add(backward, exposed) == pytest.approx(1e3 * rows["backward_s"].to_numpy(dtype=float))
    assert exposed[0] == 0 and min(exposed[1:]) > 10, "one GPU exchanges nothing"


def test_a_step_in_one_cuda_graph_has_no_figure_of_phases() -> None:
    assert phases(committed_inputs("captured")[0]) is None


@pytest.mark.parametrize("name", ["slowdown", "bus_bandwidth", "timeline", "loss", "scaling_strong"])
def test_figures_of_the_collapsed_part_fit_a_phone(name: str) -> None:
    with narrow():
        figure = PLOTS[name](committed_inputs("hpml-lab4")[0])
    assert figure is not None and figure.get_figwidth() == NARROW_INCHES
    render(figure)
    assert all(axis.get_position().height * figure.get_figheight() > 0.15 for axis in figure.axes)


def test_note_on_hidden_panels_does_not_overlap() -> None:
    figure, axes = grid_of_axes(MAX_FACETS + 8, sharey=True)
    legend(figure, [Line2D([], [], label=f"strategy {i}") for i in range(6)])
    figure.canvas.draw()
    (note,) = [text for text in figure.texts if text.get_text() == "24 of 32 panels"]
    box = note.get_window_extent()
    assert not any(box.overlaps(other.get_tightbbox()) for other in (*figure.legends, *axes))


def test_bar_labels_name_varying_fields_and_do_not_overlap() -> None:
    long = {name: f"something quite long {name}" for name in ("dataset", "storage", "order", "decode", "goal", "view")}
    rows = [long | {"augment": "none", "world_size": i, "batch_per_gpu": 4} for i in range(1, 41)]
    found = pd.DataFrame(rows)
    found.loc[3, list(long)] = "else"
    values = pd.DataFrame({"forward_s": np.ones(len(found))})
    figure = stacked_bars(found, values, PHASE_LABELS, [*long, "augment", "world_size"], ("GPU", "GPUs"), "ms")
    figure.canvas.draw()
    labels = figure.axes[0].get_yticklabels()
    assert not any("augment" in label.get_text() for label in labels)
    boxes = [label.get_window_extent() for label in labels]
    assert all(upper.y0 > lower.y1 for upper, lower in pairwise(boxes))


def test_models_that_differ_much_in_speed_have_panels_of_their_own() -> None:
    models = ["mlp", "resnet18", "resnet50"]
    found = pd.DataFrame({"model": models * 2, "batch_per_gpu": [4] * 3 + [8] * 3, "world_size": 1})
    values = pd.DataFrame({"forward_s": [0.2, 9.0, 20.0, 5.0, 9.0, 20.0]})
    figure = stacked_bars(found, values, PHASE_LABELS, ["model"], ("GPU", "GPUs"), "ms")
    shown = [
        [label.get_text().removeprefix("model ") for label in axis.get_yticklabels()]
        for axis in figure.axes
        if axis.get_visible()
    ]
    assert shown == [["mlp"], ["resnet18", "resnet50"], models]
    totals = pd.Series(0.0, index=found.index)
    together = stacked_bars(found, values, PHASE_LABELS, ["model"], ("GPU", "GPUs"), "ms", totals)
    assert sum(axis.get_visible() for axis in together.axes) == 2


def test_bars_of_many_fields_keep_distinct_labels_on_a_phone() -> None:
    axes = {
        "storage": ("arrow_raw", "jpeg"),
        "storage_place": ("disk", "shared_memory"),
        "page_cache": ("cold", "as_is"),
        "order": ("in_order", "shuffled"),
    }
    found = pd.DataFrame(product(*axes.values()), columns=list(axes)).assign(batch_per_gpu=4)
    values = pd.DataFrame({"forward_s": np.ones(len(found))})
    with narrow():
        figure = stacked_bars(found, values, PHASE_LABELS, list(axes), ("GPU", "GPUs"), "ms")
    labels = [" ".join(label.get_text().split()) for label in figure.axes[0].get_yticklabels()]
    assert len(set(labels)) == len(found)
    assert labels[0].startswith("arrow_raw, disk, ")
    assert any("page cache as_is" in label for label in labels), "this word says nothing without its field"
    own = found.rename(columns={"order": "flag order", "storage": "NCCL_ALGO"}).assign(script="/home/me/train.py")
    shown = brief_label(own, own.iloc[0], ["script", "NCCL_ALGO", "flag order"], ("GPU", "GPUs"))
    assert shown == "script /home/me/train.py, NCCL_ALGO=arrow_raw, order in_order"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (
            ["--data /d --epochs 3", "--data /d --epochs 3 --lr 0.1", "--data /d --epochs 5", ""],
            ["… --epochs 3", "… --lr 0.1", "… --epochs 5", ""],
        ),
        (
            ["--model a --batch 8 --size 2"] * 2 + ["--model a --batch 8 --size 2 --model b --batch 4", "--model a"],
            ["--model a --batch 8 --size 2"] * 2 + ["… --model b --batch 4", "--model a"],
        ),
        (["--set x=1 --set y=2", "--set x=1 --set y=3"], ["--set x=1 --set y=2", "--set x=1 --set y=3"]),
        (["--lr=0.1 -v one"], ["--lr=0.1 -v one"]),
    ],
)
def test_labels_of_scripts_show_the_options_that_differ(given: list[str], shown: list[str]) -> None:
    own = pd.DataFrame({"script": "train.py", "script_arguments": given})
    labels = [telling_label(own, row, ["script_arguments"], ("GPU", "GPUs")) for _, row in own.iterrows()]
    assert [label.rpartition("arguments ")[2] for label in labels] == shown


def test_of_many_fields_a_label_has_the_users_file_and_what_differs_among_configurations_with_it() -> None:
    fields = [f"field_{i}" for i in range(MOST_FIELDS + 1)]
    of_factory = [{name: 0 for name in fields} | {"script": "", "script_arguments": ""}] * 3
    of_script = [
        {name: 1 for name in fields} | {"script": "a.py", "script_arguments": f"--late {late}"} for late in (0, 20)
    ]
    found = pd.DataFrame([*of_factory, *of_script])
    names = telling_fields(found, found.iloc[-1], ["script", "script_arguments", *fields])
    assert names == ["script", "script_arguments"]


def bar_labels(found: pd.DataFrame, names: list[str]) -> list[str]:
    """Return the labels of the bars of a figure for a phone, from top to bottom."""
    values = pd.DataFrame({"forward_s": np.ones(len(found))}, index=found.index)
    with narrow():
        figure = stacked_bars(found, values, PHASE_LABELS, names, ("GPU", "GPUs"), "ms")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    plt.close(figure)
    return labels


def test_labels_too_long_for_a_phone_leave_out_what_other_fields_imply() -> None:
    analysis = analyse(load(RESULTS / "acceleration-ladder-1gpu"))
    labels = bar_labels(analysis.configurations, list(analysis.axes))
    assert len(set(labels)) == len(analysis.configurations)
    assert not any("…" in label or label.count("\n") >= MOST_LABEL_LINES for label in labels)
    assert not any("cpus" in label or "shared_memory" in label for label in labels), (
        "the workers and storage imply them"
    )
    assert any("fp16_master" in label for label in labels)


def test_labels_that_a_cut_would_make_alike_are_longer() -> None:
    found = pd.DataFrame({"model": [20 * "word " + letter for letter in "ab"], "batch_per_gpu": 4})
    labels = bar_labels(found, ["model"])
    assert [label[-1] for label in labels] == ["a", "b"]
    assert all(label.count("\n") >= MOST_LABEL_LINES for label in labels)
    found["model"] = [letter + 20 * " word" for letter in "ab"]
    assert {label.count("\n") + 1 for label in bar_labels(found, ["model"])} == {MOST_LABEL_LINES}
    assert all(label.endswith("word…") for label in bar_labels(found, ["model"])), "the sign is no line of its own"


def test_long_words_are_broken_after_separators() -> None:
    assert filled("faulty_workloads.py:language_model, fsdp2", 22) == "faulty_workloads.py:\nlanguage_model, fsdp2"
    lines = filled("function.py:train_func, config", 22).splitlines()
    assert lines == ["function.py:", "train_func, config"], "no line starts with a comma"


def test_the_bar_with_the_most_common_settings_has_a_label() -> None:
    fields = [f"field {i}" for i in range(9)]
    rows = [{name: "usual" for name in fields} for _ in range(10)]
    for i, name in enumerate(fields):
        rows[i + 1][name] = "other"
    found = pd.DataFrame(rows).assign(batch_per_gpu=4)
    labels = bar_labels(found, fields)
    assert MOST_COMMON in labels and all(labels)
    sizes = found.assign(world_size=2)
    sizes.loc[0, "world_size"] = 1
    assert f"world size 1, {MOST_COMMON}" in [
        " ".join(label.split()) for label in bar_labels(sizes, [*fields, "world_size"])
    ]


def test_names_of_hundreds_of_characters_leave_room_for_the_bars() -> None:
    rows = [{"model": letter * 1000, "world_size": 1, "batch_per_gpu": 4} for letter in "ab"]
    values = pd.DataFrame({"forward_s": [1.0, 2.0]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        labels = {"forward_s": "forward " + 300 * "x"}
        figure = stacked_bars(pd.DataFrame(rows), values, labels, ["model", "world_size"], ("GPU", "GPUs"), "ms")
        figure.canvas.draw()
    assert figure.axes[0].get_position().width > 0.4
    assert figure.axes[0].get_position().height > 0.3


def test_each_phase_has_its_own_colour() -> None:
    found = pd.DataFrame({"batch_per_gpu": [4], "world_size": [1]})
    values = pd.DataFrame({name: [1.0] for name in PHASE_LABELS})
    figure = stacked_bars(found, values, PHASE_LABELS, ["world_size"], ("GPU", "GPUs"), "ms")
    bars = [bar for bar in figure.axes[0].patches if isinstance(bar, Rectangle)]
    assert len({bar.get_facecolor() for bar in bars}) == len(PHASE_LABELS) <= len(COLOURS)


def test_the_legend_has_what_is_visible_in_any_panel() -> None:
    found = pd.DataFrame({"batch_per_gpu": [4, 4096], "world_size": [1, 1]})
    values = pd.DataFrame({"loss_s": [0.05, 0.001], "forward_s": [1.0, 1000.0], "optimizer_s": [0.001, 1.0]})
    figure = stacked_bars(found, values, PHASE_LABELS, ["world_size"], ("GPU", "GPUs"), "ms")
    shown = [text.get_text() for made in figure.legends for text in made.get_texts()]
    assert shown == ["loss", "forward"]


def test_losses_of_own_code_without_a_precision_are_drawn() -> None:
    """In a study of several entries, users' own code lacks the fields of the project's loop."""
    analysis = analyse(load(RESULTS / "doors" / "study"))
    assert "precision" in analysis.axes and analysis.configurations["precision"].isna().any()
    drawing = loss(analysis)
    assert drawing is not None
    lines = sum(len(axis.get_lines()) for axis in drawing.axes)
    assert lines == analysis.loss_curves.dropna(subset="loss")["configuration"].nunique() > 0
    assert all(axis.get_lines() for axis in drawing.axes), "no panel is empty"
    assert not any("learning rate" in axis.get_title() for axis in drawing.axes), "own code has none to differ from"
    plt.close(drawing)


def test_configurations_that_learn_the_same_share_a_line_of_losses() -> None:
    """Nine numbers of loader processes and CPU threads, one batch and one number format."""
    inputs = committed_inputs("loader-grid")[0]
    assert inputs.loss_curves["configuration"].nunique() > 4
    drawing = loss(inputs)
    assert drawing is not None
    assert [len(axis.get_lines()) for axis in drawing.axes if axis.get_visible()] == [1]
    plt.close(drawing)


def test_each_panel_of_losses_is_named_completely_by_what_distinguishes_it() -> None:
    drawing = loss(committed_inputs("everything-1gpu")[0])
    assert drawing is not None
    titles = [axis.get_title() for axis in drawing.axes if axis.get_visible()]
    assert len(set(titles)) == len(titles) == MAX_FACETS
    assert MOST_COMMON in titles and all(titles)
    assert not any("…" in title or title.count("\n") > 1 for title in titles)
    plt.close(drawing)


def test_strong_scaling_by_accumulation_is_one_line_per_global_batch() -> None:
    """A fixed global batch needs fewer accumulation steps on more GPUs, so that they are no field of a panel."""
    drawing = scaling_strong(committed_inputs("gpt2-scaling")[0])
    assert drawing is not None
    [axis] = drawing.axes
    assert max(len(np.asarray(line.get_xydata())) for line in axis.lines) == 3
    assert not axis.get_title()
    plt.close(drawing)


def test_titles_of_panels_with_wide_labels_stay_within_the_figure() -> None:
    drawing = scaling_strong(committed_inputs("captured")[0])
    assert drawing is not None
    drawing.canvas.draw()
    boxes = [axis.title.get_window_extent() for axis in drawing.axes]
    assert min(box.x0 for box in boxes) > 0
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    assert any("no_p2p (emulated)" in axis.get_title() for axis in drawing.axes), "the mark stays with its value"
    plt.close(drawing)


def test_panels_are_in_the_order_of_the_batch_and_the_card_s_is_among_them() -> None:
    for name, batch in (("hpml-lab4", 32_768), ("vgg-case-study", 512)):
        with brief():
            drawing = phases(committed_inputs(name)[0])
        assert drawing is not None
        batches = [int(axis.get_title().split()[1].replace(",", "")) for axis in drawing.axes if axis.get_title()]
        assert batch in batches
        assert batches == sorted(batches)
        plt.close(drawing)


def test_ticks_of_large_batches_have_separators() -> None:
    drawing = batch_size(committed_inputs("hpml-lab4-memory")[0])
    assert drawing is not None
    labels = [label.get_text() for label in drawing.axes[0].get_xticklabels()]
    assert any("," in label for label in labels)
    assert all(f"{int(label.replace(',', '')):,}" == label for label in labels)
    plt.close(drawing)


def test_bands_of_accuracy_and_loss_are_within_the_axes() -> None:
    inputs = committed_inputs("vgg-case-study")[0]
    for drawing in (accuracy_batch(inputs), training_curves(inputs)):
        assert drawing is not None
        for axis in drawing.axes:
            low, high = axis.get_ylim()
            edges = np.concatenate(
                [np.asarray(path.vertices)[:, 1] for band in axis.collections for path in band.get_paths()]
            )
            is_percent = "accuracy" in axis.get_ylabel()
            edges = edges.clip(0, 100) if is_percent else edges
            assert low <= edges.min() and edges.max() <= high
        plt.close(drawing)


@pytest.mark.parametrize("name", ["vgg-case-study", "real-ranks"])
def test_epochs_are_whole_numbers(name: str) -> None:
    for draw in (training_curves, lr_schedules):
        drawing = draw(committed_inputs(name)[0])
        assert drawing is not None
        assert all(tick == int(tick) for axis in drawing.axes for tick in axis.get_xticks())
        plt.close(drawing)
