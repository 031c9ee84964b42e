"""The report's page in a browser: it loads without errors or requests, sorts and filters tables, and links its data.

Headless Chromium opens a copy of the page with an added script that acts and writes its observations into the page.
"""

import csv
import io
import json
import re
import subprocess
from base64 import b64decode, b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from analysis.predict.inputs import with_models
from analysis.read.results import load
from analysis.report.page import Term, with_terms
from analysis.report.report import write_report
from analysis.report.sections import SECTIONS, TABLES
from analysis.study import analyse
from tests.support.cards import RESULTS
from tests.support.frames import grid, write_results
from tests.support.system import needs, program

BEFORE = """<script>
window.problems = [];
addEventListener("error", (event) => problems.push(event.message), true);
addEventListener("securitypolicyviolation", (event) => problems.push(event.violatedDirective + " " + event.blockedURI));
const complain = console.error;
console.error = (...words) => { problems.push(words.join(" ")); complain(...words); };
</script>"""

AFTER = """<script>
const box = document.querySelector("#everything");
const found = { open_at_first: box.open };
box.open = true;
const table = document.querySelector("#batch_size table");
const visible = () => [...table.tBodies[0].rows].filter((row) => !row.hidden);
const column = (n) => visible().map((row) => row.cells[n].textContent.trim());
const heads = [...table.tHead.rows[0].cells];
const at = (name) => heads.findIndex((head) => head.textContent.includes(name));
const press = (name) => heads[at(name)].querySelector("button").click();
const sorts = () => heads.map((head) => head.getAttribute("aria-sort"));
Object.assign(found, { titles: heads.map((head) => head.textContent), given: column(at("batch")), sorts: [] });
const memory = at("throughput");
for (let i = 0; i < 3; i++) { press("throughput"); found.sorts.push([sorts()[memory], column(memory)]); }
press("throughput"); press("precision");
found.others = sorts();
press("precision"); press("precision");
const input = document.querySelector("#batch_size input");
const type = (text) => { input.value = text; input.dispatchEvent(new Event("input")); };
found.label = input.getAttribute("aria-label");
const message = () => document.querySelector("#batch_size output").textContent;
type("BF16 64"); found.filtered = column(at("batch")); found.message = message();
type(""); found.cleared = column(at("batch")); found.cleared_message = message();
const button = heads[0].querySelector("button");
button.focus(); found.focused = document.activeElement === button;
const search = document.querySelector("#search");
const seek = (text) => { search.value = text; search.dispatchEvent(new Event("input")); };
const shown = () => [...box.querySelectorAll(":scope > section:not([hidden])")].map((part) => part.id);
found.sections = shown();
seek("Batch SIZE on one gpu"); found.hits = shown(); found.hits_message = document.querySelector("#hits").textContent;
found.hidden_links = [...box.querySelectorAll("nav li[hidden] a")].map((link) => link.hash.slice(1));
seek(""); found.sections_again = shown();
box.open = false; location.hash = "#hardware"; dispatchEvent(new Event("hashchange")); found.revealed = box.open;
found.colours = [...document.querySelectorAll("figure path, figure use")].slice(0, 400)
  .map((part) => getComputedStyle(part).fill + getComputedStyle(part).stroke);
found.inputs = document.querySelectorAll("#weak_scaling input").length;
const resources = performance.getEntriesByType("resource").map((entry) => entry.name);
found.requests = resources.filter((name) => !name.startsWith("data:"));
found.beside = [...document.querySelectorAll(".question")].map((part) => {
  const [figure, evidence] = ["figure", ".evidence"].map((name) => part.querySelector(`:scope > ${name}`));
  return figure && evidence && figure.getBoundingClientRect().right <= evidence.getBoundingClientRect().left;
});
found.wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
box.open = true;
setTimeout(() => {  // observers of sizes have been called
  const tables = [...document.querySelectorAll(".scroll > table")];
  found.stacked = tables.filter((table) => table.classList.contains("stacked")).length;
  found.cut = tables.filter((table) => table.offsetWidth > table.parentElement.clientWidth + 1)
    .map((table) => table.id);
  found.problems = window.problems;
  const result = document.createElement("pre");
  result.id = "result"; result.textContent = encodeURIComponent(JSON.stringify(found));
  document.body.append(result);
}, 200);
</script>"""

VISIBLE_TABLES = """<script>
setTimeout(() => {  // observers of sizes have been called
  const tables = [...document.querySelectorAll(".question .scroll > table")];
  const cut = tables.filter((table) => table.offsetWidth > table.parentElement.clientWidth + 1)
    .map((table) => table.id);
  const result = document.createElement("pre");
  result.id = "result"; result.textContent = encodeURIComponent(JSON.stringify({ count: tables.length, cut }));
  document.body.append(result);
}, 200);
</script>"""

STEP_S = {8: 0.02, 16: 0.02, 64: 0.05, 128: 0.08, 512: 0.3}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("page") / "results"
    base = {"device": "cuda", "steps": 4, "image_size": 224}
    trials = grid(base, batch_per_gpu=STEP_S, precision=["fp32", "bf16"], world_size=[1, 2])

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        faster = 0.6 if fields["precision"] == "bf16" else 1.0
        step_s = STEP_S[fields["batch_per_gpu"]] * faster
        return {
            "step_s": step_s * (1.1 if fields["world_size"] > 1 else 1.0),
            "communication": {"last_gradient_s": 0.9 * step_s},
        }

    return write_results(directory, trials, law, spread=0.0)


@pytest.fixture(scope="module")
def page(results: Path) -> str:
    return Path(write_report(results).path).read_text()


def digest(element: str) -> str:
    """Return the hash of a script element's content, as in a content security policy."""
    return b64encode(sha256(re.sub(r"^<script>|</script>$", "", element).encode()).digest()).decode()


def in_browser(html: str, folder: Path, width: int, after: str = AFTER) -> dict[str, Any]:
    """Return the observations of the script `after` in a window `width` pixels wide."""
    browser = program("chromium")
    assert browser
    file = folder / "acted.html"
    allowed = " ".join(f"'sha256-{digest(script)}'" for script in (BEFORE, after))
    assert "script-src 'sha256-" in html, "the policy allows scripts by their hash only"
    html = html.replace("script-src ", f"script-src {allowed} ", 1)
    html = html.replace('<meta http-equiv="Content-Security', f'{BEFORE}<meta http-equiv="Content-Security', 1)
    file.write_text(html.replace("</body>", f"{after}</body>", 1))
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={width},900", "--virtual-time-budget=5000",
        "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    written = re.search(r'<pre id="result">(.*?)</pre>', run.stdout)
    assert written, run.stderr[-2_000:]
    return dict(json.loads(unquote(written[1])))


@pytest.fixture(scope="module")
def seen(page: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return in_browser(page, tmp_path_factory.mktemp("browser"), 1200)


@needs("chromium")
def test_page_loads_without_errors_or_requests(seen: dict[str, Any]) -> None:
    assert seen["problems"] == []
    assert seen["requests"] == []


@needs("chromium")
def test_tables_are_next_to_their_figures_on_a_wide_window_only(
    seen: dict[str, Any], page: str, tmp_path: Path
) -> None:
    assert True in seen["beside"]
    assert True not in in_browser(page, tmp_path, 500)["beside"]


@needs("chromium")
def test_page_fits_a_phone(page: str, tmp_path: Path) -> None:
    seen = in_browser(page, tmp_path, 500)  # the narrowest window that headless Chromium opens
    assert seen["wide"] is False
    assert seen["problems"] == []
    assert seen["cut"] == []
    assert seen["stacked"] > 5


@needs("chromium")
@pytest.mark.parametrize("name", ["mlstm-scaling", "improve-fp8"])
def test_visible_tables_fit_a_window_of_medium_width(name: str, tmp_path: Path) -> None:
    html = Path(write_report(RESULTS / name, tmp_path).path).read_text()
    seen = in_browser(html, tmp_path, 768, VISIBLE_TABLES)
    assert seen["count"] > 0
    assert seen["cut"] == []


@needs("chromium")
def test_tables_keep_their_columns_on_a_wide_window(seen: dict[str, Any]) -> None:
    assert seen["stacked"] == 0


@needs("chromium")
def test_clicking_a_header_sorts_ascending_then_descending_then_not(seen: dict[str, Any]) -> None:
    up, down, given = seen["sorts"]
    as_numbers = [[float(cell.split()[0].replace(",", "")) for cell in cells] for _, cells in (up, down)]
    assert (up[0], down[0], given[0]) == ("ascending", "descending", "none")
    assert as_numbers[0] == sorted(as_numbers[0])
    assert as_numbers[1] == as_numbers[0][::-1]
    assert as_numbers[0] != [float(cell.replace(",", "")) for cell in given[1]]


@needs("chromium")
def test_only_one_column_is_marked_as_sorted(seen: dict[str, Any]) -> None:
    assert sorted(set(seen["others"])) == ["ascending", "none"]
    assert seen["others"].count("ascending") == 1


@needs("chromium")
def test_headers_are_buttons_with_keyboard_focus(seen: dict[str, Any]) -> None:
    assert seen["focused"] is True


@needs("chromium")
def test_filter_keeps_rows_that_contain_all_words(seen: dict[str, Any]) -> None:
    assert len(seen["given"]) == 10
    assert seen["label"] == "Filter rows of: Batch size on one GPU"
    assert "64" in seen["filtered"]
    assert len(seen["filtered"]) < 10
    assert seen["message"] == f"{len(seen['filtered'])} of 10 rows"
    assert (seen["cleared"], seen["cleared_message"]) == (seen["given"], "")


@needs("chromium")
def test_the_collapsed_part_is_closed_at_first_and_opened_by_links_into_it(seen: dict[str, Any]) -> None:
    assert seen["open_at_first"] is False
    assert seen["revealed"] is True


@needs("chromium")
def test_search_hides_sections_without_all_words(seen: dict[str, Any]) -> None:
    assert "batch_size" in seen["hits"]
    assert 0 < len(seen["hits"]) < len(seen["sections"])
    assert seen["hits_message"] == f"{len(seen['hits'])} of {len(seen['sections'])} sections"
    assert set(seen["hidden_links"]) >= {"hardware", "glossary"} - set(seen["hits"])
    assert not set(seen["hidden_links"]) & set(seen["hits"])
    assert seen["sections_again"] == seen["sections"]


@needs("chromium")
def test_figures_keep_their_colours_under_the_security_policy(seen: dict[str, Any]) -> None:
    assert len(set(seen["colours"])) > 4


def test_each_figure_has_its_data_on_the_page(page: str, results: Path) -> None:
    links = re.findall(r'<a href="data:text/csv;charset=utf-8;base64,([^"]+)" download="(\w+)\.csv">', page)
    data = {name: list(csv.DictReader(io.StringIO(b64decode(text).decode()))) for text, name in links}
    drawn_names = {path.stem for path in (results / "report" / "figures").glob("*.svg")}
    section_of = {figure.name: section.name for section in SECTIONS for figure in section.figures}
    assert all(name in data or section_of[name] in data for name in drawn_names)
    assert {"batch_size", "loss", "timeline", "phases", "scaling_weak", "work", "lost_ranks"} <= drawn_names
    assert {"loss", "timeline", "work", "lost_ranks", "weak_scaling"} <= set(data)
    curve = TABLES["batch_size"](with_models(analyse(load(results)))).frame
    drawn = [float(row["throughput_samples_per_s"]) for row in data["batch_size"]]
    assert drawn == pytest.approx(curve["throughput_samples_per_s"].tolist())
    assert {row["kind"] for row in data["timeline"]} >= {"compute", "hidden", "optimizer"}


def test_every_trial_is_listed_with_its_rerun_command(page: str, results: Path) -> None:
    section = page[page.index('<section id="trials"') :]
    for folder in (results / "trials").iterdir():
        assert f">{folder.name}<" in section
    assert section.count("python -m study.scaling run default") == 20


def test_the_first_mention_of_a_term_explains_it_and_links_to_the_glossary(page: str) -> None:
    visible, everything = page.split('<details id="everything">')
    links = re.findall(r'<a class="term" href="#([\w-]+)" title="([^"]+)">', visible)
    assert {"term-efficiency", "term-weak-scaling", "term-host-bound"} & {anchor for anchor, _ in links}
    assert len(links) == len(dict(links)), "only the first mention is linked"
    assert 'class="term"' not in everything
    for anchor, meaning in links:
        entry = re.search(rf'<div id="{anchor}"><dt>[^<]+</dt><dd>([^<]+)</dd>', everything)
        assert entry and entry[1] == meaning


def test_terms_of_captions_are_printed(page: str) -> None:
    caption = page[page.index("<figcaption>") : page.index("</figcaption>")]
    assert 'class="term"' in caption
    assert "figcaption a:not(.term)" in page


def test_terms_are_not_linked_in_headings_figures_or_other_links() -> None:
    term = Term("rank", "one process & its GPU.", "ranks?")
    html = "<main><h2>Ranks</h2><svg><text>rank</text></svg><a>rank</a><td>2 ranks, rank</td></main>"
    expected = '<td>2 <a class="term" href="#term-rank" title="one process &amp; its GPU.">ranks</a>, rank</td>'
    assert with_terms(html, [term]) == html.replace("<td>2 ranks, rank</td>", expected)


def test_contents_link_to_existing_sections(page: str) -> None:
    contents = page[page.index("<nav") : page.index("</nav>")]
    targets = re.findall(r'href="#(\w+)"', contents)
    assert {"weak_scaling", "batch_size", "hardware", "failures", "environment", "trials"} <= set(targets)
    assert all(f'<section id="{target}"' in page for target in targets)
