"""What partial steps bring and what waiting costs, as ratios within one run."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

from envmanager import ActionInfo, AgentSteps, EnvContext, EnvManager, SubprocessEnvManager, Wait
from envmanager.testing import EchoEnvironment

pytestmark = pytest.mark.load


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

    times = partial / together
    print(f"Wait.any() {partial:.0f} steps/s, Wait.all() {together:.0f}: {times:.1f} times; by worker {counts}")
    assert partial >= 20 * together, f"{partial:.0f} against {together:.0f} steps/s"
    assert counts[0] >= 15, "the slow environment must get its steps too"


def test_fast_environments_go_on_while_a_slow_one_steps() -> None:
    with SubprocessEnvManager(one_slow, 4) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        counts: Counter[int] = Counter()
        while counts[0] < 5:
            counts.update(info.worker_id for info in manager.step(Wait.any()))

    assert min(counts[worker_id] for worker_id in (1, 2, 3)) > 3 * counts[0]


def test_the_trainer_sleeps_while_its_workers_do() -> None:
    with SubprocessEnvManager(all_slow, 8) as manager:
        manager.set_policy("default", Zeros())
        steps_per_second(manager, Wait.any(), 0.3)
        cpu, wall = time.process_time(), time.monotonic()
        rate, _ = steps_per_second(manager, Wait.any(), 2.0)
        share = (time.process_time() - cpu) / (time.monotonic() - wall)

    print(f"8 workers that sleep 50 ms a step: {rate:.0f} steps/s, the trainer used {share:.2%} of a core")
    assert rate > 80
    assert share < 0.05, f"the trainer used {share:.1%} of a core"
