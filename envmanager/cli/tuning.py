"""What ``envmanager tune`` tries, what came of it, and which is best.

The rule: nothing is run here and no clock is read. Trials are compared by successive halving: each round gives every
trial that is left the same time, and the slower half is out, so that most of the time goes to those that are close.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from envmanager.cli.display import count
from envmanager.placing.placement import IN_PROCESS, Probe, round_s
from envmanager.ray_cluster import probing

ENVS_PER_CORE = (1, 4, 16)
"""How many environments are tried when that is left open too."""

ENVS_PER_CPU = (4, 32, 128)
"""The same on a cluster, where a call takes long: more share an actor."""

SUBPROCESS, RAY = "subprocess", "ray"
"""The kinds of managers that can be tuned."""

AS_FAST = 0.97
"""Trials within so much of the fastest are as fast; of these the one with the fewest environments and workers wins."""


@attrs.frozen
class Candidate:
    """One way to run environments; ``n_workers`` may be IN_PROCESS. ``kind``: of a manager that has workers."""

    n_envs: int
    n_workers: int
    wait: str | int = "any"
    kind: str = SUBPROCESS

    def options(self) -> dict[str, Any]:
        """As a config's table ``manager`` says it."""
        if self.n_workers == IN_PROCESS:
            return {"kind": "simple", "n_envs": self.n_envs}
        return {"kind": self.kind, "n_envs": self.n_envs, "n_workers": self.n_workers, "wait": self.wait}

    def __str__(self) -> str:
        envs = count(self.n_envs, "environment")
        if self.n_workers == IN_PROCESS:
            return f"{envs} in this process"
        return f"{envs} in {count(self.n_workers, 'worker')}, wait {self.wait}"

    @property
    def envs_per_worker(self) -> str:
        """``"4"``, or ``"2-3"`` where they do not come out even."""
        workers = max(1, self.n_workers)
        least, most = self.n_envs // workers, math.ceil(self.n_envs / workers)
        return str(most) if least == most else f"{least}-{most}"


@attrs.define(eq=False)
class Trial:
    """A candidate and what came of it so far; ``failure`` is the error that ended it."""

    candidate: Candidate
    n_steps: int = 0
    seconds: float = 0.0
    is_out: bool = False
    failure: Exception | None = None

    @property
    def steps_per_s(self) -> float:
        """Environment steps per second, over all rounds; 0 before the first."""
        return self.n_steps / self.seconds if self.seconds > 0 else 0.0

    def add(self, n_steps: int, seconds: float) -> None:
        """Count what another round brought."""
        self.n_steps += n_steps
        self.seconds += seconds

    def fail(self, error: Exception) -> None:
        """Leave it out from now on, because of ``error``."""
        self.failure, self.is_out = error, True


def candidates(n_envs: int | None, n_cores: int, kind: str = SUBPROCESS) -> list[Candidate]:
    """What to try for so many environments, or, for None, for several numbers of them.

    On a cluster (``kind="ray"``) no more workers than CPUs, since there is no room for them, and none in this process.
    """
    per_core = ENVS_PER_CORE if kind == SUBPROCESS else ENVS_PER_CPU
    sizes = sorted({n_cores * each for each in per_core}) if n_envs is None else [n_envs]
    tried = [candidate for size in sizes for candidate in _for_size(size, n_cores)]
    if kind == SUBPROCESS:
        return tried
    return [attrs.evolve(each, kind=kind) for each in tried if IN_PROCESS < each.n_workers <= n_cores]


def _for_size(n_envs: int, n_cores: int) -> Iterator[Candidate]:
    yield Candidate(n_envs, IN_PROCESS)
    doubled = [2**power for power in range(n_envs.bit_length())]
    for n_workers in sorted({*doubled, min(n_cores, n_envs), n_envs}):
        yield Candidate(n_envs, n_workers)
        if n_workers >= 4:
            yield Candidate(n_envs, n_workers, n_workers // 2)
        if n_workers > 1:
            yield Candidate(n_envs, n_workers, "all")


def trials_for(candidates: Sequence[Candidate], probe: Probe, n_cores: int) -> list[Trial]:
    """A trial of each, the most promising first, so that a short time is spent well; one manager's stay together."""

    def promise(candidate: Candidate) -> tuple[float, int, int]:
        if candidate.kind == RAY:
            seconds = probing.round_s(probe, candidate.n_envs, candidate.n_workers)
        else:
            seconds = round_s(probe, candidate.n_envs, candidate.n_workers, n_cores)
        return seconds / candidate.n_envs, candidate.n_envs, candidate.n_workers

    return [Trial(candidate) for candidate in sorted(candidates, key=promise)]


def n_rounds(n_trials: int) -> int:
    """How many rounds there are for so many, halved between them, if two are to meet in the last."""
    return max(1, math.ceil(math.log2(n_trials))) if n_trials else 0


def halve(trials: Sequence[Trial]) -> None:
    """Put the slower half of those that are left out; one stays."""
    left = sorted(remaining(trials), key=lambda trial: trial.steps_per_s, reverse=True)
    for trial in left[math.ceil(len(left) / 2) :]:
        trial.is_out = True


def remaining(trials: Sequence[Trial]) -> list[Trial]:
    """Those that are not out."""
    return [trial for trial in trials if not trial.is_out]


def best(trials: Sequence[Trial]) -> Trial | None:
    """The winner, or the leader so far: of those as fast as the fastest the lightest; None when none was measured."""
    measured = [trial for trial in remaining(trials) if trial.n_steps]
    if not measured:  # those that are left were not yet tried when the time was up
        measured = [trial for trial in trials if trial.n_steps and trial.failure is None]
    fastest = max((trial.steps_per_s for trial in measured), default=0.0)
    as_fast = [trial for trial in measured if trial.steps_per_s >= AS_FAST * fastest]
    return min(as_fast, key=lambda trial: (trial.candidate.n_envs, trial.candidate.n_workers), default=None)


def config_text(settings: Mapping[str, Any], *, remark: str) -> str:
    """A config file, in TOML, whose table ``manager`` has these settings, which are texts and whole numbers."""
    # What JSON writes for these is TOML too.
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()]
    return "\n".join([f"# {remark}", "[manager]", *lines, ""])


def command_line(settings: Mapping[str, Any]) -> str:
    """The same as a command to type."""
    flags = {("manager" if name == "kind" else name.replace("_", "-")): value for name, value in settings.items()}
    return shlex.join(["envmanager", "run", *(word for name in flags for word in (f"--{name}", str(flags[name])))])
