"""Scaling series and tables, compared with values computed by hand from known step times."""

import csv
import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.predict.inputs import ReportInputs, with_models
from analysis.read.results import load
from analysis.report.report import write_report
from analysis.report.sections import TABLES
from analysis.study import analyse
from analysis.tables.table import Column, Table
from analysis.text import decimals_for, join, with_interval
from tests.support.frames import FIELDS, gpu_study, grid, record, steps, write_results, write_study, write_trial

BASE = {"device": "cuda", "steps": 4, "cpus_per_rank": 8}


def analysis_of(
    directory: Path, trials: list[dict[str, Any]], step_ms: dict[tuple[int, int], float], **more: Any
) -> ReportInputs:
    """Analyse a study whose steps take `step_ms[world_size, batch_per_gpu]`, without noise."""

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": step_ms[fields["world_size"], fields["batch_per_gpu"]] / 1e3}

    return with_models(analyse(load(write_results(directory, trials, law, spread=0.0, **more))))


def rows(analysis: ReportInputs, label: str) -> pd.DataFrame:
    found = analysis.scaling[analysis.scaling["scaling"] == label]
    batches = analysis.configurations[["batch_per_gpu", "nodes", "precision"]]
    return found.join(batches, on="configuration").reset_index(drop=True)


@pytest.fixture
def exact(tmp_path: Path) -> ReportInputs:
    """1, 2 and 4 GPUs at batch 8 and 1 GPU at batch 16, two repeats; 1 and 2 GPUs share global batch 16."""
    step_ms = {(1, 8): 100.0, (2, 8): 125.0, (4, 8): 160.0, (1, 16): 180.0}
    trials = [t for t in grid(BASE, world_size=[1, 2, 4], batch_per_gpu=[8, 16], repeat=[0, 1])]
    directory = write_study(tmp_path / "results")
    for fields in trials:
        key = (fields["world_size"], fields["batch_per_gpu"])
        if key in step_ms:
            write_trial(directory, record(fields), steps(fields, step_ms[key] / 1e3))
    return with_models(analyse(load(directory)))


def test_tokens_per_second_follow_from_the_tokens_per_sample_that_the_users_code_states(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    for fields in grid(BASE, world_size=[2], batch_per_gpu=[8], repeat=[0, 1]):
        of_trial = record(fields)
        for rank in of_trial["environment"]["ranks"]:
            rank["tokens_per_sample"] = 512.0
        write_trial(directory, of_trial, steps(fields, 0.1))
    analysis = with_models(analyse(load(directory)))
    [value] = TABLES["throughput"](analysis).frame["tokens_per_s"]
    assert value == pytest.approx(512 * 2 * 8 / 0.1)


def test_weak_scaling_keeps_the_batch_per_gpu_constant(exact: ReportInputs) -> None:
    found = rows(exact, "weak")
    assert found[["batch_per_gpu", "world_size"]].to_numpy().tolist() == [[8, 1], [8, 2], [8, 4]]
    assert found["speed_up"].tolist() == pytest.approx([1.0, 2 * 100 / 125, 4 * 100 / 160])
    assert found["efficiency"].tolist() == pytest.approx([1.0, 0.8, 0.625])
    assert found["ideal"].tolist() == [1, 2, 4]


def test_strong_scaling_keeps_the_global_batch_constant(exact: ReportInputs) -> None:
    found = rows(exact, "strong")
    assert found[["batch_per_gpu", "world_size"]].to_numpy().tolist() == [[16, 1], [8, 2]]
    assert found["speed_up"].tolist() == pytest.approx([1.0, 180 / 125])
    assert found["efficiency"].tolist() == pytest.approx([1.0, 0.72])


def test_strong_scaling_may_accumulate_fewer_batches_instead(tmp_path: Path) -> None:
    """32 samples per step: four batches of 8 on one rank, two on two ranks, one on four."""
    layouts = {1: (4, 0.4), 2: (2, 0.25), 4: (1, 0.16)}
    trials = [
        trial
        for size, (accumulated, _) in layouts.items()
        for trial in grid(BASE, world_size=[size], accumulation_steps=[accumulated], batch_per_gpu=[8])
    ]
    law = {size: {"step_s": step_s} for size, (_, step_s) in layouts.items()}
    folder = write_results(tmp_path / "results", trials, lambda fields: law[fields["world_size"]], spread=0.0)
    found = analyse(load(folder)).scaling
    assert found["scaling"].tolist() == ["strong"] * 3
    assert found["world_size"].tolist() == [1, 2, 4]
    assert found["efficiency"].tolist() == pytest.approx([1.0, 0.8, 0.625])


def test_slow_interconnects_are_compared_with_the_single_rank_without_one(tmp_path: Path) -> None:
    """One GPU needs no interconnect, so it ran once, with "auto"; with sockets, 2 and 4 GPUs take 200 and 400 ms."""
    trials = [
        *grid(BASE, world_size=[1, 2], interconnect=["auto"]),
        *grid(BASE, world_size=[2, 4], interconnect=["socket"], communication_steps=[3], repeat=[1]),
    ]
    step_s = {("auto", 1): 0.1, ("auto", 2): 0.1, ("socket", 2): 0.2, ("socket", 4): 0.4}

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": step_s[fields["interconnect"], fields["world_size"]]}

    found = with_models(analyse(load(write_results(tmp_path / "results", trials, law, spread=0.0))))
    weak = found.scaling.join(found.configurations["interconnect"], on="configuration")
    weak = weak[weak["interconnect"] == "socket"]
    assert weak["scaling"].tolist() == ["weak", "weak"]
    assert weak["reference_world_size"].tolist() == [1, 1]
    assert weak["speed_up"].tolist() == pytest.approx([1.0, 1.0])
    assert weak["efficiency"].tolist() == pytest.approx([0.5, 0.25])


def test_configurations_without_counterpart_are_neither_weak_nor_strong(tmp_path: Path) -> None:
    trials = [FIELDS | BASE | {"batch_per_gpu": 8}, FIELDS | BASE | {"batch_per_gpu": 32, "world_size": 2}]
    found = analysis_of(tmp_path / "results", trials, {(1, 8): 100.0, (2, 32): 100.0})
    assert found.scaling["scaling"].tolist() == ["neither", "neither"]
    assert found.scaling["speed_up"].isna().all()
    assert TABLES["throughput"](found).frame["series"].tolist() == ["neither", "neither"]
    table = TABLES["weak_scaling"](found)
    assert table.to_markdown() == f"### {table.title}\n\n{table.empty}\n"
    assert table.empty


def test_series_that_differ_in_another_field_do_not_mix(tmp_path: Path) -> None:
    fast, slow = (
        FIELDS | BASE | {"batch_per_gpu": 8},
        FIELDS | BASE | {"batch_per_gpu": 8, "world_size": 2, "precision": "bf16"},
    )
    found = analysis_of(tmp_path / "results", [fast, slow], {(1, 8): 100.0, (2, 8): 100.0})
    assert set(found.scaling["scaling"]) == {"neither"}


@pytest.mark.usefixtures("no_figures")
def test_windows_of_one_epoch_do_not_split_series(tmp_path: Path) -> None:
    trials = grid(BASE, world_size=[1, 2], batch_per_gpu=[8, 16], repeat=[0, 1])
    trials = [
        t | {"steps": 64 // (t["world_size"] * t["batch_per_gpu"]), "warmup_steps": 16 // t["world_size"]}
        for t in trials
    ]
    found = analysis_of(tmp_path / "results", trials, {(1, 8): 100.0, (2, 8): 125.0, (1, 16): 180.0, (2, 16): 200.0})
    assert rows(found, "weak")["speed_up"].tolist() == pytest.approx([1.0, 1.6, 1.0, 1.8])
    assert rows(found, "strong")["speed_up"].tolist() == pytest.approx([1.0, 180 / 125])
    curve = found.batch_curve
    assert curve["series"].tolist() == [0, 0]
    assert curve["batch_per_gpu"].tolist() == [8, 16]
    page = Path(write_report(tmp_path / "results").path).with_name("report.md").read_text()
    assert "\n- steps: 2 to 8, derived from the other fields" in page
    assert "warmup steps: 8 to 16, derived from the other fields" in page


def test_chosen_numbers_of_steps_split_series(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    for number, fields in enumerate(grid(BASE, world_size=[1, 2], steps=[4, 8])):
        write_trial(directory, record(fields) | {"trial_id": str(number)}, steps(fields, 0.1))
    found = with_models(analyse(load(directory)))
    assert found.axes == ("world_size", "steps")
    weak = found.scaling[found.scaling["scaling"] == "weak"]
    assert weak["world_size"].tolist() == [1, 2, 1, 2]


def test_smallest_size_is_the_reference_if_one_gpu_was_not_measured(tmp_path: Path) -> None:
    trials = grid(BASE, world_size=[2, 4, 8], batch_per_gpu=[8])
    found = rows(analysis_of(tmp_path / "results", trials, {(2, 8): 100.0, (4, 8): 125.0, (8, 8): 200.0}), "weak")
    assert found["reference_world_size"].tolist() == [2, 2, 2]
    assert found["speed_up"].tolist() == pytest.approx([1.0, 1.6, 2.0])
    assert found["ideal"].tolist() == [1, 2, 4]
    assert found["efficiency"].tolist() == pytest.approx([1.0, 0.8, 0.5])


def test_nodes_may_differ_within_a_series(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    for size, nodes, step_s in ((1, 1, 0.10), (2, 1, 0.11), (2, 2, 0.125), (4, 2, 0.2)):
        fields = FIELDS | BASE | {"world_size": size, "nodes": nodes}
        trial = record(fields) | {"trial_id": f"n{nodes}x{size}"}
        write_trial(directory, trial, steps(fields, step_s))
    found = rows(with_models(analyse(load(directory))), "weak")
    assert found[["world_size", "nodes"]].to_numpy().tolist() == [[1, 1], [2, 1], [2, 2], [4, 2]]
    assert found["efficiency"].tolist() == pytest.approx([1.0, 0.1 / 0.11, 0.8, 0.5])


def test_a_reference_with_one_repeat_leaves_its_series_without_intervals(tmp_path: Path) -> None:
    trials = [FIELDS | BASE, *grid(BASE, world_size=[2], repeat=range(4))]
    directory = write_results(tmp_path / "results", trials, lambda fields: {"step_s": 0.1}, spread=0.01)
    found = rows(with_models(analyse(load(directory))), "weak")
    assert found["n"].tolist() == [1, 4]
    assert found["reference_n"].tolist() == [1, 1]
    assert found[["speed_up_low", "speed_up_high", "efficiency_low"]].isna().all(axis=None)
    assert found["speed_up"].notna().all()


def test_intervals_contain_the_known_law(tmp_path: Path) -> None:
    trials = grid(BASE, world_size=[1, 2, 4], batch_per_gpu=range(8, 15), repeat=range(5))
    lost = {1: 1.0, 2: 1.05, 4: 1.2}

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": 0.01 * fields["batch_per_gpu"] * lost[fields["world_size"]]}

    directory = write_results(tmp_path / "results", trials, law, spread=0.01)
    found = rows(with_models(analyse(load(directory))), "weak").query("ideal > 1")
    true = 1 / found["world_size"].map(lost)
    inside = (found["efficiency_low"] <= true) & (true <= found["efficiency_high"])
    assert len(found) == 14
    assert inside.sum() >= 12  # 95 % of 14; fewer would happen by chance in 3 % of seeds
    assert (found["speed_up_high"] / found["speed_up_low"]).between(1.005, 1.2).all()


def test_weak_table_matches_values_computed_by_hand(exact: ReportInputs) -> None:
    text = TABLES["weak_scaling"](exact).to_markdown()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in (table[0], *table[2:])] == [
        ["batch per GPU", "GPUs", "reference (samples/s)", "throughput (samples/s)", "speed-up", "efficiency (%)", "n"],
        ["8", "2", "80.0", "128", "1.60 [1.60, 1.60]", "80.0 [80.0, 80.0]", "2"],
        ["8", "4", "80.0", "200", "2.50 [2.50, 2.50]", "62.5 [62.5, 62.5]", "2"],
    ]


def test_only_the_csv_has_a_row_for_a_reference(exact: ReportInputs) -> None:
    table = TABLES["weak_scaling"](exact)
    assert [row["world_size"] for row in csv.DictReader(io.StringIO(table.to_csv()))] == ["1", "2", "4"]
    assert list(table.cells()["GPUs"]) == ["2", "4"]
    assert table.to_html("weak").count("<tr>") == table.to_latex().count(r"\\") == 3  # with the header


def test_csv_contains_plain_values_and_trial_ids(exact: ReportInputs) -> None:
    found = list(csv.DictReader(io.StringIO(TABLES["strong_scaling"](exact).to_csv())))
    assert float(found[1]["speed_up"]) == pytest.approx(1.44, rel=1e-12)
    assert found[0]["speed_up_low"] == ""
    assert found[1]["trial_ids"].split() == ["resnet18_small-fp32-2-8-0-0", "resnet18_small-fp32-2-8-0-1"]


def test_columns_without_values_are_omitted(tmp_path: Path) -> None:
    cpu = analysis_of(tmp_path / "cpu", grid({"steps": 4}, world_size=[1, 2]), {(1, 32): 100.0, (2, 32): 110.0})
    heads = list(TABLES["phases"](cpu).cells().columns)
    assert heads == [
        "CPU ranks", "step (ms)", "load wait (ms)", "forward (ms)", "loss (ms)", "backward (ms)", "optimizer (ms)",
        "overhead",
    ]  # fmt: skip
    shown = [table for make in TABLES.values() if len((table := make(cpu)).frame)]
    assert not any("GPU" in head for table in shown for head in table.cells().columns)


def test_shares_of_phases_refer_to_the_step(exact: ReportInputs) -> None:
    cells = TABLES["phases"](exact).cells()
    first = cells.iloc[0]
    assert first["forward (ms)"] == "28.1 (28\u00a0%)"
    assert first["loss (ms)"] == "2.0 (2\u00a0%)"
    assert first["backward (ms)"] == "60.2 (60\u00a0%)"


def test_results_older_than_the_loss_phase_show_it_within_the_forward_pass(tmp_path: Path) -> None:
    fields = FIELDS | BASE
    directory = write_study(tmp_path / "results")
    old = steps(fields, 0.1, (0.02, 0.01, 0.3, 0.0, 0.6, 0.07)).drop(columns=["loss_s", "loss_launch_s"])
    write_trial(directory, record(fields), old[~old["window"].isin(["busy", "transfer_synced"])])
    table = TABLES["phases"](with_models(analyse(load(directory))))
    assert "loss (ms)" not in table.cells()
    assert table.cells().iloc[0]["forward (ms)"] == "30.1 (30\u00a0%)"
    meaning = "forward pass and loss, including the wait for slower ranks in its collectives."
    assert dict(table.definitions())["forward (ms)"] == meaning


def test_failures_have_reason_and_log(tmp_path: Path) -> None:
    found = TABLES["failures"](with_models(analyse(load(gpu_study(tmp_path / "results"))))).cells()
    assert found["status"].value_counts().to_dict() == {"pruned": 3, "failed": 3, "out of memory": 3, "infeasible": 1}
    assert found.iloc[0].tolist() == [
        "resnet50-fp32-1-512-8-1", "failed", "rank 2: RuntimeError: <b>loader</b> died & left",
        "trials/resnet50-fp32-1-512-8-1/error.log",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "decimals"),
    [([0.0123, 4.5], 4), ([12.345], 1), ([123.4, 9999.0], 0), ([float("nan")], 0), ([0.0, 5.0], 2), ([1e-9], 6)],
)
def test_decimals_suit_the_smallest_value_of_a_column(values: list[float], decimals: int) -> None:
    assert decimals_for(pd.Series(values)) == decimals


def test_intervals_are_rounded_like_their_value() -> None:
    assert with_interval(12.34, 11.911, 12.777, 1) == "12.3 [11.9, 12.8]"
    assert with_interval(3.76, 3.754, 3.781, 1) == "3.76 [3.75, 3.78]", "an interval does not look like a point"
    assert with_interval(9.84, -54.01, 80.52, 2) == "10 [-54, 81]", "no digits that the interval leaves open"
    assert with_interval(1234.56, 1000.0, 1500.0, 2) == "1,235 [1,000, 1,500]"
    assert with_interval(0.1, 0.1, 0.1, 2) == "0.10 [0.10, 0.10]"
    assert with_interval(12345.6, float("nan"), float("nan"), 0) == "12,346"


def test_enumerated_parts_with_commas_are_separated_by_semicolons() -> None:
    assert join(["a", "b", "c"]) == "a, b and c"
    assert join(["a (1, 2)", "b [3, 4]"]) == "a (1, 2) and b [3, 4]"
    assert join(["a, 1", "b"]) == "a, 1; b"


def test_cells_are_escaped() -> None:
    frame = pd.DataFrame({"trial_id": ["<script>a|b</script> 5 % of $x_1$ & more\nlines"]})
    table = Table("Names", (Column("trial_id", "trial"),), frame)
    assert "<script>" not in table.to_html("names")
    assert "&lt;script&gt;a|b&lt;/script&gt;" in table.to_html("names")
    body = table.to_markdown().splitlines()[4]
    assert body.startswith(r"| &lt;script&gt;a\|b&lt;/script&gt; 5 % of $x\_1$ & more lines")
    assert (
        r"\textless{}script\textgreater{}a\textbar{}b\textless{}/script\textgreater{} 5 \% of \$x\_1\$ \& more"
        in table.to_latex()
    )
