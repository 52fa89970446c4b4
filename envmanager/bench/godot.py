"""Engines of a manager as contenders: the game of the Godot workloads, stepped by a manager.

The rule: engines are pinned and wait for any, as users' are unless they say otherwise.
"""

from __future__ import annotations

import attrs
import numpy as np

from envmanager.bench.contender import Contender
from envmanager.bench.engine import FRAME_PER_SECOND
from envmanager.bench.games import TICKS, find_engine
from envmanager.data.steps import ActionInfo, AgentSteps
from envmanager.godot.engine_host import EngineHost
from envmanager.godot.manager import GodotEnvManager
from envmanager.godot.options import EngineOptions
from envmanager.options import Timeouts

START_S = 120.0
"""As many engines as a cell may have, on as few cores as there may be."""
LONG_TICKS = 8
"""Per action, of every other engine where they are uneven."""


class Engines(Contender):
    """``n_engines`` with ``n_envs`` arenas each, by ``step()`` with a policy whose actions were drawn beforehand.

    ``fixed_fps``: frames of the engine's main loop per simulated second; None: as many as ticks, the default.
    """

    def __init__(
        self,
        env: str,
        n_envs: int,
        *,
        n_engines: int = 1,
        wait: str = "any",
        fixed_fps: int | None = FRAME_PER_SECOND,
        kind: type[GodotEnvManager] = GodotEnvManager,
    ) -> None:
        options = EngineOptions(binary=find_engine(), fixed_fps=fixed_fps, ticks_per_action=TICKS[env])
        timeouts = Timeouts(start_s=START_S)
        self._manager = kind(
            "demo:rolling_ball",
            n_envs * n_engines,
            n_workers=n_engines,
            engine=options,
            wait=wait,
            timeouts=timeouts,
        )
        self._manager.set_policy("default", Drawn())
        self._manager.reset({"seed": 0})

    def run(self, n_calls: int) -> int:
        step, n_steps = self._manager.step, 0
        for _ in range(n_calls):
            for info in step():
                n_steps += len(info.current["default"])
        return n_steps

    def close(self) -> None:
        self._manager.close()


class Uneven(Engines):
    """As Engines, but in every other one an action takes eight ticks."""

    def __init__(self, env: str, n_envs: int, *, n_engines: int, wait: str) -> None:
        super().__init__(env, n_envs, n_engines=n_engines, wait=wait, kind=UnevenManager)


class UnevenHost(EngineHost):
    """Has engines of two kinds."""

    def engine_options(self, worker_id: int) -> EngineOptions:
        own = super().engine_options(worker_id)
        return attrs.evolve(own, ticks_per_action=LONG_TICKS) if worker_id % 2 else own


class UnevenManager(GodotEnvManager):
    """Has an UnevenHost."""

    _host_class = UnevenHost


class Drawn:
    """A policy that has drawn one action for each agent beforehand, whatever it sees."""

    def __init__(self) -> None:
        self._by_count: dict[int, ActionInfo] = {}

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        known = self._by_count.get(len(steps))
        if known is None:
            drawn = np.random.default_rng(0).uniform(-1, 1, (len(steps), 2)).astype(np.float32)
            known = self._by_count[len(steps)] = ActionInfo(drawn)
        return known
