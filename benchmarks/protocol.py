"""Messages between the command and the processes that measure: one JSON object per line.

Standard library only, because both sides import it, the measuring side in a peer's interpreter.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

READY, MISSING = "ready", "missing"
"""Whether a zygote could import its library."""

STARTED, MEASURED, UNABLE, FAILED, ENDED = "started", "measured", "unable", "failed", "ended"
"""Events of a turn: its pid; then its result, the reason why it cannot take part, or its error; its process's end."""


@dataclass(frozen=True)
class Job:
    """One turn: run ``contender`` on ``n_envs`` environments of ``workload`` for ``seconds`` after a warm-up."""

    contender: str
    workload: str
    n_envs: int
    seconds: float
    warm_up_s: float
    limit_s: float
    """Time after which a turn counts as hung."""


@dataclass(frozen=True)
class Measured:
    """The result of a turn. ``cpu_s``: CPU time of the trainer's process; ``all_cpu_s``: also that of its workers."""

    n_steps: int
    wall_s: float
    cpu_s: float
    all_cpu_s: float
    start_s: float
    """Time from the imported library to the first observations of all environments."""


def line_of(event: str, **fields: Any) -> str:
    """Encode an event as a line."""
    return json.dumps({"event": event, **fields}) + "\n"


def job_line(job: Job) -> str:
    """Encode a job as a line."""
    return json.dumps(asdict(job)) + "\n"


def job_of(line: str) -> Job:
    """Decode the line of a job."""
    return Job(**json.loads(line))


def measured_of(fields: dict[str, Any]) -> Measured:
    """Return the result in the fields of a ``measured`` line."""
    return Measured(**{name: fields[name] for name in Measured.__dataclass_fields__})
