"""Small repairs of rendered pages: docstrings are written for `help()`, with some marks that Markdown does not know."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """``::`` before a code block goes, and ``:class:`~a.b.C``` becomes `C`."""
    html = html.replace("<p>::</p>\n", "").replace("::</p>", ":</p>")
    return re.sub(r":(?:class|func|meth|mod):<code>~?(?:[\w.]+\.)?(\w+)</code>", r"<code>\1</code>", html)
