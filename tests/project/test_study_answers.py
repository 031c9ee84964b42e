"""Each page answers each question of its study, and the coverage of the published studies is graded by its rules."""

import csv
import json
import re
from pathlib import Path

import pandas as pd
import pytest

from analysis.report.questions import questions
from scripts.claims.sources import committed_inputs
from scripts.study_answers import FOLDERS, FURTHER, RESULTS, section, study_answers
from scripts.study_coverage import COLUMNS, ENVIRONMENT, coverage, graded, rows
from scripts.study_page import COMMAND, page
from study.studies.questions import QUESTIONS, asked
from tests.support.frames import gpu_law, grid, write_results

pytestmark = pytest.mark.xdist_group("committed studies")

STUDIES = Path(__file__).parent.parent.parent / "docs" / "studies"
UNANSWERED = "These results do not answer the "


def sections(text: str) -> dict[str, str]:
    """Return the text after each bold question of a page."""
    parts = re.split(r"^\*\*(.+?)\*\* ", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", FOLDERS)
def test_the_page_of_answers_has_each_question_with_an_answer_or_a_command(name: str) -> None:
    answers = (STUDIES / "answers.md").read_text()
    (part,) = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", answers, flags=re.MULTILINE | re.DOTALL)
    assert f"## {name}\n{part}".rstrip() == section(name), "written by python -m scripts.study_answers"
    found = sections(part)
    assert list(found) == list(QUESTIONS[name].values())
    for text in found.values():
        if UNANSWERED in text:
            assert re.search(r"`python -m (study|scripts)\.\w+.*`", text), "the command that would answer"
        else:
            assert re.search(r"\d", text), "an answer has a number"


def pages_with_questions() -> dict[str, str]:
    """Return the results folder of each page whose study asks questions."""
    folders = {
        file.stem: [results.removeprefix("benchmarks/results/") for results, _, _ in COMMAND.findall(file.read_text())]
        for file in sorted(STUDIES.glob("*.md"))
    }
    return {
        name: found[0]
        for name, found in folders.items()
        if found and json.loads((RESULTS / found[0] / "study.json").read_text())["name"] in QUESTIONS
    }


PAGES = pages_with_questions()
PACKED = sorted({*PAGES.values(), *(name for names in (*FOLDERS.values(), *FURTHER.values()) for name in names)})


def test_each_results_folder_with_questions_and_a_page_of_its_name_is_checked() -> None:
    for file in RESULTS.glob("*/study.json"):
        asks = json.loads(file.read_text())["configuration"].get("questions")
        if asks and (STUDIES / f"{file.parent.name}.md").exists():
            assert file.parent.name in PAGES or file.parent.name in PAGES.values(), file.parent.name
    assert {name for names in FOLDERS.values() for name in names} <= set(PAGES.values())


@pytest.mark.parametrize("name", PAGES)
def test_the_page_of_packed_results_answers_each_question_of_their_study(name: str) -> None:
    study = json.loads((RESULTS / PAGES[name] / "study.json").read_text())["name"]
    found = sections((STUDIES / f"{name}.md").read_text().partition("## Summary")[0])
    assert list(found) == list(QUESTIONS[study].values())
    for text in found.values():
        if UNANSWERED in text:
            assert re.search(r"because .+ This would: `python -m (study|scripts)\.\w+.*`", text), "reason and command"
        else:
            assert re.search(r"\d", text), "an answer has a number"


@pytest.mark.parametrize("name", FURTHER)
def test_further_results_follow_the_answer_to_the_same_question(name: str) -> None:
    pairs = [(reply.key, folder) for folder, reply in study_answers(name)]
    keys = [key for key, _ in pairs]
    assert [key for index, key in enumerate(keys) if key not in keys[:index]] == list(QUESTIONS[name])
    assert keys == sorted(keys, key=list(QUESTIONS[name]).index)
    assert len(pairs) == len(set(pairs)) > len(set(keys))


def test_the_case_study_on_h200_has_one_gpu_better_and_its_memory_no_earlier_at_an_end() -> None:
    found = {(reply.key, folder): reply for folder, reply in study_answers("vgg-case-study")}
    better = found["vgg.one_is_better", "vgg-case-study-h200"]
    assert better.numbers["count"] == 1 and better.numbers["worst"] == pytest.approx(0.56, abs=0.005)
    assert "(1 repeat)" in better.text, "no interval"
    memory = found["vgg.memory", "vgg-case-study-h200"].numbers
    assert memory["ratio"] == pytest.approx(1.69, abs=0.005)
    assert memory["ratio_to_one"] == pytest.approx(1.0, abs=0.01)
    assert found["vgg.best_batch", "vgg-case-study-batches"].numbers["best"] == 128


@pytest.mark.parametrize("name", FOLDERS)
def test_the_report_of_a_study_shows_the_answers_to_its_questions(name: str) -> None:
    inputs = committed_inputs(FOLDERS[name][0])[0]
    shown = [reply.question for question in questions(inputs) for reply in question.replies(inputs)]
    assert shown == list(QUESTIONS[name].values())


@pytest.mark.parametrize("folder", PACKED)
def test_packed_results_ask_the_questions_of_their_study(folder: str) -> None:
    study = json.loads((RESULTS / folder / "study.json").read_text())
    asked = {entry["key"]: entry["question"] for entry in study["configuration"]["questions"]}
    assert asked == QUESTIONS[study["name"]]


def test_the_coverage_has_every_row_and_a_reason_for_each_that_does_not_work() -> None:
    with (STUDIES / "coverage.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == 71
    assert tuple(found[0]) == COLUMNS
    assert [row["row"] for row in found] == [row["row"] for row in rows()]
    assert {row["grade"] for row in found} <= {"works", "partly", "no"}
    for row in found:
        assert bool(row["reason"]) == (row["grade"] != "works"), row["row"]
        assert row["command"], row["row"]


def test_the_committed_coverage_is_what_the_results_give_now() -> None:
    with (STUDIES / "coverage.csv").open(newline="") as file:
        committed = list(csv.DictReader(file))
    computed = coverage()
    assert committed == [{name: str(row[name]) for name in COLUMNS} for row in computed]
    assert sum(row["grade"] == "works" for row in computed) >= 62


def trials(repeats: int, **fields: object) -> pd.DataFrame:
    common: dict[str, object] = {
        "device": "cuda",
        "device_name": "NVIDIA H100",
        "status": "done",
        "world_size": 2,
        ENVIRONMENT: 0,
    }
    common |= fields
    return pd.DataFrame([common | {"trial_id": f"t{repeat}", "repeat": repeat} for repeat in range(repeats)])


ROW = {"row": "r", "source": "s", "study": "one", "results": "folder", "answer": "k", "command": "c", "where": ""}


@pytest.mark.parametrize(
    ("repeats", "where", "answered", "grade"),
    [
        (3, "world_size=2", True, "works"),
        (3, "world_size=2", False, "partly"),
        (1, "world_size=2|4", True, "partly"),
        (3, "world_size=2|4", True, "works"),
        (3, "world_size=2&4", True, "partly"),
        (3, "status=done&out_of_memory", True, "partly"),
        (3, "world_size=4", True, "no"),
        (3, "unknown=1", True, "no"),
    ],
)
def test_a_row_is_graded_by_trials_repeats_and_answer(repeats: int, where: str, answered: bool, grade: str) -> None:
    found = graded(ROW | {"where": where}, {"folder": trials(repeats)}, {("folder", "k"): answered})
    assert found["grade"] == grade
    assert bool(found["reason"]) == (grade != "works")


@pytest.mark.parametrize(("first", "second", "repeats"), [(3, 1, 3), (2, 2, 2)])
def test_repeats_count_within_one_environment(first: int, second: int, repeats: int) -> None:
    mixed = pd.concat([trials(first), trials(second, **{ENVIRONMENT: 1})])
    assert graded(ROW, {"folder": mixed}, {("folder", "k"): True})["repeats"] == repeats


def test_trials_on_cpus_and_failed_trials_do_not_count() -> None:
    for fields in ({"device": "cpu"}, {"status": "failed"}):
        assert graded(ROW, {"folder": trials(3, **fields)}, {("folder", "k"): True})["grade"] == "no"


def test_other_results_do_not_answer_the_question_of_a_row() -> None:
    found = graded(ROW, {"folder": trials(3)}, {("folder", "k"): False, ("another", "k"): True})
    assert (found["answer"], found["grade"]) == ("no", "partly")


def test_a_row_without_trials_needs_only_the_answer() -> None:
    row = ROW | {"results": ""}
    assert graded(row, {}, {("folder", "k"): True})["grade"] == "works"
    assert graded(row, {}, {("folder", "k"): False})["grade"] == "no"


def test_a_generated_page_answers_each_question_first(tmp_path: Path) -> None:
    base = {"device": "cuda", "model": "vgg19", "steps": 4, "warmup_steps": 2, "loader_workers": 4}
    write_results(tmp_path / "results", grid(base, world_size=[1, 2]), gpu_law)
    file = tmp_path / "results" / "study.json"
    study = json.loads(file.read_text())
    listed = {entry["key"]: entry for name in QUESTIONS for entry in asked(name)["questions"]}
    study["configuration"] |= {"questions": list(listed.values())}
    file.write_text(json.dumps(study))
    found = sections(page(str(tmp_path / "results"), []).partition("## Summary")[0])
    assert list(found) == [entry["question"] for entry in listed.values()]
    for text in found.values():
        assert re.search(r"`python -m \S+.*`" if UNANSWERED in text else r"\d", text)
