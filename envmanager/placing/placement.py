"""Functions that choose where environments run, in this process or in worker processes, and state the reason.

::

    Probe (what a step and a message cost) ──┐
    n_envs, n_cores ─────────────────────────┴── choose ──▶ Placement (kind, n_workers, local_envs, the reason)

Layouts are compared by the estimated time of a *round*, one step of all environments. In this process a round takes
about the sum of their step times. In workers it takes at least the longest of three times: the time of the slowest
worker, the time that the cores need for all the work, and the time that the trainer needs to serve the workers one
after another. The costs of a step and a message come from a probe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Literal

import attrs

from envmanager.data.specs import BehaviorSpecs
from envmanager.data.steps import LEAST_LENT_BYTES
from envmanager.hosts.spin import SPIN_NS


@attrs.frozen(kw_only=True)
class Probe:
    """Measured costs of a message and of one environment step, including the resets after the ends of episodes."""

    wall_s: float
    """Mean time of a step, without its waits for a free core."""
    cpu_s: float
    """Mean CPU time of a step, over all threads of its process."""
    message_s: float = 50e-6
    """Time of a message, which is half the round trip of a command that does nothing."""
    unevenness: float = 0.0
    """Difference between the 95th percentile and the median of the step times, divided by their mean."""
    obs_bytes: int = 0
    """Size of the observations of one step."""
    n_steps: int = 1
    """Number of steps measured."""
    n_rows: int | None = None
    """Number of environments if a vector was probed. ``wall_s``, ``cpu_s`` and ``obs_bytes`` are per environment."""
    fixed_s: float = 0.0
    """Time for which a vector's step waits, whatever the number of rows. It is not included in ``wall_s``."""
    begins_late: bool = False
    """Whether a vector begins the next episode one step after the previous one has ended."""
    behavior_specs: BehaviorSpecs = attrs.field(factory=dict, repr=False)

    @property
    def busy_share(self) -> float:
        """Share of a step in which the environment computes, as opposed to sleeping or waiting for another program."""
        return min(1.0, self.cpu_s / self.wall_s) if self.wall_s > 0 else 1.0


@attrs.frozen
class Placement:
    """A choice of the kind of manager, and of its numbers of workers and local environments, with the reason as text.

    ``round_s``: expected seconds of one step of all environments, times a penalty for some layouts; inf if unknown.
    ``is_vectorised``: whether the environments are made in their vectorised form. ``probes``: costs of single
    environments and, if that was measured, of their vectorised form.
    """

    kind: str
    n_workers: int
    reason: str
    local_envs: int = 0
    round_s: float = attrs.field(default=math.inf, eq=False)
    is_vectorised: bool = False
    probes: tuple[Probe, ...] = attrs.field(default=(), eq=False, repr=False)

    def shares_a_process(self, n_envs: int) -> bool:
        """Return whether several of the ``n_envs`` environments are in one process."""
        return self.local_envs > 1 or n_envs - self.local_envs > self.n_workers

    def __str__(self) -> str:
        return self.reason


IN_PROCESS = 0

HERE_COUNTS = 1.02
"""Penalty factor on the time of a round in this process, where nothing protects the trainer from a crash or a hang."""

SHARED_COUNTS = 1.12
"""Penalty factor on the time of a round with a local worker. Such a round uses all cores and may wait for workers."""

AS_GOOD = 1.05
"""Greatest ratio to the least time at which a layout counts as equally good, because the model is imprecise."""

UNEVEN = 1.0
"""Unevenness from which the largest of equally good numbers of workers is chosen, so that few environments wait for a
slow neighbour in their worker. Otherwise, or if slow steps cost less than a message, the smallest is chosen."""

MOSTLY = 0.5
"""Share of a step spent computing, below which the text of a placement says that steps mostly wait."""

CROWD = 0.33
"""Greatest share of a round that is lost because the trainer spins on a core when processes outnumber cores."""

BYTE_S = 0.02e-9
"""Time in seconds to copy one byte that another core wrote."""


def choose(
    probe: Probe,
    n_envs: int,
    n_cores: int,
    *,
    in_process: bool = True,
    n_workers: int | None = None,
    local_envs: int | Literal["auto"] = 0,
) -> Placement:
    """Return a placement that should be about the fastest for ``n_envs`` environments like the probed one.

    ``in_process``: whether the trainer's process may run all environments. ``n_workers``: number of workers if any are
    used, None for the fastest. ``local_envs``: number of environments in a local worker, "auto" for the fastest.
    """
    uneven = probe.unevenness >= UNEVEN and probe.unevenness * probe.wall_s > probe.message_s

    def best(layouts: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], float]:
        times = [round_s(probe, n_envs, count, n_cores, local_envs=n_local) for count, n_local in layouts]
        as_good = [layout for layout, time_s in zip(layouts, times, strict=True) if time_s <= AS_GOOD * min(times)]
        return as_good[-1 if uneven else 0], min(times)

    least = 0 if local_envs == "auto" else local_envs
    counts = list(range(1, n_envs - least + 1)) if n_workers is None else [n_workers]
    found = [best([(count, least) for count in counts])]
    if local_envs == "auto" and n_cores > 1 and not uneven:  # during a slow local step the trainer serves no worker
        counts = list(range(1, min(n_cores, n_envs))) if n_workers is None else [n_workers]
        shared = [(count, n_envs // (count + 1)) for count in counts if count < n_envs]
        if shared:
            layout, shared_s = best(shared)
            found.append((layout, SHARED_COUNTS * shared_s))
    if in_process and not least:
        found.append(((IN_PROCESS, 0), HERE_COUNTS * round_s(probe, n_envs, IN_PROCESS, n_cores)))
    (chosen, n_local), time_s = min(found, key=itemgetter(1))
    n_apart = n_envs - n_local
    here = f"{n_local} in this process and " if n_local else ""
    reason = f"{here}{_where(chosen, n_apart, n_cores)}, because {_why(chosen, probe, uneven and chosen == n_apart)}"
    return Placement("subprocess" if chosen else "simple", max(1, chosen), reason, n_local, time_s, probes=(probe,))


def better_form(single: Placement, probe: Probe, vector: Placement, vector_probe: Probe) -> Placement:
    """Return ``vector`` if it is equivalent and clearly faster, else ``single``. Add the comparison to the reason."""
    probes = (*single.probes, *vector.probes)
    if vector_probe.behavior_specs != probe.behavior_specs:
        why = "not in their vectorised form, which has other observations or actions"
    elif vector_probe.begins_late:
        why = "not in their vectorised form, which begins episodes a step late"
    else:
        times = f"{describe_seconds(vector.round_s)} instead of {describe_seconds(single.round_s)}"
        why = f"in their vectorised form, in which a step of all takes {times}"
        if AS_GOOD * vector.round_s <= single.round_s:
            return attrs.evolve(vector, reason=f"{vector.reason}; {why}", is_vectorised=True, probes=probes)
        why = f"not {why}"  # single environments can be stepped one by one, so they stay
    return attrs.evolve(single, reason=f"{single.reason}; {why}", probes=probes)


def isolate(
    reason: str, n_envs: int, *, n_workers: int | None = None, local_envs: int | Literal["auto"] = 0
) -> Placement:
    """Return a placement for environments that should not share a process. By default, each gets its own worker.

    ``reason``: text that says why they should not. Numbers in ``n_workers`` and ``local_envs`` are kept.
    """
    n_local = 0 if local_envs == "auto" else local_envs
    n_apart = n_envs - n_local
    chosen = n_apart if n_workers is None else n_workers
    here = f"{n_local} in this process and " if n_local else ""
    where = f"{here}{_where(chosen, n_apart, n_cores=0)}"
    placement = Placement("subprocess", chosen, f"{where}, because {reason}", n_local)
    if not placement.shares_a_process(n_envs):
        return placement
    return attrs.evolve(placement, reason=f"{where}, as chosen by hand, although {reason}")


def round_s(probe: Probe, n_envs: int, n_workers: int, n_cores: int, *, local_envs: int = 0) -> float:
    """Return the expected seconds of one step of all environments. If ``n_workers`` is 0, they run in this process."""
    copied_s = n_envs * probe.obs_bytes * BYTE_S
    if n_workers == IN_PROCESS:
        return (
            n_envs * probe.wall_s + probe.fixed_s + (copied_s if n_envs * probe.obs_bytes < LEAST_LENT_BYTES else 0.0)
        )
    n_apart = n_envs - local_envs
    local_s = local_envs * probe.wall_s + probe.fixed_s + probe.message_s if local_envs else 0.0
    trainer_s = n_workers * probe.message_s + local_s + copied_s
    worker_s = math.ceil(n_apart / n_workers) * probe.wall_s + probe.fixed_s + probe.message_s + copied_s / n_workers
    cores_s = (n_apart * probe.cpu_s + trainer_s) / min(n_cores, n_workers + 1)
    time_s = max(trainer_s, worker_s, cores_s)
    n_too_many = n_workers + 1 - n_cores
    if n_too_many > 0:
        time_s += min(CROWD * time_s, SPIN_NS / 1e9) + n_too_many * probe.message_s
    return time_s


def _where(chosen: int, n_envs: int, n_cores: int) -> str:
    envs = count(n_envs, "environment")
    if chosen == IN_PROCESS:
        return f"{envs} in this process"
    workers = count(chosen, "worker")
    if n_envs > 1 and chosen == n_envs:
        return f"{envs} in {workers}, one each"
    return f"{envs} in {workers}, one per core" if chosen == n_cores > 1 else f"{envs} in {workers}"


def _why(chosen: int, probe: Probe, apart: bool) -> str:
    step = f"a step takes {describe_seconds(probe.wall_s)}"
    if probe.n_rows is not None:
        whole_s = probe.wall_s * probe.n_rows + probe.fixed_s
        step = f"a step of a vector of {probe.n_rows} takes {describe_seconds(whole_s)}"
        return f"{step}, no longer than in workers" if chosen == IN_PROCESS else step
    if chosen == IN_PROCESS:
        return f"{step}, too little to be worth the messages to a worker"
    if probe.busy_share < MOSTLY:
        return f"{step} and computes for only {probe.busy_share:.0%} of that, so they can wait side by side"
    if apart:
        return f"{step} on average and some steps far more, so that none should wait for another"
    return f"{step} and computes for {probe.busy_share:.0%} of that, so the cores are what they share"


def describe_seconds(seconds: float) -> str:
    """Return a duration as text with up to three significant digits, in s, ms or µs."""
    unit, size = ("s", 1.0) if seconds >= 0.9995 else ("ms", 1e-3) if seconds >= 0.9995e-3 else ("µs", 1e-6)
    return f"{float(f'{seconds / size:.3g}'):g} {unit}"  # without float(), 1234 s would be 1.23e+03 s


def count(number: int, thing: str) -> str:
    """Format a number of things: ``"1 worker"``, ``"2 workers"``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
