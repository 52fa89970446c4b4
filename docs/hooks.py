"""Repairs of pages: the first page is README.md, and docstrings have some marks that Markdown does not know."""

import re
from pathlib import Path
from typing import Any

_README = Path(__file__).parents[1] / "README.md"
_PLACE = "[README]"
_DOCS = re.compile(r"https://(?:github\.com/[\w-]+/[\w-]+/blob|raw\.githubusercontent\.com/[\w-]+/[\w-]+)/main/docs/")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put README.md in the place of a line ``[README]``; its links to pages then lead to those of the site.

    Decisions come last among what a search finds.
    """
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"boost": 0.2}
    if _PLACE not in markdown:
        return markdown
    return markdown.replace(_PLACE, _DOCS.sub("", _README.read_text(encoding="utf-8")))


def on_page_content(html: str, **_: Any) -> str:
    """``::`` before a code block goes, and ``:class:`~a.b.C``` becomes `C`."""
    html = html.replace("<p>::</p>\n", "").replace("::</p>", ":</p>")
    return re.sub(r":(?:class|func|meth|mod):<code>~?(?:[\w.]+\.)?(\w+)</code>", r"<code>\1</code>", html)
