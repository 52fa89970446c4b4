"""The result of a training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from envmanager.observe.stats import ManagerStats
from envmanager.training.evaluation import Evaluation, mean_and_spread


@attrs.frozen
class TrainingResult:
    """The result of a training. ``ended`` is ``"done"``, ``"stopped"``, or ``"over"`` when no steps were left to take.

    ``n_steps``: agent steps of the training; ``n_steps_before``: how many of them earlier runs took. ``wall_s``:
    seconds of this run. ``mean_return_of``: mean of the last returns of each behavior that has ended an episode.
    """

    ended: str
    n_steps: int
    wall_s: float
    mean_return: float
    evaluation: Evaluation | None
    stats: ManagerStats
    n_steps_before: int = 0
    mean_return_of: Mapping[str, float] = attrs.field(factory=dict)

    @property
    def steps_per_s(self) -> float:
        """Mean agent steps per second of this run."""
        return (self.n_steps - self.n_steps_before) / self.wall_s if self.wall_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "ended": self.ended,
            "n_steps": self.n_steps,
            "n_steps_before": self.n_steps_before,
            "wall_s": self.wall_s,
            "steps_per_s": self.steps_per_s,
            "mean_return": None if math.isnan(self.mean_return) else self.mean_return,
            "mean_return_of": dict(self.mean_return_of),
            "evaluation": None
            if self.evaluation is None
            else {
                "episodes": self.evaluation.n_episodes,
                "mean": self.evaluation.mean,
                "spread": self.evaluation.spread,
                "mean_length": mean_and_spread(self.evaluation.lengths)[0] if self.evaluation.lengths else None,
                "returns": dict(self.evaluation.returns_of),
            },
            "restarts": self.stats.restarts,
            "steps_lost": self.stats.steps_lost,
        }
