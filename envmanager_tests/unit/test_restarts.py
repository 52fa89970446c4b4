"""Supervisor: who is replaced, when, and when it is enough. No time passes here: it is an argument."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager.errors import (
    BadObservation,
    ConnectionLost,
    EnvRaised,
    NotPlaced,
    RestartsExhausted,
    UsageError,
    WorkerDied,
    WorkerError,
    WorkerTimedOut,
)
from envmanager.kernel.recovery import LONGEST_BACKOFF_S, GiveUp, Replace, Supervisor
from envmanager.options import RestartPolicy


def died(worker_id=0, exit="SIGKILL"):
    return WorkerDied(worker_id=worker_id, env_ids=[worker_id], phase="step", exit=exit)


def raised():
    where = {"worker_id": 0, "env_ids": [0], "phase": "step"}
    return EnvRaised(**where, type_name="ValueError", cause="gear 7", remote_traceback="…")


def broke_its_spec():
    return BadObservation(worker_id=0, env_ids=[0], phase="step", path="obs", expected="float32[3]", got="None")


FAULTS = {
    "died": died(),
    "timed out": WorkerTimedOut(worker_id=0, env_ids=[0], phase="step", timeout_s=2.0),
    "could not start": WorkerError("…", worker_id=0, env_ids=(), phase="start", cause="no more processes"),
}
EXCEPTIONS = {"raised": raised(), "broke its spec": broke_its_spec()}


class Latest(random.Random):
    """No jitter: always the longest delay."""

    def uniform(self, low, high):
        return high


def supervisor(jitter=None, **policy):
    return Supervisor(RestartPolicy(**policy), Latest() if jitter is None else jitter)


def judged(judge, times, error=None):
    """Which of these failures end in a replacement."""
    return [isinstance(judge.judge(0, died() if error is None else error, now), Replace) for now in times]


# What is a fault.


@pytest.mark.parametrize("error", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_replaced_at_once(error):
    assert supervisor().judge(0, error, 100.0) == Replace(0.0, 1)


@pytest.mark.parametrize("error", EXCEPTIONS.values(), ids=EXCEPTIONS.keys())
def test_an_exception_of_the_environment_is_raised_whatever_the_budget(error):
    assert supervisor(max_restarts=100, then="drop").judge(0, error, 0.0) == GiveUp(error)


@pytest.mark.parametrize("error", EXCEPTIONS.values(), ids=EXCEPTIONS.keys())
def test_an_exception_of_the_environment_is_a_fault_when_asked_for(error):
    judge = supervisor(max_restarts=1, on_exception="restart")

    assert judged(judge, [0.0, 1.0], error) == [True, False]


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_an_exception_does_not_advise_the_policy_that_is_in_force(max_restarts):
    error = raised()
    supervisor().judge(0, error, 0.0)
    assert "on_exception='restart'" in str(error)
    supervisor(max_restarts=max_restarts, on_exception="restart").judge(0, error, 0.0)
    assert str(error).startswith("the environment in worker 0 (env 0) raised ValueError in step: gear 7")
    assert "on_exception" not in str(error)
    assert "no more steps until reset()" not in str(error)


def test_an_exception_that_is_raised_spends_no_budget():
    judge = supervisor(max_restarts=1)

    assert judged(judge, [0.0, 1.0], raised()) == [False, False]
    assert judged(judge, [2.0]) == [True]


def test_what_is_not_about_a_worker_is_raised_and_never_restarted():
    error = UsageError("two specs for one behavior")

    assert supervisor(max_restarts=100, on_exception="restart", then="drop").judge(0, error, 0.0) == GiveUp(error)


# The budget.


def test_the_failure_after_the_last_restart_in_the_window_is_refused():
    assert judged(supervisor(max_restarts=2, within_s=10.0), [0.0, 1.0, 2.0, 3.0]) == [True, True, False, False]


def test_restarts_older_than_the_window_do_not_count():
    judge = supervisor(max_restarts=2, within_s=10.0)

    assert judged(judge, [0.0, 8.0, 10.0, 10.5, 18.0, 18.5]) == [True, True, False, True, False, True]


def test_a_worker_that_always_hangs_is_given_up_though_its_timeout_is_longer_than_the_window():
    hung = WorkerTimedOut(worker_id=0, env_ids=[0], phase="reset", timeout_s=120.0)

    assert judged(supervisor(max_restarts=2, within_s=60.0), [120.0, 240.0, 360.0], hung) == [True, True, False]


def test_a_worker_that_hangs_now_and_then_is_replaced_each_time():
    hung = WorkerTimedOut(worker_id=0, env_ids=[0], phase="step", timeout_s=50.0)

    assert judged(supervisor(max_restarts=1, within_s=60.0), [1000.0, 1111.0, 1222.0], hung) == [True, True, True]


def test_an_unlimited_window_forgets_nothing():
    assert judged(supervisor(max_restarts=1, within_s=math.inf), [0.0, 1e12]) == [True, False]


def test_a_failure_that_was_refused_spends_nothing():
    judge = supervisor(max_restarts=1, within_s=10.0)

    assert judged(judge, [0.0, 9.0, 11.0]) == [True, False, True]


def test_each_worker_has_a_budget_of_its_own():
    judge = supervisor(max_restarts=1)

    verdicts = [judge.judge(worker_id, died(worker_id), 0.0) for worker_id in (0, 1, 2, 1)]
    assert [type(verdict) for verdict in verdicts] == [Replace, Replace, Replace, GiveUp]


def test_without_a_budget_the_fault_itself_is_raised():
    error = died()

    assert supervisor(max_restarts=0).judge(0, error, 0.0) == GiveUp(error)
    assert supervisor(max_restarts=0, then="drop").judge(0, error, 0.0) == GiveUp(error, drop=True)


@pytest.mark.parametrize(("then", "drop"), [("raise", False), ("drop", True)])
def test_past_the_budget_the_first_and_the_last_failure_in_the_window_are_told(then, drop):
    judge = supervisor(max_restarts=2, within_s=10.0, then=then)
    forgotten, first, second, last = (died(exit=name) for name in ("EXIT(0)", "EXIT(1)", "EXIT(2)", "EXIT(3)"))
    judge.judge(0, forgotten, 0.0)
    judge.judge(0, first, 20.0)
    judge.judge(0, second, 21.0)
    verdict = judge.judge(0, last, 22.0)

    assert isinstance(verdict, GiveUp)
    assert verdict.drop is drop
    told = verdict.error
    assert isinstance(told, RestartsExhausted)
    assert (told.first, told.last, told.__cause__) == (first, last, last)
    assert (told.worker_id, told.phase, told.cause) == (0, "step", "EXIT(3)")
    assert "restarted 2 times within 10 s" in str(told)
    assert ("then: drop" in str(told)) is (then == "raise"), "advice to do what is set"


def test_past_the_budget_no_text_advises_the_restarts_that_were_made():
    judge = supervisor(max_restarts=1, on_exception="restart")
    judge.judge(0, raised(), 0.0)
    verdict = judge.judge(0, raised(), 1.0)

    assert isinstance(verdict, GiveUp)
    assert "on_exception" in str(raised())
    assert "on_exception" not in str(verdict.error)
    assert "gear 7" in str(verdict.error)


def test_a_worker_that_is_forgiven_has_its_whole_budget_again_and_the_others_have_not():
    judge = supervisor(max_restarts=1, backoff_s=1.0)
    for worker_id in (0, 1):
        judge.judge(worker_id, died(worker_id), 0.0)
    judge.forgive(0)

    assert judge.judge(0, died(0), 1.0) == Replace(0.0, 1)
    assert isinstance(judge.judge(1, died(1), 1.0), GiveUp)


@given(
    st.integers(0, 4),
    st.floats(0.1, 50),
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 20)), max_size=60),
)
def test_no_window_ever_holds_more_restarts_than_allowed(max_restarts, within_s, failures):
    judge = supervisor(max_restarts=max_restarts, within_s=within_s)
    restarted = {0: [], 1: [], 2: []}
    now = 0.0
    for worker_id, later_s in failures:
        now += later_s
        if isinstance(judge.judge(worker_id, died(worker_id), now), Replace):
            restarted[worker_id].append(now)

    for times in restarted.values():
        for begin in times:
            assert sum(0 <= each - begin <= within_s for each in times) <= max_restarts


# When.


def delays(judge, n):
    return [judge.judge(0, died(), float(k)).delay_s for k in range(n)]


def test_the_first_restart_comes_at_once_and_each_further_one_twice_as_late():
    judge = supervisor(max_restarts=9, within_s=1000.0, backoff_s=0.5)

    assert delays(judge, 9) == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_the_delay_grows_with_the_restarts_in_the_window_only():
    judge = supervisor(max_restarts=9, within_s=10.0, backoff_s=0.5)

    assert [judge.judge(0, died(), now).delay_s for now in (0.0, 1.0, 2.0, 100.0, 101.0)] == [0.0, 0.5, 1.0, 0.0, 0.5]


def test_a_worker_that_has_worked_well_restarts_at_once_and_a_crash_loop_backs_off():
    judge = supervisor(max_restarts=20, within_s=1000.0, backoff_s=0.5)

    def delay(now, worked_s):
        return judge.judge(0, died(), now, worked_s).delay_s

    assert [delay(3.0 * k, 2.5) for k in range(8)] == [0.0] * 8
    assert [delay(24.0 + k, 0.1) for k in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert [delay(40.0, 9.0), delay(41.0, 0.1)] == [0.0, 0.5]


def test_the_time_in_which_a_worker_hung_is_no_work():
    judge = supervisor(max_restarts=20, within_s=1000.0, backoff_s=0.5)

    assert [judge.judge(0, FAULTS["timed out"], 10.0 * k, 2.0).delay_s for k in range(4)] == [0.0, 0.5, 1.0, 2.0]


def test_without_a_backoff_every_restart_comes_at_once():
    assert delays(supervisor(max_restarts=50, within_s=1000.0, backoff_s=0.0), 50) == [0.0] * 50


def test_a_thousand_restarts_in_one_window_wait_no_longer_than_the_longest():
    judge = supervisor(max_restarts=2000, within_s=1e6, backoff_s=1e-3)

    assert max(delays(judge, 2000)) == LONGEST_BACKOFF_S


@given(st.integers(0, 2**32), st.floats(0.001, 5.0), st.integers(2, 8))
def test_a_delay_is_at_least_half_of_what_is_meant_and_never_more(seed, backoff_s, n):
    judge = supervisor(jitter=random.Random(seed), max_restarts=n, within_s=1000.0, backoff_s=backoff_s)

    for k, delay_s in enumerate(delays(judge, n)):
        meant_s = 0.0 if k == 0 else min(backoff_s * 2 ** (k - 1), LONGEST_BACKOFF_S)
        assert 0.5 * meant_s <= delay_s <= meant_s


def test_workers_that_fail_together_do_not_come_back_together():
    judge = supervisor(jitter=random.Random(0), max_restarts=2, backoff_s=1.0)
    for worker_id in range(50):
        judge.judge(worker_id, died(worker_id), 0.0)
    second = [judge.judge(worker_id, died(worker_id), 1.0).delay_s for worker_id in range(50)]

    assert len(set(second)) == 50
    assert max(second) - min(second) > 0.4


def test_no_delay_is_longer_than_the_longest():
    judge = supervisor(jitter=random.Random(0), max_restarts=200, within_s=1e6, backoff_s=10.0)

    assert max(delays(judge, 200)) <= LONGEST_BACKOFF_S


@pytest.mark.parametrize(
    "error",
    [
        WorkerTimedOut(worker_id=0, env_ids=[0], phase="reset", timeout_s=120.0),
        NotPlaced(worker_id=0, env_ids=[0], timeout_s=120.0, wanted="1 GPU", missing="no GPU", cluster="8 CPUs"),
        ConnectionLost(
            worker_id=0, env_ids=[0], phase="reset", type_name="OSError", cause="", timeout_s=120.0, is_charged=True
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_failures_that_each_take_longer_than_the_window_end_too(error):
    assert judged(supervisor(max_restarts=3, within_s=60), [120, 240, 360, 480], error) == [True, True, True, False]


def test_a_lost_connection_spends_no_restart_unless_it_is_charged():
    free = ConnectionLost(worker_id=0, env_ids=[0], phase="step", type_name="ConnectionResetError", cause="")
    judge = supervisor(max_restarts=1)

    assert [judge.judge(0, free, now) for now in range(5)] == [Replace(0.0, 0)] * 5
    assert judge.judge(0, died(), 5) == Replace(0.0, 1)
    assert isinstance(supervisor(max_restarts=0).judge(0, free, 0), GiveUp)
