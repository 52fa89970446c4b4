"""The suites that the tests belong to.

The ``__init__.py`` of a folder names its suites, ``SUITE = "core faults"``; a file that belongs to others names them at
its top. They are read, not imported, so that a run of one suite loads no library of another.

Cases under other start methods are ``start-methods`` in place of the file's other suites, but for ``faults``. Thorough
cases are ``faults`` alone. What is marked ``load`` belongs to `make soak`; files of the suite ``load`` have
nothing else, so that no other suite imports them. The suite ``check`` is a part of `make check`.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

_SUITE = re.compile(r'^SUITE = "([a-z -]+)"$', re.M)


@cache
def suites_of(file: Path) -> frozenset[str]:
    """The names of the suites of a file with tests."""
    for source in (file, file.with_name("__init__.py")):
        if found := _SUITE.search(source.read_text(encoding="utf-8")):
            return frozenset(found[1].split())
    raise LookupError(f'no suite: write SUITE = "…" into {file.with_name("__init__.py")}')


def is_in(item: pytest.Item, suites: frozenset[str]) -> bool:
    """Whether a test belongs to one of the suites."""
    if item.get_closest_marker("load"):
        return False
    if item.get_closest_marker("thorough"):
        return "faults" in suites
    if item.get_closest_marker("start_methods"):
        return bool(suites & {"start-methods", "faults"})
    return bool(suites_of(item.path) & (suites - {"start-methods"}))
