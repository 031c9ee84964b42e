"""Every figure of the README and the pages comes from committed results, and every missed goal is on a page."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.check_claims import Entry, covered, missed_figures, problems, read_pages, rewritten
from scripts.claims.sources import Cell, Claim, Stated, Table, Value, cell, claim, figure, figures, number, yes_no

pytestmark = pytest.mark.xdist_group("committed studies")

PAGES = read_pages()
PAGE = "docs/evidence.md"
MISSED = figure("cpu-ranks", "2 gloo ranks, pinned / 2 independent ones, resnet18 batch 32 at 64 px")


def found(text: str, *entries: Entry) -> list[str]:
    """Return the problems of a page with these entries."""
    return problems({PAGE: text}, entries, [])


@pytest.fixture(scope="module")
def all_entries() -> list[Entry]:
    """All claims. They analyse committed results when they are imported, which not every process of a run needs."""
    from scripts.claims.pages import ENTRIES

    return ENTRIES


def test_every_figure_has_a_source_that_says_the_same_and_every_missed_goal_is_on_a_page(
    all_entries: list[Entry],
) -> None:
    assert problems(PAGES, all_entries, missed_figures()) == []


def test_a_changed_figure_is_found_and_rewritten_from_the_results(all_entries: list[Entry]) -> None:
    written = [entry for entry in all_entries if not isinstance(entry, Stated)]
    pages = {entry.page for entry in written}
    assert {PAGE, "README.md"} <= pages
    for page in sorted(pages):
        text = PAGES[page]
        entries = [entry for entry in written if entry.page == page]
        before = problems({page: text}, entries, [])
        for start, end in covered(text, entries):
            last = max(position for position in range(start, end) if text[position].isdigit())
            changed = text[:last] + str((int(text[last]) + 1) % 10) + text[last + 1 :]
            assert problems({page: changed}, entries, []) != before, (page, text[start:end])
            assert rewritten(changed, entries) == text


@pytest.mark.parametrize(
    "sentence",
    [
        "It is 12.3 % faster.",
        "It takes 14 ms.",
        "Found in 6 of 7 cases.",
        "It has 14 streams.",
        "It ran at 4,722 images per second.",
        "The ratio is 2 [1, 3].",
        "| case | rate |\n|---|---|\n| ours | 17 |",
    ],
)
def test_a_figure_without_a_source_is_a_problem(sentence: str) -> None:
    assert found(f"# Page\n\n{sentence}\n") != []


@pytest.mark.parametrize(
    "sentence",
    [
        "ResNet-50 at batch 1,024 and 224 px on 4 GPUs, torch 2.11, with 95 % intervals.",
        "Run `--set width=0.01` or see [a page](https://arxiv.org/abs/1706.02677).",
        "    python -m study.scaling run --gpus 1,2 --target-accuracy 0.93",
        "Exit codes: 0 or 130.",
    ],
)
def test_settings_and_code_need_no_source(sentence: str) -> None:
    assert found(f"{sentence}\n") == []


def test_a_stated_number_needs_no_source_but_has_to_be_on_the_page() -> None:
    setting = Stated(PAGE, "at most 2,000 trials", "limit")
    assert found("It takes at most 2,000\ntrials.\n", setting) == []
    assert len(found("It takes at most 3,000 trials.\n", setting)) == 2


@given(st.floats(0, 1e6), st.integers(0, 4))
def test_a_figure_is_compared_with_as_many_decimals_as_the_text_shows(value: float, decimals: int) -> None:
    says = claim(PAGE, "It takes {} ms.", number(value))
    assert found(f"It takes {value:,.{decimals}f} ms.\n", says) == []
    assert found(f"It takes {value + 2 * 10.0**-decimals:,.{decimals}f} ms.\n", says) != []


def test_an_interval_that_the_source_lacks_is_a_problem() -> None:
    says = claim(PAGE, "The ratio is {}.", number(1.0))
    assert found("The ratio is 1.0.\n", says) == []
    assert found("The ratio is 1.0 [0.9, 1.1].\n", says) != []
    known = claim(PAGE, "The ratio is {}.", number(1.0, 1.0, 1.02))
    assert found("The ratio is 1.00 [1.00, 1.02].\n", known) == []
    assert found("The ratio is 1.00 [0.98, 1.02].\n", known) != []


def test_a_missed_goal_that_no_page_mentions_is_a_problem(all_entries: list[Entry]) -> None:
    for missing in sorted(missed_figures()):
        others = [entry for entry in all_entries if missing not in sources(entry)]
        mentions = [problem for problem in problems({}, others, [missing]) if problem.startswith("no page mentions")]
        assert any(missing[1] in problem for problem in mentions), missing


def sources(entry: Entry) -> set[tuple[str, str]]:
    """Return the missed figures that an entry shows."""
    cells = [part for row in entry.rows for part in row if isinstance(part, Cell)] if isinstance(entry, Table) else []
    values = entry.values if isinstance(entry, Claim) else [value for part in cells for value in part.values]
    return set().union(*(value.missed for value in values))


def test_a_missed_goal_has_to_be_called_missed() -> None:
    assert found("Pinned ranks reach 0.83.\n", claim(PAGE, "Pinned ranks reach {}.", MISSED)) != []
    text = "Pinned ranks miss the goal at 0.83.\n"
    assert found(text, claim(PAGE, "Pinned ranks miss the goal at {}.", MISSED)) == []


@pytest.mark.parametrize(("answer", "admitted"), [(yes_no(MISSED), True), ("yes", False)])
def test_a_row_with_a_missed_goal_has_to_say_no(answer: Cell | str, admitted: bool) -> None:
    table = Table(PAGE, "ranks", ("case", "ratio", "goal met"), [("no batch", cell("{:2}", MISSED), answer)])
    text = rewritten("<!-- by python -m scripts.check_claims --write: ranks -->\n<!-- end -->\n", [table])
    assert "| no batch | 0.83 [0.81, 0.86] |" in text
    assert (found(text, table) == []) == admitted


def test_text_that_is_missing_or_ambiguous_is_a_problem() -> None:
    says = claim(PAGE, "takes {} ms", number(2))
    assert found("It takes 2 ms.\n", says) == []
    assert found("It needs 2 ms.\n", says) != []
    assert found("It takes 2 ms. That takes 2 ms.\n", says) != []


def test_values_scale_with_their_intervals() -> None:
    loss: Value = -100 * number(-0.0119, -0.0133, -0.0105)
    assert f"{loss:2}" == "1.19 [1.05, 1.33]"
    assert f"{loss:1v}" == "1.2"
    assert len(figures("faults", ".*: survived")) == len(re.findall(r"survived \d+ of \d+ times", PAGES[PAGE]))
