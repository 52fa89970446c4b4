"""Tasks while workers are killed, tasks kill their worker, and calls are interrupted: each is accounted for, once.

An observation is (task, steps, seed), and an environment refuses an action that is not for this task and this step.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import gymnasium
import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    BadAction,
    EnvContext,
    EnvManager,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Task,
    TaskResult,
)
from envmanager_tests.interrupting import interrupted

SIGKILL = getattr(signal, "SIGKILL", 9)
RESTARTS = RestartPolicy(max_restarts=10**6, backoff_s=0, on_exception="restart")
POISON = {5: "reset", 11: "step", 17: "raise"}
"""What fails, by the index of the task: the process ends in the reset or in a step, or a step raises."""


class Level(gymnasium.Env[Any, Any]):
    """An episode of task k takes 3 to 9 steps. Every fourth environment takes a millisecond a step."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(10**9)

    def __init__(self, context: EnvContext) -> None:
        self._sleep_s = 0.0 if context.env_id % 4 else 0.001

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert options is not None
        self.task, self.poison, self.seed, self.steps = options["task"], options.get("poison"), seed or 0, 0
        if self.poison == "reset":
            os._exit(3)
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        assert action == self.task * 100 + self.steps, "an action of another task or step"
        self.steps += 1
        time.sleep(self._sleep_s)
        if self.poison == "step":
            os._exit(3)
        if self.poison == "raise":
            raise ValueError("gear 7 broke")
        return self._obs(), float(self.task), self.steps == length_of(self.task), False, {}

    def _obs(self) -> Any:
        return np.array([self.task, self.steps, self.seed], np.float64)


def length_of(task: int) -> int:
    return 3 + task % 7


def actions_for(obs: Any) -> Any:
    return (obs[:, 0] * 100 + obs[:, 1]).astype(np.int64)


class Acting:
    def get_action(self, steps: Any) -> ActionInfo:
        return ActionInfo(actions_for(steps.obs))


def received(manager: EnvManager, wait: str) -> Iterator[int]:
    """Play with ``send`` and ``recv``. Yield the tasks that finish."""
    while not manager.tasks.done:
        batch = manager.recv(wait)
        assert batch.obs[:, 0].tolist() == batch.task.tolist()
        if batch.final_obs is not None:
            assert batch.final_obs[:, 0].tolist() == batch.final_task.tolist()
        yield from batch.final_task[~batch.lost[batch.terminated | batch.truncated]].tolist()
        manager.send(actions_for(batch.obs), batch.env_ids)


def stepped(manager: EnvManager, wait: str) -> Iterator[int]:
    """Play with ``step``. Yield the tasks that finish."""
    manager.set_policy("default", Acting())
    while not manager.tasks.done:
        for info in manager.step(wait):
            for steps in info.current.values():
                assert steps.obs[:, 0].tolist() == [info.tasks[env_id] for env_id in steps.env_id.tolist()]
            made = info.transitions()
            assert (made.obs[:, 0] == made.next_obs[:, 0]).all(), "a transition crosses the end of an episode"
            assert (made.obs[:, 1] + 1 == made.next_obs[:, 1]).all()
            assert made.action.tolist() == actions_for(made.obs).tolist()
            if info.lost is None:
                yield from info.final_tasks.values()


def check_ledger(results: list[TaskResult], finished: Counter[int], n_tasks: int) -> None:
    assert [result.index for result in results] == list(range(n_tasks))
    assert finished == Counter(result.index for result in results if result.error is None)
    for result in results:
        if result.error is None:
            assert (result.length, result.total) == (length_of(result.index), result.index * length_of(result.index))


def tasks(n: int, poison: dict[int, str]) -> list[Task]:
    more = {index: {"poison": what} for index, what in poison.items()}
    return [Task(options={"task": index, **more.get(index, {})}) for index in range(n)]


KINDS = {
    "one each": {"n_envs": 4},
    "four each": {"n_envs": 16, "n_workers": 4},
    "zero copy": {"n_envs": 8, "n_workers": 2, "zero_copy": True},
    "share": {"n_envs": 8, "n_workers": 2, "local_envs": 2},
    "portable": {"n_envs": 8, "n_workers": 2, "transport": "portable"},
    "recycled": {"n_envs": 8, "n_workers": 2, "restarts": attrs.evolve(RESTARTS, recycle_after_steps=20)},
}


def play_under_kills(
    kind: str, play: Any, wait: str, prefetch: bool, n_tasks: int, kill_s: float, poison: dict[int, str]
) -> int:
    """Play all tasks while a worker is killed every ``kill_s`` seconds. Return the number of kills."""
    chance, finished, n_kills = random.Random(n_tasks), Counter[int](), 0
    with SubprocessEnvManager(Level, **{"restarts": RESTARTS, "seed": 1, **KINDS[kind]}) as manager:
        manager.reset(tasks=tasks(n_tasks, poison), prefetch=prefetch, attempts=10)  # kills may hit one task often
        kill_at = time.monotonic() + kill_s
        for task in play(manager, wait):
            finished[task] += 1
            if time.monotonic() > kill_at and n_kills < n_tasks // 20:
                kill_at = time.monotonic() + chance.uniform(0, 2 * kill_s)
                pid = chance.choice(manager.stats().workers).pid
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):  # dead already
                        os.kill(pid, SIGKILL)
                        n_kills += 1
        check_ledger(manager.tasks.results, finished, n_tasks)
        assert [result.index for result in manager.tasks.results if result.error is not None] == list(poison)
        assert manager.tasks.n_lost == len(poison)
    return n_kills


@pytest.mark.parametrize(
    ("kind", "play", "wait", "prefetch"),
    [
        ("one each", received, "any", True),
        ("four each", received, "all", False),
        ("four each", stepped, "any", True),
        ("zero copy", stepped, "all", False),
        ("portable", received, "any", False),
    ],
)
def test_each_task_is_finished_once_while_workers_are_killed(kind: str, play: Any, wait: str, prefetch: bool) -> None:
    play_under_kills(kind, play, wait, prefetch, 100, 0.1, {})


def test_each_task_that_kills_its_worker_is_given_up_and_takes_no_other_along() -> None:
    play_under_kills("four each", received, "any", True, 100, 1000.0, POISON)


@pytest.mark.parametrize("play", [received, stepped])
@pytest.mark.parametrize("kind", ["share", "recycled"])
def test_each_task_is_finished_once_beside_environments_in_this_process_and_where_workers_are_recycled(
    kind: str, play: Any
) -> None:
    play_under_kills(kind, play, "any", True, 150, 1000.0, {})


@pytest.mark.load
@pytest.mark.parametrize("prefetch", [False, True], ids=["begun at once", "laid ready"])
@pytest.mark.parametrize("play", [received, stepped])
@pytest.mark.parametrize("kind", list(KINDS))
def test_ten_thousand_tasks_under_a_kill_a_second(kind: str, play: Any, prefetch: bool) -> None:
    assert play_under_kills(kind, play, "any", prefetch, 10_000, 1.0, POISON if kind != "share" else {}) > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: SimpleEnvManager(Level, 3, restarts=RESTARTS),
        lambda: SubprocessEnvManager(Level, 3, restarts=RESTARTS),
        lambda: SubprocessEnvManager(Level, 4, n_workers=2, restarts=RESTARTS),
    ],
    ids=["simple", "one each", "two each"],
)
@pytest.mark.parametrize("prefetch", [False, True], ids=["begun at once", "laid ready"])
def test_an_interrupt_at_any_call_of_send_and_recv_loses_no_task(
    make: Callable[[], EnvManager], prefetch: bool
) -> None:
    chance, finished = random.Random(7), Counter[int]()
    made: list[Any] = [None]

    def receive() -> None:
        made[0] = manager.recv()

    def send() -> None:
        manager.send(actions_for(made[0].obs), made[0].env_ids)
        made[0] = None

    with make() as manager:
        manager.reset(tasks=tasks(5, {}), prefetch=prefetch)
        while not manager.tasks.done:
            while made[0] is None:
                interrupted(receive, int(10 ** chance.uniform(0, 3.5)))
            batch = made[0]
            assert batch.obs[:, 0].tolist() == batch.task.tolist()
            finished.update(batch.final_task[~batch.lost[batch.terminated | batch.truncated]].tolist())
            while made[0] is not None:
                try:
                    interrupted(send, int(10 ** chance.uniform(0, 3.0)))
                except BadAction:  # sent before the interrupt
                    made[0] = None
        check_ledger(manager.tasks.results, finished, 5)
