"""Names the pip command where a module needs an optional library that is not installed.

::

    with needed_by("envmanager.training", extra="torch"):
        import torch

Who imports such a module is given the pip command, not the name of a library that the module happened to import.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from envmanager.errors import MissingExtra


@contextmanager
def needed_by(what: str, *, extra: str | None) -> Iterator[None]:
    """Let a library that is missing among those imported within become MissingExtra; ``extra`` brings it.

    A library that is there and does not load raises what it raises.
    """
    try:
        yield
    except MissingExtra:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "envmanager":
            raise
        raise MissingExtra(what, library=error.name, extra=extra) from error
