"""Partial asynchronous steps: fast environments do not wait for slow ones, and waiting costs the trainer nothing.

What is measured here are ratios within one run, with room for a noisy machine; `docs/decisions` has the figures.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from envmanager import ActionInfo, AgentSteps, EnvContext, EnvManager, SubprocessEnvManager, Wait
from envmanager.testing import EchoEnvironment


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


def one_slow(context: EnvContext) -> EchoEnvironment:
    return EchoEnvironment(context, sleep_s=0.05 if context.env_id == 0 else 0.001)


def all_slow(context: EnvContext) -> EchoEnvironment:
    return EchoEnvironment(context, sleep_s=0.05)


def steps_per_second(manager: EnvManager, wait: Wait, seconds: float) -> tuple[float, Counter[int]]:
    counts: Counter[int] = Counter()
    manager.reset()
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        counts.update(info.worker_id for info in manager.step(wait))
    return counts.total() / (time.monotonic() - started), counts


def test_partial_steps_are_twenty_times_faster_with_one_slow_environment() -> None:
    with SubprocessEnvManager(one_slow, 4) as manager:
        manager.set_policy("default", Zeros())
        together, _ = steps_per_second(manager, Wait.all(), 1.5)
        partial, counts = steps_per_second(manager, Wait.any(), 1.5)

    assert partial >= 20 * together, f"{partial:.0f} against {together:.0f} steps/s"
    assert counts[0] >= 15, "the slow environment must get its steps too"


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


def test_the_trainer_sleeps_while_its_workers_do() -> None:
    with SubprocessEnvManager(all_slow, 8) as manager:
        manager.set_policy("default", Zeros())
        steps_per_second(manager, Wait.any(), 0.3)
        cpu, wall = time.process_time(), time.monotonic()
        rate, _ = steps_per_second(manager, Wait.any(), 2.0)
        share = (time.process_time() - cpu) / (time.monotonic() - wall)

    assert rate > 80
    assert share < 0.05, f"the trainer used {share:.1%} of a core"


def test_a_timeout_hands_out_what_is_ready_and_loses_nothing() -> None:
    with SubprocessEnvManager(one_slow, 2) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        seen: list[Any] = []
        while len(seen) < 3:
            seen += [info for info in manager.step(Wait.all(timeout_s=0.01)) if info.worker_id == 0]
        steps = [int(info.current["default"].obs[0, 2]) for info in seen]

    assert steps == [1, 2, 3]


def test_workers_that_are_equally_fast_get_equally_many_steps() -> None:
    def make(context: EnvContext) -> EchoEnvironment:
        return EchoEnvironment(context, sleep_s=0.002)

    with SubprocessEnvManager(make, 4) as manager:
        manager.set_policy("default", Zeros())
        _, counts = steps_per_second(manager, Wait(max_ready=1), 1.0)

    assert min(counts.values()) > 0.7 * max(counts.values())
