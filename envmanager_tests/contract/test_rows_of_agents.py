"""Which environments send() and recv() serve: those with exactly one acting agent each, in every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envmanager import (
    AgentSteps,
    ArraySpec,
    BehaviorSpec,
    EnvContext,
    Environment,
    RandomPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    UsageError,
)
from envmanager.adapters.side_by_side import SideBySide
from envmanager.data.steps import Steps

SPEC = BehaviorSpec(ArraySpec((1,), np.float32), ArraySpec((), np.int64, 0, 1))


class Turnover(Environment):
    """Has the agents ``agents[t]`` in step t. Agents below 0 do not act. Env 0 has agent 0 in any case."""

    def __init__(self, context: EnvContext, agents: list[list[int]], max_agents: int) -> None:
        self.agents = [[0]] * len(agents) if context.env_id == 0 else agents
        self.most = max_agents

    @property
    def max_agents(self) -> Any:
        return {"default": self.most}

    @property
    def behavior_specs(self) -> Any:
        return {"default": SPEC}

    def reset(self, *, seeds: Any, options: Any) -> Steps:
        self.t = -1
        return self.step({})

    def step(self, actions: Any) -> Steps:
        self.t += 1
        ids = np.array(self.agents[self.t], np.int64)
        n = len(ids)
        no, acting = np.zeros(n, np.bool_), None if (ids >= 0).all() else ids >= 0
        obs, reward = np.full((n, 1), self.t, np.float32), np.ones(n, np.float32)
        return {"default": AgentSteps(np.abs(ids), obs, reward, no, no, acting=acting)}

    def close(self) -> None:
        pass


JOINS, IS_GONE, RESTS, IS_ANOTHER = [[0], [0], [0, 1]], [[0], [0], []], [[0], [0], [-1]], [[0], [0], [1], [1]]
MANAGERS = {
    "simple": SimpleEnvManager,
    "a worker each": SubprocessEnvManager,
    "one worker": lambda *args, **options: SubprocessEnvManager(*args, n_workers=1, **options),
}


@pytest.mark.parametrize("max_agents", [1, 2])
@pytest.mark.parametrize("agents", [JOINS, IS_GONE, RESTS], ids=["joins", "is gone", "rests"])
@pytest.mark.parametrize("make_manager", MANAGERS.values(), ids=MANAGERS)
def test_recv_refuses_an_environment_that_no_longer_has_one_acting_agent(
    make_manager: Any, agents: list[list[int]], max_agents: int
) -> None:
    with make_manager(lambda context: Turnover(context, agents, max_agents), 2) as manager:
        manager.reset()
        batch = manager.recv("all")
        manager.send(np.zeros(2, np.int64), batch.env_ids)
        batch = manager.recv("all")
        assert batch.env_ids.tolist() == [0, 1]
        manager.send(np.zeros(2, np.int64), batch.env_ids)
        for _ in range(2):  # nothing is delivered in part
            with pytest.raises(UsageError, match=r"one agent each.*use step\(\)"):
                manager.recv("all")
        manager.set_policy("default", RandomPolicy(SPEC))
        manager.reset()
        assert sum(len(info.current["default"]) for info in manager.step("all")) == 2


@pytest.mark.parametrize("make_manager", MANAGERS.values(), ids=MANAGERS)
def test_recv_serves_an_environment_whose_only_agent_is_another_one_later(make_manager: Any) -> None:
    with make_manager(lambda context: Turnover(context, IS_ANOTHER, 1), 2) as manager:
        manager.reset()
        batch = manager.recv("all")
        for t in range(1, 4):
            manager.send(np.zeros(2, np.int64), batch.env_ids)
            batch = manager.recv("all")
            assert (batch.env_ids.tolist(), batch.obs.ravel().tolist()) == ([0, 1], [t, t])


@pytest.mark.parametrize("make_manager", MANAGERS.values(), ids=MANAGERS)
def test_recv_refuses_an_environment_whose_only_agent_rests_at_first(make_manager: Any) -> None:
    with make_manager(lambda context: Turnover(context, [[-1]], 1), 2) as manager:
        manager.reset()
        with pytest.raises(UsageError, match=r"one agent each.*use step\(\)"):
            manager.recv("all")


class Turned(SideBySide):
    """A group whose steps, but not its first observations, have the rows in reverse."""

    def step(self, actions: Any, rows: Any = None) -> Steps:
        return {name: steps.take(np.arange(len(steps))[::-1]) for name, steps in super().step(actions, rows).items()}


def test_recv_refuses_all_rows_of_a_worker_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envmanager.hosts.hosting.build_group", Turned)
    with SimpleEnvManager(lambda context: Turnover(context, [[0]] * 3, 1), 3) as manager:
        manager.reset()
        batch = manager.recv("all")
        manager.send(np.zeros(3, np.int64), batch.env_ids)
        with pytest.raises(UsageError, match=r"one agent each.*env_ids \[2, 1, 0\]"):
            manager.recv("all")
