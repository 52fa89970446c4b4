"""The managers of this library as contenders, stepped with ``send`` and ``recv``."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from benchmarks.contender import Contender, env_fns, repeated
from benchmarks.engine import Codec
from benchmarks.godot import Engines, Uneven
from benchmarks.roster import CannotTakePart
from envmanager.data.steps import ActionInfo, AgentSteps
from envmanager.env_manager import EnvManager
from envmanager.options import Wait
from envmanager.registry import make_manager
from envmanager.simple_env_manager import SimpleEnvManager
from envmanager.subprocess_env_manager import SubprocessEnvManager
from envmanager.system.machine import count_cores

__all__ = ["Auto", "Codec", "Engines", "InProcess", "Processes", "Share", "Stepped", "Turns", "Uneven", "Workers"]


class Managed(Contender):
    """A manager that is stepped with ``send`` and ``recv``."""

    def __init__(self, manager: EnvManager, env: str, n_envs: int) -> None:
        self._manager = manager
        self._n_envs = n_envs
        self._actions = repeated(env, n_envs)
        manager.reset({"seed": 0})
        self._env_ids = manager.recv(Wait.all()).env_ids

    def run(self, n_calls: int) -> int:
        send, recv, env_ids, n_envs, n_steps = self._manager.send, self._manager.recv, self._env_ids, self._n_envs, 0
        for actions in islice(self._actions, n_calls):
            send(actions if len(env_ids) == n_envs else actions[: len(env_ids)], env_ids)
            env_ids = recv().env_ids
            n_steps += len(env_ids)
        self._env_ids = env_ids
        return n_steps

    def close(self) -> None:
        self._manager.close()


class InProcess(Managed):
    """All environments in this process."""

    def __init__(self, env: str, n_envs: int, **options: Any) -> None:
        super().__init__(SimpleEnvManager(env_fns(env, n_envs), n_envs, **options), env, n_envs)

    def run(self, n_calls: int) -> int:  # one worker, so every batch has all environments
        send, recv, env_ids = self._manager.send, self._manager.recv, self._env_ids
        for actions in islice(self._actions, n_calls):
            send(actions, env_ids)
            recv()
        return n_calls * self._n_envs


class Processes(Managed):
    """One environment per process."""

    def __init__(
        self, env: str, n_envs: int, *, wait: str = "all", n_workers: int | None = None, **options: Any
    ) -> None:
        n_half = max(1, (n_envs if n_workers is None else n_workers) // 2)
        chosen = Wait(min_ready=n_half) if wait == "half" else Wait.parse(wait)
        manager = SubprocessEnvManager(env_fns(env, n_envs), n_envs, wait=chosen, n_workers=n_workers, **options)
        super().__init__(manager, env, n_envs)


class Workers(Processes):
    """One process per core."""

    def __init__(self, env: str, n_envs: int, **options: Any) -> None:
        super().__init__(env, n_envs, n_workers=min(count_cores(), n_envs), **options)


class Turns(Processes):
    """Two processes per core; ``recv`` waits for half of them. The trainer serves one half while the other steps."""

    def __init__(self, env: str, n_envs: int) -> None:
        super().__init__(env, n_envs, wait="half", n_workers=min(2 * count_cores(), n_envs))


class Share(Workers):
    """One process per core except one core, on which the trainer steps a share of the environments itself."""

    def __init__(self, env: str, n_envs: int) -> None:
        if count_cores() < 2 or n_envs < 2:
            raise CannotTakePart("there is nothing to share with one core or one environment")
        Processes.__init__(self, env, n_envs, n_workers=count_cores() - 1, local_envs=n_envs // count_cores())


class Auto(Managed):
    """The placement that ``kind="auto"`` chooses."""

    def __init__(self, env: str, n_envs: int, **options: Any) -> None:
        config = {"kind": "auto", "n_envs": n_envs, **options}
        super().__init__(make_manager(config, env_fns(env, n_envs)), env, n_envs)


class Stepped(Contender):
    """One environment per process, stepped with ``step()`` and a trivial policy; each step waits for all workers."""

    def __init__(self, env: str, n_envs: int) -> None:
        self._manager = SubprocessEnvManager(env_fns(env, n_envs), n_envs, wait=Wait.all())
        self._manager.set_policy("default", NullPolicy())
        self._manager.reset({"seed": 0})

    def run(self, n_calls: int) -> int:
        step = self._manager.step
        return sum(len(step()) for _ in range(n_calls))  # one environment per worker: a StepInfo is one step

    def close(self) -> None:
        self._manager.close()


class NullPolicy:
    """A policy that always returns action 0."""

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))
