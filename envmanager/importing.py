"""Imports by name: of objects, of plugins of other packages, and of optional libraries; the name meant by a wrong one.

::

    with needed_by("envmanager.training", extra="torch"):
        import torch

A library that is not installed raises MissingExtra, with the pip command that installs it.
"""

from __future__ import annotations

import difflib
import importlib
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from envmanager.errors import MissingExtra


def imported(place: str) -> Any:
    """Return the object at ``"module:name"`` or ``"module:Class.name"``. Raises ImportError or AttributeError."""
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


class Plugins(NamedTuple):
    """The plugins registered under one entry-point group. ``what`` names one in errors: ``"manager kind"``."""

    group: str
    what: str

    def names_with(self, own: Iterable[str]) -> list[str]:
        """Return the sorted names of all plugins and of ``own``."""
        return sorted({*own, *(entry_point.name for entry_point in entry_points(group=self.group))})

    def load(self, name: str) -> Any | None:
        """Import the plugin of this name; return None without one. Raises MissingExtra when it cannot be imported."""
        for entry_point in entry_points(group=self.group, name=name):
            try:
                return entry_point.load()
            except MissingExtra:
                raise
            except ImportError as error:
                package = "envmanager" if entry_point.dist is None else entry_point.dist.name
                extra = entry_point.extras[0] if entry_point.extras else None
                if extra is None and package == "envmanager":
                    extra = name
                what = f"the {self.what} {name!r}" + ("" if package == "envmanager" else f" of {package}")
                raise MissingExtra(what, library=error.name or str(error), extra=extra, package=package) from error
        return None


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
    places = [(Path(each.filename), each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    places = [(path, line) for path, line in places if path.is_file() and path.parent.name != "importlib"]
    where = f" ({places[-1][0].name}, line {places[-1][1]})" if places else ""
    return MissingExtra(f"{what}{where}", library=error.name, extra=_extra_with(error.name))


_FOR_DEVELOPERS = ("test", "docs", "dev", "all")


def _extra_with(library: str) -> str | None:
    """Return the first extra of this package that installs a library of this name."""
    try:
        requirements = metadata.requires("envmanager") or []
    except metadata.PackageNotFoundError:  # run from a folder, not installed
        return None

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "_", name).lower()

    for requirement in requirements:
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == ['\"]([\w-]+)", requirement)
        if name and extra and extra[1] not in _FOR_DEVELOPERS and normal(name[0]) == normal(library):
            return extra[1]
    return None


def nearest(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return ``; did you mean …?`` with the known name most similar to ``name``, or a full stop if none is."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    where = f"{prefix}." if prefix else ""
    return f"; did you mean {where}{matches[0]}?" if matches else "."
