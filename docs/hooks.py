"""Repairs of pages: some are files beside docs/, docstrings have marks that Markdown does not know, tables are wide."""

import itertools
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_ROOT = Path(__file__).parents[1]
_PLACE = "[README]"
_WIDE = 3
"""Number of columns from which a table does not fit a phone."""
_BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the files beside docs/ to which README.md has links."""
    for name in _BESIDE:
        files.append(File.generated(config, name, abs_src_path=str(_ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put README.md in the place of a line ``[README]``; links of files beside docs/ then lead to pages of the site.

    Decisions come last among what a search finds.
    """
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"boost": 0.2}
    if _PLACE in markdown:
        markdown = markdown.replace(_PLACE, (_ROOT / "README.md").read_text(encoding="utf-8"))
    elif page.file.src_uri not in _BESIDE:
        return markdown
    return markdown.replace("](docs/", "](")


def on_page_content(html: str, **_: Any) -> str:
    """``::`` before a code block goes, ``:class:`~a.b.C``` becomes `C`, and cells of wide tables get labels."""
    html = html.replace("<p>::</p>\n", "").replace("::</p>", ":</p>")
    html = re.sub(r":(?:class|func|meth|mod):<code>~?(?:[\w.]+\.)?(\w+)</code>", r"<code>\1</code>", html)
    return re.sub(r"<table>\s*<thead>.*?</table>", lambda table: _with_labels(table[0]), html, flags=re.S)


def _with_labels(table: str) -> str:
    """Give each cell of a table with many columns the name of its column: on a phone, rows are cards of these."""
    head, _, body = table.partition("</thead>")
    names = [
        re.sub(r"<[^>]+>", "", name).strip().replace('"', "&quot;")
        for name in re.findall(r"<th\b[^>]*>(.*?)</th>", head, re.S)
    ]
    if len(names) < _WIDE:
        return table
    column = itertools.cycle(names)
    body = re.sub(r"<td\b", lambda _: f'<td data-column="{next(column)}"', body)
    return head.replace("<table>", "<table data-wide>") + "</thead>" + body
