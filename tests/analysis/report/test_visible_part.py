"""The part of the report that is visible at first: its order, its size, and that it agrees with the card."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import yaml

import analysis
from analysis.figures.answers import work_rows
from analysis.figures.style import INK
from analysis.predict.inputs import with_models
from analysis.read.results import load
from analysis.report.answer_tables import MOST_ROWS, largest_steps, outlook, phases_of_headline, scales
from analysis.report.methods import CITATION, bibtex, methods
from analysis.report.picture import first_drawn
from analysis.report.questions import questions
from analysis.report.report import environment_rows, write_report
from analysis.report.sentences import MOST_ACTIONS, actions, holds_back
from analysis.study import analyse
from analysis.tables.batch_size import ladder
from analysis.tables.table import Column, Table
from analysis.text import as_html
from scripts.claims.sources import committed_inputs
from tests.support.cards import RESULTS
from tests.support.frames import grid, write_results

pytestmark = pytest.mark.xdist_group("committed studies")

ROOT = Path(__file__).parent.parent.parent.parent
MOST_WORDS, MOST_TABLES, MOST_BYTES = 1_500, 8, 1_500_000
MOST_FIGURE_WORDS = 300
QUESTIONS = [
    "Does it scale?",
    "What holds it back?",
    "What should I change?",
    "What would more GPUs bring?",
    "Can I trust it?",
]


class Visible(HTMLParser):
    """Collect what a reader sees before opening anything: words, headings, and rows per table.

    Summaries of collapsed parts are visible. Text of figures counts in their wide form only.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.headings: list[str] = []
        self.rows: list[int] = []
        self.figures = 0
        self._hidden: list[str] = []
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        is_hidden = tag in ("script", "style", "title") or attributes.get("class") == "narrow"
        if tag == "details" and "open" not in attributes or is_hidden:
            self._hidden.append(tag)
        if tag == "summary" and self._hidden:
            self._hidden.append("summary")
        if self._is_visible():
            self.rows += [0] if tag == "table" else []
            self.figures += tag == "figure"
            if tag == "tr":
                self.rows[-1] += 1
        self._open.append(tag)
        if self._hidden and tag == "div" and not is_hidden:
            self._hidden.append("inner div")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass
        if self._hidden and (self._hidden[-1] == tag or (tag == "div" and self._hidden[-1] == "inner div")):
            self._hidden.pop()

    def handle_data(self, data: str) -> None:
        if self._is_visible() and (text := data.split()):
            self.words += text
            if self._open and self._open[-1] == "h2":
                self.headings.append(" ".join(text))

    def _is_visible(self) -> bool:
        return not self._hidden or self._hidden[-1] == "summary"


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of a committed study of the default kind."""
    out = tmp_path_factory.mktemp("report")
    write_report(RESULTS / "captured", out)
    return out


def test_questions_that_results_do_not_answer_are_collapsed(tmp_path: Path) -> None:
    page = Path(write_report(RESULTS / "hpml-lab4-memory", tmp_path).path).read_text()
    shown = " ".join(Visible(page).words)
    assert "Q1: Does an epoch take longer or shorter" in shown
    assert "8 more questions, not answered by these results" in shown
    assert "Q2: Is this weak or strong scaling" not in shown
    assert "Q2: Is this weak or strong scaling" in page


def test_the_visible_part_of_the_default_study_fits_into_a_few_screens(default: Path) -> None:
    page = (default / "index.html").read_text()
    seen = Visible(page)
    assert 100 < len(seen.words) <= MOST_WORDS
    assert 3 <= len(seen.rows) <= MOST_TABLES
    assert max(seen.rows) <= 1 + MOST_ROWS
    assert 4 <= seen.figures <= 1 + len(QUESTIONS)
    assert len(page.encode()) <= MOST_BYTES
    assert page.count("<table") > len(seen.rows) + 15, "everything else is collapsed, not lost"


def test_card_and_figure_come_first_then_the_questions_in_order(default: Path) -> None:
    page = (default / "index.html").read_text()
    assert Visible(page).headings == [*QUESTIONS, "Everything else"]
    order = [page.index(part) for part in ('class="facts"', 'class="card', "<figure", "<h2>", 'id="everything"')]
    assert order == sorted(order)
    markdown = (default / "report.md").read_text()
    assert re.findall(r"^##? (.*)$", markdown, flags=re.MULTILINE)[1:7] == [*QUESTIONS, "Everything else"]
    assert markdown.index("| **scales** |") < markdown.index("figures/work.svg") < markdown.index(QUESTIONS[0])


def test_facts_line_has_model_data_devices_torch_and_date(default: Path) -> None:
    (line,) = re.findall(r'<p class="facts">(.*?)</p>', (default / "index.html").read_text())
    facts = re.findall(r"<span>(.*?)</span>", line)
    assert len(facts) == 5
    assert "resnet18" in facts[0] and "px" in facts[1]
    assert facts[2] == "1 to 4 × NVIDIA H200"
    assert re.fullmatch(r"torch 2\.\d+\.\d+\+cu\d+", facts[3])
    assert re.fullmatch(r"2026-\d\d-\d\d( to 2026-\d\d-\d\d)?", facts[4])


def test_the_figures_are_about_the_configuration_of_the_card(default: Path) -> None:
    lines = {line["key"]: line for line in json.loads((default / "card.json").read_text())["lines"]}
    work = next(entry for entry in lines["scales"]["quantities"] if entry["name"] == "equivalent_ranks")
    (table,) = re.findall(r'<section id="scale".*?</section>', (default / "index.html").read_text(), flags=re.DOTALL)
    assert f"{work['value']:.2f}" in re.sub(r"<svg.*?</svg>", "", table, flags=re.DOTALL)
    assert f">{work['value']:.2f}</text>" in (default / "figures" / "work.svg").read_text()


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("large-batch", "Which accuracy does it reach?"),
        ("acceleration-ladder", "Which step gains most?"),
        ("forum-phases-h200", "How long does each part of a step take?"),
        ("doors/study", "What ran, and how fast?"),
    ],
)
@pytest.mark.usefixtures("no_figures")
def test_a_study_answers_its_own_question_first(name: str, first: str, tmp_path: Path) -> None:
    page = Path(write_report(RESULTS / name, tmp_path).path).read_text()
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "no link leads to another part than it names"
    seen = Visible(page)
    assert seen.headings[0] == first
    assert max(seen.rows) <= 1 + MOST_ROWS
    assert len(seen.rows) <= MOST_TABLES


def test_a_long_ladder_shows_its_first_and_best_steps_and_leaves_out_those_that_change_little() -> None:
    ratios = [1.0, 0.87, 1.38, 1.86, 1.12, 0.92, 1.46, 1.13, 1.01, 3.26]
    steps = pd.DataFrame({"step": [f"step {i}" for i in range(10)], "step_ratio": ratios})
    steps["cumulative_ratio"] = steps["step_ratio"].cumprod()
    steps["against"] = [None, *(f"step {i}" for i in (0, 1, 2, 3, 4, 4, 6, 7, 7))]
    table = largest_steps(Table("Ladder", (Column("step", "step"), Column("step_ratio", "speed-up")), steps), steps)
    assert table.frame["step"].tolist() == [f"step {i}" for i in (0, 1, 2, 3, 4, 6, 7, 9)]
    assert table.note == "Without “step 5” and “step 8”: shown are the steps that change most, and what they follow."
    assert set(table.frame["against"].dropna()) <= set(table.frame["step"]), "the step compared with is a row"
    steps.loc[9, "against"] = "step 8"
    table = largest_steps(Table("Ladder", (Column("step", "step"), Column("step_ratio", "speed-up")), steps), steps)
    assert len(table.frame) <= MOST_ROWS
    assert {"step 0", "step 9"} <= set(table.frame["step"]), "the first and the best stay, also after a long chain"


def test_the_table_of_a_ladder_has_no_empty_cell_and_names_what_is_compared() -> None:
    inputs = committed_inputs("acceleration-ladder")[0]
    table = ladder(inputs)
    first = table.frame.groupby("machine", sort=False).head(1)
    assert (first["step_ratio"] == 1).all()
    assert (first["against"] == first["step"]).all()
    assert table.frame[["step_ratio", "against"]].notna().all(axis=None)
    published = table.frame[table.frame["machine"].str.startswith("another")]
    assert published["step"].tolist()[:3] == ["start", "after 1 change", "after 2 changes"]


def test_what_is_not_resolved_is_not_explained_either() -> None:
    inputs = committed_inputs("interconnect/unlimited")[0]
    assert inputs.headlines[0].scaling is not None and inputs.headlines[0].scaling["efficiency_more"] > 0
    assert inputs.lost_ranks == {}
    assert not [text for text in holds_back(inputs) if "lost" in text]
    assert work_rows(inputs)["is_open"].tolist()[:2] == [False, True]


def test_options_and_percentages_stay_on_one_line() -> None:
    shown = as_html("run `a <b>` with (--gpus 1,2) --set pin_memory=false, 2 % of GPT-2")
    assert "<code>a &lt;b&gt;</code>" in shown
    assert '(<span class="option">--gpus 1,2</span>)' in shown
    assert "2\u00a0%" in shown
    assert '<span class="option">GPT-2</span>' in shown
    assert " ".join(shown.striptags().split()) == "run a <b> with (--gpus 1,2) --set pin_memory=false, 2 % of GPT-2"


def test_figures_of_a_study_with_many_configurations_show_a_part(tmp_path: Path) -> None:
    """48 configurations in 8 panels make 48 bars and 24 lines; the complete figures are among everything else."""
    inputs = committed_inputs("forum-phases-h200")[0]
    shown: set[str] = set()
    words = 0
    for question in questions(inputs):
        picture = first_drawn(inputs, question.figures, {}, shown)
        assert picture is None or picture.name not in shown
        styles = re.findall("<text[^>]*>", picture.svg) if picture else []
        assert all(INK in style for style in styles), "black text is invisible in the dark"
        shown |= {picture.name} if picture else set()
        if picture and not question.is_collapsed:
            words += sum(len(text.split()) for text in re.findall(r"<text[^>]*>(.*?)</text>", picture.svg))
    assert {"phases_brief", "scaling_weak_brief"} <= shown
    assert 0 < words <= MOST_FIGURE_WORDS
    table = phases_of_headline(inputs)
    assert table.frame["trial_ids"].iloc[0] == inputs.headline_row["trial_ids"]
    assert 2 < len(table.frame) <= MOST_ROWS


def test_constant_and_empty_columns_say_nothing() -> None:
    frame = pd.DataFrame({"a": [1, 2], "same": [3, 3], "empty": [None, None], "x": [5.0, 5.0]})
    frame = frame.assign(x_low=[4.0, 4.0], x_high=[6.0, 6.0])
    columns = (Column("a", "a"), Column("same", "same"), Column("empty", "empty"), Column("x", "x", interval=True))
    assert [column.name for column in Table("t", columns, frame).telling().columns] == ["a", "x"]
    assert [column.name for column in Table("t", columns, frame.head(1)).telling().columns] == ["a", "same", "x"]
    main = (*columns[:1], Column("same", "same", is_main=True))
    assert [column.name for column in Table("t", main, frame).telling().columns] == ["a", "same"]


def test_the_best_and_the_worst_series_are_listed_if_there_are_many() -> None:
    inputs = committed_inputs("default-4gpu")[0]
    table = scales(inputs)
    rows = inputs.scaling[inputs.scaling["ideal"] > 1]
    rows = rows[rows["world_size"] == rows.groupby("series")["world_size"].transform("max")]
    assert len(table.frame) == MOST_ROWS < len(rows)
    assert table.frame["configuration"].iloc[0] == inputs.headline
    assert table.frame["efficiency"].max() == rows["efficiency"].max()
    assert table.frame["efficiency"].min() == rows["efficiency"].min()
    assert (table.frame["work"] == table.frame["efficiency"] * table.frame["world_size"]).all()


def test_the_outlook_lists_predictions_only() -> None:
    inputs = committed_inputs("default-4gpu")[0]
    table = outlook(inputs)
    assert len(table.frame) and table.frame["step_s"].notna().all()
    assert set(table.frame["world_size"]) == {8, 16}


def test_actions_ask_for_what_the_study_lacks(tmp_path: Path) -> None:
    single = write_results(
        tmp_path / "single", grid({"device": "cuda", "steps": 4}, world_size=[1, 2]), lambda t: {"step_s": 0.1},
        spread=0.0,
    )  # fmt: skip
    (line,) = actions(analyse(load(single)))
    assert line.startswith("Run more repeats: 2 of 2 ")
    quiet = write_results(
        tmp_path / "quiet", grid({"device": "cuda", "steps": 4}, world_size=[1, 2], repeat=range(5)),
        lambda t: {"step_s": 0.1}, spread=0.002,
    )  # fmt: skip
    assert actions(analyse(load(quiet))) == []
    for name in ("default-4gpu", "communication", "hpml-lab4-h200"):
        found = actions(committed_inputs(name)[0])
        assert 0 < len(found) <= MOST_ACTIONS + 1
        assert all(len(line.split()) < 40 for line in found)


# ------------------------------------------------------------------------------------------- methods and notebooks


def test_methods_state_versions_repeats_and_date_and_cite_the_program(tmp_path: Path) -> None:
    trials = grid({"device": "cuda", "steps": 4}, world_size=[1, 2], repeat=range(3))
    directory = write_results(tmp_path / "results", trials, lambda t: {"step_s": 0.1}, spread=0.01)
    text = methods(with_models(analyse(load(directory))))
    assert "Each of the 2 configurations ran 3 times" in text
    assert "PyTorch 2.11.0" in text and "CUDA 13.0" in text and "driver 570.86" in text
    assert "cuDNN" not in text and "lock file" not in text, "these trials do not record them"
    assert re.search(r"The trials ran on \d{4}-\d\d-\d\d", text)
    assert bibtex() in text


def test_the_environment_states_the_cluster_and_the_governor_if_they_are_recorded(tmp_path: Path) -> None:
    directory = write_results(
        tmp_path / "results", grid({"device": "cuda", "steps": 4}, world_size=[1, 2]), lambda t: {"step_s": 0.1},
        spread=0.0,
    )  # fmt: skip
    assert not {"Ray cluster", "CPU governor"} & {name for name, _ in environment_rows(analyse(load(directory)))}
    for file in directory.glob("trials/*/trial.json"):
        record = json.loads(file.read_text())
        record["environment"]["cluster"] = {"nodes": 1, "gpus": 2, "cpus": 32}
        for node in record["environment"]["nodes"]:
            node["cpu_governor"] = "performance"
        file.write_text(json.dumps(record))
    rows = dict(environment_rows(analyse(load(directory))))
    assert rows["Ray cluster"] == "1 node, 2 GPUs, 32 CPUs" and rows["CPU governor"] == "performance"


def test_methods_of_a_single_trial_are_in_the_singular(tmp_path: Path) -> None:
    trials = grid({"device": "cuda", "model": "resnet18", "dataset": "synthetic", "image_size": 224}, world_size=[1])
    directory = write_results(tmp_path / "results", trials, lambda t: {"step_s": 0.1}, spread=0.01)
    text = methods(with_models(analyse(load(directory))))
    assert "We trained resnet18 on synthetic images of 224 pixels, with 1 NVIDIA H200 GPU, in 1 trial of" in text
    assert "The configuration ran once." in text


def test_methods_list_the_numbers_of_gpus_and_the_file_of_a_users_workload(tmp_path: Path) -> None:
    text = methods(committed_inputs("captured")[0])
    assert (
        "We trained resnet18 and resnet50 on synthetic images of 224 pixels, with 1, 2 and 4 NVIDIA H200 GPUs" in text
    )
    assert " on synthetic text, with " in methods(committed_inputs("mlstm-scaling")[0])
    trials = grid({"device": "cuda", "workload": "/home/me/mine.py:build"}, world_size=[1, 2])
    directory = write_results(tmp_path / "results", trials, lambda t: {"step_s": 0.1}, spread=0.01)
    assert "We trained mine.py:build, with 1 and 2 " in methods(with_models(analyse(load(directory))))


def test_methods_include_what_newer_trials_record(tmp_path: Path) -> None:
    trials = grid({"device": "cuda", "steps": 4}, world_size=[1, 2])
    directory = write_results(tmp_path / "results", trials, lambda t: {"step_s": 0.1}, spread=0.01)
    for path in directory.rglob("trial.json"):
        record = json.loads(path.read_text())
        record["environment"] |= {"lock_file": "0123456789ab"}
        record["environment"]["versions"] |= {"cudnn": "91900"}
        record["environment"]["nodes"][0] |= {"os": "Debian GNU/Linux 12, Linux 6.1"}
        path.write_text(json.dumps(record))
    text = methods(with_models(analyse(load(directory))))
    assert "cuDNN 91900" in text and "0123456789ab" in text and "Debian GNU/Linux 12, Linux 6.1" in text


def test_bibtex_is_that_of_the_citation_file() -> None:
    citation = yaml.safe_load(CITATION.read_text())
    entry = bibtex()
    assert entry.startswith("@software{") and entry.count("{") == entry.count("}")
    assert citation["title"] in entry and citation["version"] in entry and str(citation["date-released"])[:4] in entry


def test_scaling_returns_efficiencies_with_intervals(tmp_path: Path) -> None:
    trials = grid({"device": "cuda", "steps": 4}, world_size=[1, 2], repeat=range(3))
    law = {1: 0.1, 2: 0.125}
    directory = write_results(tmp_path / "results", trials, lambda t: {"step_s": law[t["world_size"]]}, spread=0.001)
    rows = analysis.scaling(directory)
    assert rows["scaling"].tolist() == ["weak", "weak"]
    low, value, high = (
        float(rows.set_index("world_size")[f"efficiency{end}"].to_dict()[2]) for end in ("_low", "", "_high")
    )
    assert value == pytest.approx(0.8, rel=0.01)
    assert low < value < high


def test_figure_returns_a_figure_by_name_or_lists_the_names(tmp_path: Path) -> None:
    trials = grid({"device": "cuda", "steps": 4}, world_size=[1, 2])
    directory = write_results(tmp_path / "results", trials, lambda t: {"step_s": 0.1}, spread=0.0)
    figure = analysis.figure(directory, "scaling_weak")
    assert figure is not None and figure.axes
    with pytest.raises(ValueError, match=r"one of .*scaling_weak.*, got 'weak'"):
        analysis.figure(directory, "weak")


def test_the_example_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    variables: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "outputs are not committed"
            exec("".join(cell["source"]), variables)
    assert variables["figure"] is not None
    assert len(variables["weak"]) > 0  # type: ignore[arg-type]
