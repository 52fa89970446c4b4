"""Rollouts hold each step that arrives once, whatever happens to the workers."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from envmanager import ActionInfo, AgentSteps, EnvContext, RestartPolicy, Rollouts, SubprocessEnvManager
from envmanager.testing import EchoEnvironment
from envmanager_tests.ledger import ACTIONS, Ledger, numbers_in, steps_of

RESTARTS = RestartPolicy(max_restarts=100, backoff_s=0)


def act(rollouts: Rollouts, generator: np.random.Generator, env_ids: Any = None, obs: Any = None) -> None:
    obs = rollouts.obs if obs is None else obs
    n = len(obs["last"])
    if n:
        rollouts.send(generator.integers(ACTIONS, size=n), env_ids, of=obs["where"])


@pytest.mark.parametrize(("wait", "zero_copy"), [("any", False), ("all", True)])
def test_no_step_is_wrong_missing_or_twice_although_workers_are_killed(wait: str, zero_copy: bool) -> None:
    generator = np.random.default_rng(3)
    with SubprocessEnvManager(Ledger, 6, n_workers=3, wait=wait, restarts=RESTARTS, zero_copy=zero_copy) as manager:
        rollouts = Rollouts(manager, 16)
        manager.reset()
        came, kept, n_lost, n_cut = [], [], 0, 0
        for round_ in range(150):
            batch = manager.recv()
            came += steps_of(batch)
            n_lost += np.count_nonzero(batch.lost)
            rollouts.add(batch)
            if rollouts.is_full:
                rollout = rollouts.take()
                assert rollout.reward.shape == (16, 6)
                n_cut += np.count_nonzero(rollout.lost)
                kept += numbers_in(rollout)
            if round_ in (8, 40, 41, 77):  # also a worker that waits for the others, and two in a row
                os.kill(manager.stats().workers[round_ % 3].pid or 0, signal.SIGKILL)
            act(rollouts, generator)
        kept += [number for rest in rollouts.take_rest() for number in numbers_in(rest)]
    assert n_lost >= 4
    assert n_cut
    assert sorted(kept) == sorted(came)
    assert len(set(kept)) == len(kept) > 100


def test_recycled_workers_lose_no_step_either() -> None:
    generator = np.random.default_rng(3)
    policy = RestartPolicy(recycle_after_steps=9)
    with SubprocessEnvManager(Ledger, 4, n_workers=4, restarts=policy) as manager:
        rollouts = Rollouts(manager, 12)
        manager.reset()
        came, kept, n_lost = [], [], 0
        for _ in range(80):
            batch = manager.recv()
            came += steps_of(batch)
            n_lost += np.count_nonzero(batch.lost)
            rollouts.add(batch)
            if rollouts.is_full:
                kept += numbers_in(rollouts.take())
            act(rollouts, generator)
        kept += [number for rest in rollouts.take_rest() for number in numbers_in(rest)]
    assert n_lost
    assert sorted(kept) == sorted(came)


def test_all_environments_may_go_on_without_waiting_for_full_columns() -> None:
    generator = np.random.default_rng(3)
    with SubprocessEnvManager(Ledger, 4, n_workers=2, restarts=RESTARTS) as manager:
        rollouts = Rollouts(manager, 8)
        manager.reset()
        came, kept = [], []
        for round_ in range(120):
            batch = manager.recv()
            came += steps_of(batch)
            rollouts.add(batch)
            act(rollouts, generator, batch.env_ids, batch.obs)
            if rollouts.n_full >= 3:
                n_full, rollout = rollouts.n_full, rollouts.take()
                assert rollout.reward.shape == (8, n_full)
                kept += numbers_in(rollout)
            if round_ == 50:
                os.kill(manager.stats().workers[0].pid or 0, signal.SIGKILL)
        kept += [number for rest in rollouts.take_rest() for number in numbers_in(rest)]
    assert sorted(kept) == sorted(came)


@pytest.mark.parametrize("n_workers", [1, 4])
def test_with_tasks_environments_that_rest_hold_up_no_other(n_workers: int) -> None:
    generator = np.random.default_rng(3)
    with SubprocessEnvManager(Ledger, 4, n_workers=n_workers, restarts=RESTARTS) as manager:
        rollouts = Rollouts(manager, 8)
        manager.reset(tasks=range(30))
        came, kept, n_rounds = [], [], 0
        while not manager.tasks.done:
            batch = manager.recv()
            came += steps_of(batch)
            rollouts.add(batch)
            if rollouts.is_full:
                kept += numbers_in(rollouts.take())
            n_rounds += 1
            if n_rounds == 20:
                os.kill(manager.stats().workers[0].pid or 0, signal.SIGKILL)
            act(rollouts, generator)
        kept += [number for rest in rollouts.take_rest() for number in numbers_in(rest)]
        assert not rollouts.is_full
        assert not len(rollouts.ready)
    assert sorted(kept) == sorted(came)


class Policy:
    """A policy whose output shows for which observations it was asked."""

    def __init__(self, n_actions: int, key: Any = ...) -> None:
        self._generator, self._n_actions, self._key = np.random.default_rng(3), n_actions, key

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        action = self._generator.integers(self._n_actions, size=len(steps))
        return ActionInfo(action, {"of": steps.obs[self._key].copy()})


@pytest.mark.parametrize("tasks", [None, range(60)], ids=["", "tasks"])
def test_with_steps_of_policies_the_actions_and_outputs_come_with_the_steps(tasks: Any) -> None:
    with SubprocessEnvManager(Ledger, 4, n_workers=2, restarts=RESTARTS, zero_copy=True) as manager:
        manager.set_policy("default", Policy(ACTIONS, "where"))
        rollouts = Rollouts(manager, 8)
        came, kept, n_lost = [], [], 0
        infos = manager.reset(tasks=tasks)
        for round_ in range(150):
            for info in infos:
                came += [reward for reward in info.current["default"].reward.tolist() if reward]
                n_lost += info.lost is not None
            rollouts.add(infos)
            if rollouts.is_full:
                kept += numbers_in(rollouts.take())
            if round_ in (20, 21, 50):
                os.kill(manager.stats().workers[round_ % 2].pid or 0, signal.SIGKILL)
            infos = manager.reset(tasks=tasks) if round_ == 40 else manager.step()
        kept += [number for rest in rollouts.take_rest() for number in numbers_in(rest)]
    assert n_lost
    assert sorted(kept) == sorted(came)


def test_each_of_many_agents_keeps_its_own_steps() -> None:
    def make(context: EnvContext) -> EchoEnvironment:
        return EchoEnvironment(context, n_agents=3, episode_length=5)

    with SubprocessEnvManager(make, 4, n_workers=2, restarts=RESTARTS) as manager:
        manager.set_policy("default", Policy(1000))
        rollouts, n_came, parts = Rollouts(manager, 16), 0, []
        rollouts.add(manager.reset())
        for round_ in range(150):
            infos = manager.step()
            n_came += sum(len(info.transitions().reward) for info in infos)
            rollouts.add(infos)
            if rollouts.is_full:
                parts.append(rollouts.take())
            if round_ in (20, 21, 60):
                os.kill(manager.stats().workers[round_ % 2].pid or 0, signal.SIGKILL)
        parts += rollouts.take_rest()
    assert sum(each.reward.size for each in parts) == n_came
    for each in parts:
        env_id, agent, step, _, episode = np.moveaxis(each.obs, -1, 0)
        np.testing.assert_array_equal(each.env_id, env_id)
        np.testing.assert_array_equal(each.agent_id & 0xFFFFFFFF, agent)
        np.testing.assert_array_equal(each.outputs["of"], each.obs)
        np.testing.assert_array_equal(each.reward, each.action)
        np.testing.assert_array_equal(each.next_obs, np.stack([env_id, agent, step + 1, each.action, episode], -1))
        goes_on = ~each.ended[:-1]
        np.testing.assert_array_equal(each.next_obs[:-1][goes_on], each.obs[1:][goes_on])


def test_workers_that_are_dropped_hold_up_no_other() -> None:
    generator = np.random.default_rng(3)
    policy = RestartPolicy(max_restarts=0, then="drop")
    with SubprocessEnvManager(Ledger, 3, restarts=policy) as manager:
        rollouts = Rollouts(manager, 8)
        manager.reset()
        rollouts.add(manager.recv("all"))
        os.kill(manager.stats().workers[1].pid or 0, signal.SIGKILL)
        while not rollouts.is_full:
            act(rollouts, generator)
            rollouts.add(manager.recv())
        rollout = rollouts.take()
        assert rollout.env_id[0].tolist() == [0, 2]
        numbers_in(rollout)
