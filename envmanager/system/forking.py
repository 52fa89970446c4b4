"""Registers what is done in forked processes, where the system has any."""

from __future__ import annotations

import os
from collections.abc import Callable


def after_fork_in_child(function: Callable[[], object]) -> None:
    """Call ``function`` in each process that is forked from this one; Windows forks none."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
