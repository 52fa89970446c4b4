"""Trainers, training runs and saved policies. They need PyTorch: ``pip install 'envmanager[torch]'``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envmanager.training.policies.exporting import export_policy
    from envmanager.training.policies.saved import SavedPolicy, load_policy

__all__ = ["SavedPolicy", "export_policy", "load_policy"]
_HOME_OF = {"SavedPolicy": "saved", "export_policy": "exporting", "load_policy": "saved"}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'envmanager.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"envmanager.training.policies.{home}"), name)
