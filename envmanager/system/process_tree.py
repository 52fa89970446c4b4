"""Which processes descend from which, as Linux counts them.

The rule: standard library only, because ``benchmarks`` imports it in interpreters of other libraries too.
"""

from __future__ import annotations

import contextlib
import os


def children_of(pid: int) -> list[int]:
    """The children of all threads of a process, zombies too; none when it has ended, or without /proc."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as children:
                found += map(int, children.read().split())
    return found


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process: R, S, D, T, t, Z or X; "" when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``, each after its parent."""
    found = children_of(pid)
    for child in found:  # it grows meanwhile
        found += children_of(child)
    return found
