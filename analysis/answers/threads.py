"""The question of the global interpreter lock (GIL): one process with threads against one process per GPU."""

import pandas as pd

from analysis.answers.reply import Missing, Reply, highest, ms, span
from analysis.compare.scaling import WEAK
from analysis.predict.inputs import ReportInputs
from analysis.study import study_ranks
from analysis.text import configuration_label, value_label

THREADS = "dp"


def gil(inputs: ReportInputs) -> Reply | Missing:
    """Compare how the time to launch a step grows with the number of ranks, with threads and with processes."""
    rows, configurations = inputs.scaling, inputs.configurations
    rows = rows[(rows["scaling"] == WEAK) & (rows["ideal"] > 1) & (rows["reference_world_size"] == 1)]
    rows = rows[rows["world_size"] == rows["world_size"].max()]
    growth = pd.DataFrame({"configuration": rows["configuration"], "reference": rows["reference"]})
    for name in ("configuration", "reference"):
        growth[f"{name}_s"] = growth[name].map(configurations["step_launch_s"]).astype(float)
    growth["parallel"] = growth["configuration"].map(configurations["parallel"]) if len(growth) else None
    growth = growth.dropna()
    growth["ratio"] = growth["configuration_s"] / growth["reference_s"]
    threads, processes = growth[growth["parallel"] == THREADS], growth[growth["parallel"] != THREADS]
    if threads.empty or processes.empty:
        known = ""
        if len(growth):
            kind = "threads of one process" if len(threads) else "one process per GPU"
            known = (
                f"With {kind} ({growth['parallel'].iloc[0]}), launching a step takes {span(growth['ratio'])} times as "
                "long as on one rank."
            )
        return Missing("threads and processes were not both timed while launching", "--set parallel=dp,ddp", known)
    size = value_label("world_size", int(rows["world_size"].max()), study_ranks(inputs))
    worst = highest(threads, "ratio")
    row = configurations.loc[worst["configuration"]]
    fields = [name for name in inputs.axes if name not in ("world_size", "parallel")]
    label = configuration_label(row, fields, study_ranks(inputs))
    grows = threads["ratio"].median() > 1.1 * processes["ratio"].median()
    verdict = (
        "The GIL costs, because one interpreter launches the work of all GPUs in turn"
        if grows
        else "No cost of the GIL is visible"
    )
    return Reply(
        f"{verdict}: on {size}, launching a step takes {span(threads['ratio'])} times as long as on one with threads "
        f"of one process ({THREADS}), and {span(processes['ratio'])} times with one process per GPU "
        f"({', '.join(dict.fromkeys(processes['parallel']))}). Largest growth: from {ms(worst['reference_s'])} to "
        f"{ms(worst['configuration_s'])}{f' ({label})' if label else ''}.",
        {"threads": float(threads["ratio"].median()), "processes": float(processes["ratio"].median())},
        "gil" if grows else "none",
    )
