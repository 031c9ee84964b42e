"""Hooks of mkdocs.yml: the site also has the root's documents, and the files outside docs/ that a page links to."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
LINK = re.compile(r"(?<=\]\()(?!https?://|#|mailto:)([^)#\s]+)")
"""The address of a relative link in Markdown."""


def linked_files(page: str, text: str) -> dict[str, str]:
    """Return the repository's path of every link of a page that leads out of docs/. page: its path below docs."""
    folder = posixpath.join("docs", posixpath.dirname(page))
    links = {link: posixpath.normpath(posixpath.join(folder, link)) for link in LINK.findall(text)}
    return {link: path for link, path in links.items() if not path.startswith("docs/")}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's documents, and what pages link to outside docs/ as plain files."""
    outside = {
        path
        for page in files.documentation_pages()
        for path in linked_files(page.src_uri, page.content_string).values()
        if path not in DOCUMENTS and Path(ROOT, path).is_file()
    }
    for path in (*DOCUMENTS, *sorted(outside)):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that lead out of docs/ to the copies in the site."""
    if page.file.src_uri in DOCUMENTS:
        return markdown
    outside = linked_files(page.file.src_uri, markdown)
    folder = posixpath.dirname(page.file.src_uri)

    def in_site(match: re.Match[str]) -> str:
        path = outside.get(match[1])
        return match[1] if path is None else posixpath.relpath(path, folder or ".")

    return LINK.sub(in_site, markdown)
