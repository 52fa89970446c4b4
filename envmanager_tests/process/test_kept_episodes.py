"""Episodes that go on in the next worker: each run with faults is compared with the same run without."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import gymnasium
import numpy as np
import pytest
from pettingzoo.utils.env import ParallelEnv

from envmanager import (
    ActionInfo,
    AgentSteps,
    AsyncioEnvManager,
    EnvManager,
    RestartPolicy,
    Rollouts,
    SimpleEnvManager,
    SubprocessEnvManager,
    Task,
    Timeouts,
    UsageError,
    Wait,
    WorkerDied,
)
from envmanager.observe import events
from envmanager.observe.episodes import Episodes
from envmanager.recording.data import episodes, facts
from envmanager.replay_env_manager import ReplayEnvManager
from envmanager.testing.fault_checks import until

SUITE = "core"

ALL = Wait.all()
KEPT = RestartPolicy(max_restarts=1000, backoff_s=0, keep_episodes=True, on_exception="restart")
MEMORIES = [{}, {"zero_copy": True}, {"transport": "portable"}, {"transport": "portable", "zero_copy": True}]


class Chain(gymnasium.Env):  # type: ignore[misc]
    """Numbers that depend on the seed and all actions. ``faults``: numbers of steps at which one happens.

    The steps of all copies are counted in a file, so that a repeated step is another one.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(4)
    level = 0

    def __init__(self, counter: str = "", fault: str = "", faults: tuple[int, ...] = ()) -> None:
        self._fd = os.open(counter, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if counter else -1
        self._counter, self._fault, self._faults = counter, fault, faults

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._n, self._length = 0, int(self.np_random.integers(8, 25))
        self._x = float(self.np_random.random())
        return np.array([self._x, 0.0]), {}

    def step(self, action: Any) -> Any:
        if self._fd >= 0:
            os.write(self._fd, b".")
            if os.lseek(self._fd, 0, os.SEEK_CUR) in self._faults:
                self._fail()
        if action == 3 and self._fault == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        self._n += 1
        self._x = (self._x * 3.7 + int(action) + float(self.np_random.random()) + self.level) % 10.0
        return np.array([self._x, float(self._n)]), float(action), self._n >= self._length, False, {}

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _fail(self) -> None:
        """Fail, but not twice in the same step of an episode, which would cost that episode."""
        try:
            Path(f"{self._counter}-{self._x!r}").touch(exist_ok=False)
        except FileExistsError:
            return
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "raise":
            raise ValueError("a fault")
        if self._fault == "hang":
            time.sleep(1000)
        if self._fault == "clock":
            self._x += time.time()


@attrs.frozen
class Make:
    """A factory of Chains."""

    counter: str = ""
    fault: str = ""
    faults: tuple[int, ...] = ()

    def __call__(self) -> Chain:
        return Chain(self.counter, self.fault, self.faults)


class ChainOfCoroutines(Chain):
    async def reset(self, **arguments: Any) -> Any:  # type: ignore[override]
        return Chain.reset(self, **arguments)

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return Chain.step(self, action)


class Streams:
    """A digest of the rows of each environment, in their order, and actions that depend on these rows alone."""

    def __init__(self, n_envs: int, *, n_actions: int = 3) -> None:
        self._hashes = [hashlib.sha256() for _ in range(n_envs)]
        self._random = [np.random.default_rng(env_id) for env_id in range(n_envs)]
        self._n_actions = n_actions
        self.lost = 0

    def add(self, batch: Any, counts: np.ndarray) -> None:
        self.lost += int(batch.lost.sum())
        ended = np.cumsum(batch.terminated | batch.truncated) - 1
        for row in np.flatnonzero(counts).tolist():
            env_id = int(batch.env_ids[row])
            parts = [batch.obs[row], batch.reward[row], batch.terminated[row], batch.truncated[row], batch.first[row]]
            if batch.terminated[row]:
                parts.append(batch.final_obs[ended[row]])
            for part in parts:
                self._hashes[env_id].update(part.tobytes())

    def actions(self, env_ids: np.ndarray) -> np.ndarray:
        return np.array([self._random[env_id].integers(0, self._n_actions) for env_id in env_ids.tolist()], np.int64)

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(self.actions(steps.env_id))

    @property
    def digests(self) -> list[str]:
        return [each.hexdigest() for each in self._hashes]


def played(
    manager: EnvManager,
    n_rounds: int = 60,
    n_actions: int = 3,
    wait: Wait = ALL,
    meanwhile: Callable[[int], Any] = lambda _: None,
    **reset: Any,
) -> Streams:
    """Play with ``send`` and ``recv``, until each environment has had so many rows or the tasks are done."""
    streams, n_rows = Streams(manager.n_envs, n_actions=n_actions), np.zeros(manager.n_envs, np.int64)
    manager.reset(**reset)
    batch = manager.recv(wait)
    while n_rows.min() < n_rounds and not ("tasks" in reset and manager.tasks.done):
        streams.add(batch, n_rows[batch.env_ids] < n_rounds)
        n_rows[batch.env_ids] += 1
        manager.send(streams.actions(batch.env_ids), batch.env_ids)
        meanwhile(int(n_rows.max()))
        batch = manager.recv(wait)
    return streams


def killer(manager: EnvManager, every: int = 7, most: float = np.inf) -> Callable[[int], None]:
    """Kill a worker, another each time, while its step is in flight; each at most ``most`` times."""
    order, n_kills = random.Random(1), [0] * manager.n_workers

    def kill(round_: int) -> None:
        if round_ % every == 0:
            worker = manager.stats().workers[order.randrange(manager.n_workers)]
            if worker.pid is not None and not worker.replacing and n_kills[worker.worker_id] < most:
                n_kills[worker.worker_id] += 1
                with contextlib.suppress(ProcessLookupError):  # it has died of the last one, and that was not seen yet
                    os.kill(worker.pid, signal.SIGKILL)

    return kill


def without_faults(n_envs: int = 4, **how: Any) -> list[str]:
    with SubprocessEnvManager(Make(), n_envs, n_workers=2, seed=1, restarts=KEPT) as manager:
        return played(manager, **how).digests


@pytest.mark.parametrize("more", [*MEMORIES, {"start_method": "spawn"}], ids=str)
def test_rows_of_a_run_with_kills_are_those_of_the_run_without(more: Any) -> None:
    if more.get("transport") != "portable" and sys.platform != "linux":
        pytest.skip("needs Linux")
    with SubprocessEnvManager(Make(), 4, n_workers=2, seed=1, restarts=KEPT, **more) as manager:
        streams = played(manager, meanwhile=killer(manager))
        stats = manager.stats()
        assert manager.events.count(events.Died) == manager.events.count(events.EpisodesKept) >= 5
        assert (streams.lost, stats.steps_lost, stats.episodes_diverged) == (0, 0, 0)
        assert stats.episodes_kept == 2 * manager.events.count(events.EpisodesKept)
    assert streams.digests == without_faults()


class DiesInReset(Chain):
    """Kills its process in the first resets of all copies, as many as its ``faults`` has numbers."""

    def reset(self, **arguments: Any) -> Any:
        os.write(self._fd, b".")
        if os.lseek(self._fd, 0, os.SEEK_CUR) in self._faults:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(**arguments)


@pytest.mark.parametrize("resets", [(1,), (2,), (1, 4, 5)], ids=str)
def test_a_worker_that_dies_in_the_first_reset_begins_the_same_episodes(resets: Any, tmp_path: Path) -> None:
    def make() -> Chain:
        return DiesInReset(str(tmp_path / "resets"), faults=resets)

    with SubprocessEnvManager(make, 4, n_workers=2, seed=1, restarts=KEPT) as manager:
        streams = played(manager)
        assert manager.events.count(events.Died) == len(resets)
    assert (streams.lost, streams.digests) == (0, without_faults())


@pytest.mark.parametrize("resets", [(1,), (2,)], ids=str)
def test_tasks_lost_in_the_reset_in_which_they_begin_start_in_the_same_row(resets: Any, tmp_path: Path) -> None:
    tasks = {"tasks": [Task(seed=k) for k in range(12)], "attempts": 1}
    with SubprocessEnvManager(
        lambda: DiesInReset(str(tmp_path / "resets"), faults=resets), 4, n_workers=2, seed=1, restarts=KEPT
    ) as manager:
        streams = played(manager, 30, **tasks)
        assert manager.events.count(events.Died) == len(resets)
        assert (streams.lost, manager.events.count(events.TaskLost)) == (0, 0)
        assert {result.attempts for result in manager.tasks.results} == {1}
    assert streams.digests == without_faults(n_rounds=30, **tasks)


def test_a_worker_found_dead_by_a_reset_begins_its_tasks_in_the_same_row() -> None:
    tasks = {"tasks": [Task(seed=k) for k in range(12)]}
    with SubprocessEnvManager(Make(), 4, n_workers=2, seed=1, restarts=KEPT) as manager:
        manager.reset()
        batch = manager.recv(ALL)
        manager.send(np.ones(4, np.int64), batch.env_ids)
        os.kill(manager.stats().workers[1].pid or 0, signal.SIGKILL)
        assert played(manager, 30, **tasks).digests == without_faults(n_rounds=30, **tasks)


def test_a_task_that_kills_its_worker_in_each_reset_is_given_up_and_the_others_are_played(tmp_path: Path) -> None:
    class Dies(Chain):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if seed == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().reset(seed=seed, options=options)

    with SubprocessEnvManager(Dies, 4, n_workers=2, seed=1, restarts=KEPT) as manager:
        played(manager, 10_000, tasks=[Task(seed=k) for k in (0, 5, 1, 2, 3, 4, 6, 7)])
        errors = [result.error is not None for result in manager.tasks.results]
        assert errors == [False, True, *[False] * 6]


@pytest.mark.parametrize("env", ["CartPole-v1", "Acrobot-v1"])
def test_episodes_of_gymnasiums_environments_go_on(env: str) -> None:
    def digests(*, kills: bool) -> list[str]:
        with SubprocessEnvManager(env, 4, n_workers=2, seed=2, restarts=KEPT) as manager:
            own = played(manager, 150, 2, meanwhile=killer(manager, 20) if kills else lambda _: None)
            assert manager.events.count(events.Died) >= 5 * kills
            assert own.lost == 0
            return own.digests

    assert digests(kills=True) == digests(kills=False)


@pytest.mark.parametrize("fault", ["kill", "raise", "hang"])
@pytest.mark.parametrize("wait", [ALL, Wait.any()], ids=["all", "any"])
def test_each_environments_rows_are_as_without_a_fault(fault: str, wait: Wait, tmp_path: Path) -> None:
    make = Make(str(tmp_path / "steps"), fault, (20, 60, 150) if fault == "hang" else (20, 21, 60, 100, 150))
    limits = Timeouts(step_s=1.0)
    with SubprocessEnvManager(make, 4, n_workers=2, seed=1, restarts=KEPT, timeouts=limits) as manager:
        streams = played(manager, wait=wait)
        assert streams.lost == 0
        assert manager.events.count(events.Failed) >= 1  # two copies may have counted past a number at once
        assert streams.digests == without_faults()


@pytest.mark.parametrize("more", [{}, {"zero_copy": True}], ids=str)
@pytest.mark.parametrize("kind", [SimpleEnvManager, SubprocessEnvManager])
def test_an_exception_in_this_process_makes_the_environments_anew(kind: Any, more: Any, tmp_path: Path) -> None:
    make = Make(str(tmp_path / "steps"), "raise", (20, 60, 61, 150))
    more = {**more, "local_envs": 2, "n_workers": 1} if kind is SubprocessEnvManager else more
    with kind(make, 4, seed=1, restarts=KEPT, **more) as manager:
        streams = played(manager)
        assert (streams.lost, manager.events.count(events.Raised)) == (0, 4)
    assert streams.digests == without_faults()


def test_starts_that_fail_cost_no_episode(tmp_path: Path) -> None:
    n_made = [0]

    def make() -> Chain:
        n_made[0] += 1
        if 4 < n_made[0] <= 20:
            raise OSError("no memory")
        return Chain(str(tmp_path / "steps"), "raise", (20,))

    with SimpleEnvManager(make, 4, seed=1, restarts=KEPT) as manager:
        streams = played(manager)
        assert (streams.lost, manager.events.count(events.Raised)) == (0, 17)
    assert streams.digests == without_faults()


def test_coroutines_go_on_after_an_exception(tmp_path: Path) -> None:
    path = str(tmp_path / "steps")
    with AsyncioEnvManager(
        lambda: ChainOfCoroutines(path, "raise", (20, 60, 150)), 4, seed=1, restarts=KEPT
    ) as manager:
        streams = played(manager)
        assert (streams.lost, manager.events.count(events.Raised)) == (0, 3)
    assert streams.digests == without_faults()


def columns_of(steps: AgentSteps) -> list[Any]:
    return [each.copy() for each in attrs.astuple(steps, recurse=False)[:5]]


def infos_played(
    manager: EnvManager, n_rounds: int = 60, wait: Wait = ALL, meanwhile: Callable[[int], Any] = lambda _: None
) -> list[str]:
    """Play with ``step()``, and return a digest of each environment's rows. Arrays hold for as long as promised."""
    manager.set_policy("default", Streams(4))
    own, n_steps = [hashlib.sha256() for _ in range(4)], [0] * manager.n_workers
    held: dict[int, tuple[Any, Any]] = {}

    def still_holds(worker_id: int) -> None:
        info, seen = held[worker_id]
        for steps, columns in zip((info.previous, info.current), seen, strict=True):
            assert steps is None or all(map(np.array_equal, columns_of(steps["default"]), columns))

    infos, least = manager.reset(), 0
    while least < n_rounds:
        for info in infos:
            worker_id, now = info.worker_id, columns_of(info.current["default"])
            assert info.lost is None
            assert (info.actions is None) == (n_steps[worker_id] == 0)
            assert info.previous is (held[worker_id][0].current if worker_id in held else None)
            held[worker_id] = info, (held[worker_id][1][1] if worker_id in held else None, now)
            still_holds(worker_id)
            if n_steps[worker_id] < n_rounds:
                for env_id, *row in zip(*now, strict=True):
                    own[env_id >> 32].update(b"".join(each.tobytes() for each in row))
            n_steps[worker_id] += 1
        if min(n_steps) > least:  # no step is killed twice
            least = min(n_steps)
            meanwhile(least)
        infos = manager.step(wait)
        for worker_id in held.keys() - {info.worker_id for info in infos}:
            still_holds(worker_id)
    return [each.hexdigest() for each in own]


@pytest.mark.parametrize("wait", [ALL, Wait.any()], ids=["all", "any"])
@pytest.mark.parametrize("more", MEMORIES, ids=str)
def test_step_returns_infos_as_without_kills(more: Any, wait: Wait) -> None:
    with SubprocessEnvManager(Make(), 4, n_workers=2, seed=1, restarts=KEPT) as manager:
        without = infos_played(manager)
    with SubprocessEnvManager(Make(), 4, n_workers=2, seed=1, restarts=KEPT, **more) as manager:
        assert infos_played(manager, wait=wait, meanwhile=killer(manager)) == without
        assert manager.events.count(events.EpisodesKept) >= 3


@pytest.mark.parametrize(
    ("kind", "more"), [(SimpleEnvManager, {}), (SubprocessEnvManager, {"local_envs": 2, "n_workers": 1})]
)
def test_with_zero_copy_step_returns_infos_as_without_exceptions(kind: Any, more: Any, tmp_path: Path) -> None:
    with kind(Make(), 4, seed=1, restarts=KEPT, **more) as manager:
        without = infos_played(manager)
    make = Make(str(tmp_path / "steps"), "raise", (20, 60, 61, 150))
    with kind(make, 4, seed=1, restarts=KEPT, zero_copy=True, **more) as manager:
        assert infos_played(manager) == without
        assert manager.events.count(events.Raised) == 4


@pytest.mark.parametrize("transport", [None, "portable"])
def test_what_the_trainer_holds_stays_when_a_step_is_taken_again(transport: Any, tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    how: Any = {"n_workers": 2, "seed": 1, "restarts": KEPT, "zero_copy": True, "transport": transport}
    with SubprocessEnvManager(Make(str(steps)), 4, **how) as manager:
        manager.set_policy("default", Streams(4))
        is_delivered = True
        while is_delivered:  # until the other worker's step comes first
            manager.reset(seed=1)
            for _ in range(5):
                held = next(info for info in manager.step(ALL) if info.worker_id == 0)
            assert held.previous is not None
            seen = [columns_of(each["default"]) for each in (held.previous, held.current)]
            n_steps, n_others, n_kept = steps.stat().st_size, 0, manager.events.count(events.EpisodesKept)
            os.kill(manager.stats().workers[0].pid or 0, signal.SIGKILL)
            is_delivered = False
            while not is_delivered and manager.events.count(events.EpisodesKept) == n_kept:
                infos = manager.step(Wait.any())
                is_delivered = any(info.worker_id == 0 for info in infos)
                n_others += 2 * len(infos)
        until(lambda: steps.stat().st_size == n_steps + n_others + 12)  # the replacement has taken six steps of each
        for kept, columns in zip((held.previous, held.current), seen, strict=True):
            assert all(map(np.array_equal, columns_of(kept["default"]), columns))


@pytest.mark.parametrize("transport", [None, "portable"])
def test_with_zero_copy_each_batch_is_a_view_although_workers_are_replaced(transport: Any) -> None:
    how: Any = {"n_workers": 2, "seed": 1, "restarts": KEPT, "zero_copy": True, "transport": transport}
    with SubprocessEnvManager(Make(), 4, **how) as manager:
        kill, actions = killer(manager), np.zeros(4, np.int64)
        manager.reset()
        env_ids, n_views = manager.recv(ALL).env_ids, 0
        for round_ in range(40):
            manager.send(actions, env_ids)
            kill(round_)
            batch = manager.recv(ALL)
            n_views += batch.is_view or batch.final_obs is not None  # two workers' final observations are joined
        assert manager.events.count(events.EpisodesKept) >= 3
        assert n_views == 40


class Team(ParallelEnv):  # type: ignore[misc]
    """Agents that join and leave in the middle of an episode, each with a number that depends on all actions."""

    metadata = {"name": "team"}
    possible_agents = ["a_0", "a_1", "a_2"]

    def observation_space(self, agent: str) -> Any:
        return gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def action_space(self, agent: str) -> Any:
        return gymnasium.spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._n, self._length = 0, int(self._random.integers(6, 20))
        self._x = dict.fromkeys(self.possible_agents, float(self._random.random()))
        self.agents = sorted(self._random.permutation(self.possible_agents)[: self._random.integers(1, 4)].tolist())
        return self._rows(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self._n += 1
        for agent, action in actions.items():
            self._x[agent] = (self._x[agent] * 3.7 + int(action) + float(self._random.random())) % 10.0
        is_over, acted = self._n >= self._length, self.agents
        ends = {agent: is_over or bool(self._random.random() < 0.05) for agent in acted}
        joins = [each for each in self.possible_agents if each not in acted][: self._random.random() < 0.1]
        self.agents = [] if is_over else sorted([*(agent for agent in acted if not ends[agent]), *joins])
        both = list(dict.fromkeys([*acted, *self.agents]))
        rewards = {agent: self._x[agent] for agent in both}
        no, infos = dict.fromkeys(both, False), {agent: {} for agent in both}
        return self._rows(both), rewards, {**no, **ends}, no, infos

    def _rows(self, agents: list[str]) -> dict[str, Any]:
        return {agent: np.array([self._x[agent], float(self._n)]) for agent in agents}

    def close(self) -> None:
        pass


class TwoTeams(Team):
    """Agents of two behaviors."""

    possible_agents = ["a_0", "b_0", "b_1"]


class Poisoned(TwoTeams):
    """Teams whose fourth step kills their process in some episodes, each time."""

    def step(self, actions: dict[str, Any]) -> Any:
        if self._n == 3 and self._length % 3 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(actions)


@pytest.mark.parametrize("n_workers", [4, 2])
def test_a_step_that_kills_each_time_costs_only_episodes_of_its_worker_with_two_behaviors(n_workers: int) -> None:
    with SubprocessEnvManager(Poisoned, 4, n_workers=n_workers, seed=1, restarts=KEPT) as manager:
        for name in manager.behavior_specs:
            manager.set_policy(name, Streams(4))
        manager.reset()
        lost = [info.lost.env_ids for _ in range(30) for info in manager.step(ALL) if info.lost is not None]
        assert lost
        assert {len(env_ids) for env_ids in lost} == {4 // n_workers}
        assert manager.events.count(events.EpisodesDiverged) == 0


@pytest.mark.parametrize(("make", "n_workers"), [(Team, 4), (Team, 2), (TwoTeams, 4)])
def test_agents_that_come_and_go_are_the_same_after_kills(make: type[Team], n_workers: int) -> None:
    class Own:
        def get_action(self, steps: AgentSteps) -> ActionInfo:
            return ActionInfo((np.abs(steps.obs.sum(1)) * 7).astype(np.int64) % 3)

    def digests(*, kills: bool) -> list[str]:
        with SubprocessEnvManager(make, 4, n_workers=n_workers, seed=1, restarts=KEPT) as manager:
            for name in manager.behavior_specs:
                manager.set_policy(name, Own())
            infos, own, kill = manager.reset(), [hashlib.sha256() for _ in range(4)], killer(manager)
            for round_ in range(60):
                for info in infos:
                    assert info.lost is None
                    for steps in info.current.values():
                        for row, env_id in enumerate(steps.env_id.tolist()):
                            columns = steps.agent_id, steps.obs, steps.reward, steps.terminated
                            own[env_id].update(b"".join(each[row].tobytes() for each in columns))
                if kills:
                    kill(round_)
                infos = manager.step(ALL)
            assert manager.events.count(events.Died) >= 5 * kills
            return [each.hexdigest() for each in own]

    assert digests(kills=True) == digests(kills=False)


@pytest.mark.parametrize("prefetch", [False, True])
def test_tasks_are_played_once_in_spite_of_kills(prefetch: bool) -> None:
    def results(*, kills: bool) -> Any:
        with SubprocessEnvManager(Make(), 4, n_workers=2, seed=1, restarts=KEPT) as manager:
            how: Any = {"meanwhile": killer(manager)} if kills else {}
            played(manager, 10_000, tasks=[Task(seed=k) for k in range(40)], prefetch=prefetch, **how)
            assert manager.events.count(events.TaskLost) == 0
            assert manager.events.count(events.Died) >= 5 * kills
            return [(result.index, result.total, result.length, result.attempts) for result in manager.tasks.results]

    assert results(kills=True) == results(kills=False)


@pytest.mark.parametrize("prefetch", [None, True])
@pytest.mark.parametrize("n_workers", [1, 2])
def test_tasks_whose_episodes_diverge_are_played_again(n_workers: int, prefetch: Any, tmp_path: Path) -> None:
    make = Make(str(tmp_path / "steps"), "clock", tuple(range(5, 20_000, 11)))
    with SubprocessEnvManager(make, 4, n_workers=n_workers, seed=1, restarts=KEPT) as manager:
        tasks = {"tasks": [Task(seed=k) for k in range(40)], "prefetch": prefetch, "attempts": 1000}
        played(manager, 10_000, meanwhile=killer(manager), **tasks)
        results = manager.tasks.results
        assert manager.stats().episodes_diverged >= 3
    assert [result.index for result in results if result.error is None] == list(range(40))


def test_a_pools_episodes_do_not_notice_kills() -> None:
    """A worker that died three times in the same step, as others go on meanwhile, would have an episode to blame."""

    async def play(pool: Any, seed: int, kill: Callable[[int], None]) -> str:
        chosen, digest = np.random.default_rng(seed), hashlib.sha256()
        async with pool.begin(seed) as episode:
            while not episode.is_over:
                obs, reward, *_ = await episode.step(int(chosen.integers(3)))
                digest.update(obs.tobytes() + np.float64(reward).tobytes())
                kill(int(chosen.integers(100)))
        return digest.hexdigest()

    def results(*, kills: bool) -> list[str]:
        with SubprocessEnvManager(Make(), 4, n_workers=2, seed=1, restarts=KEPT) as manager:
            pool, kill = manager.pool(), killer(manager, 97, most=2) if kills else lambda _: None

            async def play_all() -> list[str]:
                return await asyncio.gather(*(play(pool, seed, kill) for seed in range(30)))

            played_all = asyncio.run(play_all())
            assert manager.events.count(events.Died) >= kills
            return played_all

    assert results(kills=True) == results(kills=False)


def test_recycling_cuts_no_episode() -> None:
    old = attrs.evolve(KEPT, recycle_after_steps=10)
    with SubprocessEnvManager(Make(), 4, n_workers=2, seed=1, restarts=old) as manager:
        streams = played(manager)
        assert streams.lost == 0
        assert manager.events.count(events.Recycled) >= 8
    assert streams.digests == without_faults()


def test_recycling_waits_for_the_end_of_an_episode_that_is_not_kept() -> None:
    old = attrs.evolve(KEPT, recycle_after_steps=5)
    with SubprocessEnvManager(Make(), 2, n_workers=1, seed=1, restarts=old) as manager:
        manager.reset()
        batch = manager.recv(ALL)
        manager.call("close", env_ids=[0], repeat=False)
        ended = []
        while not manager.events.count(events.Recycled):
            assert sum(ended) < 2
            manager.send(np.ones(2, np.int64), batch.env_ids)
            batch = manager.recv(ALL)
            assert not batch.lost.any()
            ended.append(bool(batch.terminated[0]))
        assert sum(ended) == 1  # of the episode that is not kept
        assert len(ended) > 5


@pytest.mark.parametrize("n_workers", [4, 2, 1])
@pytest.mark.parametrize("zero_copy", [False, True])
def test_an_action_that_kills_each_time_costs_its_own_episode_alone(n_workers: int, zero_copy: bool) -> None:
    how: Any = {"n_workers": n_workers, "seed": 1, "restarts": KEPT, "zero_copy": zero_copy}
    with SubprocessEnvManager(Make(fault="poison"), 4, **how) as manager:
        manager.reset()
        batch, plays = manager.recv(ALL), np.zeros(4, np.int64)
        for round_ in range(6):
            actions = np.ones(4, np.int64)
            poisoned = {1: [2], 3: [0, 3]}.get(round_, [])
            actions[poisoned] = 3
            seen = batch.obs.copy()
            manager.send(actions, batch.env_ids)
            batch = manager.recv(ALL)
            plays += 1
            plays[poisoned] = 0
            assert np.flatnonzero(batch.lost).tolist() == poisoned
            assert batch.obs[:, 1].tolist() == plays.tolist()
            assert batch.truncated.tolist() == batch.lost.tolist()
            assert not poisoned or batch.final_obs.tolist() == seen[poisoned].tolist()
            assert poisoned or batch.is_view == zero_copy
        assert manager.events.count(events.EpisodesDiverged) == 0


@pytest.mark.parametrize("poisoned", [[1], [1, 2]])
def test_rows_of_a_partial_step_that_loses_all_its_environments_are_theirs_alone(poisoned: list[int]) -> None:
    with SubprocessEnvManager(Make(fault="poison"), 3, n_workers=1, seed=1, restarts=KEPT) as manager:
        manager.reset()
        manager.recv(ALL)
        manager.send([3] * len(poisoned), poisoned)
        batch = manager.recv(ALL)
        assert (batch.env_ids.tolist(), batch.lost.tolist()) == (poisoned, [True] * len(poisoned))
        manager.send([1, 1, 1], range(3))
        batch = manager.recv(ALL)
        assert (batch.lost.any(), batch.obs[:, 1].tolist()) == (False, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("n_workers", [4, 2, 1])
@pytest.mark.parametrize("by_step", [False, True])
def test_a_task_whose_action_kills_its_worker_is_given_up_after_two_deaths_alone(n_workers: int, by_step: bool) -> None:
    """Each worker plays on, and each other task is played once, in its rows. The second action of task 3 kills."""

    class Deadly:
        def get_action(self, steps: AgentSteps) -> ActionInfo:
            is_deadly = (steps.obs[:, 1] == 1) & (steps.obs[:, 0] == deadly)
            return ActionInfo(np.where(is_deadly, 3, 1))

    def results(fault: str) -> Any:
        with SubprocessEnvManager(Make(fault=fault), 4, n_workers=n_workers, seed=1, restarts=KEPT) as manager:
            policy, n_lost, counted = Deadly(), 0, Episodes()
            manager.set_policy("default", policy)
            infos = manager.reset(tasks=[Task(seed=k) for k in range(12)], attempts=1)
            if not by_step:
                batch = manager.recv(ALL)
            while not manager.tasks.done:
                if by_step:
                    counted.add_all(infos)
                    infos = manager.step(ALL)
                    n_lost += sum(len(info.lost.env_ids) for info in infos if info.lost is not None)
                else:
                    steps = AgentSteps.first(agent_id=batch.env_ids << 32, obs=batch.obs)
                    manager.send(policy.get_action(steps).action, batch.env_ids)
                    batch = manager.recv(ALL)
                    n_lost += int(batch.lost.sum())
            stats, lost = manager.stats(), fault == "poison"
            assert (n_lost, manager.events.count(events.TaskLost)) == (lost, lost)
            assert manager.events.count(events.Died) == lost * (2 if n_workers == 4 else 3)
            assert (stats.episodes_diverged, manager.episodes.lost, counted.lost) == (0, lost, lost * by_step)
            return [(each.index, each.total, each.length, each.error is None) for each in manager.tasks.results]

    deadly = second_observation(seed=3, action=1)
    with_death, without = results("poison"), results("")
    assert with_death[3][3] is False
    assert with_death[:3] + with_death[4:] == without[:3] + without[4:]


def second_observation(seed: int, action: int) -> float:
    chain = Chain()
    chain.reset(seed=seed)
    return float(chain.step(action)[0][0])


@pytest.mark.parametrize("n_workers", [4, 1])
def test_step_tells_which_environments_were_lost_and_the_rows_of_others_are_steps(n_workers: int) -> None:
    class Poison:
        poisoned: Any = ()

        def get_action(self, steps: AgentSteps) -> ActionInfo:
            return ActionInfo(np.where(np.isin(steps.env_id, self.poisoned), 3, 1))

    with SubprocessEnvManager(Make(fault="poison"), 4, n_workers=n_workers, seed=1, restarts=KEPT) as manager:
        policy, plays = Poison(), np.zeros(4, np.int64)
        manager.set_policy("default", policy)
        rollouts, episodes_of = Rollouts(manager, 8), manager.episodes
        infos = manager.reset()
        for round_ in range(7):
            rollouts.add(infos)
            before = {info.worker_id: info for info in infos}
            policy.poisoned = {1: [2], 3: [0, 3], 5: [0, 1, 2, 3]}.get(round_, [])
            infos = manager.step(ALL)
            plays += 1
            plays[policy.poisoned] = 0
            lost = sorted(env_id for info in infos if info.lost is not None for env_id in info.lost.env_ids)
            assert lost == policy.poisoned
            for info in infos:
                steps, of_worker = info.current["default"], info.lost.env_ids if info.lost is not None else ()
                assert info.previous is before[info.worker_id].current
                assert (info.actions is None) == (len(of_worker) == len(steps)) == (not info.is_step)
                assert steps.obs[:, 1].tolist() == plays[steps.env_id].tolist()
                assert steps.truncated.tolist() == [env_id in of_worker for env_id in steps.env_id.tolist()]
                assert steps.reward.tolist() == [float(env_id not in of_worker) for env_id in steps.env_id.tolist()]
                others = [env_id for env_id in steps.env_id.tolist() if env_id not in of_worker]
                assert (info.transitions().agent_id >> 32).tolist() == others
        rollouts.add(infos)
        n_lost, n_steps = 7, 7 * 4 - 7
        kept = rollouts.take_rest()
        assert sum(each.reward.size for each in kept) == n_steps
        assert sum(int(each.lost.sum()) for each in kept) == n_lost
        assert (episodes_of.lost, episodes_of.env_steps, manager.stats().env_steps) == (n_lost, n_steps, n_steps)
        assert manager.events.count(events.EpisodesDiverged) == 0


@pytest.mark.parametrize("keeps", [True, "unchecked"])
def test_an_episode_that_was_elsewhere_is_lost_alone_and_told(keeps: Any, tmp_path: Path) -> None:
    make = Make(str(tmp_path / "steps"), "clock", (6,))
    policy = attrs.evolve(KEPT, keep_episodes=keeps)
    with SubprocessEnvManager(make, 3, n_workers=1, seed=1, restarts=policy) as manager:
        manager.reset()
        batch = manager.recv(ALL)
        for _ in range(2):
            manager.send(np.ones(3, np.int64), batch.env_ids)
            batch = manager.recv(ALL)
        seen = batch.obs.copy()
        os.kill(manager.stats().workers[0].pid or 0, signal.SIGKILL)
        manager.send(np.ones(3, np.int64), batch.env_ids)
        batch = manager.recv(ALL)
        if keeps == "unchecked":
            assert not batch.lost.any()
            return
        assert batch.lost.tolist() == [False, False, True]
        assert batch.obs[:, 1].tolist() == [3.0, 3.0, 0.0]
        assert batch.final_obs.tolist() == [seen[2].tolist()]
        (told,) = [event for event in manager.events if isinstance(event, events.EpisodesDiverged)]
        assert (told.env_id, told.step, told.path, told.expected) == (2, 2, "obs[0]", seen[2, 0])
        assert manager.stats().episodes_diverged == 1
        manager.send(np.ones(3, np.int64), batch.env_ids)
        assert manager.recv(ALL).obs[:, 1].tolist() == [4.0, 4.0, 1.0]


class Secret(Chain):
    """Its rewards depend on the process, which no observation shows."""

    def step(self, action: Any) -> Any:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(os.getpid()), terminated, truncated, info


@pytest.mark.parametrize("counts", [True, False])
def test_an_episode_whose_return_differs_is_lost_where_returns_are_counted(counts: bool) -> None:
    with SubprocessEnvManager(Secret, 2, n_workers=1, seed=1, restarts=KEPT) as manager:
        if counts:
            assert not manager.episodes.count
        manager.reset()
        batch = manager.recv(ALL)
        for _ in range(3):
            manager.send(np.ones(2, np.int64), batch.env_ids)
            batch = manager.recv(ALL)
        total = float(batch.reward[0]) * 3
        os.kill(manager.stats().workers[0].pid or 0, signal.SIGKILL)
        manager.send(np.ones(2, np.int64), batch.env_ids)
        assert manager.recv(ALL).lost.tolist() == [counts, counts]
        told = [event for event in manager.events if isinstance(event, events.EpisodesDiverged)]
        assert [(each.env_id, each.step, each.path, each.expected) for each in told] == [
            (env_id, 3, "the return", total) for env_id in range(2 * counts)
        ]


@pytest.mark.parametrize("kind", [SubprocessEnvManager, AsyncioEnvManager])
def test_an_episode_that_began_with_actions_is_compared_by_what_counts_since(kind: Any, tmp_path: Path) -> None:
    """The rewards of the actions with which it began, and their number, were never delivered."""
    how: Any = {"n_workers": 1} if kind is SubprocessEnvManager else {}
    make = Make(str(tmp_path / "steps"), "raise", (10, 11, 25))
    with kind(make if how else lambda: ChainOfCoroutines(*attrs.astuple(make)), 2, restarts=KEPT, **how) as manager:
        tasks = [Task(seed=k, actions=np.array([2, 1, 2])) for k in range(4)]
        assert played(manager, 10_000, tasks=tasks).lost == 0
        assert manager.events.count(events.Raised) >= 2
        assert manager.stats().episodes_diverged == 0
        assert manager.stats().steps_repeated > 0


def test_an_episode_that_is_too_long_is_lost_and_told() -> None:
    class Endless(Chain):
        def step(self, action: Any) -> Any:
            obs, reward, _, truncated, info = super().step(action)
            return obs, reward, False, truncated, info

    policy = attrs.evolve(KEPT, keep_at_most=1000)
    with SubprocessEnvManager(Endless, 1, seed=1, restarts=policy) as manager:
        streams = played(manager, 2500)
        told = [event for event in manager.events if isinstance(event, events.EpisodesNotKept)]
        assert [each.env_ids for each in told] == [(0,)]
        with pytest.raises(UsageError, match="EpisodesNotKept"):
            manager.positions()
        os.kill(manager.stats().workers[0].pid or 0, signal.SIGKILL)
        manager.send(np.ones(1, np.int64), [0])
        assert manager.recv(ALL).lost.all()
    assert streams.lost == 0


def test_a_reset_and_calls_wait_for_no_lost_worker() -> None:
    with SubprocessEnvManager(Make(), 2, n_workers=2, seed=1, restarts=KEPT) as manager:
        manager.reset()
        batch = manager.recv(ALL)
        manager.send(np.ones(2, np.int64), batch.env_ids)
        os.kill(manager.stats().workers[0].pid or 0, signal.SIGKILL)
        with contextlib.suppress(WorkerDied):
            assert manager.get_attr("level") == [0, 0]
        assert manager.recv(ALL).obs[:, 1].tolist() == [1.0, 1.0]
        os.kill(manager.stats().workers[1].pid or 0, signal.SIGKILL)
        manager.send(np.ones(2, np.int64), batch.env_ids)
        first = manager.reset(seed=1)
        assert np.concatenate([info.current["default"].obs for info in first]).tolist() == batch.obs.tolist()


# Positions.


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_episode_begun_at_a_position_is_where_the_other_was(in_flight: bool) -> None:
    with SubprocessEnvManager(Make(), 4, n_workers=2, seed=1, restarts=KEPT, episodes="on_demand") as manager:
        manager.reset()
        batch = manager.recv(ALL)
        for _ in range(5):
            manager.send(np.array([0, 1, 2, 0]), batch.env_ids)
            batch = manager.recv(ALL)
        if in_flight:
            manager.send(np.ones(4, np.int64), batch.env_ids)
        positions = manager.positions([3, 1])
        if in_flight:
            manager.recv(ALL)
        assert all(position is not None and len(position.actions) == 5 for position in positions)
        manager.begin([0, 2], [Task.from_dict(each.to_dict()) for each in positions if each is not None])
        manager.send(np.ones(2, np.int64), [1, 3])
        begun = manager.recv(ALL)
        begun = begun if begun.first.any() else manager.recv(ALL)
        rows = {env_id: row for row, env_id in enumerate(begun.env_ids.tolist())}
        assert begun.obs[rows[0]].tolist() == batch.obs[3].tolist()
        assert begun.obs[rows[2]].tolist() == batch.obs[1].tolist()
        (again,) = manager.positions([0])
        assert again == positions[0]


def test_a_position_tells_none_for_an_environment_that_rests() -> None:
    with SimpleEnvManager(Make(), 2, seed=1, restarts=KEPT) as manager:
        manager.reset(tasks=[Task(seed=5, options={"a": 1})])
        position, rests = manager.positions()
        assert (position, rests) == (Task(seed=5, options={"a": 1}), None)


def test_positions_of_automatic_episodes_go_on_elsewhere() -> None:
    with SimpleEnvManager(Make(), 2, seed=1, restarts=KEPT) as manager:
        played(manager, 40)
        positions = manager.positions()
        obs = [info.current for info in manager.reset(tasks=positions)]
        assert obs[0]["default"].obs[:, 1].tolist() == [len(each.actions) for each in positions if each is not None]


def test_an_episode_of_a_pool_has_its_position() -> None:
    async def play(pool: Any) -> None:
        async with pool.begin(3) as episode:
            for action in (1, 2, 0):
                await episode.step(action)
            assert episode.position == Task(seed=3, actions=np.array([1, 2, 0]))
            async with pool.begin(episode.position) as other:
                assert other.obs.tolist() == episode.obs.tolist()
        assert episode.position is None

    with SubprocessEnvManager(Make(), 2, n_workers=2, seed=1, restarts=KEPT) as manager:
        asyncio.run(play(manager.pool()))


def test_positions_need_kept_episodes() -> None:
    with SimpleEnvManager(Make(), 1) as manager:
        manager.reset()
        with pytest.raises(UsageError, match="keep_episodes=True"):
            manager.positions()


# Refusals, and recordings.


def test_vectors_are_refused() -> None:
    def vector() -> Any:
        return gymnasium.vector.SyncVectorEnv([Chain, Chain])

    with pytest.raises(UsageError, match="environments, EnvPool, ML-Agents"):
        SubprocessEnvManager(vector, 2, n_workers=1, restarts=KEPT)


def test_a_recording_of_a_kept_run_has_each_row_once_and_can_be_replayed(tmp_path: Path) -> None:
    def run(manager: EnvManager, meanwhile: Any) -> list[str]:
        return played(manager, 40, meanwhile=meanwhile).digests

    path = str(tmp_path / "run.emrec")
    with SubprocessEnvManager(Make(), 4, n_workers=2, restarts=KEPT, record=path) as manager:
        digests = run(manager, killer(manager))
        assert manager.events.count(events.EpisodesKept) >= 3
        n_steps = {worker.worker_id: worker.steps for worker in manager.stats().workers}
    assert Counter(fact.worker_id for fact in facts(path) if fact.what == "step") == n_steps
    recorded = list(episodes(path, trust=True))
    assert all(each.error is None for each in recorded)
    for each in recorded:
        assert each.obs is not None
        assert each.obs[:, 1].tolist() == list(range(each.length + 1))
    with ReplayEnvManager(recording=path, trust=True) as manager:
        assert run(manager, lambda _: None) == digests
