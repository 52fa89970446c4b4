"""Performance targets of this library's managers, and the measured values.

A target is a ratio within a round, a number of cores, or a time that a user would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import attrs

from benchmarks.roster import ROSTER, family_of
from benchmarks.summary import CellSummary
from benchmarks.workloads import ALL, SEPARATE

ANY_OF_OURS = tuple(name for name in ROSTER if family_of(name) == "ours" and name != "ours-step")
IN_PROCESS = ("ours-simple", "ours-simple-view")
ONE_PER_PROCESS = ("ours-processes", "ours-processes-view")
ONE_PER_CORE = ("ours-workers", "ours-workers-view")
VIEWS = ("ours-simple-view", "ours-processes-view", "ours-workers-view")
COPIES = ("ours-simple", "ours-processes", "ours-workers", "ours-share")
NOT_WAITING_FOR_ALL = ("ours-any",)
BY_HAND = ("ours-simple", "ours-processes", "ours-workers", "ours-any")
"""Placements from which ``kind="auto"`` chooses. Views and local environments have options of their own."""
GODOT_RL = ("godot_rl-fixed", "godot_rl-fastest")
"""The fastest settings of godot_rl_agents: they do not wait for real time."""
BY_STEP = ("ours-engine", "ours-engine-frames")
PUFFERLIB = ("pufferlib-serial", "pufferlib-processes", "pufferlib-workers")


@attrs.frozen
class Target:
    """A goal for ``figure`` of the best of ``ours``; ratios compare it with the fastest of ``peers``."""

    workload: str
    n_envs: int
    about: str
    figure: str
    ours: tuple[str, ...]
    goal: float
    peers: tuple[str, ...] = ()

    @property
    def at_most(self) -> bool:
        """Whether smaller values are better."""
        return self.figure in ("cores", "all_cores", "start_s", "extra_us")


@attrs.frozen
class Outcome:
    """The measured value of a target; ``value`` and ``met`` are None if it was not measured.

    For a cost of 0 or less, which is only an error of measurement, ``met`` is None too.
    """

    target: Target
    value: float | None = None
    by: str | None = None
    against: str | None = None

    @property
    def is_lost_in_noise(self) -> bool:
        """Whether the measured cost is smaller than the error of the measurement."""
        return self.value is not None and self.target.at_most and self.value <= 0

    @property
    def met(self) -> bool | None:
        """Whether the target is reached."""
        if self.value is None or self.is_lost_in_noise:
            return None
        return self.value <= self.target.goal if self.target.at_most else self.value >= self.target.goal


def _by_hand(workload: str) -> tuple[str, ...]:
    return tuple(name for name in BY_HAND if name in ALL[workload].contenders)


TARGETS = (
    Target("noop", 8, "in process", "times", IN_PROCESS, 1.3, ("gymnasium-sync",)),
    Target("noop", 64, "in process", "times", IN_PROCESS, 1.6, ("gymnasium-sync",)),
    Target("noop", 8, "a worker each", "times", ONE_PER_PROCESS, 2.2, ("gymnasium-async",)),
    Target("noop", 8, "step() above send/recv, µs per worker step", "extra_us", ("ours-step",), 15.0),
    Target("cartpole", 8, "in process", "times", IN_PROCESS, 1.0, ("gymnasium-sync",)),
    Target("cartpole", 32, "best placement", "times", ANY_OF_OURS, 1.4, ("gymnasium-sync",)),
    Target("cartpole", 32, "a worker per core", "times", ONE_PER_CORE, 9.0, ("gymnasium-async",)),
    Target("pong", 8, "a worker per core", "to_bare", ONE_PER_CORE, 1.7),
    Target("pong", 8, "with local environments", "to_bare", ("ours-share",), 1.8),
    Target("pong", 8, "auto", "to_bare", ("ours-auto",), 1.7),
    Target("bigobs", 32, "copied out", "times", COPIES, 1.0, ("gymnasium-sync",)),
    Target("bigobs", 32, "zero_copy", "times", VIEWS, 1.6, PUFFERLIB),
    Target("straggler", 32, "share of the limit", "to_limit", NOT_WAITING_FOR_ALL, 0.92),
    Target("straggler", 32, "cores used by trainer and workers", "all_cores", NOT_WAITING_FOR_ALL, 0.55),
    Target("badworker", 8, "any synchronous peer", "times", NOT_WAITING_FOR_ALL, 30.0, SEPARATE),
    Target("waiting", 8, "cores used by the trainer", "cores", NOT_WAITING_FOR_ALL, 0.05),
    Target("start", 8, "forkserver, seconds", "start_s", ("ours-forkserver",), 1.0),
    Target("godot", 1, "connection and codec", "times", ("ours-codec",), 2.5, GODOT_RL),
    Target("godot", 64, "connection and codec", "times", ("ours-codec",), 4.0, GODOT_RL),
    Target("godot", 1, "step()", "times", BY_STEP, 1.0, GODOT_RL),
    Target("godot", 8, "step()", "times", BY_STEP, 2.0, GODOT_RL),
    Target("godot", 64, "step()", "times", BY_STEP, 2.5, GODOT_RL),
    Target("godot", 1, "step(), its default", "times", BY_STEP, 15.0, ("godot_rl-default",)),
    Target("godot", 64, "two engines", "times", ("ours-engines-2",), 4.0, GODOT_RL),
    Target("godot-uneven", 64, "any beside all", "times", ("ours-uneven-any",), 1.9, ("ours-uneven-all",)),
    Target("godot-start", 4, "one engine, seconds", "start_s", ("ours-engine",), 0.2),
    Target("godot-start", 4, "16 engines, seconds", "start_s", ("ours-engines-16",), 5.0),
    *(
        Target(workload, n_envs, "auto, local_envs too, beside the best", "times", ("ours-auto-local",), 0.9, best)
        for workload in ("noop", "cartpole", "pong", "bigobs")
        for n_envs in ALL[workload].sizes
        for best in [(*_by_hand(workload), "ours-share")]
    ),
    *(
        Target(workload, n_envs, "auto beside the best by hand", "times", ("ours-auto",), 0.9, _by_hand(workload))
        for workload in ("noop", "cartpole", "pong", "bigobs", "straggler", "badworker")
        for n_envs in ALL[workload].sizes
    ),
)
"""Targets on an idle machine of two cores. Automatic placement must reach 90 % of the best manual placement."""


def outcomes(summaries: Sequence[CellSummary]) -> list[Outcome]:
    """Return the outcome of every target in these summaries."""
    by_cell = {(summary.workload, summary.n_envs): summary for summary in summaries}
    return [_outcome(target, by_cell.get((target.workload, target.n_envs))) for target in TARGETS]


def _outcome(target: Target, summary: CellSummary | None) -> Outcome:
    if summary is None:
        return Outcome(target)
    against = summary.fastest(target.peers)
    best = Outcome(target, against=against)
    for name in target.ours:
        value = FIGURES[target.figure](summary, name, against)
        if value is None:
            continue
        better = best.value is None or (value < best.value if target.at_most else value > best.value)
        best = Outcome(target, value, name, against) if better else best
    return best


def _field(name: str) -> Callable[[CellSummary, str, str | None], float | None]:
    def figure(summary: CellSummary, ours: str, _: str | None) -> float | None:
        line = summary.line(ours)
        return None if line is None else getattr(line, name)

    return figure


def _times(summary: CellSummary, ours: str, against: str | None) -> float | None:
    return None if against is None else summary.ratio(ours, against)


def _extra_us(summary: CellSummary, ours: str, _: str | None) -> float | None:
    extra = [1e6 / one - 1e6 / other for one, other in summary.rates(ours, "ours-processes") if one and other]
    return median(extra) if extra else None


FIGURES: dict[str, Callable[[CellSummary, str, str | None], float | None]] = {
    "times": _times,
    "to_bare": _field("to_bare"),
    "to_limit": _field("to_limit"),
    "cores": _field("cores"),
    "all_cores": _field("all_cores"),
    "start_s": _field("start_s"),
    "extra_us": _extra_us,
}
"""Functions that compute a figure from a summary, the name of one of our contenders, and a peer's name or None."""
