"""Input of tables, figures and sentences: an analysis with the laws fitted to its series."""

import dataclasses
from functools import cached_property

from analysis.predict.model import ScalingModel, models
from analysis.read.results import Results
from analysis.study import Analysis, analyses


class ReportInputs(Analysis):
    """An analysis whose models are fitted once, on first use."""

    @cached_property
    def models(self) -> list[ScalingModel]:
        """Return the models of all series, see `model.models`."""
        return models(self)


def with_models(analysis: Analysis) -> ReportInputs:
    """Return the same analysis with models."""
    return ReportInputs(**{field.name: getattr(analysis, field.name) for field in dataclasses.fields(analysis)})


def report_inputs(results: Results) -> list[ReportInputs]:
    """Return one analysis per environment; the one with most done trials comes first.

    Raises ValueError naming a missing column.
    """
    return [with_models(analysis) for analysis in analyses(results)]
