"""The report: complete, escaped, without network, and right about what ran."""

import csv
import io
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.compare.bottleneck import regions
from analysis.load.results import load
from analysis.predict.inputs import with_models
from analysis.report.report import status_counts, write_report
from analysis.report.sections import PLOTS, TABLES
from analysis.study import analyse
from analysis.tables.table import Column, Table
from analysis.verdict.answer import answer, limits
from analysis.verdict.trust import trust
from tests.analysis.figures.test_plots import TRAININGS
from tests.support.frames import (
    FIELDS,
    cpu_study,
    gpu_study,
    grid,
    record,
    steps,
    write_results,
    write_study,
    write_trial,
)

GPU = {"device": "cuda", "steps": 4, "cpus_per_rank": 8}


class Page(HTMLParser):
    """Every element of a page with its attributes, its ids, and the text in it."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(Path(path).read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_study(tmp_path_factory.mktemp("gpu") / "results")


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpu_study(tmp_path_factory.mktemp("cpu") / "results")


@pytest.fixture(scope="module")
def gpu_page(gpu: Path) -> Page:
    return Page(write_report(gpu).path)


@pytest.fixture(scope="module")
def cpu_page(cpu: Path) -> Page:
    return Page(write_report(cpu).path)


def small(directory: Path, **more: Any) -> Path:
    """Two trials: 1 and 2 GPUs."""
    trials = grid(GPU | more, world_size=[1, 2])
    return write_results(directory, trials, lambda fields: {"step_s": 0.1}, spread=0.0)


def test_all_files_are_there_and_nothing_half_written(gpu: Path, gpu_page: Page) -> None:
    written = {str(path.relative_to(gpu / "report")) for path in (gpu / "report").rglob("*") if path.is_file()}
    analysis = with_models(analyse(load(gpu)))
    made = {name: make(analysis) for name, make in TABLES.items()}
    tables = [name for name, table in made.items() if len(table.frame) or table.empty]
    assert {"phases", "host", "transfer", "hosts", "gpus", "ranks"} < set(tables)
    assert written == {
        "index.html",
        "report.md",
        *(f"tables/{name}.{kind}" for name in tables for kind in ("csv", "tex")),
        *(f"figures/{name}.{kind}" for name in PLOTS if name not in ("ladder", *TRAININGS) for kind in ("svg", "png")),
    }


def test_every_row_of_numbers_names_the_trials_that_it_comes_from(gpu: Path) -> None:
    analysis = with_models(analyse(load(gpu)))
    known = set(analysis.results.trials["trial_id"])
    named = []
    for name, make in TABLES.items():
        table = make(analysis)
        if name in ("hosts", "gpus", "ranks") or table.frame.empty:  # what a study ran on, not what it measured
            continue
        rows = csv.DictReader(io.StringIO(table.to_csv()))
        ids = [(row.get("trial_ids") or row.get("trial_id") or "").split() for row in rows]
        assert all(ids), name
        assert {trial_id for of_row in ids for trial_id in of_row} <= known, name
        named.append(name)
    assert {"bucket_utilisation", "sweep", "ceiling", "predictions", "laws", "law_parameters"} <= set(named)


def test_the_page_needs_no_network_and_no_other_file(gpu_page: Page) -> None:
    for tag, attributes in gpu_page.elements:
        assert tag not in ("iframe", "object", "img", "image")
        assert not attributes.get("src")
        target = attributes.get("href") or attributes.get("xlink:href") or "#"
        assert target.startswith(("#", "data:")) or (
            tag == "a" and re.fullmatch(r"(tables|figures)/\w+\.(csv|tex|svg|png)", target)
        )


def test_ids_are_unique_and_links_within_the_page_arrive(gpu: Path, gpu_page: Page) -> None:
    ids = [attributes["id"] for _, attributes in gpu_page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:url\(#|href="#)([^)"]+)', (gpu / "report" / "index.html").read_text())
    assert used
    assert set(used) <= set(ids)


@pytest.mark.usefixtures("no_figures")
def test_every_string_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    directory = write_study(tmp_path / "results", name=evil, question=evil, command=evil)
    fields = FIELDS | GPU | {"precision": evil, "data_dir": evil}
    trial = record(fields) | {"trial_id": "evil"}
    trial["environment"]["nodes"][0] |= {"host": evil, "cpu_model": evil}
    trial["environment"]["nodes"][0]["gpus"][0]["name"] = evil
    trial["environment"]["variables"] = {evil: evil}
    write_trial(directory, trial, steps(fields, 0.1))
    other = fields | {"precision": "bf16", "world_size": 2}
    write_trial(directory, record(other) | {"trial_id": "other"}, steps(other, 0.1))
    failed = record(FIELDS | GPU | {"repeat": 7}, "failed", evil) | {"trial_id": "<b>id</b>", "log": evil}
    write_trial(directory, failed | {"trial_id": "b-id"})
    page = Path(write_report(directory).path).read_text()
    assert page.count("<script") == 1  # the report's own, which sorts and filters
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;") >= 8


def left_of(latex: str) -> str:
    """What is left of a piece of LaTeX without its commands and escaped characters."""
    rest = re.sub(r"\\[^a-zA-Z]", "", latex)
    while (shorter := re.sub(r"\\[a-zA-Z]+(\{[^{}\\]*\})?|(?<!\\)\{\}", "", rest)) != rest:
        rest = shorter
    return rest


@pytest.mark.parametrize("study", ["cpu", "gpu"])
def test_every_table_is_latex_without_a_special_or_non_ascii_character_left(
    study: str, request: pytest.FixtureRequest
) -> None:
    analysis = with_models(analyse(load(request.getfixturevalue(study))))
    shown = {name: table for name, make in TABLES.items() if len((table := make(analysis)).frame)}
    assert {"throughput", "speed_up_weak", "laws", "law_parameters", "sweep", "hosts", "trials"} <= set(shown)
    for name, table in shown.items():
        latex = table.to_latex()
        assert latex.isascii(), name
        [caption] = re.findall(r"^\\caption\{(.*)\}$", latex, flags=re.MULTILINE)
        rows = [line.removesuffix(r" \\") for line in latex.splitlines() if line.endswith(r" \\")]
        assert len(rows) == 1 + len(table.frame), name
        cells = [row.split(" & ") for row in rows]
        assert {len(row) for row in cells} == {len(table.shown().columns)}, name
        for piece in [caption, *(cell for row in cells for cell in row)]:
            assert not set(left_of(piece)) & set("\\{}$&#^_~%"), (name, piece)


def test_captions_headers_and_cells_are_escaped_for_latex_alike() -> None:
    text = "5 % of $x_1$ & {a} \\b ~ ^ # 10⁶ T₁^γ µs ±1 × ≥ ≤ √2 → é 1\u00a0– “a” --gpus 漢\n가"
    escaped = (
        r"5 \% of \$x\_1\$ \& \{a\} \textbackslash{}b \textasciitilde{} \textasciicircum{} \# 10\textsuperscript{6} "
        r"T\textsubscript{1}\textasciicircum{}\ensuremath{\gamma} \ensuremath{\mu}s \ensuremath{\pm}1 \ensuremath{\times} "
        r"\ensuremath{\geq} \ensuremath{\leq} \ensuremath{\surd}2 \ensuremath{\rightarrow} e 1\,\textendash{} ``a'' "
        r"-{}-gpus ? ??"
    )
    latex = Table(text, (Column("a", text),), pd.DataFrame({"a": [text, "[0]"]})).to_latex()
    assert rf"\caption{{{escaped}}}" in latex
    assert latex.splitlines().count(rf"{escaped} \\") == 2
    assert r"{}[0] \\" in latex.splitlines()  # bare, the row before would take it as an argument


def test_what_a_study_did_not_measure_has_no_section(gpu: Path, gpu_page: Page) -> None:
    for title in ("Accuracy over the global batch", "Goodput", "Epoch 5"):
        assert title not in gpu_page.text
        assert title not in (gpu / "report/report.md").read_text()


def test_the_counts_say_what_became_of_every_trial(gpu: Path, gpu_page: Page) -> None:
    counts = {"done": 165, "failed": 3, "timed out": 0, "out of memory": 3, "pruned": 9, "infeasible": 1}
    assert dict(status_counts(load(gpu))) == counts
    listed = " ".join(gpu_page.text.split())
    assert "165 done 3 failed 3 out of memory 9 pruned 1 infeasible" in listed


@pytest.mark.usefixtures("no_figures")
def test_missing_trials_are_counted_where_the_plan_is_known(tmp_path: Path) -> None:
    directory = small(tmp_path / "results")
    assert "missing" not in dict(status_counts(load(directory)))
    known = [folder.name for folder in (directory / "trials").iterdir()]
    write_study(directory, configuration={"planned_trials": [*known, "one-more", "another"]})
    assert dict(status_counts(load(directory)))["missing"] == 2
    assert "2 missing" in " ".join(Page(write_report(directory).path).text.split())


@pytest.mark.usefixtures("no_figures")
def test_a_partial_report_says_so(tmp_path: Path) -> None:
    directory = small(tmp_path / "results")
    page = Page(write_report(directory, partial=True).path)
    assert "Partial: the study was interrupted" in page.text
    assert "**Partial: the study was interrupted." in (directory / "report" / "report.md").read_text()
    assert "artial" not in Page(write_report(directory).path).text


def test_cpu_ranks_are_never_called_gpus(cpu: Path, cpu_page: Page) -> None:
    assert "2 CPU ranks" in cpu_page.text
    assert "GPU" not in cpu_page.text
    assert "GPU" not in (cpu / "report" / "report.md").read_text()


@pytest.mark.usefixtures("no_figures")
def test_a_study_without_a_done_trial_still_has_a_clear_page(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    assert "No trial is done yet" in Page(write_report(directory).path).text
    write_trial(directory, record(FIELDS, "failed", "no such file: weights.bin"))
    page = Page(write_report(directory).path)
    assert "No trial is done yet" in page.text
    assert "no such file: weights.bin" in page.text


def test_figures_that_no_longer_apply_go_and_foreign_files_stay(tmp_path: Path) -> None:
    directory = small(tmp_path / "results")
    write_report(directory)
    figure, foreign = directory / "report/figures/speed_up_weak.svg", directory / "report/figures/mine.svg"
    assert figure.exists()
    foreign.write_text("mine")
    for folder in (directory / "trials").iterdir():
        if folder.name.split("-")[2] == "2":
            shutil.rmtree(folder)
    write_report(directory)
    assert not figure.exists()
    assert foreign.exists()


def test_the_report_goes_where_it_is_told(tmp_path: Path) -> None:
    directory = small(tmp_path / "results")
    assert write_report(directory, tmp_path / "elsewhere").path == f"{tmp_path}/elsewhere/index.html"
    assert not (directory / "report").exists()


def test_the_terminal_gets_a_row_for_each_configuration(tmp_path: Path) -> None:
    found = write_report(small(tmp_path / "results")).summary
    assert found.columns == ["GPUs", "throughput (samples/s)", "step time (ms)", "weak efficiency (%)", "n"]
    assert found.rows == [("1", "320", "100", "100.0", "1"), ("2", "640", "100", "100.0", "1")]
    assert found.left_out is None


def test_an_empty_study_has_an_empty_summary(tmp_path: Path) -> None:
    assert write_report(write_study(tmp_path / "results")).summary.rows == []


def test_the_answer_counts_what_has_no_result_by_reason(tmp_path: Path) -> None:
    directory = small(tmp_path / "results")
    assert not any("no result" in sentence for sentence in answer(with_models(analyse(load(directory)))))
    why = "CUDA graphs exist on GPUs only"
    for batch, status, reason in (
        (1, "infeasible", why), (2, "infeasible", why), (4, "out_of_memory", "rank 1: 80 GiB"), (8, "pruned", "4 did not fit"),
        (16, "failed", "x" * 500),
    ):  # fmt: skip
        write_trial(directory, record(FIELDS | GPU | {"batch_per_gpu": batch, "repeat": 3}, status, reason))
    assert answer(with_models(analyse(load(directory))))[1] == (
        f"Of 7 trials 5 have no result: {why} (2); more memory than there is (2); {'x' * 120} (1)."
    )


def test_the_answer_names_the_commonest_reasons_only(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    for batch in range(1, 12):
        write_trial(directory, record(FIELDS | GPU | {"batch_per_gpu": batch}, "infeasible", f"reason {batch}"))
    (sentence,) = answer(with_models(analyse(load(directory))))
    assert sentence.startswith("Of 11 trials 11 have no result: ")
    assert sentence.count("reason ") == 8
    assert sentence.endswith("; and 3 more reasons.")


def test_the_answer_gives_efficiency_the_fastest_and_its_bound(tmp_path: Path) -> None:
    trials = grid(GPU, world_size=[1, 2], batch_per_gpu=[8, 64], repeat=range(3))
    step_s = {(1, 8): 0.010, (2, 8): 0.020, (1, 64): 0.050, (2, 64): 0.051}

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        small_batch = fields["batch_per_gpu"] == 8
        return {
            "step_s": step_s[fields["world_size"], fields["batch_per_gpu"]],
            "launch_ratio": 1.0 if small_batch else 0.3,
            "previous_done": 1.0 if small_batch else 0.0,
            "busy_ratio": 0.5 if small_batch else 0.95,
        }

    found = with_models(analyse(load(write_results(tmp_path / "results", trials, law, spread=0.0))))
    assert answer(found) == [
        (
            "With the batch per GPU held (weak scaling), 2 GPUs reach 1.96 times the throughput of 1 GPU at best, an efficiency of "
            "98.0\u00a0% [98.0, 98.0] (batch 64 per GPU), and 1.00 times at worst, 50.0\u00a0% [50.0, 50.0] (batch 8 per GPU)."
        ),
        "On one GPU peak memory goes from 1.1 GiB at batch 8 to 1.8 at 64.",
        (
            "The highest throughput is 2,510 [2,510, 2,510] samples/s, with batch 64 per GPU, 2 GPUs; the next (1 GPU) is 49.0\u00a0% "
            "slower, beyond noise."
        ),
    ]
    assert limits(found) == [
        (
            "The fastest configuration is bound by compute: kernels of forward, loss, backward and optimizer take 92\u00a0% of a step. "
            "What helps is lower precision, compilation or a faster device; the largest other part is idle time of the device without "
            "a measured cause, 5\u00a0% (communication that is not hidden, which was not measured, is in it), without which a "
            "step would be at most 1.05 times as fast. Of the 4 configurations, 2 are bound by the host and 2 are bound by compute. One change could bring most with batch 8 "
            "per GPU, 1 GPU: without the device waiting for the host to issue work, 48\u00a0% of a step, it would be at most 1.94 "
            "times as fast."
        ),
        (
            "The host limits 2 of 4 configurations, most with batch 8 per GPU, 1 GPU: it needs 10.0 ms to issue a step whose kernels "
            "take the GPU 4.9 ms, 2.1 times as long, and the GPU is busy for 50\u00a0% of the step. There a larger batch, compilation "
            "or CUDA graphs can help: more work for each launch, or fewer of them."
        ),
        (
            "Where weak scaling loses most (batch 8 per GPU), a step takes 10.0 ms longer on 2 GPUs; the phase that grows most is "
            "backward, by 6.0 ms, which holds the all-reduce and the wait for slower ranks. The device waits for the host there, "
            "whose time to issue a step grows by 10.0 ms."
        ),
    ]


def test_waiting_for_data_is_named_as_the_bound(tmp_path: Path) -> None:
    def law(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": 0.1, "shares": (0.25, 0.05, 0.25, 0.05, 0.3, 0.1)}

    found = with_models(analyse(load(write_results(tmp_path / "results", grid(GPU, world_size=[1]), law, spread=0.0))))
    assert regions(found.configurations, found.communication)["bound"].tolist() == ["load"]
    assert limits(found) == [
        (
            "The fastest configuration is bound by loading: waiting for a batch takes 25\u00a0% of a step. What helps most is more "
            "loader workers, or a format that is read and decoded faster; without that part a step would be at most 1.33 times "
            "as fast."
        )
    ]


def test_a_difference_within_noise_is_called_that(tmp_path: Path) -> None:
    trials = grid(GPU, loader_workers=[1, 2], repeat=range(3))
    directory = write_results(tmp_path / "results", trials, lambda fields: {"step_s": 0.1}, spread=0.03)
    assert answer(with_models(analyse(load(directory))))[0].endswith("slower, which is within noise.")


def test_trust_names_lone_repeats_and_costly_instruments(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    for repeat, size in ((0, 1), (1, 1), (0, 2)):
        fields = FIELDS | GPU | {"repeat": repeat, "world_size": size}
        write_trial(directory, record(fields), steps(fields, 0.1, instruments=1.05))
    lines = trust(with_models(analyse(load(directory))))
    assert lines[0] == "1 of 2 configurations ran once, so they have no interval: run the study with more repeats."
    assert any(line.startswith("In 3 of 3 trials the instruments cost more than") for line in lines)
    assert not any("which only noise can do" in line for line in lines)


def test_weak_scaling_that_is_better_than_ideal_is_doubted(tmp_path: Path) -> None:
    def doubted(name: str, on_two_s: float) -> list[str]:
        trials = grid(GPU, world_size=[1, 2], repeat=range(3))
        law = {1: 0.1, 2: on_two_s}
        folder = write_results(
            tmp_path / name, trials, lambda fields: {"step_s": law[fields["world_size"]]}, spread=0.002
        )
        return [line for line in trust(with_models(analyse(load(folder)))) if "better than ideal" in line]

    [line] = doubted("faster on two", 0.08)
    assert line.startswith("In 1 place weak scaling is better than ideal, at best 125.")
    assert "either the reference was slowed" in line
    assert doubted("a little faster", 0.098) == doubted("slower", 0.11) == []


def test_a_calm_study_is_given_its_spread_and_no_warning(tmp_path: Path) -> None:
    trials = grid(GPU, world_size=[1, 2], repeat=range(5))
    directory = write_results(tmp_path / "results", trials, lambda fields: {"step_s": 0.1}, spread=0.002)
    (line,) = trust(with_models(analyse(load(directory))))
    assert line.startswith("5 repeats of each configuration; the middle one's 95\u00a0% interval of throughput is ±0.")
    assert line.endswith("None is wider than ±5\u00a0%.")


@pytest.mark.usefixtures("no_figures")
def test_a_done_trial_whose_throughput_is_unknown_is_left_out(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    write_trial(directory, record(FIELDS), steps(FIELDS, 0.1).assign(window_s=float("nan")))
    assert "No trial is done yet" in Page(write_report(directory).path).text
