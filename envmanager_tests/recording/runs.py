"""Runs to record and to repeat: environments of uneven speed, a policy that draws, and all that the trainer gets."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from typing import Any

import gymnasium
import numpy as np

from envmanager import ActionInfo, EnvContext, EnvManager


class Uneven(gymnasium.Env):  # type: ignore[type-arg, misc]
    """It takes a time that nobody can repeat, and returns what its seed and actions say."""

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (4,), np.float64)
    action_space = gymnasium.spaces.Discrete(1_000_000)

    def __init__(self, context: EnvContext) -> None:
        self.env_id = context.env_id
        self.slow_s = 0.004 if self.env_id == 0 else 0.0005
        self.generator = np.random.default_rng(self.env_id)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.generator = np.random.default_rng(seed)
        self.n_steps, self.last, self.length = 0, 0, int(self.generator.integers(3, 12))
        self.level = (options or {}).get("level", 0)
        return self.obs(), {}

    def obs(self) -> np.ndarray:
        return np.array([self.env_id, self.n_steps, self.last, self.generator.random() + self.level])

    def step(self, action: Any) -> Any:
        time.sleep(self.slow_s * random.random() * 2)
        self.n_steps, self.last = self.n_steps + 1, int(action)
        return self.obs(), float(action % 7), self.n_steps >= self.length, False, {}


class Drawn:
    """A policy that draws its actions, and keeps a hash of all that it has seen."""

    def __init__(self, seed: int) -> None:
        self.generator, self.seen = np.random.default_rng(seed), hashlib.sha256()

    def get_action(self, steps: Any) -> ActionInfo:
        self.seen.update(np.ascontiguousarray(steps.obs).tobytes() + steps.agent_id.tobytes())
        return ActionInfo(self.generator.integers(0, 10**6, len(steps)), version=3)


def kill(manager: EnvManager, worker_id: int) -> None:
    """Kill a worker's process, if it has one of its own."""
    pid = manager.stats().workers[worker_id].pid
    if pid is not None and pid != os.getpid():
        os.kill(pid, signal.SIGKILL)


def by_steps(manager: EnvManager, seed: int, *, kills: tuple[int, ...] = (), n: int = 80, tasks: Any = None) -> str:
    """Step a manager with policies, and return a hash of all that came."""
    policy = Drawn(seed)
    manager.set_policy("default", policy)
    manager.reset(seed=5, tasks=tasks)
    for number in range(n):
        if number in kills:
            kill(manager, number % manager.n_workers)
        for info in manager.step():
            policy.seen.update(repr((info.worker_id, info.lost is not None, dict(info.tasks))).encode())
            for steps in info.current.values():
                policy.seen.update(steps.obs.tobytes() + steps.reward.tobytes() + steps.terminated.tobytes())
        if number == 5:  # before any is killed, which a call would raise
            policy.seen.update(repr(manager.call("obs")).encode())
            manager.set_attr("slow_s", 0.0)
    return policy.seen.hexdigest()


def by_rows(manager: EnvManager, seed: int, *, kills: tuple[int, ...] = (), n: int = 80, tasks: Any = None) -> str:
    """Send and receive rows, and return a hash of all that came."""
    generator, seen = np.random.default_rng(seed), hashlib.sha256()
    manager.reset(seed=5, tasks=tasks)
    for number in range(n):
        if number in kills:
            kill(manager, number % manager.n_workers)
        batch = manager.recv()
        for column in (batch.env_ids, batch.obs, batch.reward, batch.terminated, batch.lost, batch.task):
            seen.update(np.ascontiguousarray(column).tobytes())
        if len(batch):
            manager.send(generator.integers(0, 10**6, len(batch)), batch.env_ids)
        if number == n // 2 and tasks is None:
            manager.reset(seed=6)
    return seen.hexdigest()
