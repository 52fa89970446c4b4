"""Objects by the place where they are, ``"module:name"``, imported when they are asked for."""

from __future__ import annotations

import importlib
from typing import Any


def imported(place: str) -> Any:
    """The object at ``"module:name"`` or ``"module:Class.name"``. Raises ImportError or AttributeError."""
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
