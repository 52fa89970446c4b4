"""Messages larger than a pipe, both ways at once, and torn ones."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    EnvContext,
    RestartPolicy,
    SubprocessEnvManager,
    Timeouts,
    Wait,
    WorkerDied,
)
from envmanager.testing import FakeEnvironment

LARGE = 20_000_000


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


class LargeInfo(FakeEnvironment):
    def step(self, actions: Any) -> Any:
        results = super().step(actions)
        results["default"].info = [{"weights": np.full(LARGE // 8, self._n_steps, np.int64)}]
        return results

    def echo(self, data: bytes) -> bytes:
        return data


def test_a_behavior_without_rows_has_no_infos() -> None:
    class Rare(FakeEnvironment):
        """An environment whose second behavior never has agents."""

        @property
        def behavior_specs(self) -> Any:
            return {**super().behavior_specs, "rare": FakeEnvironment.SPEC}

        def reset(self, **arguments: Any) -> Any:
            return self._with_rare(super().reset(**arguments))

        def step(self, actions: Any) -> Any:
            return self._with_rare(super().step({"default": actions["default"]}))

        def _with_rare(self, steps: Any) -> Any:
            each = steps["default"]
            each.info = [{"number": 1}]
            return {"default": each, "rare": each.take(np.zeros(0, np.int64))}

    with SubprocessEnvManager(Rare, 2, infos=True) as manager:
        manager.set_policy("default", Zeros())
        manager.set_policy("rare", Zeros())
        manager.reset()
        for info in manager.step(Wait.all()):
            assert info.current["default"].info == [{"number": 1}]
            assert "rare" not in info.current


def test_pipes_that_are_full_both_ways_block_nobody() -> None:
    with SubprocessEnvManager(LargeInfo, 2, infos=True, timeouts=Timeouts(step_s=60, call_s=60)) as manager:
        manager.reset()
        manager.send(np.zeros(2, np.int64), [0, 1])
        # The workers are writing their infos, which nobody reads yet, while this call is written to them.
        data = os.urandom(LARGE)
        assert manager.call("echo", data) == [data, data]
        batch = manager.recv(Wait.all())

    assert batch.env_ids.tolist() == [0, 1]
    assert all((info["weights"] == 1).all() for info in batch.info or [None])


def test_a_worker_killed_in_the_middle_of_a_large_info_leaves_the_others_alone() -> None:
    def make(context: EnvContext) -> FakeEnvironment:
        return LargeInfo() if context.env_id == 0 else FakeEnvironment()

    with SubprocessEnvManager(make, 3, infos=True, restarts=RestartPolicy(max_restarts=0)) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        for _ in range(3):
            manager.step(Wait.all())
        handed_out: Counter[int] = Counter()
        killed = threading.Event()

        def kill() -> None:
            os.kill(manager.stats().workers[0].pid or 0, signal.SIGKILL)
            killed.set()

        threading.Timer(0.02, kill).start()
        with pytest.raises(WorkerDied) as raised:  # noqa: PT012
            while True:
                handed_out.update(info.worker_id for info in manager.step())
        assert killed.wait(60)
        assert raised.value.worker_id == 0
        steps = Counter(info.worker_id for _ in range(10) for info in manager.step(Wait.all()))
        assert steps == {1: 10, 2: 10}
