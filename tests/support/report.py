"""Reports of tests."""

from dataclasses import replace

import pytest

from analysis.report.questions import OVERVIEW, questions
from analysis.report.sections import SECTIONS, Figure


def show_figures(monkeypatch: pytest.MonkeyPatch, names: set[str]) -> None:
    """Reports are made with these figures only."""

    def chosen(figures: tuple[Figure, ...]) -> tuple[Figure, ...]:
        return tuple(figure for figure in figures if figure.name in names)

    sections = [replace(section, figures=chosen(section.figures)) for section in SECTIONS]
    monkeypatch.setattr("analysis.report.report.SECTIONS", sections)
    monkeypatch.setattr("analysis.report.report.OVERVIEW", chosen(OVERVIEW))
    monkeypatch.setattr(
        "analysis.report.report.questions",
        lambda inputs: [replace(question, figures=chosen(question.figures)) for question in questions(inputs)],
    )
