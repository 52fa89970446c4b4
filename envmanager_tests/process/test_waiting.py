"""Partial asynchronous steps: fast environments do not wait for slow ones. How much that brings, `load/` measures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envmanager import ActionInfo, AgentSteps, EnvContext, SubprocessEnvManager, Wait
from envmanager.testing import EchoEnvironment


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


def one_slow(context: EnvContext) -> EchoEnvironment:
    return EchoEnvironment(context, sleep_s=0.05 if context.env_id == 0 else 0.001)


@pytest.mark.parametrize("max_lead", [1, 5])
def test_max_lead_holds_the_lead_at_what_it_says(max_lead: int) -> None:
    with SubprocessEnvManager(one_slow, 4) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        counts, leads = np.zeros(4, int), []
        while counts.min() < 12:
            for info in manager.step(Wait.any(max_lead=max_lead)):
                counts[info.worker_id] += 1
            leads.append(np.ptp(counts))

    assert max(leads) == max_lead


def test_a_timeout_hands_out_what_is_ready_and_loses_nothing() -> None:
    with SubprocessEnvManager(one_slow, 2) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        seen: list[Any] = []
        while len(seen) < 3:
            seen += [info for info in manager.step(Wait.all(timeout_s=0.01)) if info.worker_id == 0]
        steps = [int(info.current["default"].obs[0, 2]) for info in seen]

    assert steps == [1, 2, 3]
