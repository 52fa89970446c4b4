"""Counts the processor cores that this process may use.

The machine's number does not matter. What counts is the affinity and, in a container, the share of time that its cgroup
may use; both apply to worker processes too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from envmanager.system import cgroups


def count_cores() -> int:
    """How many cores this process and its children may keep busy: at least 1; a part of a core counts as one."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        allowed = os.cpu_count() or 1
    quotas = list(_quotas())
    return max(1, min(allowed, *(math.ceil(quota) for quota in quotas))) if quotas else allowed


def _quotas() -> Iterator[float]:
    """The limits, in cores, of the cgroup and of those around it, in the words of version 2 and of version 1."""
    for folder in cgroups.folders("cpu"):
        yield from _ratio(cgroups.words(folder / "cpu.max"))
        yield from _ratio(cgroups.words(folder / "cpu.cfs_quota_us") + cgroups.words(folder / "cpu.cfs_period_us"))


def _ratio(words: list[str]) -> Iterator[float]:
    """Quota through period; nothing for ``max``, for -1 (no limit) and for files that are not there."""
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        yield int(words[0]) / int(words[1])
