"""Errors for optional libraries that are not installed, with the pip command that installs them.

::

    with needed_by("envmanager.training", extra="torch"):
        import torch

A user who imports such a module gets the pip command, and not only the name of the missing library.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from envmanager.errors import MissingExtra


@contextmanager
def needed_by(what: str, *, extra: str | None) -> Iterator[None]:
    """Raise MissingExtra in place of a ModuleNotFoundError in this context; ``extra`` installs the library.

    Errors of a library that is installed but does not load are raised unchanged.
    """
    try:
        yield
    except MissingExtra:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "envmanager":
            raise
        raise MissingExtra(what, library=error.name, extra=extra) from error


def missing_library(error: BaseException, what: str, *, module: str = "") -> MissingExtra | None:
    """Return MissingExtra for an error because ``module`` imports a library that is not installed; else None.

    None also if ``module`` itself is missing, or a part of a library that is installed. The text names the line with
    the import, and the extra of this package that installs the library, if there is one.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name or "." in error.name:
        return None
    if error.name == module.partition(".")[0]:
        return None
    return MissingExtra(f"{what}{_line_of(error)}", library=error.name, extra=_extra_with(error.name))


def _line_of(error: BaseException) -> str:
    """Return ``" (games.py, line 3)"`` for the line that raised ``error``."""
    places = [(Path(each.filename), each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    places = [(path, line) for path, line in places if path.is_file() and path.parent.name != "importlib"]
    return f" ({places[-1][0].name}, line {places[-1][1]})" if places else ""


_FOR_DEVELOPERS = ("test", "docs", "dev", "all")


def _extra_with(library: str) -> str | None:
    """Return the first extra of this package that installs a library of this name."""
    try:
        requirements = metadata.requires("envmanager") or []
    except metadata.PackageNotFoundError:  # run from a folder, not installed
        return None
    for requirement in requirements:
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == ['\"]([\w-]+)", requirement)
        if name and extra and extra[1] not in _FOR_DEVELOPERS and _normal(name[0]) == _normal(library):
            return extra[1]
    return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
