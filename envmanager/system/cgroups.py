"""Finds the control groups that this process is in, and what they allow.

A limit anywhere between the process's own group and the root counts, in version 2 as in version 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def folders(controller: str) -> Iterator[Path]:
    """The folders of this process's group, and of those around it, that may hold limits of ``controller``.

    Not all of them need exist: in a container the own group may be what is mounted, by whatever path it has outside.
    """
    for hierarchy, path in _memberships(controller):
        if hierarchy == "":
            mounted = [ROOT, ROOT / "unified"]
        elif controller in hierarchy.split(","):
            mounted = [ROOT / hierarchy, ROOT / controller]
        else:
            continue
        for root in dict.fromkeys(mounted):
            for group in (path, *path.parents):
                yield root / group.relative_to("/")


def _memberships(controller: str) -> Iterator[tuple[str, PurePosixPath]]:
    """Each hierarchy (of version 1 by its controllers, of version 2 as ""), and the path of the own group in it."""
    try:
        lines = OWN.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = ["0::/", f"1:{controller}:/"]  # no /proc: what is mounted tells what it can
    for line in lines:
        _, hierarchy, path = line.split(":", 2)
        is_outside = not path.startswith("/") or ".." in path.split("/")  # of what this process can see
        yield hierarchy, PurePosixPath("/" if is_outside else path)


def words(path: Path) -> list[str]:
    """What a file says, in words; none when it cannot be read."""
    try:
        return path.read_text().split()
    except (OSError, UnicodeDecodeError):
        return []
