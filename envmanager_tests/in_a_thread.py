"""Functions of the tests that run beside the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def begun_in_a_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that runs ``function``, and what that has raised once it has ended."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised
