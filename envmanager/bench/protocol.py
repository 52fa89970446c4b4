"""What the command and the processes that measure say to each other: one JSON object per line.

The rule: standard library only, because both sides import it, in whatever interpreter.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

READY, MISSING = "ready", "missing"
"""Whether a zygote could import its library."""

STARTED, MEASURED, UNABLE, FAILED, ENDED = "started", "measured", "unable", "failed", "ended"
"""Of a turn: its pid; then what it measured, or why it cannot take part, or its error; and that its process is gone."""


@dataclass(frozen=True)
class Job:
    """One turn: run ``contender`` on ``n_envs`` environments of ``workload`` for ``seconds`` after a warm-up."""

    contender: str
    workload: str
    n_envs: int
    seconds: float
    warm_up_s: float
    limit_s: float
    """After so long a turn that still runs counts as hung."""


@dataclass(frozen=True)
class Measured:
    """What a turn took. ``cpu_s``: of the trainer's process with all its threads; ``all_cpu_s``: of its workers too."""

    n_steps: int
    wall_s: float
    cpu_s: float
    all_cpu_s: float
    start_s: float
    """From nothing but an imported library to the first observations of all environments."""


def line_of(event: str, **fields: Any) -> str:
    """One line that says ``event``."""
    return json.dumps({"event": event, **fields}) + "\n"


def job_line(job: Job) -> str:
    """A job as a line."""
    return json.dumps(asdict(job)) + "\n"


def job_of(line: str) -> Job:
    """The job that a line says."""
    return Job(**json.loads(line))


def measured_of(fields: dict[str, Any]) -> Measured:
    """What the fields of a ``measured`` line say."""
    return Measured(**{name: fields[name] for name in Measured.__dataclass_fields__})
