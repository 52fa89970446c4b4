"""A port for a game to attach, and what to do when a manager waits for one."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator


def free_port() -> int:
    """Return a port that nobody has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def when_awaited(begin: Callable[[logging.LogRecord], object]) -> Iterator[None]:
    """Call ``begin`` with its warning each time a manager says that it waits for a game."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = begin  # type: ignore[method-assign,assignment]
    logger = logging.getLogger("envmanager")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
