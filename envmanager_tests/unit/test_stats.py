"""What a manager tells about itself: times per worker, and the verdict."""

from __future__ import annotations

import subprocess
import sys

import attrs
import numpy as np
import pytest

from envmanager import ActionInfo, RandomPolicy, SimpleEnvManager, SubprocessEnvManager
from envmanager.observe.stats import ManagerStats, WorkerStats, wait_share
from envmanager.observe.timing import WaitTimes, WorkerTimes
from envmanager.testing import FakeEnvironment


def worker(worker_id=0, *, idle, step_time_s=0.001, **changes):
    return WorkerStats(worker_id, (worker_id,), steps=100, step_time_s=step_time_s, idle_share=idle, **changes)


def times_of(steps_ns, *, idle_ns=0):
    times, now_ns = WorkerTimes(ended_ns=1), 1
    for busy_ns in steps_ns:
        now_ns += idle_ns + busy_ns
        times.stepped(busy_ns, now_ns)
    return times


def test_a_workers_times_are_told_in_seconds():
    times = times_of([1_000_000] * 90 + [50_000_000] * 10, idle_ns=1_000_000)
    times.queued_ns = 2_000_000
    times.start_s = 0.25

    told = WorkerStats(0, (0,), steps=100, **times.shares(100))

    assert told.start_s == 0.25
    assert told.step_time_s == pytest.approx(0.0059)
    assert told.step_time_p50_s == pytest.approx(0.001, rel=0.07)
    assert told.step_time_p95_s == told.step_time_p99_s == pytest.approx(0.05, rel=0.07)
    assert told.idle_share == pytest.approx(100 / 690)
    assert told.queue_wait_s == pytest.approx(20e-6)


def test_a_worker_that_has_taken_no_step_has_no_times():
    assert WorkerStats(0, (0,), **WorkerTimes().shares(0)) == WorkerStats(0, (0,))


def test_the_trainers_waiting_is_a_share_of_the_longest_workers_time():
    waits = WaitTimes()
    waits.waited_ns = 300

    assert wait_share([times_of([100]), times_of([500, 500])], waits) == 0.3
    assert wait_share([times_of([100])], waits) == 1.0
    assert wait_share([times_of([])], waits) == 0.0


def verdict(workers, wait_share, **changes):
    return ManagerStats(tuple(workers), env_steps=1000, wait_share=wait_share, **changes).verdict


def test_busy_workers_and_a_waiting_trainer_are_environment_bound():
    assert verdict([worker(0, idle=0.1), worker(1, idle=0.14)], 0.88) == (
        "environment-bound: the workers are idle 12% of the time, the trainer waits 88%. "
        "Use more workers if cores are free, or make the steps cheaper."
    )


def test_the_worker_that_the_others_wait_for_is_named():
    told = verdict([worker(0, idle=0.98), worker(1, idle=0.02, step_time_s=0.05), worker(2, idle=0.98)], 0.95)

    assert told == (
        "environment-bound: the workers are idle 66% of the time, the trainer waits 95%. A step of worker 1 (env 1) "
        'takes 50 ms, of the median worker 1 ms: use wait="any", so that the others go on.'
    )


def test_a_slow_worker_for_which_no_other_waits_is_not_named():
    told = verdict([worker(0, idle=0.05), worker(1, idle=0.02, step_time_s=0.05), worker(2, idle=0.05)], 0.9)

    assert told.startswith("environment-bound: ")
    assert "worker 1" not in told


def test_workers_that_wait_for_a_core_are_not_idle():
    told = verdict([worker(0, idle=0.88, core_wait_share=0.7), worker(1, idle=0.88, core_wait_share=0.8)], 0.8)

    assert told == (
        "environment-bound: the workers are idle 13% of the time and wait for a free core 75%, the trainer waits 80%. "
        "Use more cores, or make the steps cheaper."
    )


def test_idle_workers_and_a_busy_trainer_are_policy_bound():
    assert verdict([worker(0, idle=0.9), worker(1, idle=0.9)], 0.04) == (
        "policy-bound: the workers are idle 90% of the time, the trainer waits 4%; your policy, your code and the "
        "manager take the rest. Make yours faster; workers would not help."
    )


def test_a_trainer_that_is_quick_with_each_step_is_the_managers_whatever_the_policy():
    told = verdict([worker(idle=0.8, step_time_s=10e-6)], 0.04)

    assert told == (
        "manager-bound: the workers are idle 80% of the time, the trainer waits 4%; your policy takes little, so the "
        "manager itself takes the rest. Put more environments in each worker."
    )


def test_with_a_random_policy_the_trainers_time_is_the_managers():
    assert verdict([worker(0, idle=0.9), worker(1, idle=0.9)], 0.04, random_policy=True) == (
        "manager-bound: the workers are idle 90% of the time, the trainer waits 4%; the policy is random, so the "
        "manager itself takes the rest. Put more environments in each worker, or measure with your own policy."
    )


def test_when_both_have_little_to_do_it_is_the_messages():
    assert verdict([worker(idle=0.95)], 0.66) == (
        "communication-bound: the workers are idle 95% of the time, the trainer waits 66%; messages take the rest. "
        "Put more environments in each worker."
    )


def test_when_both_are_at_work_alike_it_is_balanced():
    assert verdict([worker(idle=0.5)], 0.5) == (
        "balanced: the workers are idle 50% of the time, the trainer waits 50%. "
        'If each step waits for all workers, wait="any" lets both sides work at the same time.'
    )


def test_when_steps_are_as_short_as_messages_more_environments_share_these():
    assert verdict([worker(idle=0.5, step_time_s=20e-6)], 0.5) == (
        "balanced: the workers are idle 50% of the time, the trainer waits 50%. "
        "Put more environments in each worker: one message then serves them all."
    )


@pytest.mark.parametrize(
    ("environments", "is_random", "text"),
    [
        (
            0.92,
            False,
            "environment-bound: the environments take 92% of the time, your policy, your code and the manager 8%. "
            "Make their steps cheaper, or see whether workers help: kind: auto.",
        ),
        (
            0.38,
            False,
            "policy-bound: the environments take 38% of the time, your policy, your code and the manager 62%. "
            "Make yours faster; workers would not help.",
        ),
        (
            0.38,
            True,
            "manager-bound: the environments take 38% of the time, the manager itself 62%, since the policy is random. "
            "Use more environments: one step() serves them all, or measure with your own policy.",
        ),
        (
            0.5,
            True,
            "balanced: the environments take 50% of the time, the manager itself 50%. "
            "Workers would let both work at the same time: try kind: auto.",
        ),
    ],
)
def test_in_process_the_verdict_is_about_environments_and_the_rest(environments, is_random, text):
    alone = worker(idle=1 - environments)

    assert verdict([alone], environments, in_process=True, random_policy=is_random) == text


def test_in_process_a_policy_that_takes_little_is_not_to_blame():
    alone = worker(idle=0.8, step_time_s=6e-6)

    assert verdict([alone], 0.2, in_process=True) == (
        "manager-bound: the environments take 20% of the time, the manager itself 80%, since your policy takes little. "
        "Use more environments: one step() serves them all."
    )


def cheap(worker_id, *, idle=0.9, **changes):
    """One of some processes whose steps take next to no time."""
    return worker(worker_id, idle=idle, **{"step_time_s": 20e-6, "pid": 100 + worker_id, **changes})


def test_processes_that_together_do_less_than_one_could_are_one_too_many():
    assert verdict([cheap(0), cheap(1, idle=0.86)], 0.1) == (
        "too cheap for processes: the workers are idle 88% of the time, the trainer waits 10%; one process would need "
        "24% of the time for all steps. Use kind: simple, or let a probe choose: kind: auto."
    )


@pytest.mark.parametrize(("restarts", "times"), [(1, "once"), (3, "3 times")])
def test_environments_that_crash_are_never_sent_into_this_process(restarts, times):
    assert verdict([cheap(0), cheap(1, idle=0.86)], 0.1, restarts=restarts) == (
        "too cheap for processes: the workers are idle 88% of the time, the trainer waits 10%; one process would need "
        f"24% of the time for all steps. Use fewer workers. Stay with processes, since a worker was restarted {times}."
    )


@pytest.mark.parametrize(
    ("workers", "wait_share"),
    [
        ([cheap(0)], 0.1),
        ([cheap(0), cheap(1, pid=None)], 0.1),
        ([cheap(0, idle=0.5), cheap(1, idle=0.5)], 0.1),
        ([cheap(0, step_time_s=0.001), cheap(1, step_time_s=0.001)], 0.1),
    ],
    ids=["one process", "one in this process", "as much as one could", "the trainer does more than pass messages"],
)
def test_no_workers_are_sent_into_one_process_without_need(workers, wait_share):
    assert not verdict(workers, wait_share).startswith("too cheap")


@pytest.mark.parametrize("workers", [[], [WorkerStats(0, (0,))], [worker(idle=0.1, failed=True)]])
def test_without_a_measured_step_there_is_no_verdict(workers):
    assert verdict(workers, 0.5) == ""


def test_there_is_no_verdict_before_the_first_thousand_environment_steps():
    stats = ManagerStats((worker(idle=0.1),), wait_share=0.9, env_steps=1000)

    assert stats.verdict
    assert attrs.evolve(stats, env_steps=999).verdict == ""


class Zeros:
    def get_action(self, steps):
        return ActionInfo(np.zeros(len(steps), np.int64))


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize(("is_random", "steps_by"), [(True, "step"), (False, "step"), (True, "send")])
def test_a_manager_knows_whether_its_policy_is_random_or_actions_come_from_outside(
    is_random, steps_by, trace, tmp_path
):
    policy = RandomPolicy(FakeEnvironment.SPEC) if is_random else Zeros()
    with SimpleEnvManager(FakeEnvironment, 2, trace=str(tmp_path / "trace.json") if trace else None) as manager:
        manager.set_policy("default", policy)
        manager.reset()
        if steps_by == "step":
            manager.step()
        else:
            manager.send(np.zeros(2, np.int64), manager.recv("all").env_ids)
            manager.recv("all")

        assert manager.stats().random_policy == (is_random and steps_by == "step")
        assert manager.stats().in_process


def test_the_memory_of_a_worker_includes_that_of_the_processes_it_started():
    with SubprocessEnvManager([FakeEnvironment, Hoarding], n_envs=2) as manager:
        alone, hoarding = (each.memory_bytes for each in manager.stats().workers)

    assert alone > 2**20
    assert hoarding > alone + 64 * 2**20


class Hoarding(FakeEnvironment):
    """An environment whose simulator, a process of its own, takes 64 MiB."""

    def __init__(self, context=None):
        super().__init__()
        code = "kept = bytearray(b'x') * (64 << 20); print('ready', flush=True); input()"
        self._simulator = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._simulator.stdout.readline()

    def close(self):
        self._simulator.communicate(b"\n")


def test_memory_in_the_trainers_own_process_is_unknown():
    with SimpleEnvManager(FakeEnvironment) as manager:
        assert manager.stats().workers[0].memory_bytes == 0
