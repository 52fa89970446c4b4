"""A worker that is an object in the trainer's process, the rows it writes, and the step queue of its responses.

::

    RotatingRows   three sets of arrays in turn: views that stay valid for a while (zero_copy, or shared memory)
    LentRows       arrays that are the trainer's, without a copy: a set is written again when nothing refers to it

The rule: its step is taken when its response is asked for, and never before. So exceptions are raised where they are
with processes, and the responses of worker processes, if there are any, are looked at first. No array is written while
the trainer may still look at it.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from envmanager.data.steps import (
    STEPPING,
    AgentSteps,
    CommandName,
    EnvironmentResponse,
    RowBuffer,
    StartReport,
    Steps,
    only_agents,
)
from envmanager.data.trees import Tree, leaves, map_tree
from envmanager.environment import EnvGroup
from envmanager.errors import EnvManagerError
from envmanager.hosts.hosting import COMMANDS, GroupFactory, failed
from envmanager.hosts.wire import describe_failure
from envmanager.kernel.host import ResponseSource
from envmanager.observe.events import EventLog, Started
from envmanager.observe.timing import WorkerTimes
from envmanager.system.interrupts import let_through

_logger = logging.getLogger("envmanager")
_STEP, _STEP_ROWS, _FAILED = CommandName.STEP, CommandName.STEP_ROWS, CommandName.FAILED


LEAST_BYTES = 1 << 16
"""Least bytes of observations that are lent; copying fewer is faster."""
_MAX_KEPT = 3
"""Number of sets that are kept to be written again; a trainer may keep any number of others."""


class RotatingRows:
    """Buffers that are used in turn."""

    def __init__(self, buffers: Sequence[RowBuffer]) -> None:
        self._buffers = buffers
        self._slot = 0

    def next(self) -> RowBuffer:
        """Return the buffer for the next step."""
        self._slot = (self._slot + 1) % len(self._buffers)
        return self._buffers[self._slot]

    def handed_out(self, steps: Steps) -> Steps:
        """Return the step that was written, for the trainer."""
        return steps


class LentRows:
    """Buffers whose observations are delivered without a copy; the other arrays are small and copied."""

    def __init__(self, make: Callable[[], RowBuffer]) -> None:
        self._make = make
        self._kept: list[_LentBuffer] = []
        self._next: _LentBuffer | None = None

    def next(self) -> RowBuffer:
        """Return a buffer for the next step: the latest free one, perhaps still in the caches, or a new one."""
        self._next = next((each for each in self._kept if each.is_back), None)
        if self._next is None:
            self._next = _LentBuffer(self._make())
            self._kept = [self._next, *self._kept[: _MAX_KEPT - 1]]  # the trainer keeps one more for long
        return self._next.buffer

    def handed_out(self, steps: Steps) -> Steps:
        """Return the step that was written, for the trainer; arrays of other buffers are copied."""
        return {behavior: self._own(each) for behavior, each in steps.items()}

    def _own(self, steps: AgentSteps) -> AgentSteps:
        if self._next is None or steps.obs is not self._next.buffer.steps.obs:
            return steps.copy()
        return steps.copy(obs=self._next.lend())


class _LentBuffer:
    """A buffer that knows whether its lent observations are still in use.

    Lent arrays are views of an array on the buffer's memory whose own base is no array. NumPy makes views of views
    refer to the first array of the chain, so that one lives as long as any of them.
    """

    def __init__(self, buffer: RowBuffer) -> None:
        self.buffer = buffer
        self._roots: list[weakref.ref[np.ndarray]] = []

    @property
    def is_back(self) -> bool:
        return all(root() is None for root in self._roots)

    def lend(self) -> Tree:
        """Return the observations, and count as in use until they are garbage."""
        lent = map_tree(_on_the_same_memory, self.buffer.steps.obs)
        self._roots = [weakref.ref(leaf.base) for leaf in leaves(lent)]
        return lent


def _on_the_same_memory(array: np.ndarray) -> np.ndarray:
    data: Any = array.reshape(-1).view(np.uint8)
    same: np.ndarray = np.asarray(memoryview(data)).view(array.dtype).reshape(array.shape)
    return same


def is_worth_lending(observation: Tree, n_envs: int) -> bool:
    """Return whether lending pays for the observations of ``n_envs`` environments, by their spec."""
    n_bytes = 0
    for leaf in leaves(observation):
        if leaf.is_object:
            return False
        n_bytes += n_envs * leaf.dtype.itemsize * math.prod(leaf.shape)
    return n_bytes >= LEAST_BYTES


class LocalWorker:
    """A worker whose environments are in this process."""

    def __init__(
        self,
        worker_id: int,
        factory: GroupFactory,
        times: WorkerTimes,
        events: EventLog,
        *,
        rotates: bool,
        lends: bool = False,
    ) -> None:
        """``rotates``: the environments write into three sets of arrays in turn, so that a StepInfo stays valid for a
        while. ``lends``: large observations are the trainer's, without a copy.
        """
        self.worker_id = worker_id
        self.times = times
        self.group: Any = None  # an EnvGroup, once started
        self._factory = factory
        self._events = events
        self._n_reported = 0
        """Number of behaviors whose specs came with a response."""
        self._rotates = rotates
        self._lends = lends
        self._asked: tuple[CommandName, Any] | None = None
        self._step: tuple[CommandName, Any] | None = None
        self._stepped: EnvironmentResponse | None = None
        self._begun: CommandName | None = None
        """A step or reset that has begun and not ended; between calls, one that was interrupted half-way."""
        self._rows: RotatingRows | LentRows | None = None
        self._user_code = let_through()

    def start(self) -> StartReport:
        """Make the environments. Raises the errors of a worker process's start."""
        asked_ns = time.monotonic_ns()
        generation = self._factory.contexts[0].generation
        try:
            self.group = self._factory()
        except (Exception, SystemExit) as error:
            env_ids = [context.env_id for context in self._factory.contexts]
            failure = describe_failure(error, worker_id=self.worker_id, env_ids=env_ids, phase="start")
            if failure is error:
                raise  # an error that says it all must not become its own cause
            raise failure from error
        self.times.started(asked_ns, time.monotonic_ns(), generation=generation)
        self._events.add(Started(worker_id=self.worker_id, generation=generation, pid=None, start_s=self.times.start_s))
        self._make_rows(self.group)
        report: StartReport = COMMANDS[CommandName.START](self.group, None)
        return report

    def attach(self, worker_rows: Any) -> None:
        """Let the environments write into these ``WorkerRows``, one slot after the other."""
        if None not in worker_rows.buffers:
            self._rows = RotatingRows(worker_rows.buffers)

    @property
    def lends(self) -> bool:
        """Whether its responses' arrays are the trainer's: they are not written again while the trainer has them."""
        return isinstance(self._rows, LentRows)

    def close_quietly(self) -> None:
        """Close the environments; log errors instead of raising them."""
        if self.group is not None:
            try:
                self.group.close()
            except (Exception, SystemExit):
                _logger.exception("an environment failed to close")

    def _make_rows(self, group: EnvGroup) -> None:
        if len(group.behavior_specs) != 1:
            return
        ((behavior, spec),) = group.behavior_specs.items()
        if len(group.env_ids) != group.max_agents[behavior]:
            return
        make = partial(RowBuffer.empty, spec.observation, only_agents(group.env_ids))
        if self._lends and is_worth_lending(spec.observation, len(group.env_ids)):
            self._rows = LentRows(make)
        elif self._rotates:
            self._rows = RotatingRows([make() for _ in range(3)])

    def send(self, name: str, payload: Any = None) -> None:
        """Remember a command; it is carried out when its response is asked for, after a step in flight."""
        command = name if name.__class__ is CommandName else CommandName(name)
        if command in STEPPING:
            self._step = (command, payload)
            return
        if self._step is not None:
            self._stepped = self.take_step()
        if command is CommandName.RESET:
            self._stepped = self._begun = None
        self._asked = (command, payload)

    def recv(self) -> EnvironmentResponse:
        """Carry out the command that was sent and return the response; a replacement starts first."""
        if self._asked is None:
            raise RuntimeError("recv() without send()")
        (name, payload), self._asked = self._asked, None
        try:
            if self.group is None:
                self.start()
        except EnvManagerError as error:
            return EnvironmentResponse(_FAILED, self.worker_id, error)
        started_ns = time.monotonic_ns()
        if name is CommandName.RESET:
            self._begun = name
            if isinstance(self._rows, LentRows):
                self.group.offer_rows(self._rows.next())
        response = self._obey(name, payload)
        if name is CommandName.RESET:
            self._begun = None
            self._hand_over(response)
        ended_ns = time.monotonic_ns()
        self.times.responded(name, ended_ns - started_ns, ended_ns)
        return response

    def take_step(self) -> EnvironmentResponse | None:
        """Take the step that was sent and return its response; None without one.

        The response is a failure if the environments were interrupted half-way: they must be reset first.
        """
        if self._begun is not None or self._stepped is not None:
            return self._left_behind()
        if self._step is None:
            return None
        if self._rows is not None:
            self.group.offer_rows(self._rows.next())  # first: without memory for them, no step has begun
        (name, actions), self._step = self._step, None
        self._begun = name
        started_ns = time.monotonic_ns()
        group = self.group
        try:
            with self._user_code:
                result = group.step(actions) if name is _STEP else COMMANDS[name](group, actions)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            response = self._failed(error, name)
        else:
            response = EnvironmentResponse(_STEP, self.worker_id, result)
            if len(group.behavior_specs) != self._n_reported:
                self._report_specs(response)
        self._begun = None
        ended_ns = time.monotonic_ns()
        self.times.stepped(ended_ns - started_ns, ended_ns)
        if self._rows is None:
            return response
        self._stepped = response
        return self._left_behind()

    def _left_behind(self) -> EnvironmentResponse | None:
        """Return the response to a step that was interrupted, or that was taken before; None without one."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            return self._failed(KeyboardInterrupt(), begun)
        if self._stepped is not None:
            self._hand_over(self._stepped)
        stepped, self._stepped = self._stepped, None
        return stepped

    def _hand_over(self, response: EnvironmentResponse) -> None:
        """Give the trainer arrays of its own; if there is no memory for them, the next call delivers the response."""
        if self._rows is not None and response.name is not _FAILED:
            response.payload = self._rows.handed_out(response.payload)

    def _obey(self, name: CommandName, payload: Any) -> EnvironmentResponse:
        group = self.group
        try:
            with self._user_code:
                result = COMMANDS[name](group, payload)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return self._failed(error, name)
        response = EnvironmentResponse(name, self.worker_id, result)
        if len(group.behavior_specs) != self._n_reported:
            self._report_specs(response)
        return response

    def _report_specs(self, response: EnvironmentResponse) -> None:
        response.specs = dict(self.group.behavior_specs)
        self._n_reported = len(response.specs)

    def _failed(self, error: BaseException, name: CommandName) -> EnvironmentResponse:
        return failed(error, name, worker_id=self.worker_id, env_ids=self.group.env_ids, group=self.group)


class LocalStepQueue(ResponseSource):
    """The responses of one local worker and of other workers, if there are any; the others' come first.

    ``workers``: all workers of a manager, of which ``worker_id`` is the local one, also after a replacement.
    """

    def __init__(self, workers: list[Any], worker_id: int = 0, others: ResponseSource | None = None) -> None:
        self._workers = workers
        self._worker_id = worker_id
        self._others = others
        self._n_of_others = 0

    def take(self) -> Sequence[EnvironmentResponse]:
        """Return the others' responses; without others, or after one of each, step the local worker too."""
        if self._others is None:
            response = self._workers[self._worker_id].take_step()
            return () if response is None else (response,)
        if self._n_of_others < len(self._workers) - 1:
            taken = self._others.take()
            self._n_of_others += len(taken)
            return taken
        own = self._take_step()  # first: if it is interrupted, the others' responses are still in the queue
        return [*own, *self._others.take()]

    def wait(self, timeout: float | None, n_wanted: int = 1) -> Sequence[EnvironmentResponse]:
        """Return ready responses; otherwise step the local worker; otherwise wait for a remote one."""
        if self._others is None:
            return self._take_step() or self._wait_for_replacement(timeout)
        return self.take() or self._take_step() or self._others.wait(timeout, n_wanted)

    def _take_step(self) -> Sequence[EnvironmentResponse]:
        response: EnvironmentResponse | None = self._workers[self._worker_id].take_step()
        if response is None:
            return ()
        self._n_of_others = 0
        return (response,)

    def _wait_for_replacement(self, timeout: float | None) -> Sequence[EnvironmentResponse]:
        """Sleep for ``timeout`` seconds, since only a later replacement can respond; then take any step sent."""
        if timeout:
            with let_through():
                time.sleep(timeout)
        return self._take_step()
