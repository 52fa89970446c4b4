"""Cases 20, 22, 29 to 31, 33, 36, 37 and 43 of docs/fault-cases.md: budgets, options, values, specs and calls.

A kind of manager leaves them to the kernel, so they are no part of FaultContract; here they run over every manager.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import pytest

from envmanager import ActionInfo, AgentSteps, ArraySpec, BehaviorSpec, EnvManager
from envmanager.data.steps import Batch
from envmanager.errors import (
    BadAction,
    BadObservation,
    EnvRaised,
    ManagerClosed,
    RestartsExhausted,
    UsageError,
    WorkerDied,
)
from envmanager.observe import events
from envmanager.options import RestartPolicy, Timeouts, Wait
from envmanager.testing.bad_steps import BAD_STEPS
from envmanager.testing.contract import NumberedActions
from envmanager.testing.fakes import Die, EchoEnvironment, FakeEnvironment, Raise
from envmanager.testing.fault_checks import (
    NO_RESTARTS,
    check_error,
    only_with_processes,
    returns_within,
)
from envmanager.testing.fault_contract_restarts import BROKEN, ON_EXCEPTION
from envmanager.testing.faults import Change, faulty
from envmanager_tests.faults.bad_keyed_steps import BAD_KEYED_STEPS, NOT_FINITE, KeyedFaultyEnvironment
from envmanager_tests.faults.kernel_restarts import KernelRestarts


class KernelFaults(KernelRestarts):
    # Options.

    @pytest.mark.parametrize("field", ["start_s", "reset_s", "step_s", "call_s", "close_s"])
    def test_case_29_a_timeout_that_makes_no_sense_is_refused_at_construction(self, field: str) -> None:
        bad: list[Any] = [0, -1, math.nan, None, "1", True]
        for value in [*bad, math.inf] if field == "close_s" else bad:
            with pytest.raises(UsageError, match=field):
                Timeouts(**{field: value})

    def test_case_29_a_manager_refuses_what_is_no_timeouts_or_restart_policy(self) -> None:
        bad: list[dict[str, Any]] = [{"timeouts": 5}, {"restarts": 3}, {"wait": "soon"}]
        for options in bad:
            with pytest.raises(UsageError):
                self.make_manager(EchoEnvironment, 1, **options)
        for value in (-1, math.nan, math.inf, None):
            with pytest.raises(UsageError, match="backoff_s"):
                RestartPolicy(backoff_s=value)  # type: ignore[arg-type]

    def test_case_29_no_limit_and_no_waiting_are_both_possible(self) -> None:
        no_limit = Timeouts(start_s=math.inf, reset_s=math.inf, step_s=math.inf, call_s=math.inf)
        with self.running(EchoEnvironment, timeouts=no_limit) as trainer:
            with returns_within(0):
                for _ in range(10):
                    trainer.step(Wait.any(timeout_s=0))
            trainer.go_on(range(trainer.manager.n_workers))

    # Observations.

    @pytest.mark.parametrize("what", BAD_STEPS)
    def test_case_30_a_step_that_breaks_its_spec_is_the_fault_of_one_worker(self, what: str) -> None:
        with self.running(faulty(BAD_STEPS[what], after=3, only_env=1)) as trainer:
            error = trainer.first_error()
            told = check_error(error, BadObservation, worker_id=self.worker_of(1), env_id=1, phase="step")
            assert told.path == what.partition(":")[0]
            assert told.got != told.expected

            trainer.go_on(self.others_than(1))
            trainer.reset()
            trainer.go_on(range(trainer.manager.n_workers))

    @pytest.mark.parametrize("what", BAD_KEYED_STEPS)
    def test_case_30_a_leaf_that_breaks_its_spec_is_named_by_its_path(self, what: str) -> None:
        with self.keyed(BAD_KEYED_STEPS[what]) as manager:
            told = check_error(_error_of_step(manager), BadObservation, worker_id=0, env_id=0, phase="step")
            assert told.path == what.partition(":")[0]
            manager.reset()

    def test_case_30_a_first_observation_that_breaks_its_spec_is_named(self) -> None:
        with self.managing(faulty(BAD_STEPS["obs: shape"], at="reset", only_env=1)) as manager:
            with pytest.raises(BadObservation) as raised:
                manager.reset()
            check_error(raised.value, BadObservation, worker_id=self.worker_of(1), env_id=1, phase="reset")
            manager.reset()

    @pytest.mark.parametrize("what", NOT_FINITE)
    def test_case_31_numbers_that_are_not_finite_are_refused_on_request(self, what: str) -> None:
        with self.keyed(NOT_FINITE[what], check_values=True) as manager:
            told = check_error(_error_of_step(manager), BadObservation, worker_id=0, env_id=0, phase="step")
            assert told.path == what.partition(":")[0]

    @pytest.mark.parametrize("what", NOT_FINITE)
    def test_case_31_numbers_that_are_not_finite_are_delivered_otherwise(self, what: str) -> None:
        with self.keyed(NOT_FINITE[what]) as manager:
            (info,) = manager.step()
            steps = info.current["default"]
            numbers = steps.reward if what.startswith("reward") else steps.obs["place"]
            assert not np.isfinite(numbers).any()

    @contextmanager
    def keyed(self, fault: Change, **options: Any) -> Iterator[EnvManager]:
        """A reset manager with a policy and one KeyedFaultyEnvironment."""
        with self.managing(lambda context: KeyedFaultyEnvironment(context, fault), 1, **options) as manager:
            manager.set_policy("default", NumberedActions())
            manager.reset()
            yield manager

    # Actions.

    @pytest.mark.parametrize(
        ("actions", "env_ids"),
        [
            (np.zeros(2), [0, 1, 2]),
            (np.zeros((3, 1)), [0, 1, 2]),
            (np.zeros(3, np.complex128), [0, 1, 2]),
            (np.full(3, 1001.0), [0, 1, 2]),
            (np.full(3, -1.0), [0, 1, 2]),
            (np.full(3, np.nan), [0, 1, 2]),
            (np.array([1.0, None, 2.0]), [0, 1, 2]),
            (None, [0, 1, 2]),
            (np.zeros(3), [0, 1, 3]),
            (np.zeros(3), [0, 1, 1]),
        ],
        ids=["count", "shape", "dtype", "high", "low", "NaN", "None in it", "None", "unknown env", "env twice"],
    )
    def test_case_33_bad_actions_from_outside_are_refused_and_nothing_is_sent(self, actions: Any, env_ids: Any) -> None:
        with self.managing(_TakesFloats) as manager:
            manager.reset()
            manager.recv(Wait.all())
            for number in (1, 2):
                with pytest.raises(BadAction):
                    manager.send(actions, env_ids)
                sent = np.array([5.0, 6.0, 7.0]) * number
                manager.send(sent, [0, 1, 2])
                with pytest.raises(BadAction, match="waiting"):
                    manager.send(sent + 1, [0, 1, 2])
                batch = manager.recv(Wait.all())
                assert batch.obs[:, 2:4].tolist() == [[number, action] for action in sent.tolist()]

    @pytest.mark.parametrize(
        "returned",
        [
            lambda n: ActionInfo(np.zeros(n + 1)),
            lambda n: ActionInfo(np.zeros((n, 1))),
            lambda n: ActionInfo(np.full(n, np.nan)),
            lambda n: ActionInfo(np.full(n, 1001.0)),
            lambda _: ActionInfo(None),
            lambda _: None,
        ],
        ids=["count", "shape", "NaN", "high", "None", "no ActionInfo"],
    )
    def test_case_33_a_policys_bad_actions_are_refused_and_nothing_is_sent(
        self, returned: Callable[[int], ActionInfo]
    ) -> None:
        with self.managing(_TakesFloats) as manager:
            manager.reset()
            for number in (1, 2):
                manager.set_policy("default", _Returns(returned))
                with pytest.raises(BadAction):
                    manager.step(Wait.all())
                manager.set_policy("default", _Constant(5.0 * number))
                for info in manager.step(Wait.all()):
                    assert (info.current["default"].obs[:, 2:4] == [number, 5 * number]).all()

    # Specs and calls.

    def test_case_37_one_behavior_with_two_specs_is_refused_and_both_are_shown(self) -> None:
        with pytest.raises(UsageError) as raised:
            self.make_manager([EchoEnvironment, FakeEnvironment], 2)
        assert "int64[5]" in str(raised.value)
        assert "float32[3]" in str(raised.value)

    def test_case_43_every_call_after_close_says_so(self) -> None:
        with self.running(EchoEnvironment, 1) as trainer:
            trainer.manager.close()
            for call in _calls_of_an_open_manager(trainer.manager):
                with pytest.raises(ManagerClosed):
                    call()

    def test_case_43_a_step_before_the_first_reset_says_so(self) -> None:
        with self.managing(EchoEnvironment, 1) as manager:
            manager.set_policy("default", NumberedActions())
            for call in (manager.step, manager.recv, lambda: manager.send(np.zeros(1, np.int64), [0])):
                with pytest.raises(UsageError, match=r"reset\(\)"):
                    call()

    def test_case_43_the_error_of_a_worker_that_is_out_comes_again_when_it_is_addressed(self) -> None:
        with self.managing(faulty(Raise(ValueError("gear 7 broke")), only_env=1)) as manager:
            manager.reset()
            manager.recv(Wait.all())
            manager.send(np.array([1, 2, 3]), [0, 1, 2])
            with pytest.raises(EnvRaised) as raised:
                manager.recv(Wait.all())
            check_error(raised.value, EnvRaised, worker_id=self.worker_of(1), env_id=1, phase="step")
            if self.has_processes:
                others = manager.recv(Wait.all())
                assert sorted(zip(others.env_ids.tolist(), others.obs[:, 3].tolist(), strict=True)) == [(0, 1), (2, 3)]
            for _ in range(2):
                with pytest.raises(EnvRaised, match="gear 7 broke"):
                    manager.send(np.array([1]), [1])
                with pytest.raises(EnvRaised, match="gear 7 broke"):
                    manager.get_attr("label", env_ids=[1])

    # Factories.

    def test_case_36_a_factory_that_makes_nothing_is_refused(self) -> None:
        factories: list[Any] = [None, lambda: None, FakeEnvironment(), 7, "no:where", []]
        for factory in factories:
            with pytest.raises(UsageError):
                self.make_manager(factory, 1)

    def test_case_36_one_environment_for_two_is_refused(self) -> None:
        if self.has_processes:
            pytest.skip("each worker has a copy")
        one = FakeEnvironment()
        with pytest.raises(UsageError, match="same environment"):
            self.make_manager(lambda: one, 2)

    # Restarts.

    def test_case_22_an_exception_is_raised_by_default(self) -> None:
        with self.running(faulty(BROKEN, after=3, only_env=1)) as trainer:
            check_error(trainer.first_error(), EnvRaised, worker_id=self.worker_of(1), env_id=1, phase="step")
            trainer.go_on(self.others_than(1))
            assert trainer.lost == []
            assert trainer.manager.stats().restarts == 0
            assert trainer.manager.events.count(events.Restarted) == 0
            assert trainer.manager.events.count(events.Raised) == 1

    @only_with_processes
    def test_without_a_budget_the_fault_is_raised_once_and_the_worker_is_out_until_reset(self) -> None:
        factory = faulty(Die(3), after=3, only_env=1, only_generation=0)
        with self.running(factory, restarts=NO_RESTARTS) as trainer:
            error = check_error(trainer.first_error(), WorkerDied, worker_id=1, env_id=1, phase="step")
            trainer.go_on([0, 2], n_steps=10)
            with pytest.raises(WorkerDied) as again:
                trainer.manager.get_attr("label", env_ids=[1])
            assert str(again.value) == str(error)
            assert trainer.manager.get_attr("label", env_ids=[0, 2]) == ["env 0", "env 2"]
            assert {info.worker_id for info in trainer.step(Wait.all())} == {0, 2}
            assert len(trainer.reset()) == 3
            trainer.go_on([0, 1, 2])
            assert trainer.lost == []

    @pytest.mark.parametrize(("max_restarts", "kind"), [(0, EnvRaised), (1, RestartsExhausted)])
    def test_when_all_workers_are_dropped_the_error_is_raised(self, max_restarts: int, kind: Any) -> None:
        policy = RestartPolicy(max_restarts=max_restarts, backoff_s=0, on_exception="restart", then="drop")
        with self.running(faulty(BROKEN), 1, restarts=policy) as trainer:
            check_error(trainer.first_error(), kind, worker_id=0, env_id=0, phase="step")

    def test_an_exception_in_a_call_is_raised_and_replaces_no_worker(self) -> None:
        with self.running(faulty(BROKEN, at="call", only_env=1), restarts=ON_EXCEPTION) as trainer:
            with pytest.raises(EnvRaised) as raised:
                trainer.manager.call("misbehave")
            check_error(raised.value, EnvRaised, worker_id=self.worker_of(1), env_id=1, phase="call")
            assert trainer.manager.call("misbehave") == ["fine"] * 3
            trainer.go_on(range(trainer.manager.n_workers))
            assert trainer.lost == []
            assert trainer.manager.stats().restarts == 0

    def test_recycling_spends_no_restarts(self) -> None:
        policy = RestartPolicy(max_restarts=1, recycle_after_steps=1)
        with self.running(EchoEnvironment, recycling=True, restarts=policy) as trainer:
            trainer.step_until(lambda: len(trainer.recycled) >= 3)
            assert trainer.manager.stats().restarts == 0

    def test_case_20_lost_rows_of_a_batch_are_marked(self) -> None:
        with self.managing(faulty(BROKEN, after=3, only_env=1, only_generation=0), restarts=ON_EXCEPTION) as manager:
            manager.reset()
            last = manager.recv(Wait.all())
            for number in range(1, 4):
                manager.send(np.array([10, 20, 30]) + number, last.env_ids)
                last = manager.recv(Wait.all())
                assert not last.lost.any()
            manager.send(np.array([14, 24, 34]), [0, 1, 2])
            batch = manager.recv(Wait.all())

            assert batch.env_ids.tolist() == [0, 1, 2]
            assert batch.lost.tolist() == ([False, True, False] if self.others_than(1) else [True] * 3)
            _check_lost_rows(batch, last)
            alive = ~batch.lost
            assert batch.obs[alive, 3].tolist() == np.array([14, 24, 34])[alive].tolist()
            manager.send(np.array([15, 25, 35]), [0, 1, 2])
            assert manager.recv(Wait.all()).obs[:, 3].tolist() == [15, 25, 35]


def _check_lost_rows(batch: Batch, last: Batch) -> None:
    """Assert that lost rows are truncated and their ``final_obs`` is their ``obs`` in the previous batch, ``last``."""
    rows = np.flatnonzero(batch.lost)
    ended = np.flatnonzero(batch.terminated | batch.truncated).tolist()
    assert batch.truncated[rows].all()
    assert not batch.terminated[rows].any()
    assert not batch.reward[rows].any()
    assert batch.obs[rows, 0].tolist() == batch.env_ids[rows].tolist()
    assert not batch.obs[rows, 1:].any(), "not a first observation"
    finals = [batch.final_obs[ended.index(row)].tolist() for row in rows.tolist()]
    assert finals == last.obs[rows].tolist()


def _calls_of_an_open_manager(manager: EnvManager) -> list[Callable[[], Any]]:
    """Return functions, each of which calls a method of ``manager`` and must raise ManagerClosed after ``close()``."""
    return [
        manager.reset,
        manager.step,
        manager.recv,
        manager.render,
        lambda: manager.send(np.zeros(1, np.int64), [0]),
        lambda: manager.call("who", ""),
        lambda: manager.get_attr("label"),
        lambda: manager.set_attr("label", ["x"]),
        lambda: manager.set_policy("default", NumberedActions()),
    ]


def _error_of_step(manager: EnvManager) -> BaseException:
    with pytest.raises(BadObservation) as raised:
        manager.step(Wait.all())
    return raised.value


@attrs.frozen
class _Returns:
    """A policy whose ``get_action`` returns ``returned(n_rows)``, which may be invalid."""

    returned: Callable[[int], Any]

    def get_action(self, steps: AgentSteps) -> Any:
        return self.returned(len(steps))


@attrs.frozen
class _Constant:
    """A policy that returns ``action`` for every row."""

    action: float

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.full(len(steps), self.action))


class _TakesFloats(EchoEnvironment):
    """An EchoEnvironment with float64 actions from 0 to 1000."""

    SPEC = BehaviorSpec(EchoEnvironment.SPEC.observation, ArraySpec((), np.float64, 0.0, 1000.0))
