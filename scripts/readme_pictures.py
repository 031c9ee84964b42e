"""Write the pictures of README.md to docs/images, from committed results of studies on GPUs.

python -m scripts.readme_pictures
"""

import re
from collections.abc import Mapping
from pathlib import Path

from analysis.figures.style import GRID, INK, render
from analysis.predict.inputs import ReportInputs, report_inputs
from analysis.read.results import load_reduced
from analysis.report.card_svg import as_svg
from analysis.report.sections import PLOTS
from analysis.verdict.card import card_of

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"
OF = RESULTS / "default-resnet50-4gpu"
"""the default study with ResNet-50, in five worker groups"""

FIGURE = "work"

_THEME = f"""<style>
.page {{ fill: #ffffff; }}
@media (prefers-color-scheme: dark) {{
  .page {{ fill: #14171b; }}
  [style*="fill: {INK}"] {{ fill: #e6e9ed !important; }}
  [style*="stroke: {INK}"] {{ stroke: #e6e9ed !important; }}
  [style*="stroke: {GRID}"] {{ stroke: #363d46 !important; }}
  text:not([style*="fill"]) {{ fill: #e6e9ed; }}
}}
</style><rect class="page" width="100%" height="100%"/>"""
"""Background, and colours on a dark page: a picture of a page does not inherit its colours."""


def pictures() -> Mapping[str, str]:
    """Return the pictures as SVG, by file name."""
    inputs, *others = report_inputs(load_reduced(str(OF)))
    return {"card.svg": as_svg(card_of(inputs, others)), f"{FIGURE}.svg": picture(FIGURE, inputs)}


def picture(name: str, inputs: ReportInputs) -> str:
    """Return a figure of the report as SVG, with a background of its own. Raises ValueError if it has no data."""
    figure = PLOTS[name](inputs)
    if figure is None:
        raise ValueError(f"the results have nothing to draw for {name}")
    svg, _ = render(figure)
    return re.sub(r"(<svg[^>]*>)", lambda match: match[1] + _THEME, svg, count=1)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (FOLDER / name).write_text(svg)
