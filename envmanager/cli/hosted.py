"""A SimpleEnvManager inside a worker, so that a crash in a trial of ``envmanager tune`` does not end the command.

::

    envmanager tune                         worker
    a manager of one worker ── reset ────▶  HostedManager ── reset ──▶ SimpleEnvManager of n_envs environments
                            ── call run ─▶                ── step, for a number of seconds
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envmanager.cli.plan import random_policy, set_policies
from envmanager.data.steps import AgentSteps, Steps
from envmanager.placing.pair import Hosted
from envmanager.registry import make_manager


class HostedManager(Hosted):
    """A manager that is stepped with random actions by ``run``."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Start the manager. ``settings`` is the table ``manager`` of a config."""
        self._manager = make_manager(settings)
        self._n_behaviors = 0

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        self._manager.reset()
        return {"default": AgentSteps.first(agent_id=np.zeros(1, np.int64), obs=np.zeros((1, 1), np.float32))}

    def run(self, seconds: float) -> tuple[int, float]:
        """Step the manager for at least ``seconds``. Return the number of environment steps and the elapsed seconds."""
        n_before, started = self._manager.stats().env_steps, time.perf_counter()
        self._step()
        while time.perf_counter() < started + seconds:
            self._step()
        return self._manager.stats().env_steps - n_before, time.perf_counter() - started

    def close(self) -> None:
        self._manager.close()

    def _step(self) -> None:
        self._n_behaviors = set_policies(self._manager, random_policy, self._n_behaviors)
        self._manager.step()
