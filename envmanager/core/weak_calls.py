"""Calling back an object without keeping it alive: a manager that nobody holds any more must become garbage at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method as long as its object lives, and returns None after that."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call
