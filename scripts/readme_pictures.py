"""Write the pictures of README.md to docs/images, from committed results of studies on GPUs.

python -m scripts.readme_pictures
"""

import re
from collections.abc import Mapping
from pathlib import Path

from analysis.figures.style import GRID, INK, render
from analysis.predict.inputs import report_inputs
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
    figure = PLOTS[FIGURE](inputs)
    assert figure is not None, f"{OF.name} has nothing to draw for {FIGURE}"
    svg, _ = render(figure)
    drawn = re.sub(r"(<svg[^>]*>)", lambda match: match[1] + _THEME, svg, count=1)
    return {"card.svg": as_svg(card_of(inputs, others)), f"{FIGURE}.svg": drawn}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (FOLDER / name).write_text(svg)
