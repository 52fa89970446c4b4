"""``manager.episodes``: what a manager knows of the episodes that have ended, whoever steps and however."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from typing import Any

import gymnasium
import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    AsyncioEnvManager,
    EnvContext,
    EnvManager,
    EnvRaised,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Wait,
)
from envmanager_tests.envs import Duel

ALWAYS = RestartPolicy(max_restarts=1000, backoff_s=0)
MANAGERS = pytest.mark.parametrize("kind", [SimpleEnvManager, AsyncioEnvManager, SubprocessEnvManager])


class Counting(gymnasium.Env):  # type: ignore[misc]
    """Its episodes have three steps more than its env_id says; the k-th step brings k. The action 1 is a mistake."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, context: EnvContext) -> None:
        self._length = length_of(context.env_id)
        self._k = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._k = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ValueError("not this one")
        self._k += 1
        return np.full(1, self._k, np.float32), float(self._k), self._k == self._length, False, {}


def length_of(env_id: int) -> int:
    return 3 + env_id


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


def made(kind: type, n_envs: int = 4, **options: Any) -> EnvManager:
    manager: EnvManager = kind(Counting, n_envs, **options)
    manager.set_policy("default", Zeros())
    return manager


def assert_all_are_whole(manager: EnvManager) -> None:
    for episode in manager.episodes.recent:
        n = length_of(episode.env_id)
        assert (episode.behavior, episode.length, episode.total) == ("default", n, n * (n + 1) / 2)


def n_ended(manager: EnvManager) -> Counter[int]:
    return Counter(episode.env_id for episode in manager.episodes.recent)


class Sender:
    """Sends to some environments at a time, in an order of chance, and notes how many steps each has taken."""

    def __init__(self, manager: EnvManager, seed: int = 0) -> None:
        self.manager = manager
        self.chance = random.Random(seed)
        self.n_steps: Counter[int] = Counter()
        self.n_lost: Counter[int] = Counter()
        self.idle: list[int] = []
        self.busy: set[int] = set()

    def begin(self) -> None:
        self.manager.reset()
        self.idle = self.manager.recv(Wait.all()).env_ids.tolist()

    def go_on(self, wait: Wait | None = None) -> None:
        per_worker = self.manager.n_envs // self.manager.n_workers
        chosen: list[int] = []
        for worker_id in range(self.manager.n_workers):
            own = [env_id for env_id in self.idle if env_id // per_worker == worker_id]
            if own and worker_id not in self.busy:
                chosen += self.chance.sample(own, self.chance.randint(1, len(own)))
                self.busy.add(worker_id)
        if chosen:
            self.chance.shuffle(chosen)
            self.manager.send(np.zeros(len(chosen), np.int64), chosen)
        self.idle = [env_id for env_id in self.idle if env_id not in chosen]
        batch = self.manager.recv(Wait.any() if wait is None else wait)
        for env_id, lost in zip(batch.env_ids.tolist(), batch.lost.tolist(), strict=True):
            self.busy.discard(env_id // per_worker)
            if env_id not in self.idle:
                self.idle.append(env_id)
            if lost:
                self.n_lost[env_id] += 1
            else:
                self.n_steps[env_id] += 1


@MANAGERS
@pytest.mark.parametrize("wait", ["any", "all", 2])
def test_every_episode_that_is_stepped_to_its_end_is_there(kind: Any, wait: Any) -> None:
    with made(kind, wait=wait) as manager:
        manager.episodes  # noqa: B018  (from here on)
        manager.reset()
        n_steps: Counter[int] = Counter()
        for _ in range(60):
            n_steps.update(info.worker_id for info in manager.step())

        assert_all_are_whole(manager)
        per_worker = manager.n_envs // manager.n_workers
        expected = {env_id: n_steps[env_id // per_worker] // length_of(env_id) for env_id in range(4)}
        assert n_ended(manager) == +Counter(expected)
        assert manager.episodes.env_steps == manager.stats().env_steps


@pytest.mark.parametrize("n_workers", [6, 3, 2])
@pytest.mark.parametrize("wait", ["any", "all"])
def test_rows_that_are_sent_in_parts_and_in_any_order_are_counted_right(n_workers: int, wait: str) -> None:
    with made(SubprocessEnvManager, 6, n_workers=n_workers) as manager:
        assert manager.episodes.count == 0
        sender = Sender(manager)
        sender.begin()
        for _ in range(150):
            sender.go_on(Wait.parse(wait))

        assert_all_are_whole(manager)
        expected = Counter({env_id: n // length_of(env_id) for env_id, n in sender.n_steps.items()})
        assert n_ended(manager) == expected  # 0 and missing are equal
        assert manager.episodes.env_steps == sum(sender.n_steps.values())


def test_first_observations_that_come_late_are_no_steps() -> None:
    with made(SubprocessEnvManager, 3) as manager:
        manager.reset()
        assert manager.episodes.count == 0
        first = manager.recv(Wait(max_ready=2)).env_ids
        manager.send(np.zeros(2, np.int64), first)
        seen = manager.recv(Wait(min_ready=3)).env_ids

        assert len(seen) == 3, "the first observation of one, the steps of two"
        assert manager.episodes.env_steps == 2


@pytest.mark.parametrize("way", ["send", "step"])
def test_first_observations_that_a_further_reset_has_discarded_leave_no_trace(way: str) -> None:
    with made(SubprocessEnvManager, 2) as manager:
        manager.reset()
        manager.recv(Wait(max_ready=1))
        manager.reset()
        assert manager.episodes.env_steps == 0
        if way == "step":
            manager.set_policy("default", Zeros())
            manager.step("all")
        else:
            manager.send(np.zeros(2, np.int64), [0, 1])
            assert not manager.recv("all").first.any()

        assert manager.episodes.env_steps == manager.stats().env_steps == 2


@MANAGERS
def test_who_sends_after_a_reset_without_having_received_is_counted_too(kind: Any) -> None:
    with made(kind, 2) as manager:
        assert manager.episodes.count == 0
        manager.reset()
        for _ in range(4):
            manager.send(np.zeros(2, np.int64), [1, 0])
            manager.recv(Wait.all())

        assert [(end.env_id, end.length) for end in manager.episodes.recent] == [(0, 3), (1, 4)]


@MANAGERS
def test_a_reset_in_the_middle_ends_no_episode(kind: Any) -> None:
    with made(kind) as manager:
        assert manager.episodes.count == 0
        for way in ("step", "send", "step"):
            manager.reset()
            if way == "send":
                manager.recv(Wait.all())
            for _ in range(2):
                if way == "step":
                    manager.step(Wait.all())
                else:
                    manager.send(np.zeros(4, np.int64), np.arange(4))
                    manager.recv(Wait.all())
        for _ in range(8):
            manager.step(Wait.all())

        assert_all_are_whole(manager)
        assert n_ended(manager) == {0: 3, 1: 2, 2: 2, 3: 1}


@MANAGERS
@pytest.mark.parametrize("way", ["step", "send"])
def test_what_was_under_way_when_somebody_first_asked_is_passed_over(kind: Any, way: str) -> None:
    with made(kind) as manager:
        manager.reset()
        if way == "send":
            manager.recv(Wait.all())

        def go_on() -> None:
            if way == "step":
                manager.step(Wait.all())
            else:
                manager.send(np.zeros(4, np.int64), np.arange(4))
                manager.recv(Wait.all())

        go_on()
        assert manager.episodes.count == 0
        for _ in range(11):
            go_on()

        assert_all_are_whole(manager)
        assert n_ended(manager) == {0: 3, 1: 2, 2: 1, 3: 1}


@MANAGERS
def test_after_a_reset_the_first_episodes_are_whole_whether_somebody_asked_before_or_after_it(kind: Any) -> None:
    with made(kind) as manager:
        manager.reset()
        assert manager.episodes.count == 0
        for _ in range(6):
            manager.step(Wait.all())

        assert n_ended(manager) == {0: 2, 1: 1, 2: 1, 3: 1}


def test_episodes_that_are_lost_with_a_worker_are_no_episodes() -> None:
    with made(SubprocessEnvManager, n_workers=2, restarts=ALWAYS) as manager:
        assert manager.episodes.count == 0
        manager.reset()
        for _ in range(2):
            manager.step(Wait.all())
        pid = manager.stats().workers[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        n_lost = 0
        while not n_lost:
            n_lost = sum(info.lost is not None for info in manager.step(Wait.all()))
        for _ in range(20):
            manager.step(Wait.all())

        assert_all_are_whole(manager)
        assert manager.episodes.lost == 2
        assert n_ended(manager).keys() == {0, 1, 2, 3}


def test_rows_that_are_lost_with_a_worker_are_no_steps_and_no_episodes() -> None:
    with made(SubprocessEnvManager, 6, n_workers=2, restarts=ALWAYS) as manager:
        assert manager.episodes.count == 0
        sender = Sender(manager)
        sender.begin()
        for n, worker_id in enumerate([0, 1, 0]):
            for _ in range(20):
                sender.go_on()
            pid = manager.stats().workers[worker_id].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while sum(sender.n_lost.values()) < 3 * (n + 1):
                sender.go_on()
        for _ in range(20):
            sender.go_on()

        assert sender.n_lost == {0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1}
        assert manager.episodes.lost == sum(sender.n_lost.values())
        assert_all_are_whole(manager)
        assert manager.episodes.env_steps == sum(sender.n_steps.values())


@pytest.mark.parametrize(("way", "n_lost"), [("step", 0), ("send", 5)])
def test_a_recycled_worker_takes_only_an_episode_with_it_that_an_action_has_begun(way: str, n_lost: int) -> None:
    recycling = RestartPolicy(recycle_after_steps=5)
    with made(SubprocessEnvManager, 2, n_workers=2, restarts=recycling) as manager:
        assert manager.episodes.count == 0
        manager.reset()
        if way == "send":
            manager.recv(Wait.all())
        for _ in range(24):
            if way == "step":
                manager.step(Wait.all())
            else:
                manager.send(np.zeros(2, np.int64), [0, 1])
                manager.recv(Wait.all())

        assert max(worker.generation for worker in manager.stats().workers) >= 2
        assert_all_are_whole(manager)
        assert n_ended(manager) == {0: 7, 1: 5}, "a round is spent for each replacement"
        assert manager.episodes.lost == manager.stats().steps_lost == n_lost


@MANAGERS
def test_an_exception_of_an_environment_costs_its_episode_alone(kind: Any) -> None:
    with made(kind, 2) as manager:
        assert manager.episodes.count == 0
        manager.reset()
        manager.recv(Wait.all())
        manager.send(np.array([0, 1]), [0, 1])
        with pytest.raises(EnvRaised):
            manager.recv(Wait.all())
        manager.reset()
        for _ in range(4):
            manager.step(Wait.all())

        assert_all_are_whole(manager)
        assert n_ended(manager) == {0: 1, 1: 1}


def test_agents_of_several_behaviors_are_told_apart() -> None:
    with SimpleEnvManager(Duel, 2, wait="all") as manager:
        for behavior in ("hero", "target"):
            manager.set_policy(behavior, Zeros())
        assert manager.episodes.count == 0
        manager.reset()
        for _ in range(12):
            manager.step()

        lengths = {(end.env_id, end.behavior, end.agent_id & 0xFFFF): end.length for end in manager.episodes.recent}
        assert lengths == {
            (env_id, behavior, k): 5 + env_id
            for env_id in (0, 1)
            for behavior, k in (("hero", 0), ("target", 1), ("target", 2))
        }
        assert {end.total for end in manager.episodes.of(behavior="target", env_id=0)} == {-5.0}


def test_many_environments_that_end_at_once_are_all_there() -> None:
    with made(SimpleEnvManager, 300, wait="all") as manager:
        assert manager.episodes.take() == []
        manager.reset()
        taken = []
        for _ in range(400):
            manager.step()
            taken += manager.episodes.take()

        assert len(taken) == sum(400 // length_of(env_id) for env_id in range(300)) == manager.episodes.count
