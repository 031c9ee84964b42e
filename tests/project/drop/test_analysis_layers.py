"""The order of analysis' layers, held by reading which top-level name of one module uses which of another."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from analysis.report.sections import PLOTS, SECTIONS, TABLES

ANALYSIS = Path(__file__).parent.parent.parent.parent / "analysis"

ORDER = ("text", "statistics", "load", "measure", "compare", "checks", "study", "predict", "output", "report", "export")
"""From the lowest layer on: a name uses names of its own layer and of lower ones only."""

SIBLINGS = {"tables": "output", "figures": "output", "verdict": "output"}
"""Layers of one height, which do not use each other."""

LAYERS: Mapping[str, str] = {
    "formatting": "text",
    "statistics": "statistics",
    **dict.fromkeys(
        (
            "environments", "fields", "goals", "links", "packed", "parquet", "results", "results_error", "schema", "step_losses",
            "step_shape", "study_record", "windows",
        ),
        "load",
    ),
    **dict.fromkeys(("ceiling", "hardware", "measures", "trace"), "measure"),
    **dict.fromkeys(
        (
            "accuracy", "batch_curves", "bounds", "communication", "communication_cost", "compare", "comparison", "contest",
            "host", "ladder", "remedies", "report_epoch", "scaling", "speed_up", "step_rows",
        ),
        "compare",
    ),
    **dict.fromkeys(("checks", "finding", "time_checks"), "checks"),
    "study": "study",
    **dict.fromkeys(
        (
            "averaging", "fitting", "forecast", "laws", "next_trial", "prediction", "report_inputs", "run_spread", "series",
        ),
        "predict",
    ),
    **dict.fromkeys(
        (
            "accuracy_tables", "bandwidth_table", "batch_tables", "check_table", "columns", "communication_tables",
            "comparison_tables", "evidence", "hardware_tables", "host_tables", "ladder_table", "prediction_tables", "table",
            "tables", "trace_table", "trials_table",
        ),
        "tables",
    ),
    **dict.fromkeys(
        (
            "accuracy_plots", "batch_plots", "communication_plots", "drawing", "plots", "prediction_plots", "step_plots",
        ),
        "figures",
    ),
    **dict.fromkeys(
        ("accuracy_verdict", "advice", "communication_verdict", "caveats", "study_verdict", "verdict"), "verdict"
    ),
    **dict.fromkeys(("report", "sections", "summary"), "report"),
    "export": "export",
    "__init__": "export",
}  # fmt: skip
"""The layer of each module, and so of every top-level name in it but those in `ELSEWHERE`."""

ELSEWHERE: Mapping[str, str] = {
    **{f"columns.{name}": "text" for name in ("GB", "GIB", "MIB", "PHASE_LABELS")},
    "columns.characters_per_s": "measure",
    **{
        f"communication.{name}": "measure"
        for name in (
            "ACCOUNT_COLUMNS", "WAIT_MATTERS_SHARE", "WINDOW", "_SECONDS", "_STEP", "_SUMS", "_after", "_against_others",
            "_lateness", "_latest_end_before", "_rank_medians", "_rank_with", "_uncovered_start", "account", "bucket_rows",
            "step_rows",
        )
    },
    **{
        f"scaling.{name}": "measure"
        for name in (
            "LAYOUT", "RESULT_COLUMNS", "_LENGTHS", "_NEEDED", "_NOT_MEDIANS", "configurations", "derived_lengths",
            "throughput_estimates", "trial_fields",
        )
    },
    **{f"accuracy.{name}": "measure" for name in ("_noted", "_ratio", "_reached", "training_runs")},
}  # fmt: skip
"""Names whose layer is not that of the rest of their module."""


def names_of(node: ast.stmt) -> list[str]:
    """The names that a top-level statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def layer_of(name: str) -> str:
    return ELSEWHERE.get(name) or LAYERS[name.partition(".")[0]]


def uses() -> Iterator[tuple[str, str]]:
    """Each use of a top-level name of analysis by another, as "module.name" both; a use of a module is one of "module"."""
    for path in sorted(ANALYSIS.glob("*.py")):
        tree = ast.parse(path.read_text())
        known = {name: f"{path.stem}.{name}" for node in tree.body for name in names_of(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "analysis":
                module = str(node.module).partition(".")[2]
                known |= {(a.asname or a.name): f"{module}.{a.name}" if module else a.name for a in node.names}
        for node in tree.body:
            used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & set(known)
            for name in names_of(node):
                yield from ((f"{path.stem}.{name}", known[other]) for other in sorted(used) if other != name)


def height(layer: str) -> int:
    return ORDER.index(SIBLINGS.get(layer, layer))


def test_no_name_of_analysis_uses_one_of_a_higher_layer_or_of_a_sibling() -> None:
    offenders = []
    for user, used in uses():
        above, below = layer_of(user), layer_of(used)
        unlike = above != below
        if height(below) > height(above) or (unlike and above in SIBLINGS and below in SIBLINGS):
            offenders.append(f"{user} ({above}) uses {used} ({below})")
    assert not offenders, "\n".join(offenders)


def test_every_module_of_analysis_has_a_layer_and_every_exception_exists() -> None:
    modules = {path.stem: path for path in ANALYSIS.glob("*.py")}
    assert set(modules) == set(LAYERS)
    for name in ELSEWHERE:
        module, _, defined = name.partition(".")
        tree = ast.parse(modules[module].read_text())
        assert defined in {known for node in tree.body for known in names_of(node)}, name


def test_tables_and_figures_of_the_report_have_names_of_their_own() -> None:
    assert len(TABLES) == len(SECTIONS)
    assert len(PLOTS) == sum(len(section.figures) for section in SECTIONS)
