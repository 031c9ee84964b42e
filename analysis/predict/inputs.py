"""What tables, figures and sentences read: an analysis, and the laws fitted to its series."""

import dataclasses
from functools import cached_property

from analysis.load.results import Results
from analysis.predict.model import Model, models
from analysis.study import Analysis, analyses


class ReportInputs(Analysis):
    """An analysis whose models are fitted on first use, once."""

    @cached_property
    def models(self) -> list[Model]:
        """See `prediction.models`."""
        return models(self)


def with_models(analysis: Analysis) -> ReportInputs:
    """The same analysis, with models."""
    return ReportInputs(**{field.name: getattr(analysis, field.name) for field in dataclasses.fields(analysis)})


def report_inputs(results: Results) -> list[ReportInputs]:
    """One per environment, that with most done trials first. Raises ValueError naming a missing column."""
    return [with_models(analysis) for analysis in analyses(results)]
