"""Imports of plugins and of optional libraries, and suggestions for misspelled names.

::

    with needed_by("envmanager.training", extra="torch"):
        import torch

If the library is not installed, the context raises MissingExtra, whose text ends with the pip command that installs it.
If it is installed and its import fails, the context raises ImportFailed, whose text says where and why.
"""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from envmanager.errors import EnvManagerError, ImportFailed, MissingExtra


class Plugins(NamedTuple):
    """The plugins registered under one entry-point group. ``what`` is the noun for a plugin in error messages."""

    group: str
    what: str

    def names_with(self, own: Iterable[str]) -> list[str]:
        """Return the names in ``own`` and the names of all plugins in the group, sorted and without duplicates."""
        return sorted({*own, *(entry_point.name for entry_point in entry_points(group=self.group))})

    def load(self, name: str) -> Any | None:
        """Return the plugin ``name``, or None if no package registers it. Raises ImportFailed if its import fails."""
        for entry_point in entry_points(group=self.group, name=name):
            package = "envmanager" if entry_point.dist is None else entry_point.dist.name
            what = f"the {self.what} {name!r}" + ("" if package == "envmanager" else f" of {package}")
            extra = entry_point.extras[0] if entry_point.extras else name if package == "envmanager" else None
            with needed_by(what, extra=extra, package=package):
                return entry_point.load()
        return None


@contextmanager
def needed_by(what: str, *, extra: str | None, package: str = "envmanager") -> Iterator[None]:
    """Return a context manager that turns the failure of an import into ImportFailed, whose text begins with ``what``.

    If the library is not installed, the error is a MissingExtra. ``extra``: the extra of ``package`` that installs it,
    or None. Errors of this library, and imports of modules of ``envmanager`` that fail, are not converted.
    """
    try:
        yield
    except EnvManagerError:
        raise
    except Exception as error:  # of another ABI, NumPy and PyTorch raise AttributeError, ValueError, OSError, …
        failed = import_failure(error, what, extra=extra, package=package)
        if failed is None:
            raise
        raise failed from error


def import_failure(
    error: BaseException, what: str, *, extra: str | None, package: str = "envmanager", module: str = "envmanager"
) -> ImportFailed | None:
    """Return the error to raise instead of ``error``, which an import raised that ``what`` needs.

    Return None if it is no failure of a library, but of ``module``, the module that was imported, or of this package.
    """
    raised_by, file, line = "", "", 0
    for frame, number in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in ("importlib", "_frozen_importlib", "_frozen_importlib_external"):
            raised_by, file, line = name, frame.f_code.co_filename, number
    library = (error.name if isinstance(error, ImportError) else None) or raised_by
    if library.partition(".")[0] in ("envmanager", module.partition(".")[0]):
        return None
    if is_missing(error):
        where = "" if raised_by == "envmanager" else f" ({Path(file).name}, line {line})"
        return MissingExtra(f"{what}{where}", library=library, extra=extra, package=package)
    return ImportFailed(
        f"{what} needs {library.partition('.')[0]}, which is installed, but its import failed in {file}, line {line}: "
        f"{type(error).__name__}: {error}",
        library=library,
    )


def is_missing(error: BaseException | None) -> bool:
    """Return whether ``error`` says that a whole library is not installed. Else a part of an installed one is missing.

    A package of a namespace, which several libraries share, counts as a library.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return False
    around = sys.modules.get(error.name.rpartition(".")[0])
    return getattr(around, "__file__", None) is None


SIMILAR = 0.75
"""Least similarity, from 0 to 1, of a name that is suggested. A wrong suggestion is worse than none."""


def nearest(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return ``; did you mean prefix.name?`` with the most similar known name, or ``.`` if no known name is similar.

    A mapping has, for each known name, the name to suggest. Upper and lower case are alike.
    """
    shown = known if isinstance(known, Mapping) else {each: each for each in known}
    folded, names = name.lower(), {each.lower(): each for each in shown}
    matches = difflib.get_close_matches(folded, names, n=1, cutoff=SIMILAR)
    if not matches and folded:  # a name cut short, or two letters of a short one swapped
        matches = [each for each in names if each.startswith(folded) or sorted(each) == sorted(folded)]
    where = f"{prefix}." if prefix else ""
    return f"; did you mean {where}{shown[names[matches[0]]]}?" if matches else "."
