"""``envmanager run --explain``: what was measured and compared to choose a placement, as a table.

::

    place ── logs a Placement, with its Probes ──▶ Explained ── round_s of each layout ──▶ table
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from envmanager.cli.display import RunDisplay
from envmanager.cli.output import LibraryLog, Table
from envmanager.placing.placement import IN_PROCESS, Placement, Probe, count, describe_seconds, round_s
from envmanager.ray_cluster import probing as on_ray
from envmanager.registry import ManagerOptions
from envmanager.system.machine import count_cores

COLUMNS = ("form", "workers", "here", "a step of all", "env steps/s", "")


class Explained(LibraryLog):
    """A log that shows how the placement of a manager with ``options`` is chosen."""

    def __init__(self, options: ManagerOptions, display: RunDisplay) -> None:
        super().__init__(logging.INFO)
        self._options, self._display = options, display

    def emit(self, record: logging.LogRecord) -> None:
        found = record.args[0] if isinstance(record.args, tuple) and record.args else None
        if not isinstance(found, Placement):
            return
        for probe in found.probes:
            self._display.show_line(f"measured: {describe(probe)}")
        if found.probes:
            self._display.show_table(Table(COLUMNS, list(_rows(found, self._options))))


def describe(probe: Probe) -> str:
    """Return a line with what a probe has measured."""
    of = "an environment" if probe.n_rows is None else f"an environment of a vector of {probe.n_rows}"
    steps = f"a step of {of} takes {describe_seconds(probe.wall_s)} and computes for {probe.busy_share:.0%} of that"
    return f"{steps}, a message {describe_seconds(probe.message_s)}; {count(probe.n_steps, 'step')}"


def _rows(found: Placement, options: ManagerOptions) -> Iterator[tuple[str, ...]]:
    """Yield a row for each form and layout that was compared, the fastest first."""
    n_envs, n_cores, given = options.n_envs, count_cores(), options.n_workers
    chosen = IN_PROCESS if found.kind == "simple" else found.n_workers
    layouts = []
    for number in range(len(found.probes)):
        doubled = {2**power for power in range(n_envs.bit_length())}
        for n_workers in {given} if isinstance(given, int) else doubled | {n_cores, n_envs, max(1, chosen)}:
            shared = {0, n_envs // (n_workers + 1), found.local_envs}
            for here in shared if options.local_envs == "auto" else {found.local_envs}:
                if n_workers + here <= n_envs:
                    layouts.append((number, n_workers, here))
        if options.kind == "auto" and not found.local_envs:
            layouts.append((number, IN_PROCESS, 0))

    def seconds_of(layout: tuple[int, int, int]) -> float:
        number, n_workers, here = layout
        if found.kind == "ray":
            return on_ray.round_s(found.probes[number], n_envs, n_workers)
        return round_s(found.probes[number], n_envs, n_workers, n_cores, local_envs=here)

    for layout in sorted(layouts, key=seconds_of):
        (number, n_workers, here), seconds = layout, seconds_of(layout)
        yield (
            "single" if found.probes[number].n_rows is None else "vector",
            "in process" if n_workers == IN_PROCESS else str(n_workers),
            str(here),
            describe_seconds(seconds),
            f"{n_envs / seconds:,.0f}",
            "chosen" if layout == (int(found.is_vectorised), chosen, found.local_envs) else "",
        )
