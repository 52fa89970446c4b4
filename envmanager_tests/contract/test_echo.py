"""No mix-up: an environment that says where each observation comes from, over every manager × start method × wait mode
× environments per worker × zero_copy. 10⁴ environment steps per cell here, 10⁵ in `make soak`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envmanager import ActionInfo, AgentSteps, EnvManager, SimpleEnvManager, StepInfo, SubprocessEnvManager, Wait
from envmanager_tests.envs import EchoGym
from envmanager_tests.start_methods import FIRST_START_METHOD, MARKED_START_METHODS

N_ENVS = 6
WAITS = {"any": Wait.any(), "all": Wait.all(), "2 to 3": Wait(min_ready=2, max_ready=3), "lead": Wait.any(max_lead=3)}


class Numbering:
    """A policy that never gives the same action twice, and notes what it gave to each environment."""

    def __init__(self) -> None:
        self._next = 1
        self.given = np.zeros(N_ENVS, np.int64)

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        action = np.arange(self._next, self._next + len(steps))
        self._next += len(steps)
        self.given[steps.env_id] = action
        return ActionInfo(action)


class Ledger:
    """Checks every step that is handed out against what was given, and counts."""

    def __init__(self, policy: Numbering) -> None:
        self._policy = policy
        self.n_steps = np.zeros(N_ENVS, np.int64)

    def check(self, info: StepInfo) -> int:
        now = info.current["default"]
        env_id = now.env_id
        self.n_steps[env_id] += 1
        given = self._policy.given[env_id]
        made = info.transitions("default")
        assert (made.agent_id == now.agent_id).all()
        assert (made.action == given).all()
        assert (now.reward == given % 1000).all()
        # next_obs is what the step showed, obs what was acted on: one step apart, in the same episode.
        assert (made.next_obs[:, 0] == env_id).all()
        assert (made.next_obs[:, 2] == self.n_steps[env_id]).all()
        assert (made.next_obs[:, 3] == given).all()
        assert (made.obs[:, 2] == self.n_steps[env_id] - 1).all()
        assert (made.obs[:, 4] == made.next_obs[:, 4]).all()
        assert (now.obs[:, 4] == made.next_obs[:, 4] + now.terminated).all()
        return len(now)


def run(manager: EnvManager, wait: Wait, n_steps: int) -> None:
    policy = Numbering()
    ledger = Ledger(policy)
    with manager:
        manager.set_policy("default", policy)
        manager.reset()
        handed_out = 0
        while handed_out < n_steps:
            handed_out += sum(ledger.check(info) for info in manager.step(wait))
        assert manager.stats().late_replies == 0
    assert ledger.n_steps.sum() == handed_out
    if wait.max_lead is not None:
        assert np.ptp(ledger.n_steps) <= wait.max_lead


def make(kind: str, per_worker: int, zero_copy: bool) -> EnvManager:
    if kind == "simple":
        return SimpleEnvManager(EchoGym, N_ENVS, zero_copy=zero_copy)
    options: Any = {"start_method": kind, "zero_copy": zero_copy}
    return SubprocessEnvManager(EchoGym, N_ENVS, n_workers=N_ENVS // per_worker, **options)


cells = [
    pytest.mark.parametrize("zero_copy", [False, True], ids=["copied", "zero-copy"]),
    pytest.mark.parametrize("per_worker", [1, 3], ids=["K=1", "K=3"]),
    pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys()),
    pytest.mark.parametrize("kind", ["simple", *MARKED_START_METHODS]),
]


def over_all_cells(test: Any) -> Any:
    for mark in cells:
        test = mark(test)
    return test


@pytest.mark.sample("copied-K=1-any|zero-copy-K=3-lead|zero-copy-K=1-2 to")
@over_all_cells
def test_hundreds_of_steps_show_no_mix_up(kind: str, wait: Wait, per_worker: int, zero_copy: bool) -> None:
    if kind == "simple" and per_worker == 3:
        pytest.skip("one worker hosts all environments: there is no K to vary")
    run(make(kind, per_worker, zero_copy), wait, 600)


@pytest.mark.load
@over_all_cells
def test_a_hundred_thousand_steps_show_no_mix_up(kind: str, wait: Wait, per_worker: int, zero_copy: bool) -> None:
    if kind == "simple" and per_worker == 3:
        pytest.skip("one worker hosts all environments: there is no K to vary")
    run(make(kind, per_worker, zero_copy), wait, 100_000)


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copied", "zero-copy"])
@pytest.mark.parametrize("per_worker", [1, 3], ids=["K=1", "K=3"])
@pytest.mark.parametrize("kind", ["simple", FIRST_START_METHOD])
def test_send_and_recv_show_no_mix_up(kind: str, per_worker: int, zero_copy: bool) -> None:
    generator = np.random.default_rng(0)
    given = np.zeros(N_ENVS, np.int64)
    n_steps = np.zeros(N_ENVS, np.int64)
    with make(kind, per_worker, zero_copy) as manager:
        manager.reset()
        ready = set(manager.recv(Wait.all()).env_ids.tolist())
        for number in range(400):
            chosen = generator.permutation(sorted(ready))[: generator.integers(1, len(ready) + 1)]
            given[chosen] = number * 10 + np.arange(len(chosen))
            manager.send(given[chosen], chosen)
            batch = manager.recv()
            # An env is ready again when it was not among those sent, or has been handed out.
            ended = batch.terminated
            last = batch.obs.copy()
            if ended.any():
                last[ended] = batch.final_obs
            ids = batch.env_ids
            n_steps[ids] += 1
            assert (last[:, 0] == ids).all()
            assert (last[:, 2] == n_steps[ids]).all()
            assert (last[:, 3] == given[ids]).all()
            assert (batch.reward == given[ids] % 1000).all()
            in_flight = {env_id for worker in manager.stats().workers if worker.waiting for env_id in worker.env_ids}
            ready = set(range(N_ENVS)) - in_flight
            if not ready:
                ready = set(manager.recv(Wait.all()).env_ids.tolist())
                n_steps[list(ready)] += 1
    assert n_steps.min() > 0


def test_with_zero_copy_a_step_is_valid_while_the_next_is_in_flight() -> None:
    with make(FIRST_START_METHOD, 1, zero_copy=True) as manager:
        manager.set_policy("default", Numbering())
        manager.reset()
        for _ in range(40):
            infos = manager.step(Wait.all())
            kept = [info.copy() for info in infos]
            manager._policy_steps.send_actions(Wait.all(), is_begun=True)
            manager.call("get_wrapper_attr", "spec")  # answered after the step, which has been written by now
            for info, copy in zip(infos, kept, strict=True):
                now, then = info.current["default"], copy.current["default"]
                assert (now.obs == then.obs).all()
                assert (now.reward == then.reward).all()
                assert (now.final_obs is None) == (then.final_obs is None)
                assert now.final_obs is None or (now.final_obs == then.final_obs).all()
            assert len(manager.step(Wait.all())) == N_ENVS
