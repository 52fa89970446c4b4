"""Errors for optional libraries that are not installed, with the pip command that installs them.

::

    with needed_by("envmanager.training", extra="torch"):
        import torch

A user who imports such a module gets the pip command, and not only the name of the missing library.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
