"""The figure of predictions shows what is predicted, and marks what is not."""

from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.figures.answers import work, work_rows
from analysis.figures.predictions import is_predicted, prediction_fan
from analysis.figures.style import MOST_BRIEF_PANELS, MOST_INTERVAL, brief, render_svg
from scripts.claims.sources import committed_inputs

pytestmark = pytest.mark.xdist_group("committed studies")


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    plt.close("all")


def fan(name: str) -> Figure:
    with brief():
        figure = prediction_fan(committed_inputs(name)[0])
    assert figure is not None
    return figure


def panels(figure: Figure) -> dict[str, Any]:
    return {axis.get_title().replace("\n", " "): axis for axis in figure.axes if axis.get_visible()}


def dashed(axis: Any) -> list[Line2D]:
    """Return the predicted lines of a panel; the ideal one is dotted."""
    return [line for line in axis.lines if line.get_linestyle() == "--" and line.get_linewidth() > 1]


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for made in figure.legends for text in made.get_texts()]


def test_nothing_is_predicted_for_scaling_that_is_not_resolved() -> None:
    axes = panels(fan("interconnect/1gbit"))
    assert set(axes) == {"resnet18_small"}, "the panel of mlp would have no prediction"
    assert dashed(axes["resnet18_small"])
    unresolved = committed_inputs("interconnect/unlimited")[0]
    assert not any(is_predicted(unresolved, model) for model in unresolved.models)
    assert prediction_fan(unresolved) is None
    assert set(work_rows(unresolved)["kind"]) == {"measured"}


def test_each_line_is_labelled_at_its_own_end() -> None:
    figure = fan("forum-phases-h200")
    for axis in panels(figure).values():
        ends = {text.get_text(): text.xy[0] for text in axis.texts}
        assert ends == {"batch 64": 2, "batch 256": 8, "batch 1,024": 8}, "the host bounds batch 64"
    assert legend_of(figure) == ["predicted, not measured"]


def test_labels_within_a_panel_are_within_its_axis() -> None:
    figure = fan("forum-phases-h200")
    figure.canvas.draw()
    for axis in panels(figure).values():
        [label] = [text for text in axis.texts if text.get_text() == "batch 64"]
        box, within = label.get_window_extent(), axis.get_window_extent()
        assert within.y0 <= box.y0 and box.y1 <= within.y1


def test_measured_intervals_are_bands_and_no_interval_takes_more_than_half_of_the_axis() -> None:
    [axis] = panels(fan("default-resnet50-4gpu")).values()
    low, high = axis.get_ylim()
    heights = [np.ptp(path.vertices[:, 1]) for band in axis.collections for path in band.get_paths()]
    assert 20 < max(heights) <= MOST_INTERVAL * (high - low)


def test_the_dotted_line_ends_before_the_labels() -> None:
    figure = fan("captured")
    for axis in panels(figure).values():
        labels = [text.xy[0] for text in axis.texts]
        [ideal] = [line for line in axis.lines if line.get_linewidth() == 0.8]
        assert labels and max(ideal.get_xdata()) == max(labels) < axis.get_xlim()[1]


def test_the_panel_of_the_card_is_among_the_first_ones() -> None:
    for name, model in (("communication", "vgg19"), ("forum-phases-h200", "resnet50")):
        titles = list(panels(fan(name)))
        assert len(titles) == MOST_BRIEF_PANELS
        assert any(title.startswith(model) for title in titles)


def test_intervals_of_predictions_are_within_the_axis() -> None:
    for axis in panels(fan("default-resnet50-4gpu")).values():
        low, high = axis.get_ylim()
        edges = [path.vertices[:, 1] for band in axis.collections for path in band.get_paths()]
        assert edges and low <= min(map(np.min, edges)) and max(map(np.max, edges)) <= high


def test_titles_of_panels_with_labels_do_not_overlap() -> None:
    figure = fan("mlstm-scaling")
    shown = list(panels(figure).values())
    figure.canvas.draw()
    boxes = [axis.title.get_window_extent() for axis in shown]
    assert all(left.x1 < right.x0 for left, right in zip(boxes, boxes[1:], strict=False))
    render_svg(figure)


def test_work_below_that_of_one_rank_has_ticks_and_room_for_its_number() -> None:
    figure = work(committed_inputs("interconnect/200mbit")[0])
    assert figure is not None
    [axis] = figure.axes
    assert sorted(axis.get_yticks()) == [0.125, 0.25, 0.5, 1, 2, 4, 8]
    assert axis.get_ylim()[0] < 0.125
    assert list(axis.get_xticks()) == [1, 2, 4, 8]
    figure.canvas.draw()
    [number] = [text for text in axis.texts if text.get_text() == "0.19"]
    assert number.get_window_extent().y0 > axis.get_window_extent().y0
