"""Repairs of pages: some are files beside docs/, and docstrings have some marks that Markdown does not know."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_ROOT = Path(__file__).parents[1]
_PLACE = "[README]"
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
    """``::`` before a code block goes, and ``:class:`~a.b.C``` becomes `C`."""
    html = html.replace("<p>::</p>\n", "").replace("::</p>", ":</p>")
    return re.sub(r":(?:class|func|meth|mod):<code>~?(?:[\w.]+\.)?(\w+)</code>", r"<code>\1</code>", html)
