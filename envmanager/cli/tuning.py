"""The placements that ``envmanager tune`` tries, their results, and the choice of the best.

This module runs nothing and reads no clock. Trials are compared by successive halving: each round gives the remaining
trials equal time, and the slower half is dropped between rounds, so that the fastest placements are measured longest.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from envmanager.cli.display import count
from envmanager.errors import RestartsExhausted, WorkerError
from envmanager.options import RestartPolicy
from envmanager.placing.placement import IN_PROCESS, Probe, round_s
from envmanager.ray_cluster import probing

ENVS_PER_CORE = (1, 4, 16)
"""Numbers of environments to try per core if the user gives none."""

ENVS_PER_CPU = (4, 32, 128)
"""Numbers of environments to try per CPU of a cluster. Remote calls are slow, so more environments share an actor."""

SUBPROCESS, RAY = "subprocess", "ray"
"""Kinds of managers that can be tuned."""

AS_FAST = 0.97
"""Minimum fraction of the highest speed for a trial to count as equally fast. ``best`` chooses among such trials."""


@attrs.frozen
class Candidate:
    """A placement to try. If ``n_workers`` is IN_PROCESS, the manager is a SimpleEnvManager and ``kind`` is ignored."""

    n_envs: int
    n_workers: int
    wait: str | int = "any"
    kind: str = SUBPROCESS

    def options(self) -> dict[str, Any]:
        """Return the settings of this placement for a config's table ``manager``."""
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
        """Number of environments in each worker, such as ``"4"``, or ``"2-3"`` if it differs between workers."""
        workers = max(1, self.n_workers)
        least, most = self.n_envs // workers, math.ceil(self.n_envs / workers)
        return str(most) if least == most else f"{least}-{most}"


@attrs.define(eq=False)
class Trial:
    """A candidate placement and its measurements so far."""

    candidate: Candidate
    n_steps: int = 0
    """Number of environment steps in ``seconds``."""
    seconds: float = 0.0
    """Total measured time."""
    is_out: bool = False
    failure: Exception | None = None
    """Error that ended the trial."""
    restarts: int = 0
    """Number of times that a failed worker was replaced."""
    last_failure: WorkerError | None = None
    """Cause of the most recent replacement of a worker."""

    @property
    def steps_per_s(self) -> float:
        """Environment steps per second over all rounds, or 0 before the first measurement."""
        return self.n_steps / self.seconds if self.seconds > 0 else 0.0

    def add(self, n_steps: int, seconds: float) -> None:
        """Add a measurement: ``n_steps`` environment steps in ``seconds``."""
        self.n_steps += n_steps
        self.seconds += seconds

    def fail(self, error: Exception) -> None:
        """Drop the trial, and store ``error`` as its failure."""
        self.failure, self.is_out = error, True


def candidates(n_envs: int | None, n_cores: int, kind: str = SUBPROCESS) -> list[Candidate]:
    """Return the placements to try for ``n_envs`` environments, or for several numbers of environments if it is None.

    With ``kind="ray"``, ``n_cores`` is the cluster's number of CPUs, and each placement has 1 to ``n_cores`` workers.
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


def trials_for(candidates: Sequence[Candidate], probe: Probe | None, n_cores: int) -> list[Trial]:
    """Return a trial per candidate, sorted by the time per step that the probe predicts, shortest first.

    Without a probe, candidates with more workers come first. Candidates that can share a manager stay adjacent.
    """

    def promise(candidate: Candidate) -> tuple[float, int, int]:
        if probe is None:
            return -candidate.n_workers, candidate.n_envs, candidate.n_workers
        if candidate.kind == RAY:
            seconds = probing.round_s(probe, candidate.n_envs, candidate.n_workers)
        else:
            seconds = round_s(probe, candidate.n_envs, candidate.n_workers, n_cores)
        return seconds / candidate.n_envs, candidate.n_envs, candidate.n_workers

    return [Trial(candidate) for candidate in sorted(candidates, key=promise)]


def n_rounds(n_trials: int) -> int:
    """Return the number of rounds for ``n_trials`` trials. Halving between rounds leaves at most two for the last."""
    return max(1, math.ceil(math.log2(n_trials))) if n_trials else 0


def halve(trials: Sequence[Trial]) -> None:
    """Mark the slower half of the remaining trials as dropped, but keep at least one trial."""
    left = sorted(remaining(trials), key=lambda trial: trial.steps_per_s, reverse=True)
    for trial in left[math.ceil(len(left) / 2) :]:
        trial.is_out = True


def remaining(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that were not dropped."""
    return [trial for trial in trials if not trial.is_out]


def best(trials: Sequence[Trial]) -> Trial | None:
    """Return the fastest measured trial or None. Of equals (AS_FAST), prefer fewer environments, then fewer workers."""
    measured = [trial for trial in remaining(trials) if trial.n_steps]
    if not measured:  # the time was up before any remaining trial was measured
        measured = [trial for trial in trials if trial.n_steps and trial.failure is None]
    fastest = max((trial.steps_per_s for trial in measured), default=0.0)
    as_fast = [trial for trial in measured if trial.steps_per_s >= AS_FAST * fastest]
    return min(as_fast, key=lambda trial: (trial.candidate.n_envs, trial.candidate.n_workers), default=None)


def config_text(settings: Mapping[str, Any], *, remark: str) -> str:
    """Return a TOML config with ``remark`` as a comment and ``settings`` in the table ``manager``."""
    # JSON and TOML write these values in the same way.
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()]
    return "\n".join([f"# {remark}", "[manager]", *lines, ""])


def command_line(settings: Mapping[str, Any]) -> str:
    """Return the shell command ``envmanager run …`` that passes ``settings``."""
    words = ["envmanager", "run"]
    for name, value in settings.items():
        if "." in name:
            words += ["--set", f"manager.{name}={value}"]
        else:
            words += [f"--{'manager' if name == 'kind' else name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def restart_options(trial: Trial, policy: RestartPolicy) -> dict[str, Any]:
    """Return the ``restarts`` settings that ``trial`` needs in a config, or ``{}`` if no worker was restarted."""
    if not trial.restarts:
        return {}
    return {"restarts.max_restarts": policy.max_restarts, "restarts.backoff_s": policy.backoff_s}


def summarize_failures(trials: Sequence[Trial]) -> list[str]:
    """Return one line for each reason why trials failed, and one line on restarts if workers were restarted.

    If all trials failed for the same reason, no line states it, because the command ends with that error.
    """
    reasons: dict[str, list[str]] = {}
    for trial in trials:
        if trial.failure is not None:
            reasons.setdefault(_reason(trial.failure), []).append(str(trial.candidate))
    lines = []
    if len(reasons) > 1 or any(trial.failure is None for trial in trials):
        for reason, failed in reasons.items():
            lines.append(f"failed: {failed[0] if len(failed) == 1 else count(len(failed), 'placement')}: {reason}")
    restarts, steps = sum(trial.restarts for trial in trials), sum(trial.n_steps for trial in trials)
    if restarts:
        last = next(trial.last_failure for trial in reversed(trials) if trial.last_failure is not None)
        lines.append(f"restarts: {restarts:,} in {steps:,} environment steps; the last failure: {last.cause}")
    return lines


def _reason(error: Exception) -> str:
    """Return ``error`` as one line without the worker's id, so that equal failures of different workers match."""
    if isinstance(error, RestartsExhausted):
        return _reason(error.last)
    if isinstance(error, WorkerError):
        return error.headline.removeprefix(f"worker {error.worker_id} ")
    return str(error).partition("\n")[0]
