"""Everything that a user reads is in the project's English: words of its glossary's left column do not occur.

Checked are Markdown, templates, and in the code: texts with spaces, headers of tables, help of commands and captions of
figures. Comments and other docstrings are not. Names of fields, columns and files are stored formats.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("study", "trainables", "analysis", "benchmarks", "scripts", "examples")

GLOSSARY = {
    r"mend(s|ed|ing)?": "fix",
    r"beg[aiu]n|begins|beginning": "start, started",
    r"told|said": "reported, listed",
    r"(?<!into )(?<!AWS )accounts?": "communication breakdown",
    r"remed(y|ies)": "recipe of training; fix of a problem",
    r"elbows?": "largest lossless batch",
    r"wires?(?! time)": "transfer, exposed communication",
    r"ceilings?": "measured all-reduce limit",
    r"beside|side by side": "extra, concurrent, next to",
    r"legs|in turns": "blocks, rounds",
    r"doubts?": "caveat",
    r"course_s": "step_time_difference_s",
    r"unfinite": "non_finite",
    r"settled|unmet|lacking|misfit|unfit": "done, missing, mismatch, does not fit",
    r"looks? back": "check",
    r"contests?": "best configuration",
    r"rungs?": "step of the ladder",
    r"(?<!\bas a )whole": "complete, entire",
    r"study's own clock": "study overhead",
    r"instruments cost": "measurement overhead",
    r"kinds? of work": "workloads",
    r"bound by (the wire|its host)": "communication-bound, host-bound",
    r"live [−-] trace": "live vs. trace",
    r"within noise": "not significantly different",
}
"""The left column as regular expressions, and the right one. Words that also have a plain use are left out."""

FORBIDDEN = re.compile("|".join(rf"\b(?P<w{i}>{word})\b" for i, word in enumerate(GLOSSARY)), re.I)

_STORED = "part of the name of a committed figure"
EXCEPTIONS = {
    ("benchmarks/cost/overhead.py", "beside"): _STORED,
    ("benchmarks/truth/communication.py", "live - trace"): _STORED,
    ("scripts/claims/evidence.py", "beside"): _STORED,
    ("scripts/claims/evidence.py", "wire"): _STORED,
}
"""Words that stay, by file, with the reason."""

NOT_TEXT = re.compile(r"^```.*?^```|^    [^\n]*$|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", re.M | re.S)
"""Code, addresses and comments of Markdown."""

Place = tuple[str, int, str]
"""File, line and word."""


def words(file: str, line: int, text: str) -> Iterator[Place]:
    """Yield the forbidden words of a text that starts at this line."""
    for match in FORBIDDEN.finditer(text):
        if (file, match[0].lower()) not in EXCEPTIONS:
            yield file, line + text.count("\n", 0, match.start()), match[0]


def in_markdown(file: str, text: str) -> list[Place]:
    """Return the forbidden words of Markdown outside code."""
    return [*words(file, 1, NOT_TEXT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text))]


def in_code(file: str, source: str) -> list[Place]:
    """Return the forbidden words of texts that users see: strings with spaces, headers, help and captions."""
    tree = ast.parse(source)
    comments = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(body := getattr(node, "body", None), list) and not shows_docstring(file, node)
        for statement in body
        if isinstance(statement, ast.Expr)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    headers = {id(call.args[1]) for call in calls if ast.unparse(call.func) == "Column" and len(call.args) > 1}
    headers |= {id(call.args[0]) for call in calls if ast.unparse(call.func) == "Table" and call.args}
    found: list[Place] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in comments:
            is_text = re.search(r"\w \w|^ | $", node.value) or id(node) in headers
            found += words(file, node.lineno, node.value) if is_text else []
    return found


def shows_docstring(file: str, node: ast.AST) -> bool:
    """Return whether users read the docstring of a node: as help of a command, or as caption of a figure."""
    if file == "study/scaling.py":
        return isinstance(node, (ast.Module, ast.FunctionDef))
    draws = isinstance(node, ast.FunctionDef) and node.returns is not None and "Figure" in ast.unparse(node.returns)
    return file.startswith("analysis/figures/") and draws


MARKDOWN = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("skills/*/*.md"))]
SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
TEMPLATES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.jinja"))]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_documents_use_the_words_of_the_glossary() -> None:
    assert [place for path in MARKDOWN for place in in_markdown(name(path), path.read_text())] == []


def test_messages_help_tables_and_captions_use_the_words_of_the_glossary() -> None:
    assert [place for path in SOURCES for place in in_code(name(path), path.read_text())] == []


def test_the_templates_of_reports_use_the_words_of_the_glossary() -> None:
    texts = {name(path): re.sub(r"\{[{%#].*?[}%#]\}", "", path.read_text(), flags=re.S) for path in TEMPLATES}
    assert texts
    assert [place for file, text in texts.items() for place in words(file, 1, text)] == []


def test_questions_and_notes_of_committed_studies_use_the_words_of_the_glossary() -> None:
    studies = {name(path): json.loads(path.read_text()) for path in ROOT.glob("benchmarks/results/**/study.json")}
    assert len(studies) > 10
    texts = [(file, text) for file, study in studies.items() for text in (study["question"], *study.get("notes", ()))]
    assert [place for file, text in texts for place in words(file, 1, text)] == []


def test_every_exception_is_needed() -> None:
    for file, word in EXCEPTIONS:
        assert re.search(rf"\b{word}\b", (ROOT / file).read_text(), re.I), (file, word)


@pytest.mark.parametrize(
    "word", ["mend", "Began", "remedy", "the wire", "ceiling", "whole", "within noise", "live − trace"]
)
def test_a_word_of_the_left_column_is_found(word: str) -> None:
    assert in_markdown("page.md", f"It has a {word}.") != []
    assert in_code("study/module.py", f"print('It has a {word}.')") != []


def test_code_names_of_columns_and_comments_may_keep_their_words() -> None:
    text = "Run `--set communication_steps=3`, see [the page](remedy.md), wire time.\n\n    mend\n"
    assert in_markdown("page.md", text) == []
    source = '"""A mend of the wire."""\nrow["remedy"], x = 1, 2\n"""The ceiling of x."""'
    assert in_code("study/module.py", source) == []
    header = 'Column("wire_s", "wire")'
    assert in_code("analysis/tables/module.py", header) == [("analysis/tables/module.py", 1, "wire")]
    assert in_code("analysis/figures/module.py", 'def f() -> Figure | None:\n    """The elbow."""') != []
