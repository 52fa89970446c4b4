"""Rollouts: what is kept of batches and StepInfos that arrive in any order and number."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from pytest_mock import MockerFixture

from envmanager import (
    ActionInfo,
    AgentSteps,
    ArraySpec,
    BadAction,
    BehaviorSpec,
    Environment,
    Rollout,
    Rollouts,
    SimpleEnvManager,
    SubprocessEnvManager,
    Task,
    UsageError,
)
from envmanager.testing import FakeWorker
from envmanager_tests.ledger import ACTIONS, Ledger, numbers_in, steps_of


class OfObs:
    """A policy whose output shows for which observations it was asked."""

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        obs = steps.obs[steps.acting_rows]
        return ActionInfo(np.arange(len(obs)), {"of": obs})


@pytest.fixture
def manager(mocker: MockerFixture) -> Iterator[SubprocessEnvManager]:
    responses: queue.Queue[Any] = queue.Queue()

    def fake(worker_id: int, _: Any, env_factory: Any) -> FakeWorker:
        return FakeWorker(worker_id, responses, env_factory)

    mocker.patch.object(SubprocessEnvManager, "create_worker", side_effect=fake)
    with SubprocessEnvManager(Ledger, n_envs=4, n_workers=4) as manager:
        manager.step_queue = responses
        manager.reset()
        yield manager


def act(rollouts: Rollouts, env_ids: Any = None, obs: Any = None) -> None:
    seen = (rollouts.obs if obs is None else obs)["where"]
    rollouts.send((seen.sum(1) % ACTIONS).astype(int), env_ids, of=seen)


def all_in(rollouts: Rollouts) -> list[float]:
    return [number for rest in rollouts.take_rest() for number in numbers_in(rest)]


# send and recv.


def test_a_full_environment_waits_until_the_others_are_full(manager: SubprocessEnvManager) -> None:
    rollouts, held = Rollouts(manager, 3), manager.env_workers[2]
    rollouts.add(manager.recv())
    assert rollouts.ready.tolist() == [0, 1, 2, 3]
    assert not rollouts.is_full
    held.hold = True
    for _ in range(3):
        act(rollouts)
        rollouts.add(manager.recv())
        assert 2 not in rollouts.ready
    assert not len(rollouts.ready)
    assert len(rollouts.obs["last"]) == 0
    assert rollouts.n_full == 3
    assert not rollouts.is_full
    held.release()
    held.hold = False
    for _ in range(2):
        rollouts.add(manager.recv())
        assert rollouts.ready.tolist() == [2]
        act(rollouts)
    rollouts.add(manager.recv())
    assert rollouts.is_full
    rollout = rollouts.take()
    assert rollout.env_id.tolist() == [[0, 1, 2, 3]] * 3
    assert len(set(numbers_in(rollout))) == 12
    assert not rollouts.is_full
    assert rollouts.ready.tolist() == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="no column is full"):
        rollouts.take()


def test_actions_may_be_sent_in_any_order_and_for_any_that_are_ready(manager: SubprocessEnvManager) -> None:
    rollouts, generator, came = Rollouts(manager, 4), np.random.default_rng(3), []
    batch = manager.recv()
    rollouts.add(batch)
    waiting = {env_id: (batch, row) for row, env_id in enumerate(batch.env_ids.tolist())}
    for _ in range(60):
        if waiting:
            ids = generator.permutation([*waiting])[: generator.integers(1, 5)].tolist()
            parts = [waiting.pop(env_id) for env_id in ids]
            obs = {name: np.stack([batch.obs[name][row] for batch, row in parts]) for name in ("where", "last")}
            act(rollouts, np.array(ids), obs)
        batch = manager.recv()
        came += steps_of(batch)
        rollouts.add(batch)
        waiting |= {env_id: (batch, row) for row, env_id in enumerate(batch.env_ids.tolist())}
    assert sorted(all_in(rollouts)) == sorted(came)
    assert all_in(rollouts) == []


def test_full_columns_of_all_environments_are_taken_without_a_copy() -> None:
    with SimpleEnvManager(Ledger, 3) as manager:
        rollouts, kept = Rollouts(manager, 5), []
        manager.reset()
        for _ in range(12):
            rollouts.add(manager.recv())
            if rollouts.is_full:
                kept.append(rollouts.take())
            act(rollouts)
    first, second = kept
    assert first.reward.base is not None
    assert not np.shares_memory(first.reward, second.reward)
    assert len({*numbers_in(first), *numbers_in(second)}) == 30  # what came later has changed nothing
    assert first.next_obs is first.next_obs
    goes_on = ~first.ended[-1]
    np.testing.assert_array_equal(first.next_obs["where"][-1][goes_on], second.obs["where"][0][goes_on])


@pytest.mark.parametrize("is_added", [True, False], ids=["its StepInfos are added", "plain"])
def test_a_reset_ends_the_trajectories_and_drops_the_actions_in_flight(is_added: bool) -> None:
    with SimpleEnvManager(Ledger, 2) as manager:
        rollouts = Rollouts(manager, 8)
        manager.reset()
        for _ in range(3):
            rollouts.add(manager.recv())
            act(rollouts)
        began = manager.reset()
        if is_added:
            rollouts.add(began)
        for _ in range(6):
            rollouts.add(manager.recv())
            if not rollouts.is_full:
                act(rollouts)
        assert not rollouts.is_full
        rest = rollouts.take_rest()
    assert [len(each.reward) for each in rest] == [7, 7]
    for each in rest:
        numbers_in(each)
        assert each.ended[1, 0]
        assert not (each.terminated | each.truncated | each.lost)[1, 0]


def test_episodes_that_begin_on_demand_end_what_they_cut() -> None:
    with SimpleEnvManager(Ledger, 3, episodes="on_demand") as manager:
        rollouts, came = Rollouts(manager, 40), []
        manager.reset()
        for round_ in range(30):
            batch = manager.recv("all")
            came += steps_of(batch)
            rollouts.add(batch)
            resting = sorted({0, 1, 2}.difference(rollouts.ready.tolist()))
            begun = resting[:1] if round_ % 4 else [1]
            if begun and round_:
                manager.begin(begun, [Task()] * len(begun))
                assert not {*begun} & {*rollouts.ready.tolist()}
            if len(rollouts.ready):
                act(rollouts)
        rest = rollouts.take_rest()
    kept = [number for each in rest for number in numbers_in(each)]
    assert sorted(kept) == sorted(came)
    assert any((each.ended & ~each.terminated & ~each.truncated & ~each.lost).any() for each in rest)


def test_a_step_whose_action_is_unknown_is_refused() -> None:
    with SimpleEnvManager(Ledger, 2) as manager:
        rollouts = Rollouts(manager, 8)
        manager.reset()
        batch = manager.recv()
        with pytest.raises(UsageError, match="no observation of env 1 was added"):
            rollouts.send([0], [1])
        rollouts.add(batch)
        manager.send([0, 0], [0, 1])
        with pytest.raises(UsageError, match="env 0 has taken a step whose action these rollouts do not know"):
            rollouts.add(manager.recv())


def test_what_the_manager_refuses_changes_nothing() -> None:
    with SimpleEnvManager(Ledger, 2) as manager:
        rollouts = Rollouts(manager, 2)
        manager.reset()
        rollouts.add(manager.recv())
        with pytest.raises(BadAction):
            rollouts.send([0, ACTIONS], of=rollouts.obs["where"])
        with pytest.raises(UsageError, match=r"the output 'of' should be \[2, 4\], but its shape is \[1, 4\]"):
            rollouts.send([0, 0], of=rollouts.obs["where"][:1])
        with pytest.raises(UsageError, match="the output 'of' is a list that cannot be made an array"):
            rollouts.send([0, 0], of=[[1], [1, 2]])
        assert rollouts.ready.tolist() == [0, 1]
        act(rollouts)
        rollouts.add(manager.recv())
        with pytest.raises(UsageError, match=r"the same outputs: \['of'\] before, now \[\]"):
            rollouts.send([0, 0])
        with pytest.raises(UsageError, match=r"the output 'of' should be \[2, 4\], but its shape is \[2\]"):
            rollouts.send([0, 0], of=np.zeros(2))
        act(rollouts)
        with pytest.raises(BadAction, match="still waiting"):
            rollouts.send([0, 0], [0, 1], of=np.zeros((2, 4)))
        rollouts.add(manager.recv())
        assert len(set(numbers_in(rollouts.take()))) == 4


def test_a_ctrl_c_during_send_loses_no_action() -> None:
    with SimpleEnvManager(Ledger, 2) as manager:
        rollouts = Rollouts(manager, 2)
        manager.reset()
        rollouts.add(manager.recv())
        act(rollouts)
        rollouts.add(manager.recv())
        sent = manager.send

        def interrupted(action: Any, env_ids: Any) -> None:
            sent(action, env_ids)
            signal.raise_signal(signal.SIGINT)

        manager.send = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            act(rollouts)
        rollouts.add(manager.recv())
        assert len(set(numbers_in(rollouts.take()))) == 4


@pytest.mark.parametrize("length", [0, 2.5, "8"])
def test_a_length_must_be_a_positive_number(length: Any) -> None:
    with SimpleEnvManager(Ledger, 2) as manager, pytest.raises(UsageError, match="length of a rollout must be"):
        Rollouts(manager, length)


# Steps of policies, and many agents.


class Scripted(Environment):
    """An environment whose steps a function yields: behavior → (agent, obs, reward, terminated, final_obs, acting)."""

    SPEC = BehaviorSpec(ArraySpec((), np.int64), ArraySpec((), np.int64))
    behavior_specs: Mapping[str, BehaviorSpec] = {"hunter": SPEC, "prey": SPEC}

    def __init__(self, script: Any) -> None:
        self._rows = script()

    def reset(self, **_: Any) -> Any:
        return self.step({})

    def step(self, actions: Any) -> Any:
        steps = {}
        for name, rows in next(self._rows).items():
            agent, obs, reward, terminated, final_obs, acting = zip(*rows, strict=True)
            finals = [final for final, ended in zip(final_obs, terminated, strict=True) if ended]
            steps[name] = AgentSteps(
                np.array(agent, np.int64),
                np.array(obs, np.int64),
                np.array(reward, np.float32),
                np.array(terminated, np.bool_),
                np.zeros(len(rows), np.bool_),
                np.array(finals, np.int64) if finals else None,
                np.array(acting, np.bool_),
            )
        return steps

    def close(self) -> None:
        pass


def of_script(script: Any, length: int, n_steps: int, behavior: str) -> tuple[list[Rollout], Rollouts]:
    """The rollouts taken whenever they were full, and what was left."""
    taken = []
    with SimpleEnvManager(lambda: Scripted(script), 1) as manager:
        for name in ("hunter", "prey"):
            manager.set_policy(name, OfObs())
        rollouts = Rollouts(manager, length, behavior=behavior)
        rollouts.add(manager.reset())
        for _ in range(n_steps):
            rollouts.add(manager.step())
            if rollouts.is_full:
                taken.append(rollouts.take())
    return taken, rollouts


def crowd() -> Any:
    """Hunter k lives for three steps from step k on, so three act at a time; a prey for ever."""
    for now in range(100):
        hunters = [
            (k, 1000 * k + now, 1000 * k + now, now == k + 3, 1000 * k + now, now < k + 3)
            for k in range(max(0, now - 3), now + 1)
        ]
        yield {"hunter": hunters, "prey": [(100, now, now, False, 0, True)]}


def test_agents_that_come_go_on_in_the_columns_of_those_that_left() -> None:
    taken, rollouts = of_script(crowd, 4, 40, "hunter")
    parts = [*taken, *rollouts.take_rest()]
    agent, reward = (np.concatenate([getattr(each, name).ravel() for each in parts]) for name in ("agent_id", "reward"))
    assert sorted(reward) == sorted(1000 * k + now for k in range(41) for now in range(k + 1, min(k + 4, 41)))
    np.testing.assert_array_equal(agent, reward // 1000)
    for each in parts:
        np.testing.assert_array_equal(each.outputs["of"], each.obs)
        np.testing.assert_array_equal(each.obs + 1, each.next_obs)
        np.testing.assert_array_equal(each.next_obs, each.reward)
        np.testing.assert_array_equal(each.terminated, each.obs % 1000 == each.agent_id + 2)
        other = each.agent_id[1:] != each.agent_id[:-1]
        assert (each.ended[:-1] >= other).all()
    assert len(parts[-1].reward)
    assert sum(each.reward.shape[1] for each in parts) < 41


def test_each_behavior_has_rollouts_of_its_own() -> None:
    taken, _ = of_script(crowd, 10, 20, "prey")
    assert [each.reward[:, 0].tolist() for each in taken] == [[*range(1, 11)], [*range(11, 21)]]
    with (
        SimpleEnvManager(lambda: Scripted(crowd), 1) as manager,
        pytest.raises(UsageError, match=r"the behaviors \['hunter', 'prey'\]: say which"),
    ):
        Rollouts(manager, 2)


def turns() -> Any:
    """Two hunters take turns, four each in an episode. A move brings 1, and the other's answer 10, if there is one."""
    now = 0
    while True:
        turn = now % 8
        ended = turn == 0 and now > 0
        mover, waits = (1, 10) if now else (0, 0)  # the rewards of the one that moved and of the other
        rows = []
        for k in (0, 1):
            reward = mover if (now - 1) % 2 == k else waits
            if ended or turn > 1 or reward == mover:
                rows.append((k, now, reward, ended, 1000 + now, turn % 2 == k))
            else:  # it has not moved in this episode: a reward that belongs to no action
                rows.append((k, now, 5.0, ended, 0, turn % 2 == k))
        yield {"hunter": rows}
        now += 1


def test_rewards_and_ends_of_others_turns_belong_to_the_last_action() -> None:
    taken, rollouts = of_script(turns, 4, 40, "hunter")
    assert len(taken) >= 3
    for each in taken:
        assert each.agent_id.tolist() == [[0, 1]] * 4
    parts = [*taken, *rollouts.take_rest()]
    for k in (0, 1):
        own = [
            (each, column) for each in parts for column in range(each.reward.shape[1]) if each.agent_id[0, column] == k
        ]
        obs, next_obs, reward, terminated = (
            np.concatenate([np.asarray(getattr(each, name))[:, column] for each, column in own])
            for name in ("obs", "next_obs", "reward", "terminated")
        )
        n = len(obs)
        assert n >= 16
        assert obs.tolist() == [*range(k, 2 * n, 2)]
        is_last = np.arange(n) % 4 == 3
        expected = np.where(is_last, 1000 + 8 * (np.arange(n) // 4 + 1), obs + 2)
        settled = n - 1
        np.testing.assert_array_equal(next_obs[:settled], expected[:settled])
        np.testing.assert_array_equal(terminated[:settled], is_last[:settled])
        np.testing.assert_array_equal(reward[:settled], np.where(is_last & (k == 1), 1, 11)[:settled])


def test_texts_are_kept_too() -> None:
    class Talks(Scripted):
        behavior_specs = {"default": BehaviorSpec(ArraySpec((), object), ArraySpec((), object))}

        def __init__(self) -> None:
            self._n = -1

        def step(self, actions: Any) -> Any:
            self._n += 1
            obs = np.array([f"it is {self._n}"], object)
            return {"default": AgentSteps.first(agent_id=np.zeros(1, np.int64), obs=obs)}

    with SimpleEnvManager(Talks, 2) as manager:
        rollouts = Rollouts(manager, 2)
        manager.reset()
        while not rollouts.is_full:
            rollouts.add(manager.recv())
            if len(rollouts.ready):
                rollouts.send(np.array([f"after {text}" for text in rollouts.obs], object))
        rollout = rollouts.take()
    assert rollout.next_obs[:, 1].tolist() == ["it is 1", "it is 2"]
    assert rollout.action[:, 1].tolist() == ["after it is 0", "after it is 1"]
