"""A worker in the trainer's own process, the buffers for its environments, and the step queue of its manager.

Large observations may be lent to the trainer without a copy. With zero_copy, environments may write into three buffers
in turn, so a StepInfo is valid until the worker's next one. No array is written while the trainer may still read it.

The worker carries out a step when the response is requested, or when a command other than a reset follows. So an
exception in a step is not raised by the call that sends the actions.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from envmanager.data.steps import (
    LEAST_LENT_BYTES,
    STEPPING,
    CommandName,
    EnvironmentResponse,
    RowBuffer,
    StartReport,
    Steps,
    only_agents,
)
from envmanager.data.trees import leaves, map_tree
from envmanager.errors import EnvManagerError
from envmanager.hosts.hosting import COMMANDS, GroupFactory, failed, take_not_begun
from envmanager.kernel.host import ResponseSource
from envmanager.observe.events import EventLog, Started
from envmanager.observe.timing import WorkerTimes
from envmanager.system.interrupts import allow_interrupts, levels, raise_what_came, state, thread_id

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_logger = logging.getLogger("envmanager")
_STEP, _FAILED = CommandName.STEP, CommandName.FAILED

_MAX_KEPT = 3
"""Maximum number of buffers that are kept for reuse. The trainer may hold any number of older ones."""


class LentBuffers:
    """A pool of RowBuffers whose observations are delivered without a copy. The other arrays are small and are copied.

    The trainer receives views of root arrays, which share a buffer's memory. The base of a view, or of a view of a
    view, is the root, so a root exists as long as any view. A buffer is free when its roots are garbage-collected.
    """

    def __init__(self, make: Callable[[], RowBuffer]) -> None:
        self._make = make
        self._kept: list[tuple[RowBuffer, list[weakref.ref[np.ndarray]]]] = []
        """Buffers, newest first, each with weak references to the root arrays of its lent observations."""
        self._next: tuple[RowBuffer, list[weakref.ref[np.ndarray]]] | None = None

    def next(self) -> RowBuffer:
        """Return a buffer for the next step or reset: the newest free one (likely in the CPU cache), else a new one."""
        self._next = next((each for each in self._kept if all(root() is None for root in each[1])), None)
        if self._next is None:
            self._next = (self._make(), [])
            self._kept = [self._next, *self._kept[: _MAX_KEPT - 1]]  # forgets the oldest, which the trainer still holds
        return self._next[0]

    def delivered(self, steps: Steps) -> Steps:
        """Return a copy of ``steps``, but with views of observations in the buffer that ``next`` returned last."""
        own = {}
        for behavior, each in steps.items():
            lent = None
            if self._next is not None and each.obs is self._next[0].steps.obs:
                lent = map_tree(_on_the_same_memory, each.obs)
                self._next[1][:] = [weakref.ref(leaf.base) for leaf in leaves(lent)]
            own[behavior] = each.copy(obs=lent)
        return own


def _on_the_same_memory(array: np.ndarray) -> np.ndarray:
    data: Any = array.reshape(-1).view(np.uint8)
    same: np.ndarray = np.asarray(memoryview(data)).view(array.dtype).reshape(array.shape)
    return same


@attrs.define(eq=False, slots=False)
class LocalWorker:
    """A worker whose environments run in the trainer's process. ``start`` makes them.

    With ``rotates``, they write into three buffers in turn, so a StepInfo is valid until the next one. With ``lends``,
    large observations are lent without a copy.
    """

    worker_id: int
    _factory: GroupFactory
    times: WorkerTimes
    _events: EventLog
    _rotates: bool = attrs.field(kw_only=True)
    _lends: bool = attrs.field(default=False, kw_only=True)
    group: Any = attrs.field(default=None, init=False)  # an EnvGroup, once started
    _n_reported: int = attrs.field(default=0, init=False)
    """Number of behaviors whose specs were sent with a response."""
    accepts_device_arrays: bool = attrs.field(default=False, init=False)
    """Whether observations and actions in PyTorch or JAX arrays are passed on without conversion to NumPy."""
    _asked: tuple[CommandName, Any] | None = attrs.field(default=None, init=False)
    _step: tuple[CommandName, Any] | None = attrs.field(default=None, init=False)
    """Command and payload of the step that was sent and has not ended, if any."""
    _has_begun: bool = attrs.field(default=False, init=False)
    """Whether ``_step`` has begun. If still true when another method is called, an interrupt cut the step short."""
    _answer: EnvironmentResponse = attrs.field(init=False)
    """Response to every step that succeeds."""
    _stepped: EnvironmentResponse | None = attrs.field(default=None, init=False)
    """Response to a step that has ended, not yet returned."""
    slot: int = attrs.field(default=0, init=False)
    """Index of the buffer into which the environments have written last."""
    _buffers: Sequence[RowBuffer] = attrs.field(default=(), init=False)
    _lent: LentBuffers | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._answer = EnvironmentResponse(_STEP, self.worker_id)

    def start(self) -> StartReport:
        """Make the environments and return their report. Raises the same errors as the start of a worker process."""
        asked_ns = time.perf_counter_ns()
        generation = self._factory.contexts[0].generation
        self.group = self._factory()
        self.times.started(asked_ns, time.perf_counter_ns(), generation=generation)
        self._events.add(Started(worker_id=self.worker_id, generation=generation, pid=None, start_s=self.times.start_s))
        report: StartReport = COMMANDS[CommandName.START](self.group, None)
        self.accepts_device_arrays = self._lends and self.group.accept_device_arrays()
        n_envs = len(self.group.env_ids)
        has_rows = len(report.specs) == 1 and list(report.max_agents.values()) == [n_envs]
        if has_rows and not self.group.returns_new_arrays:
            (spec,) = report.specs.values()
            parts = leaves(spec.observation)
            n_bytes = n_envs * sum(part.dtype.itemsize * math.prod(part.shape) for part in parts)
            make = partial(RowBuffer.empty, spec.observation, only_agents(self.group.env_ids))
            if self._lends and n_bytes >= LEAST_LENT_BYTES and not any(part.is_object for part in parts):
                self._lent = LentBuffers(make)
            elif self._rotates:
                self._buffers = [make() for _ in range(3)]
        return report

    def attach(self, worker_rows: Any) -> None:
        """Make the environments write into the buffers of ``worker_rows`` in turn. Do nothing if it has no buffers."""
        if None not in worker_rows.buffers:
            self._buffers = worker_rows.buffers

    @property
    def lends(self) -> bool:
        """Whether delivered observations need no copy, because they stay unchanged while the trainer holds them."""
        return self._lent is not None or (not self._buffers and self.group.returns_new_arrays)

    def close_quietly(self) -> None:
        """Close the environments. Log errors instead of raising them."""
        if self.group is not None:
            try:
                self.group.close()
            except (Exception, SystemExit):
                _logger.exception("an environment failed to close")

    def send(self, name: str, payload: Any = None) -> None:
        """Store a step or a command. A stored step is carried out before another command, or discarded by a reset."""
        command = name if name.__class__ is CommandName else CommandName(name)
        if command in STEPPING:
            self._step = (command, payload)
            return
        if command is CommandName.BEGIN:
            self.group.on_demand.add(payload)
            return
        if command is CommandName.RESET:
            self._step, self._has_begun, self._stepped = None, False, None
        elif self._step is not None and not self._has_begun:
            (self._stepped,) = self.take_step()
        self._asked = (command, payload)

    def recv(self) -> EnvironmentResponse:
        """Carry out the stored command and return its response. Make the environments first if there are none yet."""
        assert self._asked is not None
        (name, payload), self._asked = self._asked, None
        try:
            if self.group is None:
                self.start()
        except EnvManagerError as error:
            return EnvironmentResponse(_FAILED, self.worker_id, error)
        lent = self._lent if name is CommandName.RESET else None
        if lent is not None:
            self.group.offer_rows(lent.next())
        group, began_ns = self.group, time.perf_counter_ns()
        try:
            with allow_interrupts():
                result = COMMANDS[name](group, payload)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            response = self._failed(error, name)
        else:
            response = EnvironmentResponse(name, self.worker_id, result)
            self._add_news(response)
        ended_ns = time.perf_counter_ns()
        self.times.responded(name, ended_ns - began_ns, ended_ns)
        if lent is not None and response.name is not _FAILED:
            response.payload = lent.delivered(response.payload)
        return response

    def take_step(self, *, keeps: bool = False) -> Sequence[EnvironmentResponse]:
        """Carry out the pending step, unless ``send`` has done so. Return ``(response,)``, or ``()`` if none was sent.

        If an interrupt cut the step short in an earlier call, the response is a failure. With ``keeps``, the response
        is for the next call.
        """
        response = self._stepped
        if response is None:
            if self._step is None:
                return ()
            name, payload = self._step
            if self._has_begun:
                response = self._failed(KeyboardInterrupt(), name)
            else:
                group = self.group
                if self._buffers:
                    self.slot = (self.slot + 1) % len(self._buffers)
                    group.offer_rows(self._buffers[self.slot])
                elif self._lent is not None:  # before _has_begun, because a MemoryError here cuts no step short
                    group.offer_rows(self._lent.next())
                self._has_begun = True
                n_levels, began_ns = 0, time.perf_counter_ns()
                if levels[-1] and thread_id() == state.main_thread:  # allow_interrupts, in line
                    n_levels = len(levels)
                    levels.append(0)
                    if state.was_interrupted:
                        raise_what_came()
                try:
                    result = group.step(payload) if name is _STEP else COMMANDS[name](group, payload)
                except BaseException as error:
                    if n_levels:
                        del levels[n_levels:]
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    response = self._failed(error, name)
                else:
                    if n_levels:
                        del levels[n_levels:]
                    response = self._answer  # a step is delivered before the next one is sent
                    response.name, response.payload, response.specs, response.not_begun = _STEP, result, None, None
                    if group.not_begun or len(group.behavior_specs) != self._n_reported:
                        self._add_news(response)
                ended_ns = time.perf_counter_ns()
                self.times.stepped(ended_ns - began_ns, ended_ns)
            self._stepped, self._step, self._has_begun = response, None, False
        if keeps:
            return ()
        if self._lent is not None and response.name is not _FAILED:  # after a MemoryError, the next call tries again
            response.payload = self._lent.delivered(response.payload)
        self._stepped = None
        return (response,)

    def _add_news(self, response: EnvironmentResponse) -> None:
        response.not_begun, specs = take_not_begun(self.group, self.worker_id), self.group.behavior_specs
        if len(specs) != self._n_reported:
            response.specs, self._n_reported = dict(specs), len(specs)

    def _failed(self, error: BaseException, name: CommandName) -> EnvironmentResponse:
        return failed(error, name, worker_id=self.worker_id, env_ids=self.group.env_ids, group=self.group)


@attrs.define(eq=False, slots=False)
class LocalStepQueue(ResponseSource):
    """The step queue of a manager with a local worker. Responses of worker processes usually come first.

    ``workers`` is the manager's own list of workers. The local worker, or its replacement, is at index ``worker_id``.
    Without ``others``, all workers are local.
    """

    steps_when_asked = True

    _workers: list[Any]
    _worker_id: int = 0
    _others: ResponseSource | None = None
    _n_of_others: int = attrs.field(default=0, init=False)

    def take(self) -> Sequence[EnvironmentResponse]:
        """Return ready responses of worker processes and, once all have responded, the local worker's step response."""
        if self._others is None:
            if len(self._workers) == 1:
                return self._workers[0].take_step()  # type: ignore[no-any-return]
            for worker in self._workers:  # of all, before any response is taken, which an interrupt would lose
                worker.take_step(keeps=True)
            return [response for worker in self._workers for response in worker.take_step()]
        if self._n_of_others < len(self._workers) - 1:
            of_others = self._others.take()
            self._n_of_others += len(of_others)
            return of_others
        own = self._take_own()  # first, so that after an interrupt the others' responses are still in the queue
        return [*own, *self._others.take()]

    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        """Return ready responses. If none is ready, step the local worker; without a step, wait for worker processes.

        With neither worker processes nor a step, sleep until ``deadline``. The caller may then start a replacement.
        """
        if self._others is not None:
            return self.take() or self._take_own() or self._others.get(n_wanted, deadline)
        taken = self.take()
        left_s = deadline - time.monotonic()
        if not taken and 0.0 < left_s < math.inf:
            with allow_interrupts():
                time.sleep(left_s)
            taken = self.take()
        return taken

    def listen(self, loop: AbstractEventLoop, ring: Callable[[], None]) -> Callable[[], None]:
        return (lambda: None) if self._others is None else self._others.listen(loop, ring)

    def due_at(self) -> float:
        return math.inf if self._others is None else self._others.due_at()

    def _take_own(self) -> Sequence[EnvironmentResponse]:
        own: Sequence[EnvironmentResponse] = self._workers[self._worker_id].take_step()
        if own:
            self._n_of_others = 0
        return own
