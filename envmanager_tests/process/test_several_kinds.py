"""Several kinds of environments in one manager: their names, batches, tasks and shares, and kinds that fail."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import gymnasium
import numpy as np
import pytest
from pettingzoo import ParallelEnv

from envmanager import (
    ActionInfo,
    AgentSteps,
    AsyncioEnvManager,
    BadAction,
    Batch,
    EnvContext,
    EnvManager,
    EnvRaised,
    EnvRecipe,
    RestartPolicy,
    Rollouts,
    SimpleEnvManager,
    SubprocessEnvManager,
    Task,
    UsageError,
    Wait,
    make_manager,
)
from envmanager.adapters.factories import factories_for
from envmanager.interop import as_vector_env
from envmanager.observe.events import Dropped, KindLeftOut
from envmanager.recording import position
from envmanager.training.evaluation import evaluate, tasks_for
from envmanager_tests.envs import Duel

SUITE = "core"

Make = Callable[..., EnvManager]


class Told(gymnasium.Env):  # type: ignore[misc]
    """Observes its env_id, the number of its steps and its last action, in a kind's own dtype and shape."""

    def __init__(
        self, context: EnvContext, dtype: str = "float32", more: int = 0, length: int = 5, fails: str = ""
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(-1000, 1000, (3 + more,), np.dtype(dtype).type)
        self.action_space = gymnasium.spaces.Discrete(100 + more)
        self._env_id, self._length, self._fails = context.env_id, length, fails
        self._generation = context.generation
        if fails == "start":
            raise ValueError("no such level")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._n_steps, self._last = 0, -1
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self._n_steps, self._last = self._n_steps + 1, int(action)
        if self._fails == "step":
            raise ValueError("the physics exploded")
        if self._fails == "ctrl-c" and self._n_steps == 3 and not self._generation:
            signal.raise_signal(signal.SIGINT)
        if self._fails == "exit" or (self._fails == "once" and self._n_steps == 3 and not self._generation):
            os._exit(3)
        return self._obs(), float(action), self._n_steps == self._length, False, {}

    def _obs(self) -> Any:
        obs = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        obs[:3] = self._env_id, self._n_steps, self._last
        return obs


def kinds(*, of_b: Mapping[str, Any] | None = None, n: tuple[int, int] = (3, 2)) -> list[EnvRecipe]:
    return [
        EnvRecipe(Told, n=n[0], behavior="a"),
        EnvRecipe(Told, n=n[1], behavior="b", env_kwargs={"dtype": "int64", "more": 2, "length": 4, **(of_b or {})}),
    ]


def one_each(recipes: Any, **options: Any) -> EnvManager:
    return SubprocessEnvManager(recipes, **{"seed": 1, **options})


def two_workers(recipes: Any, **options: Any) -> EnvManager:
    return SubprocessEnvManager(recipes, **{"seed": 1, "n_workers": 2, **options})


def in_process(recipes: Any, **options: Any) -> EnvManager:
    return SimpleEnvManager(recipes, **{"seed": 1, **options})


def coroutines(recipes: Any, **options: Any) -> EnvManager:
    return AsyncioEnvManager(recipes, **{"seed": 1, **options})


def from_config(recipes: Any, **options: Any) -> EnvManager:
    names = ("env", "n", "behavior", "env_kwargs")
    tables = [{name: getattr(recipe, name) for name in names} for recipe in recipes]
    return make_manager({"kind": "simple", "env": tables, "seed": 1, **options})


ALL_KINDS = pytest.mark.parametrize("make", [in_process, from_config, coroutines, two_workers, one_each])
SOME_KINDS = pytest.mark.parametrize("make", [in_process, two_workers])
ALL = Wait.all()


class Numbers:
    """Actions that count up, from another number for each behavior."""

    def __init__(self, first: int) -> None:
        self._next = first

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        self._next += 1
        return ActionInfo(np.full(len(steps), self._next % 100))


def check_rows(manager: EnvManager, batch: Batch) -> None:
    """Check that the rows are of the environments that they name, and of the kind that the batch names."""
    spec = manager.behavior_specs[batch.behavior].observation
    assert batch.obs.dtype == spec.dtype
    assert batch.obs.shape == (len(batch), *spec.shape)
    assert batch.obs[:, 0].tolist() == batch.env_ids.tolist()
    assert {0: "a", 1: "a", 2: "a", 3: "b", 4: "b"}[int(batch.env_ids[0])] == batch.behavior


@ALL_KINDS
def test_each_kind_has_a_behavior_with_its_name_and_its_spaces(make: Make) -> None:
    with make(kinds()) as manager:
        assert (manager.n_envs, manager.kinds) == (5, ("a", "b"))
        shapes = {name: (spec.observation.shape, spec.action.maximum) for name, spec in manager.behavior_specs.items()}
        assert shapes == {"a": ((3,), 99), "b": ((5,), 101)}
        assert {(worker.kind, env_id) for worker in manager.stats().workers for env_id in worker.env_ids} == {
            *(("a", env_id) for env_id in range(3)),
            *(("b", env_id) for env_id in (3, 4)),
        }


@ALL_KINDS
def test_step_calls_the_policy_of_each_kind_with_its_own_rows(make: Make) -> None:
    with make(kinds()) as manager:
        manager.set_policy("a", Numbers(0))
        manager.set_policy("b", Numbers(50))
        manager.reset()
        for number in range(1, 8):
            infos = manager.step(ALL)
            rows = {name: steps for info in infos for name, steps in info.current.items()}
            assert rows["a"].reward.tolist() == [float(number)] * len(rows["a"])
            assert rows["b"].reward.tolist() == [50.0 + number] * len(rows["b"])
            assert {env_id for info in infos for steps in info.current.values() for env_id in steps.obs[:, 0]} == {
                *range(5)
            }


@ALL_KINDS
def test_recv_returns_one_kind_at_a_time_and_send_takes_part_of_it_in_any_order(make: Make) -> None:
    actions = np.random.default_rng(0)
    with make(kinds()) as manager:
        manager.reset()
        left: dict[str, list[int]] = {"a": [], "b": []}
        taken: dict[int, int] = {}
        seen: Counter[str] = Counter()
        while min(seen["a"], seen["b"]) < 30:
            batch = manager.recv()
            check_rows(manager, batch)
            for env_id, obs, is_end in zip(batch.env_ids.tolist(), batch.obs, batch.terminated, strict=True):
                assert obs[2] == -1 if is_end else obs[2] == taken.get(env_id, -1)
            seen[batch.behavior] += len(batch)
            left[batch.behavior] += batch.env_ids.tolist()
            blocks = [block for block in manager.stats().workers if {*block.env_ids} <= {*left[batch.behavior]}]
            env_ids = actions.permutation([env_id for block in blocks for env_id in block.env_ids])
            chosen = actions.integers(0, 100, len(env_ids))
            taken.update(zip(env_ids.tolist(), chosen.tolist(), strict=True))
            manager.send(chosen, env_ids)
            left[batch.behavior] = [env_id for env_id in left[batch.behavior] if env_id not in env_ids]


@SOME_KINDS
def test_actions_for_environments_of_two_kinds_are_refused_and_nothing_is_sent(make: Make) -> None:
    with make(kinds()) as manager:
        manager.reset()
        seen = {batch.behavior for batch in (manager.recv(), manager.recv())}
        assert seen == {"a", "b"}

        with pytest.raises(BadAction, match="of a and b: send those of each kind apart"):
            manager.send(np.zeros(5, np.int64), range(5))

        manager.send(np.array([101, 101]), [4, 3])
        batch = manager.recv()
        assert batch.obs[:, 2].tolist() == [101, 101]
        with pytest.raises(BadAction, match=r"\[0, 99\]"):
            manager.send(np.array([101, 1, 1]), [0, 1, 2])


def test_environments_with_several_behaviors_have_the_name_of_their_kind_before_theirs() -> None:
    with SimpleEnvManager([EnvRecipe(Duel, behavior="duel"), EnvRecipe(Told, n=2, behavior="a")]) as manager:
        assert {*manager.behavior_specs} == {"duel/hero", "duel/target", "a"}
        for behavior in manager.behavior_specs:
            manager.set_policy(behavior, Numbers(0) if behavior == "a" else Zeros())
        manager.reset()
        infos = manager.step(ALL)
        assert [{*info.current} for info in infos] == [{"duel/hero", "duel/target"}, {"a"}]
        manager.reset()
        with pytest.raises(UsageError, match=r"duel/hero.*Use step"):
            manager.recv()


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


class Pair(ParallelEnv):  # type: ignore[misc]
    """Two agents of one behavior."""

    metadata: Mapping[str, Any] = {}
    possible_agents = ("player_0", "player_1")

    def observation_space(self, _: Any) -> Any:
        return gymnasium.spaces.Box(0, 9, (1,), np.float32)

    def action_space(self, _: Any) -> Any:
        return gymnasium.spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self._n = [*self.possible_agents], 0
        return {agent: np.zeros(1, np.float32) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self._n += 1
        obs = {agent: np.full(1, self._n, np.float32) for agent in actions}
        ends = dict.fromkeys(actions, self._n == 3)
        rewards = {agent: float(action) for agent, action in actions.items()}
        return obs, rewards, ends, dict.fromkeys(actions, False), {agent: {} for agent in actions}


def test_kinds_may_be_of_different_libraries() -> None:
    with SubprocessEnvManager([EnvRecipe(Pair, n=2, behavior="pair"), EnvRecipe(Told, behavior="a")]) as manager:
        manager.set_policy("pair", Zeros())
        manager.set_policy("a", Zeros())
        manager.reset()
        counts: Counter[str] = Counter()
        for _ in range(6):
            counts.update({name: len(steps) for info in manager.step(ALL) for name, steps in info.current.items()})
        assert {*counts} == {"pair", "a"}


# Tasks.


@ALL_KINDS
def test_a_task_is_played_by_an_environment_of_its_kind_and_one_without_a_kind_by_any(make: Make) -> None:
    tasks = [Task(seed=number, kind=("a", "b", None)[number % 3], id=number) for number in range(30)]
    with make(kinds()) as manager:
        results = played(manager, tasks)
        assert [result.task.id for result in results] == [*range(30)]
        for result in results:
            if result.task.kind is not None:
                assert (result.env_id < 3) == (result.task.kind == "a")
            assert result.length == (5 if result.env_id < 3 else 4)


def played(manager: EnvManager, tasks: Any) -> Any:
    """The results of the tasks, once all are done."""
    manager.reset(tasks=tasks)
    while not manager.tasks.done:
        batch = manager.recv()
        manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
    return manager.tasks.results


@SOME_KINDS
def test_a_kind_whose_tasks_come_late_in_the_list_begins_them_at_once(make: Make) -> None:
    with make(kinds()) as manager:
        manager.reset(tasks=[Task(kind="a")] * 20 + [Task(kind="b")] * 2)
        assert {*manager.tasks.running.values()} >= {3, 4}


def test_an_endless_source_is_asked_no_further_ahead_than_there_are_environments() -> None:
    asked = 0

    def source() -> Iterator[Task]:
        nonlocal asked
        while True:
            asked += 1
            yield Task(kind="a")

    with SimpleEnvManager(kinds(), seed=1) as manager:
        manager.reset(tasks=source())
        assert asked <= 2 * manager.n_envs + 3
        for _ in range(30):
            batch = manager.recv()
            assert batch.behavior == "a"
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)


@SOME_KINDS
def test_a_task_of_an_unknown_kind_is_refused_by_its_name(make: Make) -> None:
    with make(kinds()) as manager:
        with pytest.raises(UsageError, match="no kind of environment 'c' for a task; the kinds are a, b"):
            manager.reset(tasks=[Task(kind="c")])
        with pytest.raises(UsageError, match="needs its kind, one of a, b"):
            manager.reset(tasks=[Task(actions=np.zeros(2, np.int64))])
    with SimpleEnvManager(Told, 2) as manager, pytest.raises(UsageError, match="have no kinds: leave it out"):
        manager.reset(tasks=[Task(kind="a")])


def test_tasks_of_a_kind_without_environments_left_are_given_up_with_its_error() -> None:
    tasks = [Task(kind=kind) for kind in "ab" * 6]
    policy = RestartPolicy(max_restarts=1, backoff_s=0, then="drop", on_exception="restart")
    with SimpleEnvManager(kinds(of_b={"fails": "step"}), seed=1, restarts=policy) as manager:
        results = played(manager, tasks)
        lost = [result for result in results if result.error is not None]
        assert [result.task.kind for result in lost] == ["b"] * 6
        assert len(results) == 12
        assert "the physics exploded" in str(lost[-1].error)
        assert [event.kind for event in manager.events if isinstance(event, KindLeftOut)] == ["b"]


@SOME_KINDS
def test_begin_refuses_a_task_of_another_kind_than_the_environments(make: Make) -> None:
    with make(kinds(), episodes="on_demand") as manager:
        manager.reset()
        manager.recv()
        with pytest.raises(UsageError, match="env 4 is of the kind b, and the task of a"):
            manager.begin([4], [Task(kind="a")])


@SOME_KINDS
def test_a_task_with_actions_begins_in_the_middle_in_a_kind_of_its_own_dtype(make: Make) -> None:
    with make(kinds()) as manager:
        manager.reset(tasks=[Task(kind="b", actions=[7, 8]), Task(kind="a", actions=np.array([1, 2, 3]))])
        first = {batch.behavior: batch for batch in (manager.recv(), manager.recv())}
        assert first["b"].obs[0, 1:3].tolist() == [2, 8]
        assert first["a"].obs[0, 1:3].tolist() == [3, 3]


@SOME_KINDS
def test_an_evaluation_plays_tasks_of_each_kind_in_turn(make: Make) -> None:
    with make(kinds()) as manager:
        evaluation = evaluate(manager, {"a": Zeros(), "b": Zeros()}, tasks=tasks_for(9, 3, kinds=manager.kinds))
        assert {name: len(lengths) for name, lengths in evaluation.lengths_of.items()} == {"a": 5, "b": 4}


# Shares.


def steps_by_kind(manager: EnvManager, wait: Wait, n: int, *, by_policy: bool = False) -> Counter[str]:
    counts: Counter[str] = Counter()
    manager.reset()
    while counts.total() < n:
        if by_policy:
            for info in manager.step(wait):
                counts.update({name: len(steps) for name, steps in info.current.items()})
        else:
            batch = manager.recv(wait)
            counts[batch.behavior] += len(batch)
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
    return counts


@pytest.mark.parametrize("by_policy", [False, True])
@ALL_KINDS
def test_each_kind_takes_its_share_of_the_steps(make: Make, by_policy: bool) -> None:
    wait = Wait(shares={"a": 0.2, "b": 0.8})
    with make(kinds()) as manager:
        for behavior in "ab":
            manager.set_policy(behavior, Zeros())
        counts = steps_by_kind(manager, wait, 1000, by_policy=by_policy)
        assert abs(counts["b"] / counts.total() - 0.8) < 0.03


def test_shares_are_counted_on_though_each_wait_has_another_limit() -> None:
    shares = {"a": 0.2, "b": 0.8}
    with SimpleEnvManager(kinds()) as manager:
        counts: Counter[str] = Counter()
        manager.reset()
        while counts.total() < 1000:
            batch = manager.recv(Wait(shares=shares, timeout_s=10 - counts.total() / 1000))
            counts[batch.behavior] += len(batch)
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
        assert abs(counts["b"] / counts.total() - 0.8) < 0.03


def test_each_kind_takes_its_share_of_the_time() -> None:
    wait = Wait(shares={"a": 0.5, "b": 0.5}, shares_of="time")
    with two_workers(kinds()) as manager:
        steps_by_kind(manager, wait, 3000)
        busy = [worker.steps * worker.step_time_s for worker in manager.stats().workers]
        assert 0.4 < busy[0] / sum(busy) < 0.6


@SOME_KINDS
def test_a_kind_that_the_trainer_does_not_step_holds_no_other_back(make: Make) -> None:
    wait = Wait(shares={"a": 0.1, "b": 0.9})
    with make(kinds()) as manager:
        manager.reset()
        n_of_a = 0
        while n_of_a < 60:
            batch = manager.recv(wait)
            if batch.behavior == "a":
                n_of_a += len(batch)
                manager.send(np.zeros(len(batch), np.int64), batch.env_ids)


def test_a_kind_that_always_crashes_holds_no_other_back_and_is_reported() -> None:
    wait = Wait(shares={"a": 0.1, "b": 0.9})
    restarts = RestartPolicy(max_restarts=10**6, backoff_s=0.05)
    with one_each(kinds(of_b={"fails": "exit"}), restarts=restarts) as manager:
        counts = steps_by_kind(manager, wait, 2000)
        assert counts["a"] > 1900
        assert [event.kind for event in manager.events if isinstance(event, KindLeftOut)] == ["b"]


def test_a_kind_that_is_dropped_while_others_wait_for_it_holds_them_back_no_longer() -> None:
    wait = Wait(shares={"a": 0.01, "b": 0.99})
    restarts = RestartPolicy(max_restarts=1, backoff_s=0, then="drop")
    with one_each(kinds(of_b={"fails": "exit"}), restarts=restarts) as manager:
        manager.reset()
        while manager.events.count(Dropped) < 2:
            batch = manager.recv(wait)
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
        for _ in range(100):
            batch = manager.recv(wait)
            assert batch.behavior == "a"
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
        assert [worker.kind for worker in manager.stats().workers if worker.dropped] == ["b", "b"]
        assert "all its workers were given up" in str([*manager.events][-1])


@pytest.mark.parametrize("shares", [{"a": 1.0}, {"a": 0.5, "c": 0.5}, {"a": 0.2, "b": 0.3, "c": 0.5}])
def test_shares_name_each_kind_and_no_other(shares: Mapping[str, float]) -> None:
    with SimpleEnvManager(kinds()) as manager:
        manager.reset()
        with pytest.raises(UsageError, match="the environments are a, b: give a share to each kind"):
            manager.recv(Wait(shares=shares))
        assert len(manager.recv())
    with SimpleEnvManager(Told, 2) as manager:
        manager.reset()
        with pytest.raises(UsageError, match="of one kind, without a name"):
            manager.recv(Wait(shares=shares))


# Failures, kept episodes, states and recordings.


@pytest.mark.parametrize("make", [in_process, two_workers, coroutines])
def test_a_kind_whose_constructor_fails_is_named_by_its_environment(make: Make) -> None:
    with pytest.raises(EnvRaised, match=r"(?s)env 3.*no such level"):
        make(kinds(of_b={"fails": "start"}))


@pytest.mark.parametrize("make", [two_workers, one_each])
def test_a_crash_cuts_the_episodes_of_its_worker_in_its_kind_alone(make: Make) -> None:
    with make(kinds(of_b={"fails": "once", "length": 9}), restarts=RestartPolicy(backoff_s=0)) as manager:
        manager.reset()
        lost: Counter[str] = Counter()
        while lost.total() < 2:
            batch = manager.recv()
            check_rows(manager, batch)
            lost[batch.behavior] += int(batch.lost.sum())
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
        assert +lost == {"b": 2}


@pytest.mark.parametrize("by_policy", [False, True])
@pytest.mark.parametrize("make", [two_workers, one_each])
def test_kept_episodes_of_a_kind_go_on_in_its_replacement(make: Make, by_policy: bool) -> None:
    restarts = RestartPolicy(backoff_s=0, keep_episodes=True)
    with make(kinds(of_b={"fails": "once", "length": 9}), restarts=restarts) as manager:
        for behavior in "ab":
            manager.set_policy(behavior, Numbers(3))
        episodes = manager.episodes
        steps_by_kind(manager, Wait.all(), 150, by_policy=by_policy)
        assert manager.stats().episodes_kept == 2
        assert episodes.lost == 0
        assert {each.length for each in episodes.of(behavior="b")} == {9}


def test_a_ctrl_c_in_a_step_of_one_kind_loses_no_step_of_another_in_this_process() -> None:
    restarts = RestartPolicy(backoff_s=0, on_exception="restart", keep_episodes=True)
    with SimpleEnvManager(kinds(of_b={"fails": "ctrl-c"}), seed=1, restarts=restarts) as manager:
        manager.reset()
        n_interrupts, shown = 0, dict[str, list[int]](a=[], b=[])
        for _ in range(5):
            batches: list[Batch] = []
            while len(batches) < 2:
                try:
                    batches.append(manager.recv())
                except KeyboardInterrupt:
                    n_interrupts += 1
            for batch in batches:  # both have a step to take in the next recv
                shown[batch.behavior].append(int(batch.obs[0][1]))
                manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
        assert n_interrupts
        assert shown == {"a": [0, 1, 2, 3, 4], "b": [0, 1, 2, 3, 0]}


@SOME_KINDS
def test_another_manager_goes_on_from_the_state_of_one_with_several_kinds(make: Make) -> None:
    options: Any = {"restarts": RestartPolicy(backoff_s=0, keep_episodes=True)}
    tasks = [Task(kind=kind) for kind in "aab" * 8]
    with make(kinds(), **options) as manager:
        manager.reset(tasks=tasks)
        for _ in range(6):
            batch = manager.recv(Wait.all())  # three rounds of both kinds, so all are amid an episode
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
        state = manager.state()
        assert [task and task.kind for task in manager.positions([0, 4])] == ["a", "b"]
    with (
        make(kinds(n=(2, 3)), **options) as other,
        pytest.raises(UsageError, match="the state is of environments of the kinds"),
    ):
        other.reset(state=state, tasks=tasks)
    with make(kinds(), **options) as other:
        other.reset(state=state, tasks=tasks)
        while not other.tasks.done:
            batch = other.recv()
            check_rows(other, batch)
            other.send(np.zeros(len(batch), np.int64), batch.env_ids)
        results = other.tasks.results
        assert [result.task.kind for result in results] == [task.kind for task in tasks]
        assert {(result.task.kind, result.length) for result in results} == {("a", 5), ("b", 4)}


def test_a_run_of_several_kinds_with_shares_is_replayed(tmp_path: Path) -> None:
    def run(manager: EnvManager) -> list[Any]:
        manager.reset(tasks=[Task(kind=kind) for kind in "ab" * 10])
        seen = []
        while not manager.tasks.done:
            batch = manager.recv()
            seen.append((batch.behavior, batch.env_ids.tolist(), batch.obs.tolist()))
            manager.send(np.full(len(batch), len(seen) % 7), batch.env_ids)
        return seen

    path, wait = str(tmp_path / "run.emrec"), Wait(shares={"a": 0.5, "b": 0.5})
    with one_each(kinds(), record=path, wait=wait) as manager:
        recorded = run(manager)
    with make_manager({"kind": "replay", "recording": path, "wait": wait}) as manager:
        assert manager.kinds == ("a", "b")
        assert run(manager) == recorded
    with one_each(kinds(), order=path, wait=wait) as manager:
        assert run(manager) == recorded
    here = position(path, 4, 2)
    assert (here.kind, {name: len(taken) for name, taken in here.actions.items()}) == ("b", {"b": 2})
    timed = Wait(shares={"a": 0.5, "b": 0.5}, shares_of="time")
    with one_each(kinds(), record=str(tmp_path / "other.emrec"), wait=timed) as manager:
        manager.reset()
        with pytest.raises(UsageError, match="no recording repeats the time"):
            manager.recv()


@SOME_KINDS
def test_each_kind_has_rollouts_of_its_own(make: Make) -> None:
    with make(kinds()) as manager:
        rollouts = {kind: Rollouts(manager, 6, behavior=kind) for kind in manager.kinds}
        manager.reset()
        while not all(own.is_full for own in rollouts.values()):
            batch = manager.recv()
            own = rollouts[batch.behavior]
            own.add(batch)
            with pytest.raises(UsageError, match=f"the batch is of the kind '{batch.behavior}'"):
                rollouts["b" if batch.behavior == "a" else "a"].add(batch)
            own.send(np.full(len(own.ready), 7), value=np.zeros(len(own.ready)))
        for kind, own in rollouts.items():
            taken = own.take()
            assert taken.reward.shape == (6, 3 if kind == "a" else 2)
            assert (taken.reward == 7).all()


# What takes one kind.


def test_bridges_pools_and_other_managers_refuse_several_kinds_and_say_why(tmp_path: Path) -> None:
    with SimpleEnvManager(kinds()) as manager:
        with pytest.raises(UsageError, match=r"behaviors \['a', 'b'\]"):
            as_vector_env(manager)
        with pytest.raises(UsageError, match="a pool lends any free environment"):
            manager.pool()
    with pytest.raises(UsageError, match="Several kinds run in managers of the kinds simple, subprocess and asyncio"):
        make_manager({"kind": "auto"}, kinds())
    with pytest.raises(UsageError, match="Several kinds run in managers of the kinds simple, subprocess and asyncio"):
        factories_for(kinds(), 5)  # as a manager of any other kind does
    for options in ({"n_workers": "auto"}, {"local_envs": 1}, {"local_envs": "auto"}):
        with pytest.raises(UsageError, match="by a probe of the first one"):
            SubprocessEnvManager(kinds(), **options)


@pytest.mark.parametrize("make", [SimpleEnvManager, SubprocessEnvManager])
def test_the_error_for_environments_of_two_kinds_says_what_to_write(make: Any) -> None:
    env_factory = ["CartPole-v1", "Acrobot-v1", "CartPole-v1"]
    with pytest.raises(UsageError) as caught:
        make(env_factory, n_envs=3)
    written = re.search(r"env_factory=(\[.*\]), and leave n_envs out", str(caught.value))
    assert written is not None
    with make(eval(written[1], {"EnvRecipe": EnvRecipe})) as manager:
        assert {worker.kind for worker in manager.stats().workers} == {"cartpole-v1", "acrobot-v1"}

    named = [attrs.evolve(recipe, n=1, behavior=None) for recipe in kinds()]
    with pytest.raises(UsageError) as caught:
        make(named, n_envs=2)
    written = re.search(r"env_factory=(\[.*\]), and leave n_envs out", str(caught.value))
    assert written is not None
    make(eval(written[1], {"attrs": attrs, "env_factory": named})).close()
