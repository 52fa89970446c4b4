"""Imports by name (objects, plugins, optional libraries), and suggestions for misspelled names.

::

    with needed_by("envmanager.training", extra="torch"):
        import torch

If the library is not installed, the context raises MissingExtra, whose text ends with the pip command that installs it.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
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
    """The plugins registered under one entry-point group. ``what`` is the noun for a plugin in error messages."""

    group: str
    what: str

    def names_with(self, own: Iterable[str]) -> list[str]:
        """Return the names in ``own`` and the names of all plugins in the group, sorted and without duplicates."""
        return sorted({*own, *(entry_point.name for entry_point in entry_points(group=self.group))})

    def load(self, name: str) -> Any | None:
        """Return the plugin ``name``, or None if no package registers it. Raises MissingExtra on an ImportError."""
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
    """Return a context manager that turns ModuleNotFoundError into MissingExtra, whose text begins with ``what``.

    ``extra``: the extra that installs the library, or None. Errors about modules of ``envmanager`` are not converted.
    """
    try:
        yield
    except MissingExtra:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "envmanager":
            raise
        raise MissingExtra(what, library=error.name, extra=extra) from error


def nearest(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return ``; did you mean prefix.name?`` with the most similar known name, or ``.`` if no known name is similar."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    where = f"{prefix}." if prefix else ""
    return f"; did you mean {where}{matches[0]}?" if matches else "."
