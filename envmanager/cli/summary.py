"""The result of a run, and its JSON file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attrs

from envmanager.cli.plan import Plan
from envmanager.observe.episodes import Episodes
from envmanager.observe.stats import ManagerStats
from envmanager.system.files import write_anew


@attrs.frozen
class RunSummary:
    """The result of a run. ``ended`` is ``"done"``, ``"interrupted"`` or ``"failed"``."""

    plan: Plan
    ended: str
    episodes: Episodes
    wall_s: float
    stats: ManagerStats

    @property
    def steps_per_s(self) -> float:
        """Environment steps per second since the reset."""
        return self.episodes.env_steps / self.wall_s if self.wall_s > 0 else 0.0

    def returns(self) -> dict[str, float]:
        """Return the mean, least and greatest return over all episodes; NaN without one."""
        values = self.episodes.all_returns()
        if not values:
            return dict.fromkeys(("mean", "min", "max"), math.nan)
        return {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain data, with None for NaN and infinite numbers."""
        return {
            "ended": self.ended,
            "env": str(self.plan.manager.env),
            "manager": self.plan.manager.kind,
            "n_envs": self.plan.manager.n_envs,
            "placement": self.stats.placement,
            "seed": self.plan.seed,
            "env_steps": self.episodes.env_steps,
            "worker_steps": self.episodes.worker_steps,
            "wall_s": self.wall_s,
            "env_steps_per_s": self.steps_per_s,
            "episodes": self.episodes.count,
            "episodes_lost": self.episodes.lost,
            "restarts": self.stats.restarts,
            "steps_lost": self.stats.steps_lost,
            "return": sayable(self.returns()),
            "episode_returns": sayable(self.episodes.returns_by_env()),
            "wait_share": self.stats.wait_share,
            "verdict": self.stats.verdict,
            "workers": sayable([attrs.asdict(worker) for worker in self.stats.workers]),
        }


def sayable(data: Any) -> Any:
    """Replace NaN and infinite numbers, which JSON does not have, by None."""
    if isinstance(data, dict):
        return {key: sayable(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [sayable(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write ``data`` to ``path``, one line per name."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in data.items()]
    write_anew(path, "{\n" + ",\n".join(lines) + "\n}\n")
