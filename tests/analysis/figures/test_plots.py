"""Figures draw the computed values."""

import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from analysis.figures.scaling import phases, speed_up_weak
from analysis.figures.style import COLOURS, MAX_FACETS, grid_of_axes, legend, render, stacked_bars
from analysis.predict.inputs import ReportInputs, with_models
from analysis.read.results import load
from analysis.report.sections import PLOTS
from analysis.study import analyse
from analysis.text import PHASE_LABELS
from tests.support.frames import cpu_study, gpu_study, grid, write_results, write_study

TRAININGS = ("accuracy_batch", "training_curves", "lr_schedules")
"""Figures of studies that train to an accuracy, tested in tests/analysis/compare/test_accuracy.py."""


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> ReportInputs:
    return with_models(analyse(load(cpu_study(tmp_path_factory.mktemp("cpu") / "results"))))


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> ReportInputs:
    return with_models(analyse(load(gpu_study(tmp_path_factory.mktemp("gpu") / "results"))))


@pytest.mark.parametrize("name", [name for name in PLOTS if name not in ("ladder", *TRAININGS)])
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
    first, second = (render(figure)[0] for _ in range(2) if (figure := speed_up_weak(cpu)) is not None)
    assert first == second


def test_speed_up_figure_shows_values_and_ideal(tmp_path: Path) -> None:
    trials = grid({"device": "cuda", "steps": 4}, world_size=[1, 2, 4])
    law = {1: 0.1, 2: 0.125, 4: 0.2}
    directory = write_results(tmp_path / "results", trials, lambda t: {"step_s": law[t["world_size"]]}, spread=0.0)
    figure = speed_up_weak(with_models(analyse(load(directory))))
    assert figure is not None
    (axis,) = figure.axes
    drawn = [np.asarray(line.get_xydata()) for line in axis.lines]
    assert any(np.allclose(line[:, 1], line[:, 0]) for line in drawn if len(line) == 50)  # the ideal
    measured = np.array([[1, 1], [2, 1.6], [4, 2]])
    assert any(np.allclose(line, measured) for line in drawn if len(line) == 3)
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("GPUs", "speed-up")


def test_phase_bars_are_as_long_as_the_step(cpu: ReportInputs) -> None:
    figure = phases(cpu)
    assert figure is not None
    bars = [[bar for bar in axis.patches if isinstance(bar, Rectangle)] for axis in figure.axes]
    ends = [max(bar.get_x() + bar.get_width() for bar in panel) for panel in bars]
    longest = 1e3 * cpu.configurations.groupby("batch_per_gpu")["phases_step_s"].max()
    assert ends == pytest.approx(longest.tolist(), rel=0.02)  # medians of parts add up only nearly
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[:2] == ["1 loader worker, bf16, 1 CPU rank", "1 loader worker, bf16, 2 CPU ranks"]


def test_note_on_hidden_panels_does_not_overlap() -> None:
    figure, axes = grid_of_axes(MAX_FACETS + 8, sharey=True)
    legend(figure, [Line2D([], [], label=f"strategy {i}") for i in range(6)])
    figure.canvas.draw()
    (note,) = [text for text in figure.texts if text.get_text() == "the first 24 of 32 panels (75\u00a0%)"]
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


def test_each_phase_has_its_own_colour() -> None:
    found = pd.DataFrame({"batch_per_gpu": [4], "world_size": [1]})
    values = pd.DataFrame({name: [1.0] for name in PHASE_LABELS})
    figure = stacked_bars(found, values, PHASE_LABELS, ["world_size"], ("GPU", "GPUs"), "ms")
    bars = [bar for bar in figure.axes[0].patches if isinstance(bar, Rectangle)]
    assert len({bar.get_facecolor() for bar in bars}) == len(PHASE_LABELS) <= len(COLOURS)
