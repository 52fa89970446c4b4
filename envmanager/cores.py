"""How many processor cores this process may use.

The rule: the machine's number does not matter. What counts is the affinity and, in a container, the share of time that
its cgroup may use; both apply to worker processes too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUP_ROOT = Path("/sys/fs/cgroup")


def count_cores(cgroup_root: Path = CGROUP_ROOT) -> int:
    """How many cores this process and its children may keep busy: at least 1; a part of a core counts as one."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        allowed = os.cpu_count() or 1
    quotas = list(_quotas(cgroup_root, _own_cgroup()))
    return max(1, min(allowed, *(math.ceil(quota) for quota in quotas))) if quotas else allowed


def _quotas(root: Path, own: PurePosixPath) -> Iterator[float]:
    """The limits, in cores, of the cgroup and of those around it; version 2, then version 1."""
    for path in (own, *own.parents):
        folder = root / path.relative_to("/")
        yield from _ratio(_words(folder / "cpu.max"))
    for folder in (root / "cpu", root / "cpu,cpuacct"):
        yield from _ratio(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"))


def _ratio(words: list[str]) -> Iterator[float]:
    """Quota through period; nothing for ``max``, for -1 (no limit) and for files that are not there."""
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        yield int(words[0]) / int(words[1])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except (OSError, UnicodeDecodeError):
        return []


def _own_cgroup() -> PurePosixPath:
    """Where this process is in the tree of cgroups (version 2), as a path from its root."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    unified = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    return PurePosixPath(unified) if unified.startswith("/") else PurePosixPath("/")
