"""Objects that are chosen by name and may come from other packages: kinds of managers, trainers, metrics writers.

::

    name ── KINDS of this library, "module:object" ──┐
        └── entry points of other packages ──────────┴──▶ the object, imported only now

A package that cannot be imported raises MissingExtra, with the pip command.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import attrs

from envmanager.errors import MissingExtra


@attrs.frozen
class Plugins:
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
                raise self._missing(entry_point, error) from error
        return None

    def _missing(self, entry_point: EntryPoint, error: ImportError) -> MissingExtra:
        package = "envmanager" if entry_point.dist is None else entry_point.dist.name
        extra = entry_point.extras[0] if entry_point.extras else None
        if extra is None and package == "envmanager":
            extra = entry_point.name
        what = f"the {self.what} {entry_point.name!r}" + ("" if package == "envmanager" else f" of {package}")
        return MissingExtra(what, library=error.name or str(error), extra=extra, package=package)
