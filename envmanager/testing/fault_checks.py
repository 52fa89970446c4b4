"""Assertions that the tests of FaultContract share, and the base class of these tests.

The assertions check that calls return in time, that errors have the right type and name the worker, that the delivered
steps are consecutive and match their actions, that healthy workers keep their episodes, and that ``close()`` works.
"""

from __future__ import annotations

import functools
import pickle
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import pytest

from envmanager.data.steps import StepInfo
from envmanager.env_manager import EnvManager
from envmanager.errors import ManagerClosed, WorkerError
from envmanager.observe.stats import WorkerStats
from envmanager.options import RestartPolicy, Timeouts
from envmanager.testing.contract import NumberedActions, OwnManagers, check_echo
from envmanager.testing.fakes import EchoEnvironment
from envmanager.testing.leaks import SLACK_S, SOON_S, nothing_left_behind, state_of

NO_RESTARTS = RestartPolicy(max_restarts=0)
IDLE = ("idle", "step")
"""Possible phases of the error for a killed idle worker: "step" if an action was sent before the death was noticed."""

SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)
"""Signal that kills a process. On Windows ``os.kill`` makes the number of the signal the exit code."""
KILLED = "SIGKILL" if hasattr(signal, "SIGKILL") else f"EXIT({signal.SIGTERM:d})"
unless_windows = functools.partial(pytest.mark.skipif, sys.platform == "win32")
"""A decorator that skips a test on Windows. ``reason`` says what Windows lacks."""

Error = TypeVar("Error", bound=WorkerError)
Test = TypeVar("Test", bound=Callable[..., Any])


@contextmanager
def returns_within(limit_s: float) -> Iterator[None]:
    """Assert that the ``with`` block takes less than ``limit_s`` + SLACK_S seconds."""
    began = time.monotonic()
    yield
    took_s = time.monotonic() - began
    assert took_s < limit_s + SLACK_S, f"it took {took_s:.1f} s"


def until(condition: Callable[[], bool], *, within_s: float = SOON_S) -> None:
    """Wait until ``condition()`` is true. Raise AssertionError after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"did not come true within {within_s} s"
        pause.wait(0.01)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended or is a zombie."""
    return state_of(pid) in ("", "Z", "X")


def check_error(
    error: BaseException, kind: type[Error], *, worker_id: int, env_id: int, phase: str | tuple[str, ...]
) -> Error:
    """Assert that ``error`` has this type, worker, environment and one of the phases, and can be pickled. Return it."""
    assert isinstance(error, kind), f"{type(error).__name__}: {error}"
    assert error.worker_id == worker_id
    assert env_id in error.env_ids
    assert error.phase in ((phase,) if isinstance(phase, str) else phase)
    assert error.cause
    assert f"worker {worker_id}" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.cause) == (kind, str(error), error.cause)
    return error


def check_close(manager: EnvManager, close_s: float) -> None:
    """Assert that ``close()`` takes at most ``close_s`` + SLACK_S seconds and ``reset()`` then raises ManagerClosed."""
    with returns_within(close_s):
        manager.close()
    manager.close()
    with pytest.raises(ManagerClosed):
        manager.reset()


def check_lost(info: StepInfo, last: StepInfo) -> None:
    """Assert that ``info`` reports a lost worker and truncates the episodes in ``last``, the worker's last StepInfo.

    The rewards are 0. If the worker was recycled, episodes that had ended in ``last`` are not truncated.
    """
    assert info.lost is not None
    assert info.lost.cause.worker_id == info.worker_id
    assert info.actions is None
    assert len(info.transitions("default").reward) == 0
    steps, before = info.current["default"], last.current["default"]
    cut = ~before.ended if is_recycled(info) else np.ones(len(before), np.bool_)
    assert steps.agent_id.tolist() == before.agent_id.tolist()
    assert steps.reward.tolist() == [0.0] * len(steps)
    assert steps.truncated.tolist() == cut.tolist()
    assert not steps.terminated.any()
    assert steps.obs[:, 0].tolist() == steps.env_id.tolist()
    assert not steps.obs[:, 1:].any(), "not a first observation"
    finals = [] if steps.final_obs is None else steps.final_obs.tolist()
    assert finals == before.obs[cut].tolist(), "not the observations that were delivered last"


def is_recycled(info: StepInfo) -> bool:
    """Return whether ``info`` reports the planned replacement of a healthy worker."""
    return info.lost is not None and info.lost.cause.phase == "recycled"


class CheckedTrainer:
    """A trainer that steps a manager of EchoEnvironments with actions that never repeat, and checks every step.

    Each worker's steps must be consecutive and have the actions that were sent. A StepInfo that reports the loss or the
    recycling of its worker must pass ``check_lost``, and is appended to ``lost`` or ``recycled``. Without
    ``recycling``, no worker may be recycled.
    """

    def __init__(self, manager: EnvManager, *, recycling: bool = False) -> None:
        self.manager = manager
        self.lost: list[StepInfo] = []
        self.recycled: list[StepInfo] = []
        self.n_infos = Counter[int]()
        self._recycling = recycling
        self._policy = NumberedActions()
        self._n_steps = Counter[int]()
        self._last: dict[int, StepInfo] = {}
        manager.set_policy("default", self._policy)

    @property
    def workers(self) -> tuple[WorkerStats, ...]:
        """Current statistics of all workers, in the order of the worker ids."""
        return self.manager.stats().workers

    def pid_of(self, worker_id: int) -> int:
        """Return the process id of a worker, and assert that the worker has one."""
        pid = self.workers[worker_id].pid
        assert pid is not None
        return pid

    def reset(self, config: Any = None) -> list[StepInfo]:
        """Reset the manager. Check that its StepInfos begin new episodes, and return them."""
        infos = self.manager.reset(config)
        for info in infos:
            assert info.lost is None
            assert not info.current["default"].obs[:, 2].any()
            self._begin(info)
        return infos

    def step(self, wait: Any = "any") -> list[StepInfo]:
        """Call the manager's ``step``. Check its StepInfos and return them."""
        infos = self.manager.step(wait)
        assert len({info.worker_id for info in infos}) == len(infos)
        for info in infos:
            self._check(info)
            self.n_infos[info.worker_id] += 1
        return infos

    def _check(self, info: StepInfo) -> None:
        last = self._last[info.worker_id]
        assert info.previous is last.current
        if info.lost is None:
            check_echo(info, self._policy.given, self._n_steps)
            self._last[info.worker_id] = info
            return
        if is_recycled(info):
            assert self._recycling
            assert last.current["default"].ended.any(), "no episode had ended"
        check_lost(info, last)
        (self.recycled if is_recycled(info) else self.lost).append(info)
        self._begin(info)

    def _begin(self, info: StepInfo) -> None:
        self._last[info.worker_id] = info
        for agent_id in info.current["default"].agent_id.tolist():
            self._n_steps[agent_id] = 0

    def step_until(self, condition: Callable[[], Any], *, wait: Any = "any", within_s: float = SOON_S) -> None:
        """Step until ``condition()`` holds. Raise AssertionError after ``within_s`` + SLACK_S seconds."""
        deadline = time.monotonic() + within_s + SLACK_S
        while not condition():
            assert time.monotonic() < deadline, f"did not come true within {within_s} s"
            self.step(wait)

    def until_lost(self, *, n: int = 1, within_s: float = SOON_S) -> StepInfo:
        """Step until ``lost`` has ``n`` StepInfos. Return the last one. Raise AssertionError as ``step_until`` does."""
        self.step_until(lambda: len(self.lost) >= n, within_s=within_s)
        return self.lost[-1]

    def first_error(self, *, wait: Any = "any", within_s: float = SOON_S) -> WorkerError:
        """Step until the manager raises a WorkerError, and return it. Raise AssertionError as ``step_until`` does."""
        try:
            self.step_until(lambda: False, wait=wait, within_s=within_s)
        except WorkerError as error:
            return error
        raise AssertionError("unreachable")

    def go_on(self, worker_ids: Iterable[int], *, n_steps: int = 3) -> None:
        """Step until each worker in ``worker_ids`` has delivered ``n_steps`` more StepInfos."""
        wanted = {worker_id: self.n_infos[worker_id] + n_steps for worker_id in worker_ids}
        self.step_until(lambda: all(self.n_infos[worker_id] >= n for worker_id, n in wanted.items()))


def only_with_processes(test: Test) -> Test:
    """Decorate a test method that needs worker processes. It is skipped if its class has ``has_processes = False``."""

    @functools.wraps(test)
    def checked(self: FaultyManagers, *args: Any, **kwargs: Any) -> Any:
        if not self.has_processes:
            pytest.skip("needs workers outside this process")
        return test(self, *args, **kwargs)

    return cast("Test", checked)


class FaultyManagers(OwnManagers):
    """Base class of FaultContract's test classes, each of which has a process per environment if ``has_processes``.

    Every test checks for leaks.
    """

    has_processes = True
    """Whether each environment has its own process, which tests may kill. If False, one worker has all environments."""
    keeps_episodes = True
    """Whether the manager can keep episodes. If False, it refuses the option."""
    start_s = 12.0
    """``Timeouts.start_s`` of tests in which one worker hangs, long enough for healthy workers to start."""

    @pytest.fixture(autouse=True)
    def _leaves_nothing_behind(self) -> Iterator[None]:
        if type(self) not in _warmed_up:  # start the helper: it runs until the program ends and is no leak
            self.make_manager(EchoEnvironment, 1).close()
            _warmed_up.add(type(self))
        with nothing_left_behind():
            yield

    @contextmanager
    def managing(self, env_factory: Any, n_envs: int = 3, **options: Any) -> Iterator[EnvManager]:
        """Yield a new manager, and call ``check_close`` on it at the end."""
        manager = self.make_manager(env_factory, n_envs, **options)
        try:
            yield manager
        finally:
            check_close(manager, options.get("timeouts", Timeouts()).close_s)

    @contextmanager
    def running(
        self, env_factory: Any, n_envs: int = 3, *, recycling: bool = False, **options: Any
    ) -> Iterator[CheckedTrainer]:
        """Yield a CheckedTrainer for a new manager that was reset. Call ``check_close`` on the manager at the end."""
        with self.managing(env_factory, n_envs, **options) as manager:
            trainer = CheckedTrainer(manager, recycling=recycling)
            trainer.reset()
            yield trainer

    def worker_of(self, env_id: int) -> int:
        """Return the id of the worker that hosts an environment."""
        return env_id if self.has_processes else 0

    def others_than(self, env_id: int, n_envs: int = 3) -> list[int]:
        """Return the ids of the workers that do not host environment ``env_id``."""
        own, n_workers = self.worker_of(env_id), n_envs if self.has_processes else 1
        return [worker_id for worker_id in range(n_workers) if worker_id != own]


_warmed_up: set[type] = set()
