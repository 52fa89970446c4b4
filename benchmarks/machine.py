"""Description of the machine of a measurement."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from envmanager import __version__


def facts() -> dict[str, Any]:
    """Return facts about the machine, the system and this library."""
    return {
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "cpu": cpu_name(Path("/proc/cpuinfo")),
        "system": f"{platform.system()} {platform.release()}",
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "envmanager": __version__,
    }


def cpu_name(cpuinfo: Path) -> str:
    """Return the name of the processor, or its architecture if ``cpuinfo`` has no name."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
