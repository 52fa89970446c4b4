"""Messages between the command and the processes that measure: one JSON object per line.

Standard library only, because the measuring processes import it in the interpreters of other libraries.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

READY, MISSING = "ready", "missing"
"""Events of a zygote: it has imported its library, or could not."""

STARTED, MEASURED, UNABLE, FAILED, ENDED = "started", "measured", "unable", "failed", "ended"
"""Events of a turn, in order: its pid; its result, the reason why it cannot take part, or its error; its exit code."""


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
    """The result of a turn. ``cpu_s``: CPU time of the trainer's process; ``all_cpu_s``: with the workers' CPU time."""

    n_steps: int
    wall_s: float
    cpu_s: float
    all_cpu_s: float
    start_s: float
    """Time from the end of the library's import to the first observations of all environments."""


def line_of(event: str, **fields: Any) -> str:
    """Encode an event as a line."""
    return json.dumps({"event": event, **fields}) + "\n"


def job_line(job: Job) -> str:
    """Encode a job as a line."""
    return json.dumps(asdict(job)) + "\n"


def job_of(line: str) -> Job:
    """Decode a line to a job."""
    return Job(**json.loads(line))


def measured_of(fields: dict[str, Any]) -> Measured:
    """Return the result in the fields of a ``measured`` line."""
    return Measured(**{name: fields[name] for name in Measured.__dataclass_fields__})
