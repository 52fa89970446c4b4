"""Choice of where environments run: in this process, or in how many worker processes; with the reason.

::

    Probe (what a step costs) ──┐
    n_envs, n_cores ────────────┼── choose ──▶ Placement (kind, n_workers, local_envs, the reason in a sentence)
    Costs (what messages cost) ─┘

One cost model decides for every environment that could be measured; nothing here measures or starts anything. A *round*
is one step of all environments. In this process it takes the sum of their times. In workers it takes as long as the
scarcest thing: the workers' own time, the cores, or the trainer, which serves one worker after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Literal

import attrs

from envmanager.hosts.local_worker import LEAST_BYTES


@attrs.frozen(kw_only=True)
class Probe:
    """Measured costs of one environment step, including resets after the end of an episode."""

    wall_s: float
    """Mean time of a step, less its waits for a free core."""
    cpu_s: float
    """Mean processor time of a step, over all threads of its process."""
    unevenness: float = 0.0
    """Difference of slow steps (95th percentile) and usual ones (median), divided by the mean."""
    reset_s: float = 0.0
    """Time of the first reset."""
    obs_bytes: int = 0
    """Size of the observations of one step."""
    n_steps: int = 1
    """Number of steps measured."""
    slowness: float = 1.0
    """Time of some lines of Python here, divided by their time on the machine where Costs were measured."""

    @property
    def busy_share(self) -> float:
        """Share of a step that is computing; in the rest it sleeps or waits for another program."""
        return min(1.0, self.cpu_s / self.wall_s) if self.wall_s > 0 else 1.0


@attrs.frozen(kw_only=True)
class Costs:
    """Costs of running environments, in seconds, in addition to the environments' own steps.

    Measured on two cores of a virtual machine (decision 0016). ``slowed`` converts them to another machine.
    """

    local_round_s: float = 14e-6
    """Time of a call of the manager that steps all environments in this process."""
    round_s: float = 4e-6
    """Time of a call of the manager that serves all workers that are ready."""
    serve_s: float = 22e-6
    """Time of the trainer for one step of one worker, also of the local one: send, read its response, deliver it."""
    respond_s: float = 8e-6
    """Time of the worker for the messages of one step: read the command, write the response."""
    wake_s: float = 4.7e-6
    """Delay until both sides notice a message while they spin; up to 100 µs where both sleep."""
    crowd_s: float = 26e-6
    """Time lost by switching, for each process (the trainer's included) beyond the number of cores."""
    crowd_share: float = 0.33
    """Share of the time lost when processes outnumber cores, because the spinning trainer takes a core."""
    crowd_most_s: float = 200e-6
    """Limit of the loss by ``crowd_share``, in seconds: the trainer spins no longer than that."""
    together: float = 0.25
    """Share by which computing takes longer with all cores busy, because they share caches, memory and clock."""
    group_s: float = 2e-6
    """Part of the probed step that a worker pays once for all its environments."""
    row_s: float = 0.08e-6
    """Time of the trainer for one row."""
    local_byte_s: float = 0.06e-9
    """Time to copy one byte within this process; large observations are not copied."""
    byte_s: float = 0.02e-9
    """Time to copy one byte that another core wrote."""

    def slowed(self, slowness: float) -> Costs:
        """Return the costs on a machine that is slower by this factor. The length of a spin is unchanged."""
        scaled = {name: value * slowness for name, value in attrs.asdict(self).items() if name.endswith("_s")}
        return attrs.evolve(self, **{**scaled, "crowd_most_s": self.crowd_most_s})


@attrs.frozen
class Placement:
    """A manager's kind and number of workers, the number of environments in its local worker, and the reason."""

    kind: str
    n_workers: int
    reason: str
    local_envs: int = 0

    def __str__(self) -> str:
        return self.reason


IN_PROCESS = 0
"""Number of workers when all environments run in this process."""

HERE_COUNTS = 1.02
"""Factor on the time of a round in this process, because nothing protects the trainer from a crash or a hang."""

SHARED_COUNTS = 1.12
"""Factor on the time of a round with a local worker, which uses all cores and may have to wait for the others."""

AS_GOOD = 1.05
"""Factor of the least time within which numbers of workers count as equal; the model is no more precise."""

UNEVEN = 1.0
"""Unevenness from which the greatest of equally good numbers of workers is taken, if slow steps are also slower than a
message, so that few environments wait for a slow neighbour. Below it the smallest is taken, to use fewer processes."""

MOSTLY = 0.5
"""Share of computing in a step from which the reason of a placement says that it computes."""


@attrs.frozen
class _Layout:
    """A number of workers, and the number of environments in this process beside them."""

    n_workers: int
    local_envs: int


def choose(
    probe: Probe,
    n_envs: int,
    n_cores: int,
    *,
    in_process: bool = True,
    n_workers: int | None = None,
    local_envs: int | Literal["auto"] = 0,
    costs: Costs | None = None,
) -> Placement:
    """Return where ``n_envs`` environments like the probed one run fastest on ``n_cores`` cores.

    ``in_process``: whether all of them may run in the trainer's own process. ``n_workers``: the number of workers, if
    there are any. ``local_envs``: number of environments in a local worker besides; "auto" for the fastest number.
    """
    costs = _costs_of(probe, costs)
    uneven = _is_uneven(probe, costs)
    least = 0 if local_envs == "auto" else local_envs
    found = [_best(probe, n_envs, n_cores, _apart(n_envs, n_cores, n_workers, least), costs)]
    shared = list(_shared(n_envs, n_cores, n_workers)) if local_envs == "auto" else []
    if shared and not uneven:  # while the trainer waits for a slow local environment, it serves no worker
        layout, shared_s = _best(probe, n_envs, n_cores, shared, costs)
        found.append((layout, SHARED_COUNTS * shared_s))
    if in_process and not least:
        here = _Layout(IN_PROCESS, 0)
        found.append((here, HERE_COUNTS * _round_s(probe, n_envs, here, n_cores, costs)))
    chosen, _ = min(found, key=itemgetter(1))
    n_apart = n_envs - chosen.local_envs
    why = _why(chosen.n_workers, probe, apart=chosen.n_workers == n_apart and uneven)
    where = f"{chosen.local_envs} in this process and " if chosen.local_envs else ""
    reason = f"{where}{_where(chosen.n_workers, n_apart, n_cores)}, because {why}"
    return Placement(
        "subprocess" if chosen.n_workers else "simple", max(1, chosen.n_workers), reason, chosen.local_envs
    )


def isolate(
    reason: str, n_envs: int, *, n_workers: int | None = None, local_envs: int | Literal["auto"] = 0
) -> Placement:
    """Return the placement of environments that end their process: one worker each, none in the trainer's process.

    ``reason`` says what happened. Numbers in ``n_workers`` and ``local_envs`` were chosen by the user and stay.
    """
    n_local = 0 if local_envs == "auto" else local_envs
    n_apart = n_envs - n_local
    chosen = n_apart if n_workers is None else n_workers
    here = f"{n_local} in this process and " if n_local else ""
    where = f"{here}{_where(chosen, n_apart, n_cores=0)}"
    return Placement("subprocess", chosen, f"{where}, because {reason}: each can be replaced alone", n_local)


def round_s(
    probe: Probe, n_envs: int, n_workers: int, n_cores: int, *, local_envs: int = 0, costs: Costs | None = None
) -> float:
    """Return the expected time of one step of all environments, in seconds, with partial steps."""
    return _round_s(probe, n_envs, _Layout(n_workers, local_envs), n_cores, _costs_of(probe, costs))


def _costs_of(probe: Probe, costs: Costs | None) -> Costs:
    """Return ``costs``, or else the default ones, adapted to the speed of the probe's machine."""
    return (Costs() if costs is None else costs).slowed(probe.slowness)


def _round_s(probe: Probe, n_envs: int, layout: _Layout, n_cores: int, costs: Costs) -> float:
    n_workers, local_envs = layout.n_workers, layout.local_envs
    group_s = min(costs.group_s, 0.9 * probe.wall_s)
    env_s, env_cpu_s = probe.wall_s - group_s, max(0.0, probe.cpu_s - group_s)
    if n_workers == IN_PROCESS:
        copied = n_envs * probe.obs_bytes if n_envs * probe.obs_bytes < LEAST_BYTES else 0
        return costs.local_round_s + group_s + n_envs * (env_s + costs.row_s) + costs.local_byte_s * copied
    n_busy = min(n_cores, n_workers + bool(local_envs))
    longer_s = costs.together * (n_busy - 1) / max(1, n_cores - 1) * env_cpu_s
    env_s, env_cpu_s = env_s + longer_s, env_cpu_s + longer_s
    row_s = costs.row_s + costs.byte_s * probe.obs_bytes
    most_envs = math.ceil((n_envs - local_envs) / n_workers)
    local_s = group_s + local_envs * env_s + costs.serve_s if local_envs else 0.0
    trainer_s = costs.round_s + n_workers * costs.serve_s + n_envs * row_s + local_s
    # A worker does its part, then nothing until the trainer has served it.
    worker_s = group_s + most_envs * env_s + costs.respond_s + costs.wake_s
    turn_s = worker_s + costs.round_s + costs.serve_s + most_envs * row_s
    apart_s = (n_envs - local_envs) * env_cpu_s + n_workers * (group_s + costs.respond_s)
    cores_s = (apart_s + trainer_s) / min(n_cores, n_workers + 1)
    return _crowded(max(trainer_s, turn_s, cores_s), n_workers + 1 - n_cores, costs)


def _crowded(time_s: float, n_too_many: int, costs: Costs) -> float:
    """Return ``time_s`` with ``n_too_many`` processes more than cores."""
    if n_too_many <= 0:
        return time_s
    return time_s + min(costs.crowd_share * time_s, costs.crowd_most_s) + n_too_many * costs.crowd_s


def _apart(n_envs: int, n_cores: int, n_workers: int | None, local_envs: int) -> list[_Layout]:
    """Return the layouts to compare with ``local_envs`` environments in this process.

    Beyond one worker per core only numbers count that load all cores equally, and one worker per environment. A local
    worker takes one core.
    """
    if n_workers is not None:
        return [_Layout(n_workers, local_envs)]
    n_apart, free = n_envs - local_envs, max(1, n_cores - 1) if local_envs else n_cores
    counts = [n for n in range(1, n_apart + 1) if n <= free or n % free == 0 or n == n_apart]
    return [_Layout(count, local_envs) for count in counts]


def _shared(n_envs: int, n_cores: int, n_workers: int | None) -> Iterator[_Layout]:
    """Yield the layouts with a local worker, which gets as many environments as each other worker, or a few less."""
    most = min(n_cores - 1, n_envs - 1)
    for count in range(1, most + 1) if n_workers is None else [n_workers]:
        even = n_envs // (count + 1)
        for local_envs in sorted({even, even - 1, even - even // 8, even - even // 4}):
            if 0 < local_envs <= n_envs - count:
                yield _Layout(count, local_envs)


def _best(probe: Probe, n_envs: int, n_cores: int, layouts: Sequence[_Layout], costs: Costs) -> tuple[_Layout, float]:
    """Return the best layout, and the least time of all.

    Among equally good layouts, the best has the fewest workers and local environments, or the most when some steps
    are far slower than others.
    """
    times = [_round_s(probe, n_envs, layout, n_cores, costs) for layout in layouts]
    best_s = min(times)
    as_good = [layout for layout, time_s in zip(layouts, times, strict=True) if time_s <= AS_GOOD * best_s]
    return as_good[-1 if _is_uneven(probe, costs) else 0], best_s


def _is_uneven(probe: Probe, costs: Costs) -> bool:
    message_s = costs.serve_s + costs.respond_s + costs.wake_s
    return probe.unevenness >= UNEVEN and probe.unevenness * probe.wall_s > message_s


def _where(chosen: int, n_envs: int, n_cores: int) -> str:
    envs = _count(n_envs, "environment")
    if chosen == IN_PROCESS:
        return f"{envs} in this process"
    workers = _count(chosen, "worker")
    if n_envs > 1 and chosen == n_envs:
        return f"{envs} in {workers}, one each"
    return f"{envs} in {workers}, one per core" if chosen == n_cores > 1 else f"{envs} in {workers}"


def _why(chosen: int, probe: Probe, *, apart: bool) -> str:
    step = f"a step takes {describe_seconds(probe.wall_s)}"
    if chosen == IN_PROCESS:
        return f"{step}, too little to be worth the messages to a worker"
    if probe.busy_share < MOSTLY:
        return f"{step} and computes for only {probe.busy_share:.0%} of that, so they can wait side by side"
    if apart:
        return f"{step} on average and some steps far more, so that none should wait for another"
    return f"{step} and computes for {probe.busy_share:.0%} of that, so the cores are what they share"


def describe_seconds(seconds: float) -> str:
    """Return a short time as text, in s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
