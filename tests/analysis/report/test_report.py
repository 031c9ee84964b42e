"""The report is complete, escaped, self-contained and correct about what ran."""

import csv
import io
import os
import re
import shutil
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.compare.bottleneck import WORDS, regions
from analysis.predict.inputs import ReportInputs, with_models
from analysis.read.results import load
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
from tests.support.report import show_figures

GPU = {"device": "cuda", "steps": 4, "cpus_per_rank": 8}
Made = dict[str, tuple[ReportInputs, dict[str, Table]]]


class Page(HTMLParser):
    """Parse a page into its elements with attributes, and its text."""

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
def made(gpu: Path, cpu: Path) -> Made:
    """Return study -> its analysis and all its tables, empty ones too."""
    inputs = {name: with_models(analyse(load(folder))) for name, folder in (("gpu", gpu), ("cpu", cpu))}
    return {name: (each, {key: make(each) for key, make in TABLES.items()}) for name, each in inputs.items()}


@pytest.fixture(scope="module")
def gpu_page(gpu: Path) -> Page:
    return Page(write_report(gpu).path)


@pytest.fixture(scope="module")
def cpu_page(cpu: Path) -> Page:
    return Page(write_report(cpu).path)


def small(directory: Path, **more: Any) -> Path:
    """Write a study of two trials, on 1 and 2 GPUs."""
    trials = grid(GPU | more, world_size=[1, 2])
    return write_results(directory, trials, lambda fields: {"step_s": 0.1}, spread=0.0)


def test_report_contains_exactly_the_expected_files(gpu: Path, gpu_page: Page, made: Made) -> None:
    written = {str(path.relative_to(gpu / "report")) for path in (gpu / "report").rglob("*") if path.is_file()}
    tables = [name for name, table in made["gpu"][1].items() if len(table.frame) or table.empty]
    assert {"phases", "host", "transfer", "hosts", "gpus", "ranks"} < set(tables)
    assert written == {
        "index.html",
        "report.md",
        "methods.md",
        "card.json",
        "card.svg",
        "tables/README.md",
        *(f"tables/{name}.csv" for name in tables),
        *(f"tables/{name}.tex" for name in tables if name != "trials"),
        *(
            f"figures/{name}.{kind}"
            for name in PLOTS
            if name not in ("ladder", "improvement", *TRAININGS)
            for kind in ("svg", "png")
        ),
    }


def test_every_row_names_its_trials(made: Made) -> None:
    analysis, tables = made["gpu"]
    known = set(analysis.results.trials["trial_id"])
    named = []
    for name, table in tables.items():
        if name in ("hosts", "gpus", "ranks") or table.frame.empty:  # hardware, not measurements
            continue
        rows = csv.DictReader(io.StringIO(table.to_csv()))
        ids = [(row.get("trial_ids") or row.get("trial_id") or "").split() for row in rows]
        assert all(ids), name
        assert {trial_id for row_ids in ids for trial_id in row_ids} <= known, name
        named.append(name)
    assert {"bucket_utilisation", "sweep", "ceiling", "predictions", "laws", "law_parameters"} <= set(named)


def test_page_is_self_contained(gpu_page: Page) -> None:
    for tag, attributes in gpu_page.elements:
        assert tag not in ("iframe", "object", "img", "image")
        assert not attributes.get("src")
        target = attributes.get("href") or attributes.get("xlink:href") or "#"
        assert target.startswith(("#", "data:")), "a link to another file breaks when the page is moved"


def test_the_policy_allows_one_script_and_one_style_by_hash(gpu: Path, gpu_page: Page) -> None:
    page = (gpu / "report" / "index.html").read_text()
    (policy,) = [a["content"] or "" for tag, a in gpu_page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        expected = b64encode(sha256(content.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{expected}'"
    assert rules["default-src"] == "'none'"
    assert not any(name.startswith("on") for _, attributes in gpu_page.elements for name in attributes)


def test_ids_are_unique_and_internal_links_resolve(gpu: Path, gpu_page: Page) -> None:
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
    assert page.count("<script") == 1  # the report's own script
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;") >= 8


def without_commands(latex: str) -> str:
    """Return LaTeX without its commands and escaped characters."""
    rest = re.sub(r"\\[^a-zA-Z]", "", latex)
    while (shorter := re.sub(r"\\[a-zA-Z]+(\{[^{}\\]*\})?|(?<!\\)\{\}", "", rest)) != rest:
        rest = shorter
    return rest


@pytest.mark.parametrize("study", ["cpu", "gpu"])
def test_every_latex_table_is_ascii_with_special_characters_escaped(study: str, made: Made) -> None:
    shown = {name: table for name, table in made[study][1].items() if len(table.frame)}
    assert {"throughput", "speed_up_weak", "laws", "law_parameters", "sweep", "hosts", "trials"} <= set(shown)
    for name, table in shown.items():
        latex = table.to_latex(name)
        assert latex.isascii(), name
        assert re.findall(r"^\\label\{(.*)\}$", latex, flags=re.MULTILINE) == [f"tab:{name}"]
        [caption] = re.findall(r"^\\caption\{(.*)\}$", latex, flags=re.MULTILINE)
        rows = [line.removesuffix(r" \\") for line in latex.splitlines() if line.endswith(r" \\")]
        assert len(rows) == 1 + len(table.shown().frame), name
        cells = [row.split(" & ") for row in rows]
        assert {len(row) for row in cells} == {len(table.shown().columns)}, name
        for piece in [caption, *(cell for row in cells for cell in row)]:
            assert not set(without_commands(piece)) & set("\\{}$&#^_~%"), (name, piece)


def test_latex_captions_headers_and_cells_are_escaped() -> None:
    text = "5 % of $x_1$ & {a} \\b ~ ^ # 10⁶ T₁^γ µs ±1 × ≥ ≤ √2 → é 1\u00a0– “a” --gpus 漢\n가"
    escaped = (
        r"5 \% of \$x\_1\$ \& \{a\} \textbackslash{}b \textasciitilde{} \textasciicircum{} \# 10\textsuperscript{6} "
        r"T\textsubscript{1}\textasciicircum{}\ensuremath{\gamma} \ensuremath{\mu}s \ensuremath{\pm}1 "
        r"\ensuremath{\times} \ensuremath{\geq} \ensuremath{\leq} \ensuremath{\surd}2 \ensuremath{\rightarrow} e 1"
        r"\,\textendash{} ``a'' -{}-gpus ? ??"
    )
    latex = Table(text, (Column("a", text),), pd.DataFrame({"a": [text, "[0]"]})).to_latex()
    assert rf"\caption{{{escaped}}}" in latex
    assert latex.splitlines().count(rf"{escaped} \\") == 2
    assert r"{}[0] \\" in latex.splitlines()  # LaTeX would read a bare one as an argument of the row before


def test_unmeasured_tables_have_no_section(gpu: Path, gpu_page: Page) -> None:
    for title in ("Accuracy by global batch", "Goodput", "Epoch 5"):
        assert title not in gpu_page.text
        assert title not in (gpu / "report/report.md").read_text()


def test_counts_cover_every_trial_status(gpu: Path, gpu_page: Page) -> None:
    counts = {"done": 99, "failed": 3, "timed out": 0, "out of memory": 3, "pruned": 3, "infeasible": 1}
    assert dict(status_counts(load(gpu))) == counts
    listed = " ".join(gpu_page.text.split())
    assert "99 done 3 failed 3 out of memory 3 pruned 1 infeasible" in listed


@pytest.mark.usefixtures("no_figures")
def test_missing_trials_are_counted_if_the_plan_is_known(tmp_path: Path) -> None:
    directory = small(tmp_path / "results")
    assert "missing" not in dict(status_counts(load(directory)))
    known = [folder.name for folder in (directory / "trials").iterdir()]
    write_study(directory, configuration={"planned_trials": [*known, "one-more", "another"]})
    assert dict(status_counts(load(directory)))["missing"] == 2
    assert "2 missing" in " ".join(Page(write_report(directory).path).text.split())


@pytest.mark.usefixtures("no_figures")
def test_partial_report_is_marked(tmp_path: Path) -> None:
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
def test_study_without_done_trials_has_a_page(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    assert "No trial is done yet" in Page(write_report(directory).path).text
    write_trial(directory, record(FIELDS, "failed", "no such file: weights.bin"))
    page = Page(write_report(directory).path)
    assert "No trial is done yet" in page.text
    assert "no such file: weights.bin" in page.text


def test_stale_figures_are_removed_and_foreign_files_remain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show_figures(monkeypatch, {"scaling_weak"})
    directory = small(tmp_path / "results")
    write_report(directory)
    retired = [directory / "report/figures/efficiency_weak.png", directory / "report/tables/trials.tex"]
    for path in retired:
        path.write_text("of an older report")
    figure, foreign = directory / "report/figures/scaling_weak.svg", directory / "report/figures/mine.svg"
    assert figure.exists()
    foreign.write_text("mine")
    for folder in (directory / "trials").iterdir():
        if folder.name.split("-")[2] == "2":
            shutil.rmtree(folder)
    write_report(directory)
    assert not figure.exists()
    assert not any(path.exists() for path in retired)
    assert foreign.exists()


@pytest.mark.usefixtures("no_figures")
def test_report_is_written_to_the_given_folder(tmp_path: Path) -> None:
    directory = small(tmp_path / "results")
    assert write_report(directory, tmp_path / "elsewhere").path == f"{tmp_path}/elsewhere/index.html"
    assert not (directory / "report").exists()


@pytest.mark.usefixtures("no_figures")
@pytest.mark.timeout(60)  # opening a named pipe waits for its reader, for ever
@pytest.mark.parametrize("kind", ["named pipe", "link"])
def test_names_in_the_report_folder_are_replaced_and_never_followed(kind: str, tmp_path: Path) -> None:
    study, out, precious = write_study(tmp_path / "study"), tmp_path / "shared", tmp_path / "precious"
    precious.write_text("mine")
    out.mkdir()
    for name in ("index.html", "index.html.tmp", "report.md", "report.md.tmp"):
        if kind == "link":
            (out / name).symlink_to(precious)
        else:
            os.mkfifo(out / name)
    write_report(study, out)
    assert precious.read_text() == "mine"
    assert (out / "index.html").read_text().startswith("<!doctype html>")
    assert (out / "report.md").is_file() and not (out / "report.md").is_symlink()
    assert not list(out.rglob(".*"))


@pytest.mark.usefixtures("no_figures")
def test_summary_has_one_row_per_configuration(tmp_path: Path) -> None:
    found = write_report(small(tmp_path / "results")).summary
    assert found.columns == ["GPUs", "throughput (samples/s)", "step time (ms)", "weak efficiency (%)", "n"]
    assert found.rows == [("1", "320", "100", "100.0", "1"), ("2", "640", "100", "100.0", "1")]
    assert found.left_out is None


@pytest.mark.usefixtures("no_figures")
def test_empty_study_has_an_empty_summary(tmp_path: Path) -> None:
    assert write_report(write_study(tmp_path / "results")).summary.rows == []


def test_answer_counts_trials_without_result_by_reason(tmp_path: Path) -> None:
    directory = small(tmp_path / "results")
    assert not any("no result" in sentence for sentence in answer(with_models(analyse(load(directory)))))
    why = "CUDA graphs exist on GPUs only"
    for batch, status, reason in (
        (1, "infeasible", why), (2, "infeasible", why), (4, "out_of_memory", "rank 1: 80 GiB"),
        (8, "pruned", "4 did not fit"), (16, "failed", "x" * 500),
    ):  # fmt: skip
        write_trial(directory, record(FIELDS | GPU | {"batch_per_gpu": batch, "repeat": 3}, status, reason))
    sentence = answer(with_models(analyse(load(directory))))[1]
    assert sentence.startswith("5 of 7 trials ")
    assert sentence.endswith(f": {why} (2); out of memory (2); {'x' * 119}… (1).")


def test_answer_lists_only_the_most_common_reasons(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    for batch in range(1, 12):
        write_trial(directory, record(FIELDS | GPU | {"batch_per_gpu": batch}, "infeasible", f"reason {batch}"))
    (sentence,) = answer(with_models(analyse(load(directory))))
    assert sentence.startswith("11 of 11 trials ")
    assert sentence.count("reason ") == 8
    assert sentence.endswith("; 3 more reasons.")


def test_answer_states_efficiency_best_configuration_and_its_bound(tmp_path: Path) -> None:
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
    scaling, memory, best = answer(found)
    assert re.findall(r"[\d.]+ times", scaling) == ["1.96 times", "1.00 times"]
    assert re.findall(r"98.0\u00a0% \[98.0, 98.0\] \((.*?)\)", scaling) == ["batch 64 per GPU"]
    assert re.findall(r"50.0\u00a0% \[50.0, 50.0\] \((.*?)\)", scaling) == ["batch 8 per GPU"]
    assert "from 1.1 GiB at batch 8 to 1.8 GiB at 64" in memory
    assert "2 GPUs, batch 64 per GPU, 2,510 [2,510, 2,510] samples/s; runner-up" in best
    assert "runner-up: 1 GPU, batch 64 per GPU, 49.0\u00a0% less (significantly" in best
    bound, host, growth = limits(found)
    assert f"bound by {WORDS['compute'].label}" in bound and "take 92\u00a0% of a step" in bound
    assert f"{WORDS['idle'].takes}, 5\u00a0%" in bound and "at most 1.05x" in bound
    assert f"2 are bound by {WORDS['host'].label} and 2 are bound by {WORDS['compute'].label}" in bound
    assert "at most 1.94x for batch 8 per GPU, 1 GPU" in bound
    assert re.search(r"\(4[89]\u00a0% of the step\)", bound), "48.5 %, which rounds either way"
    assert host.startswith("2 of 4 configurations are host-bound")
    assert "batch 8 per GPU, 1 GPU: it needs 10.0 ms" in host
    assert "2.1 times the 4.9 ms" in host and "busy for 50\u00a0%" in host
    assert "a larger batch, compilation or CUDA graphs" in host
    assert "(batch 8 per GPU): a step with instruments takes 10.0 ms longer on 2 GPUs" in growth
    assert "backward, by 6.0 ms" in growth
    assert growth.endswith("grows by 10.0 ms.")


def test_loading_is_reported_as_the_bound(tmp_path: Path) -> None:
    def law(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": 0.1, "shares": (0.25, 0.05, 0.25, 0.05, 0.3, 0.1)}

    found = with_models(analyse(load(write_results(tmp_path / "results", grid(GPU, world_size=[1]), law, spread=0.0))))
    assert regions(found.configurations, found.communication)["bound"].tolist() == ["load"]
    (sentence,) = limits(found)
    assert f"bound by {WORDS['load'].label}: {WORDS['load'].takes} takes 25\u00a0%" in sentence
    assert WORDS["load"].change in sentence
    assert "at most 1.33x" in sentence


def test_runner_up_may_not_be_significantly_different(tmp_path: Path) -> None:
    trials = grid(GPU, loader_workers=[1, 2], repeat=range(3))
    directory = write_results(tmp_path / "results", trials, lambda fields: {"step_s": 0.1}, spread=0.03)
    assert answer(with_models(analyse(load(directory))))[0].endswith("less (not significantly different, 95\u00a0%).")


def test_trust_reports_single_repeats_and_measurement_overhead(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    for repeat, size in ((0, 1), (1, 1), (0, 2)):
        fields = FIELDS | GPU | {"repeat": repeat, "world_size": size}
        write_trial(directory, record(fields), steps(fields, 0.1, instruments=1.05))
    lines = trust(with_models(analyse(load(directory))))
    assert lines[0].startswith("1 of 2 configurations ran once")
    assert any(line.startswith("In 3 of 3 trials the measurement overhead") for line in lines)
    assert not any("must be noise" in line for line in lines)


def test_superlinear_weak_scaling_is_a_caveat(tmp_path: Path) -> None:
    def superlinear(name: str, on_two_s: float) -> list[str]:
        trials = grid(GPU, world_size=[1, 2], repeat=range(3))
        law = {1: 0.1, 2: on_two_s}
        folder = write_results(
            tmp_path / name, trials, lambda fields: {"step_s": law[fields["world_size"]]}, spread=0.002
        )
        return [line for line in trust(with_models(analyse(load(folder)))) if "better than ideal" in line]

    [line] = superlinear("faster on two", 0.08)
    [percent] = re.findall(r"^In 1 case weak scaling is better than ideal by more than 5.%, at best ([\d.]+)", line)
    assert float(percent) == pytest.approx(125, abs=0.5)
    assert superlinear("a little faster", 0.098) == superlinear("slower", 0.11) == []


def test_quiet_study_reports_its_spread_and_no_warning(tmp_path: Path) -> None:
    trials = grid(GPU, world_size=[1, 2], repeat=range(5))
    directory = write_results(tmp_path / "results", trials, lambda fields: {"step_s": 0.1}, spread=0.002)
    (line,) = trust(with_models(analyse(load(directory))))
    assert line.startswith("5 repeats per configuration")
    assert "±0." in line
    assert line.endswith("None is wider than ±5\u00a0%.")


@pytest.mark.parametrize(("groups", "expected"), [(5, ["5"]), (3, ["5", "3"])])
def test_repeats_that_share_a_worker_group_are_no_separate_starts(
    groups: int, expected: list[str], tmp_path: Path
) -> None:
    directory = write_study(tmp_path / "results")
    for fields in grid(GPU, world_size=[1, 2], repeat=range(5)):
        name = f"20260101T000000-{fields['repeat'] % groups}"
        write_trial(directory, record(fields) | {"worker_group": name}, steps(fields, 0.1))
    line = next(line for line in trust(with_models(analyse(load(directory)))) if "per configuration" in line)
    assert re.findall(r"(\d+) (?:repeat|separate start)s", line.partition(";")[0]) == expected


@pytest.mark.usefixtures("no_figures")
def test_done_trial_without_throughput_is_excluded(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    write_trial(directory, record(FIELDS), steps(FIELDS, 0.1).assign(window_s=float("nan")))
    assert "No trial is done yet" in Page(write_report(directory).path).text
