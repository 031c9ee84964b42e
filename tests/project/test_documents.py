"""Generated documents match the code, and links of all documents lead somewhere."""

import posixpath
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from analysis.report.sections import TABLES
from scripts import command_reference, field_table, readme_pictures, study_page, table_reference
from scripts.claims.sources import committed_inputs
from study.scaling import app
from tests.support.system import needs

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("skills/*/*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
"""The address of a Markdown link, or of an image."""
CODE = re.compile(r"^```.*?^```|^    [^\n]*$|`[^`\n]*`", re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs form them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Return the addresses of a page that lead to no file, or to no heading of a page."""
    broken = []
    for address in ("".join(found) for found in LINK.findall(CODE.sub("", text))):
        path, _, anchor = address.partition("#")
        if re.match(r"https?:|mailto:", address):
            continue
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(address)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_document_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_a_link_to_a_missing_file_or_heading_is_found() -> None:
    text = "[a](index.md) [b](missing.md) [c](index.md#no-such-heading) ![d](images/none.svg)"
    assert broken_links(DOCS / "axes.md", text) == ["missing.md", "index.md#no-such-heading", "images/none.svg"]


def test_the_navigation_of_the_site_names_every_page_once() -> None:
    def leaves(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        assert isinstance(parts, (list, type({}.values())))
        return [leaf for part in parts for leaf in leaves(part)]

    listed = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = [posixpath.relpath(page, DOCS) for page in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted([*pages, "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])


def test_docs_fields_is_up_to_date() -> None:
    assert field_table.PAGE.read_text() == field_table.page(), "regenerate it: python -m scripts.field_table"


def test_docs_commands_is_up_to_date() -> None:
    assert command_reference.PAGE.read_text() == command_reference.page(), (
        "regenerate it: python -m scripts.command_reference"
    )


@pytest.mark.xdist_group("committed studies")
def test_docs_tables_describes_the_tables_of_a_study_as_its_report_does() -> None:
    text = table_reference.PAGE.read_text()
    with_rows, without = table_reference.descriptions(table_reference.STUDIES[0])
    differing = [name for name, description in with_rows.items() if description not in text]
    absent = [name for name in (*with_rows, *without) if f"\n`{name}`, from" not in text]
    assert (differing, absent) == ([], []), "regenerate it: python -m scripts.table_reference"


ALERT_TEST = """
rule_files: [rules.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'ray_scaling_study_trials{study="default", status="failed"}', values: '0x5 1x20'}
      - {series: 'ray_scaling_study_trials{study="default", status="done"}', values: '0+1x25'}
    alert_rule_test:
      - {eval_time: 5m, alertname: TrialFailed, exp_alerts: []}
      - eval_time: 8m
        alertname: TrialFailed
        exp_alerts:
          - exp_labels: {study: default, status: failed}
            exp_annotations: {summary: 'New trials of default with the status failed: 1'}
      - {eval_time: 25m, alertname: TrialFailed, exp_alerts: []}
"""
"""A trial fails between the fifth and the sixth minute, while others end well."""


@needs("prometheus")
def test_the_alert_of_the_monitoring_page_fires_once_a_trial_fails(tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "monitoring.md").read_text(), re.M | re.S)
    (rules,) = [block for block in blocks if "alert:" in block]
    (tmp_path / "rules.yml").write_text(rules)
    (tmp_path / "test.yml").write_text(ALERT_TEST)
    run = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_pictures_of_the_readme_are_those_of_the_committed_results() -> None:
    for name, svg in readme_pictures.pictures().items():
        assert (readme_pictures.FOLDER / name).read_text() == svg, "rerun: python -m scripts.readme_pictures"


def test_the_figures_of_study_pages_are_those_of_their_results() -> None:
    found = 0
    for page in (DOCS / "studies").glob("*.md"):
        text = page.read_text()
        for results, _, names in study_page.COMMAND.findall(text):
            for name in set(names.split()) - set(TABLES):
                file = study_page.figure_file(page, name)
                svg = readme_pictures.picture(name, committed_inputs(Path(results).name)[0])
                assert file.read_text() == svg, f"write {page.name} again"
                assert f"(../images/{file.name})" in text
                found += 1
    assert found


COMMAND = re.compile(
    r"(?:^    |`)(?:S|(?:\.venv/bin/)?python -m study\.scaling)(?: +([^`\n]*?))?(?:  +#[^\n]*)?(?:`|$)", re.M
)
"""The arguments of a command in an indented block, or in backticks; `S` is README's abbreviation."""


def unknown_words(arguments: str) -> list[str]:
    """Return the command and options of these arguments that the program does not have."""
    program = typer.main.get_command(app)
    words = arguments.partition(" -- ")[0].split()
    name = words[0] if words and words[0] in program.commands else "run"  # type: ignore[attr-defined]
    if words and not words[0].startswith("-") and words[0] not in program.commands:  # type: ignore[attr-defined]
        return [words[0]]
    command = program.commands[name]  # type: ignore[attr-defined]
    known = {option for parameter in (*command.params, *program.params) for option in parameter.opts} | {"--help"}
    return [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_of_a_document_exists_with_its_options(page: Path) -> None:
    commands = [match[1] or "" for match in COMMAND.finditer(page.read_text())]
    assert [(command, unknown) for command in commands if (unknown := unknown_words(command))] == []


def test_every_command_of_the_example_workflow_exists_with_its_options() -> None:
    workflow = yaml.safe_load((ROOT / "examples" / "ci" / "compare.yml").read_text())
    scripts = [step["run"] for step in workflow["jobs"]["compare"]["steps"] if "run" in step]
    arguments = [shlex.split(script.partition("> ")[0]) for script in scripts]
    made = [word.removeprefix("ARGS=") for words in arguments if words[0] == "make" for word in words[2:]]
    called = [" ".join(words[3:]) for words in arguments if words[1:3] == ["-m", "study.scaling"]]
    assert (len(made), len(called)) == (1, 2)
    assert [unknown for command in (*made, *called) if (unknown := unknown_words(command))] == []


def test_an_unknown_command_or_option_in_a_document_is_found() -> None:
    assert unknown_words("predict DIR --gpus 8 --horoscope") == ["--horoscope"]
    assert unknown_words("foretell DIR") == ["foretell"]
    assert unknown_words("--gpus 1,2") == []
