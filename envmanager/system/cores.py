"""Counts the processor cores that this process may use.

The machine's number does not matter. What counts is the affinity and, in a container, the share of time that its cgroup
may use; both apply to worker processes too. A limit anywhere between the process's own group and the root counts, in
version 2 of cgroups as in version 1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def count_cores() -> int:
    """Return how many cores this process and its children may keep busy: at least 1; a part of a core counts as one."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        allowed = os.cpu_count() or 1
    quotas = [quota for folder in _folders() for quota in _quotas(folder)]
    return max(1, min(allowed, *(math.ceil(quota) for quota in quotas))) if quotas else allowed


def _quotas(folder: Path) -> Iterator[float]:
    """Yield the limits of one cgroup, in cores: from the file of version 2, and from the files of version 1."""
    yield from _ratio(_words(folder / "cpu.max"))
    yield from _ratio(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"))


def _ratio(words: list[str]) -> Iterator[float]:
    """Yield quota through period; nothing for ``max``, for -1 (no limit) and for files that are not there."""
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        yield int(words[0]) / int(words[1])


def _folders() -> Iterator[Path]:
    """Yield the folders of this process's cgroup, and of the cgroups around it, that may limit its time.

    Not all of them need exist: in a container the own group may be what is mounted, by whatever path it has outside.
    """
    try:
        lines = OWN.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = ["0::/", "1:cpu:/"]  # no /proc: what is mounted tells what it can
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            mounted = [ROOT, ROOT / "unified"]
        elif "cpu" in controllers.split(","):
            mounted = [ROOT / controllers, ROOT / "cpu"]
        else:
            continue
        is_outside = not path.startswith("/") or ".." in path.split("/")  # of what this process can see
        own = PurePosixPath("/" if is_outside else path)
        for root in dict.fromkeys(mounted):
            for group in (own, *own.parents):
                yield root / group.relative_to("/")


def _words(path: Path) -> list[str]:
    """Return the words of a file; none when it cannot be read."""
    try:
        return path.read_text().split()
    except (OSError, UnicodeDecodeError):
        return []
