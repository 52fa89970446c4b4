"""The abstract manager: what a trainer sees, whatever runs the environments.

::

    step():  _queue_steps ── policies ── send("step") ──▶ every worker that is not waiting
             collect(wait)               ◀── responses ── those that are ready, the others stay in flight
             _postprocess_steps          pairs each response with the worker's previous step and actions

A manager is this class plus ``env_workers`` (anything with the three members of :class:`EnvWorker`), a ``step_queue``
and ``_close``; one that can replace a failed worker adds ``_replace``. Where each worker stands is in ``core.table``.
The rule: at most one step per worker is in flight, and what was collected but not handed out stays, so an error loses
nothing. A Ctrl-C is raised while waiting or in a policy, never between the two halves of something; what was ready then
is handed out by the next call.
"""

from __future__ import annotations

import enum
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import numpy as np

from envmanager.core.collecting import Collector, StepQueue
from envmanager.core.last_rows import batches_with, last_steps
from envmanager.core.recovery import Recovery
from envmanager.core.table import Entry, WorkerState, WorkerTable
from envmanager.env_rows import EnvRows, RowsOfWorker
from envmanager.errors import BadAction, ManagerClosed, UsageError, WorkerError
from envmanager.events import EventLog, LateReplyDiscarded, ValuesCast
from envmanager.fitting import Casting
from envmanager.hosting import News
from envmanager.interrupts import begin_held, end_held, held, let_through
from envmanager.options import ResetConfig, RestartPolicy, Wait
from envmanager.policy import Policy
from envmanager.policy_calls import call_policies, check_policies, checked_actions
from envmanager.seeding import reseeded
from envmanager.specs import BehaviorSpec, describe_value, merge_specs
from envmanager.stats import ManagerStats, WorkerStats, wait_share
from envmanager.steps import (
    AGENT_BITS,
    ActionInfo,
    AgentSteps,
    Batch,
    CommandName,
    EnvironmentResponse,
    StepInfo,
    concat_steps,
    take_rows,
)
from envmanager.timing import WorkerTimes
from envmanager.tracing import Tracer
from envmanager.trees import Tree
from envmanager.weak_calls import weakly

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EnvManager", "EnvWorker", "ManagerStats", "StepQueue", "WorkerStats"]

_LEAVE_S = 1.0
"""How long close() waits for another thread to leave its call; then that call gives back what it may still use."""
_TURN_S = 0.1
"""How long a call that waits for another thread's is deaf to a Ctrl-C."""


class EnvWorker(Protocol):
    """A worker as its manager sees it."""

    worker_id: int

    def send(self, name: str, payload: Any = None) -> None:
        """Send a command. The answer to "step" comes out of the step queue, every other answer out of ``recv``."""
        ...

    def recv(self) -> EnvironmentResponse:
        """The answer to the last command, within its deadline; a "failed" response when there is none."""
        ...


class _Use(enum.Enum):
    """Which of the two ways of stepping is in use between two resets, if any can be."""

    RESETTING = enum.auto()
    """A reset has begun and not ended: only another one may follow."""
    UNDECIDED = enum.auto()
    STEP = enum.auto()
    SEND_RECV = enum.auto()


class EnvManager(ABC):
    """Many environments behind one small class. A context manager; ``close()`` is idempotent and always returns."""

    step_queue: StepQueue
    placement = ""
    """What a probe chose and why (``"auto"``), in a sentence; empty when the placement was given."""

    def __init__(
        self,
        env_ids_of_workers: Sequence[Sequence[int]],
        *,
        wait: Wait | None = None,
        seed: int | None = None,
        restarts: RestartPolicy | None = None,
        zero_copy: bool = False,
        check_values: bool = False,
        trace: str | None = None,
    ):
        """Without ``restarts`` no worker is replaced; with them, ``_replace`` must be able to. ``trace``: a file.

        ``check_values``: actions of another kind of numbers than their spec's are refused, not cast.
        ``zero_copy``: what a worker answers is handed out as it is; while it takes the next step the arrays must last.
        """
        self.env_workers: list[Any] = []
        self._env_rows = EnvRows(env_ids_of_workers)
        self._zero_copy = zero_copy
        self._wait = Wait.any() if wait is None else Wait.parse(wait)
        self._seed = seed
        self._use = _Use.UNDECIDED
        self._closed = self._given_back = False
        self._owner_pid = os.getpid()
        self._on_their_way: list[str] = []
        """The calls that are on their way, each inside the one before it."""
        self._partial_actions = True
        self._specs: dict[str, BehaviorSpec] = {}
        self._has_objects = False
        self._row_behavior: tuple[str, BehaviorSpec | None] | None = None
        self._casts_told: set[tuple[int, str]] = set()
        self._castings: Mapping[str, Casting] = defaultdict(partial(Casting, strict=check_values))
        self._policies: dict[str, Policy] = {}
        self._undelivered: Any = None
        """What a call has made, or the error that it raises once, until it has returned; then None.

        A call that was interrupted at its end leaves it to the next one.
        """
        self._env_steps = 0
        self._times = [WorkerTimes() for _ in env_ids_of_workers]
        self._last_config = ResetConfig(seed=seed)
        self._table = WorkerTable(self._env_rows.blocks)
        policy = RestartPolicy(max_restarts=0) if restarts is None else restarts
        self._recovery = Recovery(self._table, policy, weakly(self._launch_again))
        self._collector = Collector(self._table, self._recovery)
        self._lock = threading.RLock()
        self._tracer = None if trace is None else self._begin_trace(trace)

    # What a manager adds.

    @abstractmethod
    def _close(self) -> None:
        """Give everything back, when no call is on its way any more. Called again when it was interrupted."""

    def _stop(self) -> None:  # noqa: B027  (a manager whose workers end with _close needs none)
        """End the workers, although a call is on its way, in another thread or around this one; ``_close`` follows."""

    def _replace(self, worker_id: int) -> EnvWorker:
        """A new worker in the place of one that failed or is to be recycled; the old one is given back.

        Raises OSError when it cannot be started.
        """
        raise UsageError(f"{type(self).__name__} cannot replace a worker: make it without a RestartPolicy.")

    def _begin_again(self, worker: EnvWorker, config: ResetConfig) -> EnvironmentResponse | None:
        """Reset a worker that replaces another; the answer, or None when it comes out of the step queue."""
        worker.send(CommandName.RESET, config)
        return worker.recv()

    def _is_gone(self, worker: EnvWorker) -> bool:
        """Whether a worker that failed must be replaced before it can be reset."""
        return False

    def _wake(self) -> None:  # noqa: B027  (a manager that never waits needs none)
        """Have a call that waits in another thread look up, because the manager is closed."""

    def _own(self, payload: Any) -> Any:
        """The steps of a response in arrays that stay as they are: a copy, where a worker writes into them again."""
        return payload

    def _worker_stats(self, entry: Entry) -> WorkerStats:
        """What is known of one worker."""
        known = WorkerStats(
            entry.worker_id,
            entry.env_ids,
            waiting=entry.waiting,
            failed=entry.is_given_up,
            dropped=entry.is_dropped,
            generation=entry.generation,
            restarts=entry.restarts,
            steps=entry.steps,
        )
        return known.with_times(self._times[entry.worker_id])

    # What a trainer uses.

    @property
    def n_envs(self) -> int:
        """How many environments there are."""
        return self._env_rows.n_envs

    @property
    def n_workers(self) -> int:
        """How many workers host them."""
        return len(self._env_rows.blocks)

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """The specs of all behaviors seen so far, merged over all workers; may grow."""
        return self._specs

    @property
    def events(self) -> EventLog:
        """What happened to the workers: starts, failures, replacements; see ``envmanager.events``."""
        return self._recovery.events

    def set_policy(self, behavior: str, policy: Policy) -> None:
        """Let ``policy`` decide for the agents of ``behavior`` from the next ``step()`` on.

        The behavior need not have appeared yet. Raises UsageError when the policy has no ``get_action``.
        """
        self._require_usable("set_policy")
        if not callable(getattr(policy, "get_action", None)):
            raise UsageError(f"a policy needs a method get_action(steps), which {describe_value(policy)} has not.")
        self._policies[behavior] = policy if self._tracer is None else self._tracer.policy(behavior, policy)

    def reset(self, config: Any = None) -> list[StepInfo]:
        """Begin a new episode in every environment; one StepInfo per worker, in order.

        ``config`` is None, a ResetConfig, or a mapping with ``seed`` (one number, or one per environment) and
        ``options``. Steps in flight are waited out and discarded, failed workers are revived. Takes up to
        ``Timeouts.step_s + reset_s``. Raises the first WorkerError; another reset may follow.
        """
        has_begun = False
        try:
            with self._calling("reset"):
                parsed = ResetConfig.parse(config, n_envs=self.n_envs)
                if self._seed is not None and parsed.seed is None:
                    config = parsed = attrs.evolve(parsed, seed=self._seed)
                self._check_can_travel(config)
                self._require_some_worker()
                has_begun, self._use = True, _Use.RESETTING
                infos = self._reset(config, parsed)
                self._use = _Use.UNDECIDED
        except BaseException:
            if has_begun:  # and nobody has the first observations, also when an interrupt came at the very end
                self._use = _Use.RESETTING
            raise
        return infos

    def step(self, wait: Wait | str | int | None = None) -> list[StepInfo]:
        """Act in all environments that are not waiting, then hand back the steps that are ready.

        One batched policy call per behavior. Which steps and how long: ``wait`` (a Wait, "any", "all" or a number of
        workers), by default the manager's own. Raises UsageError (no reset, no policy), BadAction (the policy's answer
        does not fit; nothing was sent), or the WorkerError of a worker whose step would have been handed out now; the
        others' steps come with the next call.
        """
        with self._calling("step"):
            self._require_use(_Use.STEP)
            chosen = self._wait if wait is None else Wait.parse(wait)
            if self._undelivered is None:
                self._queue_steps(chosen)
                self._use = _Use.STEP
                try:
                    self._undelivered = self._postprocess_steps(self._collector.collect(self.step_queue, chosen))
                except WorkerError as error:
                    self._undelivered = error
        infos = self._deliver()
        return self.step(wait) if infos is None else infos  # another thread has taken them

    def send(self, actions: Tree, env_ids: Any) -> None:
        """Act in some environments with actions from outside: a tree of ``[len(env_ids), …]``, row i for env_ids[i].

        Raises BadAction, before anything is sent, when actions or env_ids do not fit or an environment's worker is
        still waiting; the WorkerError again when its worker has failed; UsageError for multi-agent environments.
        """
        with self._calling("send"):
            self._require_use(_Use.SEND_RECV)
            behavior, spec = self._only_behavior()
            n, groups = self._env_rows.grouped(env_ids, BadAction)
            actions = checked_actions(spec, actions, n, "send", self._castings[behavior])
            if self._undelivered is not None:
                self._refuse_undelivered()
            for group in groups:
                self._check_can_send(group)
            if self._has_objects:
                self._check_can_travel(actions)
            self._begin_send_recv()
            for group in groups:
                self._send_rows(group, {behavior: take_rows(actions, group.places)})

    def recv(self, wait: Wait | str | int | None = None) -> Batch:
        """The steps that are ready, one row per environment; after a reset first the first observations.

        Raises UsageError when nothing is in flight or ready, or for multi-agent environments, and WorkerErrors as
        ``step()`` does.
        """
        with self._calling("recv"):
            self._require_use(_Use.SEND_RECV)
            behavior, _ = self._only_behavior()
            chosen = self._wait if wait is None else Wait.parse(wait)
            if self._undelivered is None:
                if self._use is _Use.UNDECIDED:
                    self._offer_first_observations()
                self._begin_send_recv()
                try:
                    self._undelivered = self._batch_of(behavior, self._collector.collect(self.step_queue, chosen))
                except WorkerError as error:
                    self._undelivered = error
        batch = self._deliver()
        return self.recv(wait) if batch is None else batch  # another thread has taken it

    def call(self, name: str | Callable[..., Any], *args: Any, env_ids: Any = None) -> list[Any]:
        """``env.name(*args)`` of each environment (all, or ``env_ids``), in that order.

        ``name`` may be a function: then ``name(env, *args)``, where the environment is. It travels by cloudpickle.
        Waits behind a step in flight, at most ``Timeouts.call_s``. Raises EnvRaised when a call raises; the worker
        stays usable.
        """
        return self._ask(CommandName.CALL, env_ids, lambda rows, _: (name, args, rows))

    def get_attr(self, name: str, env_ids: Any = None) -> list[Any]:
        """``env.name`` of each environment; see ``call``."""
        return self._ask(CommandName.GET_ATTR, env_ids, lambda rows, _: (name, rows))

    def set_attr(self, name: str, values: Sequence[Any], env_ids: Any = None) -> None:
        """``env.name = value`` for each environment, one of ``values`` each; see ``call``."""
        ids = self._ids(env_ids)
        if isinstance(values, str | Mapping) or not hasattr(values, "__getitem__") or len(values) != len(ids):
            raise UsageError(f"set_attr needs one value for each of {len(ids)} environments, not {values!r}.")
        self._ask(CommandName.SET_ATTR, ids, lambda rows, places: (name, [values[place] for place in places], rows))

    def render(self, env_ids: Any = None) -> list[Any]:
        """``env.render()`` of each environment; see ``call``."""
        return self._ask(CommandName.RENDER, env_ids, lambda rows, _: rows)

    def stats(self) -> ManagerStats:
        """Counters and times of every worker."""
        self._require_owner("stats")
        workers = tuple(self._worker_stats(entry) for entry in self._table.entries)
        return ManagerStats(
            workers,
            steps=sum(entry.steps for entry in self._table.entries),
            env_steps=self._env_steps,
            late_replies=self.events.count(LateReplyDiscarded),
            restarts=sum(entry.restarts for entry in self._table.entries),
            steps_lost=self._recovery.steps_lost,
            wait_share=wait_share(self._times, self._collector.waits),
            placement=self.placement,
        )

    def close(self) -> None:
        """Stop all workers and give everything back, within ``Timeouts.close_s``. Any number of times.

        A call that is on its way, in another thread or because a policy closes its manager, raises ManagerClosed. What
        it may still use is given back when it has ended. In a process that the trainer has forked nothing happens.
        """
        if self._owner_pid != os.getpid():
            return
        self._closed = self._collector.closed = True  # another thread that waits in a call leaves it now
        self._wake()
        with held():
            has_left = self._lock.acquire(timeout=_LEAVE_S)
            try:
                if has_left and not self._on_their_way:
                    self._give_back()
                else:  # what is given back is left to the call that is on its way
                    with let_through():
                        self._stop()
            finally:
                if has_left:
                    self._lock.release()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<{type(self).__name__}: {self.n_envs} environments over {self.n_workers} workers, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _give_back(self) -> None:
        """What close() gives back; by close() itself, or else by the last call to end."""
        self._undelivered = None
        self._table.clear()  # with zero_copy its arrays would keep the shared memory
        if not self._given_back:
            with let_through():
                self._close()
            if self._tracer is not None:
                self._tracer.close()
            self._given_back = True

    # The template behind step().

    def _queue_steps(self, wait: Wait) -> None:
        """Send an action to every worker that is not waiting."""
        ready = [entry for entry in self._table.entries if entry.state is WorkerState.IDLE]
        if wait.max_lead is not None:
            slowest = self._table.slowest()
            ready = [entry for entry in ready if entry.steps_since_reset - slowest < wait.max_lead]
        if not ready:
            return
        last_steps = [entry.previous_step for entry in ready if entry.previous_step is not None]
        if len(last_steps) < len(ready):
            raise UsageError("step() before reset(): call reset() first.")
        with let_through():
            taken = self._take_steps(last_steps)
        self._require_open("step")
        payloads = [{name: info.action for name, info in actions.items()} for actions in taken]
        if self._has_objects:
            self._check_can_travel(payloads)
        for entry, actions, payload in zip(ready, taken, payloads, strict=True):
            if entry.state is WorkerState.IDLE:
                entry.actions = actions
                self._send_step(entry, CommandName.STEP, payload, len(entry.env_ids))
            else:  # it failed in a call that the policy made
                self._recovery.discard_action(entry)

    def _take_steps(self, last_steps: Sequence[StepInfo]) -> list[dict[str, ActionInfo]]:
        """What the policies do, one ``{behavior: ActionInfo}`` per StepInfo."""
        check_policies(last_steps, self._policies, partial_actions=self._partial_actions)
        return call_policies(last_steps, self._policies, self._specs, self._castings)

    def _postprocess_steps(self, entries: Sequence[Entry]) -> list[StepInfo]:
        """Pair each response with its worker's previous step and actions; then they are handed out."""
        infos = [self._step_info(entry) for entry in entries]
        self._hand_out(entries)
        for entry, info in zip(entries, infos, strict=True):
            entry.actions, entry.previous_step = None, info
        return infos

    def _step_info(self, entry: Entry) -> StepInfo:
        before, response = entry.previous_step, entry.response
        assert response is not None
        previous = None if before is None else before.current
        cut = None if entry.replacement is None else self._recovery.cut(entry, last_steps(entry))
        if cut is None:
            return StepInfo(previous, self._own(response.payload), entry.actions, entry.worker_id, None, self._specs)
        actions = entry.actions if cut.lost is None else None
        return StepInfo(previous, cut.payload, actions, entry.worker_id, cut.lost, self._specs)

    def _hand_out(self, entries: Sequence[Entry]) -> None:
        """All that is made of their responses exists: nothing from here on may fail."""
        for entry in entries:
            if entry.response is not None and entry.response.name is CommandName.STEP:
                self._env_steps += entry.n_envs_in_flight
                self._times[entry.worker_id].handed_out()
        self._table.handed_out(entries)

    def _deliver(self) -> Any:
        """What was made, now returned: nothing is called from where it is taken to the end, so no interrupt comes."""
        made = self._undelivered
        if isinstance(made, WorkerError):
            self._undelivered = None
            raise made
        self._undelivered = None
        return made

    def _launch_again(self, entry: Entry) -> EnvironmentResponse | None:
        """Start the next generation of a worker and have it reset; see ``_begin_again``."""
        worker = self.env_workers[entry.worker_id] = self._replace(entry.worker_id)
        return self._begin_again(worker, self._config_of_replacement(entry))

    def _config_of_replacement(self, entry: Entry) -> ResetConfig:
        """What the next generation of a worker is reset with: the last reset's options, and seeds of its own."""
        return attrs.evolve(self._last_config, seed=reseeded(self._last_config.seed, entry.generation))

    # Behind the other calls.

    def _begin_trace(self, path: str) -> Tracer:
        tracer = Tracer(path, self._env_rows.blocks)
        for times, track in zip(self._times, tracer.workers, strict=True):
            times.track = track
        self._collector.waits.track = tracer.trainer
        self.events.listener = tracer.happened
        weakref.finalize(self, tracer.close)
        return tracer

    def _calling(self, what: str) -> AbstractContextManager[None]:
        """Around every call: refused where it makes no sense, one at a time, and a Ctrl-C waits for its end."""
        call = _Calling(self, what)
        return call if self._tracer is None else self._tracer.call(what, call)

    def _require_usable(self, what: str) -> None:
        self._require_owner(what)
        self._require_open(what)

    def _require_owner(self, what: str) -> None:
        if self._owner_pid != os.getpid():
            raise UsageError(
                f"{what} was called in process {os.getpid()}, which was forked from the manager's own, "
                f"{self._owner_pid}: the workers belong to that one. Make a new manager in this process."
            )

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise ManagerClosed(what)

    def _refuse_inside_a_call(self, what: str) -> None:
        outer = self._on_their_way[-1]
        raise UsageError(
            f"{what}() was called inside {outer}(), by a policy or an environment, and would mix up whose step is "
            f"whose. Call it when {outer}() has returned."
        )

    def _require_some_worker(self) -> None:
        if all(entry.is_dropped for entry in self._table.entries):
            raise self._errors()[0].with_traceback(None)

    def _errors(self) -> list[Exception]:
        """What workers were given up for."""
        return [entry.error for entry in self._table.entries if entry.error is not None]

    def _require_use(self, use: _Use) -> None:
        if self._use is _Use.RESETTING:
            raise UsageError("the last reset() did not end: call reset() again.")
        if self._use not in (use, _Use.UNDECIDED):
            raise UsageError("use either step() or send()/recv() between two resets, not both.")

    def _refuse_undelivered(self) -> None:
        raise BadAction(
            "the last recv() was interrupted, and what it had received has not been handed out. Call recv() first. "
            "Nothing was sent."
        )

    def _reset(self, config: Any, parsed: ResetConfig) -> list[StepInfo]:
        self._discard_steps_in_flight()
        self._require_some_worker()  # the last may have been dropped meanwhile
        last_seed = self._last_config.seed if parsed.seed is None else parsed.seed
        self._last_config = attrs.evolve(parsed, seed=last_seed)
        responses = self._reset_workers(config)
        infos = [StepInfo(None, self._own(each.payload), None, each.worker_id, specs=self._specs) for each in responses]
        for info in infos:
            self._table.entries[info.worker_id].previous_step = info
        self._seed = None  # later resets go on with the randomness there is, unless they name a seed
        self._row_behavior = None
        self._collector.restart_counting()
        return infos

    def _discard_steps_in_flight(self) -> None:
        self._collector.drain(self.step_queue)  # a failure does not matter: the reset revives the worker
        self._undelivered = None
        for entry in self._table.entries:
            entry.actions, entry.batches, entry.ignores_action = None, [], False

    def _reset_workers(self, config: Any) -> list[EnvironmentResponse]:
        """The first observations of every worker that is not dropped; those that are gone are replaced.

        When some failed, the first failure is raised after all have answered.
        """
        alive = []
        for entry in self._table.entries:
            entry.previous_step = None
            if entry.state is WorkerState.FAILED and self._is_gone(self.env_workers[entry.worker_id]):
                self._recovery.revive(entry)
            elif entry.state is not WorkerState.DROPPED:
                alive.append(entry)
        for entry in alive:
            self._recovery.take_back(entry)
            self.env_workers[entry.worker_id].send(CommandName.RESET, config)
        answers = {entry.worker_id: self.env_workers[entry.worker_id].recv() for entry in alive}
        for entry in alive:
            if answers[entry.worker_id].name is CommandName.FAILED:
                self._recovery.fail(entry, answers.pop(entry.worker_id).payload)
        replacements, failure = self._collector.drain(self.step_queue)
        for entry in self._table.entries:
            entry.ignores_action = False
        self._table.note_exceptions()
        if failure is not None:
            raise failure
        answers.update(replacements)
        return [answers[worker_id] for worker_id in sorted(answers)]

    def _begin_send_recv(self) -> None:
        self._use = _Use.SEND_RECV
        self._collector.holds_back = True

    def _offer_first_observations(self) -> None:
        for entry in self._table.entries:
            if entry.state is WorkerState.IDLE and entry.previous_step is not None:
                steps = entry.previous_step.current
                self._table.arrived(entry, EnvironmentResponse(CommandName.RESET, entry.worker_id, steps))

    def _send_step(self, entry: Entry, name: CommandName, payload: Any, n_envs: int) -> None:
        self.env_workers[entry.worker_id].send(name, payload)
        entry.n_envs_in_flight = n_envs
        entry.move(WorkerState.IN_FLIGHT)

    def _send_rows(self, group: RowsOfWorker, actions: dict[str, Tree]) -> None:
        worker_id, rows, _ = group
        entry = self._table.entries[worker_id]
        if entry.ignores_action:
            self._recovery.discard_action(entry)
        elif len(rows) == len(entry.env_ids):
            self._send_step(entry, CommandName.STEP, actions, len(rows))
        else:
            self._send_step(entry, CommandName.STEP_ROWS, (rows, actions), len(rows))

    def _check_can_send(self, group: RowsOfWorker) -> None:
        worker_id, rows, _ = group
        entry = self._table.entries[worker_id]
        if entry.state is WorkerState.IDLE or entry.ignores_action:
            return  # if the last: it failed after its observation was handed out, which the user cannot know yet
        self._require_alive(entry)
        raise BadAction(
            f"env {entry.env_ids[rows[0]]} is still waiting: the answer of worker {worker_id} to the last actions has "
            "not been handed out. Call recv() first. Nothing was sent."
        )

    def _require_alive(self, entry: Entry) -> None:
        if entry.error is not None:
            # Without the traceback of the last time, which would grow with every time.
            raise entry.error.with_traceback(None)

    def _only_behavior(self) -> tuple[str, BehaviorSpec | None]:
        """The behavior that send and recv are about; UsageError when there is more than one agent per environment."""
        if self._row_behavior is None or self._use is _Use.UNDECIDED:
            self._row_behavior = self._found_behavior()
        return self._row_behavior

    def _found_behavior(self) -> tuple[str, BehaviorSpec | None]:
        last = {each.env_ids: each.previous_step for each in self._table.entries if not each.is_given_up}
        if any(step is None for step in last.values()):
            raise UsageError("send() and recv() come after reset(): call reset() first.")
        if len(self._specs) > 1:
            raise UsageError(
                f"send() and recv() serve single-agent environments; these have the behaviors {sorted(self._specs)}. "
                "Use step()."
            )
        behavior, spec = next(iter(self._specs.items())) if self._specs else ("default", None)
        if self._use is _Use.UNDECIDED and spec is not None:
            for env_ids, step in last.items():
                steps = None if step is None else step.current.get(behavior)
                if steps is None or steps.env_id.tolist() != list(env_ids):
                    raise UsageError("send() and recv() serve environments of one agent each. Use step().")
        return behavior, spec

    def _batch_of(self, behavior: str, entries: Sequence[Entry]) -> Batch:
        """What ``recv`` hands out of their responses; then they are handed out."""
        cuts, shares = [], []
        for entry in entries:
            assert entry.response is not None
            payload = entry.response.payload
            cut = None if entry.replacement is None else self._recovery.cut(entry, last_steps(entry))
            if cut is not None:
                cuts.append(cut)
                payload = cut.payload
            if behavior in payload:
                shares.append((entry, payload[behavior]))
        batch = self._batch(behavior, [steps for _, steps in shares])
        for cut in cuts:
            batch.lost |= np.isin(batch.env_ids, cut.unstepped >> AGENT_BITS)
        kept = [batches_with(entry, steps, batch) for entry, steps in shares]
        self._hand_out(entries)
        for (entry, _), batches in zip(shares, kept, strict=True):
            entry.batches = batches
        return batch

    def _batch(self, behavior: str, parts: list[AgentSteps]) -> Batch:
        """The rows of some workers as one Batch, in env_id order when it holds all environments."""
        if not parts:
            return self._empty_batch(behavior)
        is_view = len(parts) == 1 and self._zero_copy
        steps = parts[0] if is_view else concat_steps(parts)
        if len(steps.agent_id) < self._env_rows.n_envs:
            return Batch.of(steps, is_view=is_view)
        if len(parts) > 1 and (np.diff(steps.agent_id) < 0).any():
            steps = steps.take(np.argsort(steps.agent_id))
        return Batch.of(steps, self._env_rows.all_env_ids, is_view=is_view)

    def _empty_batch(self, behavior: str) -> Batch:
        some = next(entry.previous_step for entry in self._table.entries if entry.previous_step is not None)
        return Batch.of(some.current[behavior].take(np.arange(0)))

    def _ids(self, env_ids: Any) -> np.ndarray:
        return np.arange(self.n_envs) if env_ids is None else self._env_rows.checked(env_ids, UsageError)

    def _ask(self, name: CommandName, env_ids: Any, payload: Any) -> list[Any]:
        """Ask the workers of some environments; the answers in the order of ``env_ids``."""
        with self._calling(name):
            ids = self._ids(env_ids)
            groups = self._env_rows.by_worker(ids)
            for group in groups:
                entry = self._table.entries[group.worker_id]
                self._collector.await_replacement(self.step_queue, entry)
                self._require_alive(entry)
            payloads = [payload(group.rows.tolist(), group.list_of_places) for group in groups]
            self._check_can_travel(payloads)
            for group, own in zip(groups, payloads, strict=True):
                self.env_workers[group.worker_id].send(name, own)
            responses = [self.env_workers[group.worker_id].recv() for group in groups]
            failures = [response for response in responses if response.name is CommandName.FAILED]
            errors = [self._after_failed_call(failure) for failure in failures]
            if errors:
                raise errors[0]
        answers: list[Any] = [None] * len(ids)
        for group, response in zip(groups, responses, strict=True):
            for place, answer in zip(group.list_of_places, response.payload or [None] * len(group.rows), strict=True):
                answers[place] = answer
        return answers

    def _after_failed_call(self, response: EnvironmentResponse) -> Exception:
        """What a failed call raises. An exception leaves the worker usable; one that is gone is replaced."""
        entry = self._table.entries[response.worker_id]
        if self._is_gone(self.env_workers[entry.worker_id]):
            return self._recovery.fail_quietly(entry, response.payload)
        return response.payload  # type: ignore[no-any-return]

    def _check_can_travel(self, payload: Any) -> None:  # noqa: B027  (within one process it can)
        """Raise UsageError, before anything is sent, when ``payload`` cannot reach a worker. Here: everything can."""

    def _learn_specs(self, specs: Mapping[str, BehaviorSpec], worker_id: int) -> None:
        """Add a worker's specs to the manager's; UsageError when a behavior has two."""
        merge_specs(self._specs, specs, seen_in="a worker before it", now_in=f"worker {worker_id}")
        self._has_objects = any(spec.has_objects for spec in self._specs.values())
        self._row_behavior = None

    def _hear(self, news: News, worker_id: int) -> None:
        """What a worker tells besides its answers; SpecConflict when a behavior has two specs."""
        if news.specs is not None:
            self._learn_specs(news.specs, worker_id)
        env_ids: dict[tuple[str, str, str], list[int]] = {}
        for cast in news.casts:
            if (cast.env_id, cast.field) not in self._casts_told:  # else by an earlier generation of the worker
                self._casts_told.add((cast.env_id, cast.field))
                env_ids.setdefault((cast.field, cast.expected, cast.got), []).append(cast.env_id)
        generation = self._table.entries[worker_id].generation
        for (field, expected, got), ids in env_ids.items():
            self.events.add(
                ValuesCast(
                    worker_id=worker_id,
                    generation=generation,
                    env_ids=tuple(ids),
                    field=field,
                    expected=expected,
                    got=got,
                )
            )


_MOVES = frozenset(["reset", "step", "send", "recv"])
"""The calls that move the environments on: they are never made inside another call."""


class _Calling:
    """``with`` one call of a manager. What a close() meanwhile could not give back is given back at its end.

    Interrupts are held before the lock is taken, and until it was given back: none can leave it taken.
    """

    __slots__ = ("_is_outermost", "_manager", "_what")

    def __init__(self, manager: EnvManager, what: str) -> None:
        self._manager = manager
        self._what = what

    def __enter__(self) -> None:
        manager = self._manager
        if manager._closed or manager._owner_pid != os.getpid():
            manager._require_usable(self._what)
        self._is_outermost = begin_held()
        try:
            while not manager._lock.acquire(timeout=_TURN_S):
                self._look_up()
            if manager._on_their_way and self._what in _MOVES:
                manager._lock.release()
                manager._refuse_inside_a_call(self._what)
        except BaseException:
            end_held(self._is_outermost)
            raise
        manager._on_their_way.append(self._what)

    def _look_up(self) -> None:
        """While another thread has its turn: see whether the manager was closed, or a Ctrl-C came."""
        self._manager._require_open(self._what)
        with let_through():
            pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        manager = self._manager
        manager._on_their_way.pop()
        try:
            if manager._closed and not manager._on_their_way:
                manager._give_back()
        finally:
            manager._lock.release()
            end_held(self._is_outermost)
        if manager._closed and (error is None or isinstance(error, Exception)):
            raise ManagerClosed(self._what) from error
