"""The summary card in all its forms. Run this file as a module to rewrite the golden files in `cards`."""

import json
import re
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from analysis.compare.causes import lost_ranks
from analysis.predict.inputs import ReportInputs
from analysis.report.card import as_html, as_json, as_json_text, as_markdown, as_text, card_at
from analysis.report.card_svg import as_svg, wrapped
from analysis.report.questions import questions
from analysis.report.sentences import actions
from analysis.verdict.card import Card, card_of
from analysis.verdict.lines.subject import subjects
from scripts.claims.sources import committed_inputs
from tests.support.cards import RESULTS, STUDIES, failures, interrupted, weak

pytestmark = pytest.mark.xdist_group("committed studies")

GOLDEN = Path(__file__).parent / "cards"
COMMITTED = sorted(str(path.parent.relative_to(RESULTS)) for path in RESULTS.rglob("study.json"))
CAUSES = {
    "exposed transfer": "transfer", "queueing for transfer": "queueing", "slowest rank": "wait", "host": "host",
    "loading": "load", "slower compute": "slower_compute",
}  # fmt: skip
"""Keys of the quantities by the words of the card."""
MOST_TEXT_WORDS, MOST_ANSWER_WORDS = 870, 700
"""Words of the visible part without figures: what every report says, and answers to a study's own questions, which are
up to nine."""
SVG = "{http://www.w3.org/2000/svg}"


def text_of(name: str, directory: Path) -> str:
    return as_text(card_at(STUDIES[name](directory))) + "\n"


@pytest.mark.parametrize("name", STUDIES)
def test_card_is_as_written_down(name: str, tmp_path: Path) -> None:
    assert text_of(name, tmp_path / "results") == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", COMMITTED)
def test_card_of_a_committed_study_is_complete_in_every_form_and_adds_up(name: str) -> None:
    analysis, *others = committed_inputs(name)
    card = card_of(analysis, others)
    assert_complete(card)
    assert_shown_parts_add_up(card)
    texts, answers = visible_words(analysis, card)
    assert texts <= MOST_TEXT_WORDS
    assert answers <= MOST_ANSWER_WORDS
    for subject in subjects(analysis):
        parts = lost_ranks(subject.scaling, analysis.communication.exposed, analysis.configurations)
        if subject.scaling is not None and parts:
            total = subject.scaling["world_size"] * (1 - subject.scaling["efficiency"])
            assert sum(parts.values()) == pytest.approx(total, abs=1e-9)


def visible_words(inputs: ReportInputs, card: Card) -> tuple[int, int]:
    """Count the words that the page shows before anything is opened, without those of figures: texts and answers."""
    texts = [as_text(card), *actions(inputs)]
    answers = list[str]()
    for question in questions(inputs):
        table = None if question.is_collapsed or question.table is None else question.table(inputs)
        texts += [question.title, *question.sentences(inputs), *(figure.caption for figure in question.figures[:1])]
        answers += [part for reply in question.replies(inputs) for part in (reply.question, reply.text)]
        if table is not None and len(table.frame):
            cells = table.cells()
            texts += [table.title, table.note, *cells.columns, *(str(cell) for cell in cells.to_numpy().ravel())]
    words, in_answers = (sum(len(text.split()) for text in part) for part in (texts, answers))
    return words, in_answers


def assert_complete(committed: Card) -> None:
    """Check that no form of a card has an empty field, a missing number, or a line of more than 80 columns."""
    lines = as_text(committed).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(committed.lines) <= 6, "with title or trust at most seven lines"
    texts = [committed.heading, committed.trust.reason, *(line.text for line in committed.lines)]
    assert not [text for text in texts if not text.strip() or re.search(r"\b(nan|None|inf|unknown number)\b", text)]
    assert not [line for line in lines if re.search(r"–(?!\d)|\(\)", line)], "dashes of missing values"
    assert not [text for text in texts if re.search(r": *$", text)], "lines may be wrapped after a colon, texts not"
    keys = [line.key for line in committed.lines]
    assert len(keys) == len(set(keys))
    loaded = json.loads(as_json_text(committed))
    assert [line["key"] for line in loaded["lines"]] == keys
    drawn = ET.fromstring(as_svg(committed))
    words = " ".join("".join(node.itertext()) for node in drawn.iter(f"{SVG}text")).split()
    for text in texts:
        assert set(text.split()) <= set(words)
        assert spaced(text) in spaced(Markup(as_html(committed)).striptags())
    assert as_markdown(committed).count("\n") == len(committed.lines) + 3


def spaced(text: str) -> str:
    """Return a text with equal spaces: the page has no-break spaces where a line must not end."""
    return " ".join(text.split())


def assert_shown_parts_add_up(card: Card) -> bool:
    """Compare the total that a card shows with the parts that it shows. Return False if it shows no parts.

    Each cause is also compared with its value. What is unexplained also contains causes too small to show.
    """
    line = card.line("lost")
    shown = re.match(r"([\d.]+) .*?: (.*)", line.text) if line and card.form == "scaling" else None
    if shown is None:
        return False
    signs = re.findall(r"(?:^|([+−]) )([\d.]+) [a-z]", shown[2])
    parts = [-float(value) if sign == "−" else float(value) for sign, value in signs]
    assert sum(parts) == pytest.approx(float(shown[1]), abs=1e-9), line and line.text
    words = re.findall(r"(?:^|[+−] )[\d.]+ ([a-z ]+[a-z])", shown[2])
    exact = {entry.part: entry.value for entry in (line.quantities if line else ()) if entry.value is not None}
    values = [exact[CAUSES[word]] for word in words if word in CAUSES]
    named = [part for part, word in zip(parts, words, strict=True) if word in CAUSES]
    unit = 10.0 ** -len(shown[1].partition(".")[2])
    assert named == pytest.approx(values, abs=0.5001 * unit), line and line.text
    return True


def test_committed_studies_show_parts() -> None:
    for name in ("mlstm-scaling", "interconnect/1gbit"):  # of which gains are parts too
        analysis, *others = committed_inputs(name)
        assert assert_shown_parts_add_up(card_of(analysis, others))


def test_json_has_numbers_with_units_and_stable_names(tmp_path: Path) -> None:
    found = as_json(card_at(weak(tmp_path / "results")))
    assert found["schema_version"] == 1
    assert (found["study"], found["form"], found["partial"], found["missing_trials"]) == (
        "default",
        "scaling",
        False,
        0,
    )
    assert found["facts"] | {
        "model": "resnet50", "precision": "bf16", "batch_per_gpu": 256, "global_batch": 1024, "world_size": 4,
        "nodes": 1, "device_kind": "GPU", "device_name": "NVIDIA H200", "torch": "2.11.0", "date": "2023-11-14",
    } == found["facts"]  # fmt: skip
    assert found["trust"]["level"] == "good"
    assert found["trust"]["groups"] == 5
    assert 0 < found["trust"]["half_width"] < 0.01
    lines = {line["key"]: line for line in found["lines"]}
    assert list(lines) == ["scales", "lost", "bound_by", "do_next", "more_gpus"]
    numbers = {key: numbers_of(line) for key, line in lines.items()}
    work = numbers["scales"]["equivalent_ranks", None]
    assert work["unit"] == "GPU"
    assert 3.8 < work["low"] < work["value"] < work["high"] < 4.0
    assert work["resolved"] and work["further_repeats"] is None
    causes = [entry["value"] for (name, _), entry in numbers["lost"].items() if name == "lost_ranks_by_cause"]
    assert sum(causes) == pytest.approx(numbers["lost"]["lost_ranks", None]["value"], abs=1e-9)
    assert sum(causes) == pytest.approx(4 - work["value"], abs=1e-9)
    assert numbers["more_gpus"]["predicted_ranks", None]["value"] == 8
    assert 0 <= numbers["more_gpus"]["held_out_error", None]["value"] < 0.1


def numbers_of(line: dict[str, Any]) -> dict[tuple[str, str | None], dict[str, Any]]:
    return {(entry["name"], entry["part"]): entry for entry in line["quantities"]}


def test_partial_study_names_the_command_that_resumes_it(tmp_path: Path) -> None:
    card = card_at(interrupted(tmp_path / "results"))
    assert (card.is_partial, card.missing_trials, card.planned_trials) == (True, 5, 15)
    assert card.heading.endswith("(partial: 5 of 15 planned trials missing)")
    assert card.resume_command.startswith("python -m study.scaling run weak --gpus 1,2,4")
    line = card.line("do_next")
    assert line is not None and card.resume_command in line.text


def test_text_of_a_study_is_escaped_and_narrow_text_wraps(tmp_path: Path) -> None:
    card = card_at(failures(tmp_path / "results"))
    assert "no such file: <weights.bin>" in " ".join(as_text(card).split())
    assert "&lt;weights.bin&gt;" in as_html(card)
    assert "<weights" not in as_html(card) + as_svg(card) + as_markdown(card)
    assert max(map(len, as_text(card, 40).splitlines())) <= 40


def test_words_wider_than_a_line_are_cut() -> None:
    lines = wrapped("a " + "w" * 200 + " b", 400, 16)
    assert "".join(lines).replace(" ", "") == "a" + "w" * 200 + "b"
    assert len(lines) > 3


if __name__ == "__main__":
    for each in sys.argv[1:] or STUDIES:
        with tempfile.TemporaryDirectory() as folder:
            GOLDEN.mkdir(exist_ok=True)
            (GOLDEN / f"{each}.txt").write_text(text_of(each, Path(folder) / "results"))
