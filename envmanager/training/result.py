"""The result of a training."""

from __future__ import annotations

import math
from typing import Any

import attrs

from envmanager.observe.stats import ManagerStats
from envmanager.training.evaluation import Evaluation, mean_and_spread


@attrs.frozen
class TrainingResult:
    """How a training went. ``ended`` is ``"done"``, ``"stopped"``, or ``"over"`` when there were no steps left to take.

    Of the ``n_steps`` agent steps this run has taken those that came after ``n_steps_before``, in ``wall_s`` seconds.
    """

    ended: str
    n_steps: int
    wall_s: float
    mean_return: float
    evaluation: Evaluation | None
    stats: ManagerStats
    n_steps_before: int = 0

    @property
    def steps_per_s(self) -> float:
        """How fast this run was."""
        return (self.n_steps - self.n_steps_before) / self.wall_s if self.wall_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "ended": self.ended,
            "n_steps": self.n_steps,
            "n_steps_before": self.n_steps_before,
            "wall_s": self.wall_s,
            "steps_per_s": self.steps_per_s,
            "mean_return": None if math.isnan(self.mean_return) else self.mean_return,
            "evaluation": None
            if self.evaluation is None
            else {
                "episodes": len(self.evaluation.returns),
                "mean": self.evaluation.mean,
                "spread": self.evaluation.spread,
                "mean_length": mean_and_spread(self.evaluation.lengths)[0] if self.evaluation.lengths else None,
                "returns": dict(self.evaluation.returns_of),
            },
            "restarts": self.stats.restarts,
            "steps_lost": self.stats.steps_lost,
        }
