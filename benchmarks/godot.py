"""Managers of Godot engines as contenders, with the game of the Godot workloads.

As by default for users, engines are pinned to cores and the manager waits for any of them.
"""

from __future__ import annotations

import attrs
import numpy as np

from benchmarks.contender import Contender
from benchmarks.engine import FRAME_PER_SECOND
from benchmarks.games import TICKS, find_engine
from envmanager.data.steps import ActionInfo, AgentSteps
from envmanager.godot.engine_host import EngineHost
from envmanager.godot.manager import GodotEnvManager
from envmanager.godot.options import EngineOptions, GodotOptions
from envmanager.kernel.host import EnvWorker
from envmanager.options import Timeouts

START_S = 120.0
"""Timeout in seconds for the start of all engines of a cell, long enough for few cores."""
LONG_TICKS = 8
"""Ticks per action of every other engine of an UnevenManager."""


class Engines(Contender):
    """A manager of ``n_engines`` with ``n_envs`` arenas each, stepped with ``step()`` and a policy of drawn actions.

    ``fixed_fps``: frames of the engine's main loop per simulated second; None, the default for users: one per tick.
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
    """A manager of engines of which every other one takes eight ticks per action."""

    def __init__(self, env: str, n_envs: int, *, n_engines: int, wait: str) -> None:
        super().__init__(env, n_envs, n_engines=n_engines, wait=wait, kind=UnevenManager)


class UnevenHost(EngineHost):
    """The host of an UnevenManager: every other engine has LONG_TICKS."""

    def __init__(self, env: str, options: GodotOptions) -> None:
        super().__init__(env, options)
        self._ticks = options.engine.ticks_per_action, LONG_TICKS

    def make_worker(self, worker_id: int) -> EnvWorker:
        engine = attrs.evolve(self.options.engine, ticks_per_action=self._ticks[worker_id % 2])
        self.options = attrs.evolve(self.options, engine=engine)
        return super().make_worker(worker_id)


class UnevenManager(GodotEnvManager):
    """A manager of engines that differ in their ticks per action."""

    def make_host(self, env: str, options: GodotOptions) -> EngineHost:
        return UnevenHost(env, options)


class Drawn:
    """A policy with random actions. They are drawn once for each number of agents and then repeated."""

    def __init__(self) -> None:
        self._by_count: dict[int, ActionInfo] = {}

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        known = self._by_count.get(len(steps))
        if known is None:
            drawn = np.random.default_rng(0).uniform(-1, 1, (len(steps), 2)).astype(np.float32)
            known = self._by_count[len(steps)] = ActionInfo(drawn)
        return known
