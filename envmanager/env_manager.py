"""The abstract class EnvManager. It has the methods that trainers call, wherever the environments run.

::

    step()          policies ── send("step") ──▶ every idle worker                    kernel.policy_steps
    send(), recv()  actions ─── send("step") ──▶ the workers of these environments    kernel.row_steps
                    the steps to deliver, by the rules of Wait ◀── responses          kernel.collecting
    reset(), call() all or some workers ◀──▶ send and recv                            kernel.commands

A manager has a :class:`WorkerHost`, which starts and ends the workers. Each worker runs one or more environments.
``kernel.table`` keeps the state of each worker; ``kernel.recovery`` replaces workers that fail.

The rule: at most one step per worker is in flight, and neither another worker's error nor a Ctrl-C loses a step. A
KeyboardInterrupt is raised in a wait, in a policy, or at the end of a call. A later call returns the ready steps.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import secrets
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from envmanager.adapters.factories import pickled
from envmanager.adapters.kinds import written_as_kinds
from envmanager.data.env_rows import EnvIndex
from envmanager.data.specs import BehaviorSpec, SpecConflict, describe_value
from envmanager.data.steps import Batch, CommandName, StartReport, StepInfo
from envmanager.data.trees import Tree, snapshot
from envmanager.errors import BadAction, EnvManagerError, ManagerClosed, UsageError, WorkerError
from envmanager.kernel.calls import Calls, Use, weak_callback
from envmanager.kernel.collecting import Collector
from envmanager.kernel.commands import Commands, one_for_each
from envmanager.kernel.host import EnvWorker, FakeHost, HostContext, QueueSource, ResponseSource, StepQueue, WorkerHost
from envmanager.kernel.policy_steps import PolicyStepper
from envmanager.kernel.recovery import Recovery
from envmanager.kernel.row_steps import BatchStepper
from envmanager.kernel.table import WorkerTable
from envmanager.kernel.tasks import SourceKind, TaskBook
from envmanager.observe.episodes import Episodes
from envmanager.observe.events import EventLog, LateReplyDiscarded
from envmanager.observe.stats import ManagerStats, WorkerStats, wait_share
from envmanager.observe.tracing import Tracer
from envmanager.options import EpisodeStart, ResetConfig, RestartPolicy, Wait, plain
from envmanager.policy import Policy
from envmanager.system import interrupts
from envmanager.system.interrupts import allow_interrupts
from envmanager.tasks import Task

if TYPE_CHECKING:
    from typing_extensions import Self

    from envmanager.kernel.pool import Pool
    from envmanager.serving.server import Server
    from envmanager.serving.watch import Watch

_RESETTING, _UNDECIDED, _STEP, _SEND_RECV = Use  # constants, because in Python 3.11 ``Use.STEP`` is as slow as a call

__all__ = ["EnvManager", "EnvWorker", "ManagerStats", "StepQueue", "WorkerHost", "WorkerStats"]


class EnvManager(ABC):
    """The base class of managers, which run environments in workers. Leaving a ``with`` block closes the manager."""

    placement = ""
    """Text that says which placement was chosen for ``"auto"``, and why. Empty if the user set the placement."""
    ends_episodes = True
    """Whether every environment ends its episodes. In others, agents may end theirs while the environment goes on."""

    @abstractmethod
    def __init__(
        self,
        env_ids_of_workers: Sequence[Sequence[int]],
        *,
        kinds: Sequence[str] = (),
        wait: Wait | str | int | None = None,
        seed: int | None = None,
        restarts: RestartPolicy | None = None,
        measures: Sequence[str] = (),
        zero_copy: bool = False,
        check_values: bool = False,
        trace: str | None = None,
        record: str | None = None,
        record_observations: bool = True,
        order: str | None = None,
        episodes: EpisodeStart = "automatic",
    ):
        """Prepare the manager, without starting workers. A subclass calls this first, then ``start(host)``.

        ``env_ids_of_workers``: the environments of each worker. ``kinds``: their kind, if there are several; the name
        of each behavior is that of its kind, or begins with it and "/". ``zero_copy``: whether to return a worker's
        arrays without a copy; the host must then keep the arrays unchanged for one more step. The others are options of
        SubprocessEnvManager.
        """
        self._env_rows = EnvIndex(env_ids_of_workers)
        self.measures = tuple(measures)
        """Names of numbers in the infos at the end of an episode that count beside its return, such as successes."""
        self._wait = Wait.any() if wait is None else Wait.parse(wait)
        self._use = _UNDECIDED
        self._host: WorkerHost | None = None
        self._given_back = False
        self._kind = SourceKind.ON_CALL if episodes == "on_demand" else SourceKind.AUTOMATIC
        """What begins episodes after a reset without tasks."""
        self._order, self._record, self._record_observations = order, record, record_observations
        self.begins_on_demand = self._can_prefetch = False
        """Whether episodes can begin on demand in all workers, and whether a worker can be told of one in advance."""
        self._wake_pool: Callable[[], Any] = lambda: None
        self._servers: list[Server] = []
        self._calls = Calls(weak_callback(self._give_back))
        self._named = self._calls.named
        self._table = table = WorkerTable(self._env_rows.blocks, kinds)
        policy = RestartPolicy() if restarts is None else restarts
        self._restarts, self._check_values = policy, check_values
        if policy.keep_episodes and seed is None:
            seed = secrets.randbits(31)
        self._recovery = recovery = Recovery(table, policy, seed)
        if policy.keep_episodes:
            assert seed is not None
            keeper = pkgutil.resolve_name("envmanager.keeping.keeper:Keeper")  # which few managers need
            recovery.keeper = keeper(table, weakref.proxy(recovery), policy, seed)
        self._collector = collector = Collector(table, recovery, self._calls)
        collector.is_recorded = record is not None or order is not None
        self._policy_steps = PolicyStepper(table, recovery, self._calls, check_values=check_values)
        self._row_steps = BatchStepper(table, recovery, self._env_rows, zero_copy=zero_copy, check_values=check_values)
        self._commands = Commands(table, recovery, collector, self._env_rows, self._calls, seed)
        table.book = self._new_book(SourceKind.AUTOMATIC, None, None)
        self._leave_interrupts = interrupts.keep_handler_for(self)
        self._tracer = None if trace is None else Tracer(trace, self._env_rows.blocks)
        if self._tracer is not None:
            for entry, track in zip(table.entries, self._tracer.workers, strict=True):
                entry.times.track = track
            collector.waits.track = self._tracer.trainer
            self._calls.draw_on(self._tracer.trainer)
            recovery.events.listener = self._tracer.happened
            weakref.finalize(self, self._tracer.close)

    def start(self, host: WorkerHost) -> None:
        """Start the workers of ``host`` and receive the specs of their environments.

        If a worker cannot start, close the manager, which stops all other workers, and raise the first error.
        """
        if getattr(self.create_worker, "__func__", None) is not _create_worker:  # a test has replaced it
            host = FakeHost(weakref.proxy(self), host)
        if self._order is not None:
            workers = [list(entry.env_ids) for entry in self._table.entries]
            host = pkgutil.resolve_name("envmanager.recording.ordered:ordered")(host, self._order, workers)
        if self._record is not None:
            record = pkgutil.resolve_name("envmanager.recording.recorder:recorded")
            host = record(host, self._record, self._about_recording(host), observations=self._record_observations)
        table, recovery = self._table, weakref.proxy(self._recovery)  # which has the host
        context = HostContext(
            table.entries,
            self._calls,
            self.events,
            seats=lambda: table.book.seats,
            starts_again=lambda error: bool(recovery.starts_again(error)),
        )
        host.open(context)
        self._host = host
        for part in (self._recovery, self._collector, self._policy_steps, self._row_steps, self._commands):
            part.host = host
        self.step_queue = host.step_queue
        try:
            for entry in self._table.entries:
                host.workers.append(host.launch(entry.worker_id, 0))
            reports = host.await_start()
            for worker_id, report in reports.items():
                self._table.learn(report.specs, worker_id)
                entry = self._table.entries[worker_id]
                entry.batch_size = report.batch_size
                self._table.has_several_agents |= sum(report.max_agents.values()) > len(entry.env_ids)
            self._policy_steps.takes_partial_actions = all(report.partial_actions for report in reports.values())
            host.steps_some_rows &= all(report.steps_some_rows for report in reports.values())
            self.begins_on_demand = bool(reports) and all(report.begins_on_demand for report in reports.values())
            self._table.takes_actions = bool(reports) and all(report.takes_actions for report in reports.values())
            self._can_prefetch = self.begins_on_demand and all(report.begins_when_ready for report in reports.values())
            if self._kind is not SourceKind.AUTOMATIC:
                self._require_can_begin()
            if self._recovery.keeper is not None:
                self._require_can_keep(reports)
            if self._restarts.recycle_above_mb is not None and not host.tells_memory:
                raise UsageError(
                    "restarts.recycle_above_mb needs workers that are processes of this machine, and here they are "
                    "not: use kind: subprocess, or leave it out. recycle_after_steps counts steps instead."
                )
            self._table.counts_each |= host.is_asked
            host.have_started(self._table.specs, reports)
            if self._tracer is not None:
                self._tracer.started()
        except BaseException as error:
            was_closed = self._calls.closed
            if isinstance(error, KeyboardInterrupt):
                host.hurry()
            self.close()
            if was_closed and isinstance(error, EnvManagerError):
                raise ManagerClosed("the constructor") from error
            if isinstance(error, SpecConflict) and (kinds := written_as_kinds(host.factories)):
                error.suggest(kinds)
            if isinstance(error, WorkerError) and host.factories:
                error.suggest_one_each(self._table.entries[error.worker_id].env_ids)
            raise

    def _about_recording(self, host: WorkerHost) -> dict[str, Any]:
        """Return what a replay needs to know to make the manager again, or one of its environments."""
        factories = None
        with suppress(Exception):  # what workers in this process make may not be picklable
            factories = pickled(list(host.factories))
        return {
            "factories": factories,
            "kind": type(self).__name__,
            "n_envs": self.n_envs,
            "env_ids": [list(entry.env_ids) for entry in self._table.entries],
            "kinds": [entry.kind for entry in self._table.entries] if self._table.kinds else [],
            "seed": self._recovery.last_config.seed,
            "wait": self._wait,
            "restarts": self._restarts,
            "check_values": self._check_values,
            "measures": self.measures,
            "episodes": "automatic" if self._kind is SourceKind.AUTOMATIC else "on_demand",
        }

    # The interface for trainers.

    def create_worker(self, worker_id: int, step_queue: Any, env_factory: Any) -> EnvWorker:
        """Return a fake worker. Only tests define this method; then the manager uses the fakes and starts no worker."""
        raise NotImplementedError("real workers are made by the manager's host")

    @property
    def n_envs(self) -> int:
        """Number of environments in all workers."""
        return self._env_rows.n_envs

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of environments by name, in the order of their environments. Empty if all are of one kind."""
        return self._table.kinds

    @property
    def n_workers(self) -> int:
        """Number of workers, including any local worker."""
        return len(self._env_rows.blocks)

    @property
    def env_workers(self) -> list[Any]:
        """Workers in order of worker_id; see ``EnvWorker``."""
        return [] if self._host is None else self._host.workers

    @property
    def step_queue(self) -> StepQueue | ResponseSource:
        """Queue of the step responses of all workers. The property has a setter so that tests can replace the queue."""
        return self._some_host.step_queue

    @step_queue.setter
    def step_queue(self, step_queue: StepQueue | ResponseSource) -> None:
        self._some_host.step_queue = step_queue
        if not isinstance(step_queue, ResponseSource):
            step_queue = QueueSource(step_queue, self._calls)
        self._collector.source = step_queue

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """Specs of all behaviors that have appeared so far in any worker. More may appear later."""
        return self._table.specs

    @property
    def events(self) -> EventLog:
        """Events of the workers, such as starts, failures and replacements. See ``envmanager.observe.events``."""
        return self._recovery.events

    @property
    def episodes(self) -> Episodes:
        """Returns and lengths of finished episodes, by environment and agent. The last 10,000 are kept.

        Counting starts at the first access and ignores episodes already running then, so access the property before the
        first step. The steps that ``step()`` and ``recv()`` return are counted.
        """
        book: TaskBook = self._table.book
        if book.episodes is None:
            begun = [] if self._use in (_UNDECIDED, _RESETTING) else self._table.entries
            last = [entry.previous_step for entry in begun]
            under_way = [info for info in last if info is not None]
            book.episodes = Episodes.of_manager(under_way, self.n_envs, self.measures)
        return book.episodes

    def set_policy(self, behavior: str, policy: Policy) -> None:
        """Use ``policy`` for the agents of ``behavior`` from the next ``step()`` on.

        The behavior need not have appeared yet. Raises UsageError if the policy has no ``get_action``.
        """
        self._calls.require_usable("set_policy")
        if not callable(getattr(policy, "get_action", None)):
            raise UsageError(f"a policy needs a method get_action(steps); {describe_value(policy)} has none.")
        self._policy_steps.policies[behavior] = (
            policy if self._tracer is None else self._tracer.policy(behavior, policy)
        )

    def reset(
        self,
        config: Any = None,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | None = None,
        tasks: Any = None,
        attempts: int = 3,
        prefetch: bool | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> list[StepInfo]:
        """Begin new episodes in all workers that were not dropped. Return a StepInfo for each, sorted by worker_id.

        Steps in flight are completed and discarded. Failed workers are reset or replaced. If a worker can be neither
        reset nor replaced, raises its WorkerError; ``reset`` can be called again. Takes up to
        ``Timeouts.step_s + reset_s``, and longer if workers are replaced.

        Args:
            config: A ResetConfig or a mapping with ``seed`` and ``options``, which are then not passed themselves.
            seed: A number, or a sequence with a seed per environment.
            options: Passed to the environments' own reset.
            tasks: A list, an iterator or a TaskSource. Each episode from now on is begun with the next task, in
                whichever environment is free. If there is none left, environments rest: they have no rows.
            attempts: Number of times that a task is begun whose episodes are lost with their workers; see ``tasks``.
            prefetch: Whether the next task is drawn while an environment plays, so that it begins without a pause. By
                default it is if the number of tasks is unknown; else the last ones could wait behind slow ones.
            state: What ``state()`` has returned, perhaps in another process. Then no other argument but ``tasks`` is
                given. The episodes go on where they stood: returned are the StepInfos of the workers that waited for
                an action, and ``recv`` returns their rows. Steps that were in flight are sent again. An episode whose
                last observation differs is lost, of which an event EpisodesDiverged tells.
        """
        has_begun = False
        try:
            with self._named["reset"]:
                if state is not None:
                    if (config, seed, options, attempts, prefetch) != (None, None, None, 3, None):
                        raise UsageError("reset(state=…) takes no other argument but tasks: the state has the others.")
                    kept = importlib.import_module("envmanager.keeping.state")  # which few managers need
                    kept.require_fits(state, self._table.entries, self._recovery.keeper)
                    book = self._book_of(state, tasks)
                    has_begun, self._use, self._table.undelivered, self._table.book = True, _RESETTING, None, book
                    self._wake_pool()
                    infos: list[StepInfo] = kept.restore(state, self._table, self._recovery, self._collector, book)
                    self._commands.seed, self._use = None, _UNDECIDED
                    return infos
                config, parsed = self._commands.checked(config, seed=seed, options=options)
                book = self._book_for(tasks, parsed, attempts=attempts, prefetch=prefetch)
                has_begun, self._use, self._table.undelivered, self._table.book = True, _RESETTING, None, book
                self._wake_pool()
                infos = self._commands.reset(config, parsed)
                book.note_first(infos)
                self._use = _UNDECIDED
        except BaseException:
            if has_begun:  # even for an interrupt at the very end, because the first observations were not returned
                self._use = _RESETTING
            raise
        return infos

    def state(self) -> dict[str, Any]:
        """Return where the manager stands, with which ``reset(state=…)`` of another one goes on, as plain data.

        Its values are dicts, lists, numbers, text and arrays: the actions of the running episodes, the rows delivered
        last, the tasks, seeds, counts, ``set_attr`` values and steps in flight. An episode in which a call came after
        a step in flight is lost. Called between two calls of ``step`` or ``recv``. Raises UsageError without
        ``RestartPolicy(keep_episodes=True)``, before a reset, inside another call, if the tasks come from an iterator,
        whose place is not known, and if a call came after a ``begin`` of which ``recv`` has not told.
        """
        with self._named["state"]:
            if self._recovery.keeper is None:
                raise UsageError(
                    "state() needs the actions of the running episodes, which a manager keeps with "
                    "restarts=RestartPolicy(keep_episodes=True)."
                )
            if self._table.undelivered is not None:
                raise UsageError("the last call was interrupted before it returned: call it again before state().")
            if self._use is _RESETTING or self._table.book.is_resetting:
                raise UsageError("state() comes after reset(): call reset() first.")
            state_of = pkgutil.resolve_name("envmanager.keeping.state:state_of")
            return state_of(self._table, self._recovery)  # type: ignore[no-any-return]

    def _book_of(self, state: Mapping[str, Any], tasks: Any) -> TaskBook:
        """Return a new book for the tasks of ``state``."""
        kind, keeper, config = self._kind, self._recovery.keeper, ResetConfig(state["seed"])
        if tasks is not None:
            kind = SourceKind.TASKS
        elif kind is SourceKind.AUTOMATIC and not self._can_prefetch:
            kind, tasks = SourceKind.TASKS, keeper.tasks(config)
        has_episodes = kind is not SourceKind.AUTOMATIC or state["episodes"] is not None
        episodes = Episodes.of_manager([], self.n_envs, self.measures) if has_episodes else None
        return self._new_book(kind, tasks, episodes)

    def _book_for(self, tasks: Any, parsed: ResetConfig, *, attempts: int, prefetch: bool | None) -> TaskBook:
        """Return the book for a reset. Raises UsageError for bad arguments."""
        book: TaskBook = self._table.book
        kind = self._kind if tasks is None else SourceKind.TASKS
        keeper, is_given = self._recovery.keeper, tasks is not None
        if kind is SourceKind.AUTOMATIC and keeper is not None and not self._can_prefetch:
            kind, tasks, prefetch = SourceKind.TASKS, keeper.tasks(parsed), False
        if kind is SourceKind.AUTOMATIC:
            return self._new_book(kind, None, book.episodes)
        self._require_can_begin()
        if prefetch and not self._can_prefetch:
            raise UsageError("prefetch=True needs Gymnasium environments in all workers.")
        if not isinstance(attempts, int) or attempts < 1:
            raise UsageError(f"attempts must be a whole number of at least 1, not {attempts!r}.")
        seed = self._recovery.last_config.seed if parsed.seed is None else parsed.seed
        if is_given and seed is not None and not isinstance(seed, int):
            raise UsageError("with tasks, seed must be one number: put the seeds into the tasks.")
        if tasks is None or book.given is not tasks or self._use is not _RESETTING:
            episodes = book.episodes or Episodes.of_manager([], self.n_envs, self.measures)
            book = self._new_book(kind, tasks, episodes)
        prefetch = prefetch if self._can_prefetch else False
        book.prepare(seed=seed, options=snapshot(parsed.options), attempts=attempts, prefetch=prefetch)
        return book

    def _new_book(self, kind: SourceKind, tasks: Any, episodes: Episodes | None) -> TaskBook:
        return TaskBook(kind, tasks, self._table, weakref.proxy(self._recovery), episodes)

    def set_episodes(self, start: EpisodeStart) -> None:
        """Set the option ``episodes``, from the next ``reset`` on. Raises UsageError if the environments cannot."""
        self._calls.require_usable("set_episodes")
        if start == "on_demand":
            self._require_can_begin()
        self._kind = SourceKind.ON_CALL if start == "on_demand" else SourceKind.AUTOMATIC

    def _require_can_keep(self, reports: Mapping[int, StartReport]) -> None:
        """Raise UsageError unless episodes can be begun again in all workers, with their actions."""
        keeper = self._recovery.keeper
        keeper.has_one_agent_each = self._can_prefetch
        repeats = self._some_host.repeats_one and self.n_envs == self.n_workers
        takes = all(report.takes_actions and not report.batch_size for report in reports.values())
        if not self.begins_on_demand or not (repeats or (takes and self._some_host.steps_some_rows)):
            if self._restarts.keep_episodes == "if_possible":
                self._recovery.keeper = None
                return
            raise UsageError(
                "keep_episodes needs episodes that begin again from a seed, one by one: Gymnasium's, PettingZoo's, "
                "dm_env's, of an Environment with can_rest, of a Godot game in engines of one arena. Vector "
                "environments, EnvPool, ML-Agents, other engines move theirs together or are seeded once: leave it out."
            )

    def _require_can_begin(self) -> None:
        if not self.begins_on_demand:
            raise UsageError(
                "these environments cannot begin episodes on demand, as tasks, begin() and a vector environment with "
                'autoreset_mode="Disabled" need. It takes Gymnasium\'s (its SyncVectorEnv and AsyncVectorEnv too), '
                "PettingZoo's, dm_env's, Godot's with this library's addon of today, or an Environment with can_rest. "
                "Others, as EnvPool and ML-Agents, begin their next episode by themselves: leave these options out."
            )

    @property
    def tasks(self) -> TaskBook:
        """The tasks since the last reset: ``done``, ``results``, ``running`` and ``n_lost``.

        Raises UsageError if episodes do not begin on demand.
        """
        book: TaskBook = self._table.book
        if book.is_automatic:
            raise UsageError('there are no tasks: call reset(tasks=…), or make the manager with episodes="on_demand".')
        return book

    def begin(self, env_ids: Any, tasks: Sequence[Task | Mapping[str, Any] | int] | None = None) -> None:
        """Begin episodes. Needs ``episodes="on_demand"``.

        Returns at once. The worker is told with the next ``send`` to one of its environments, or in ``recv`` if none of
        them takes an action or no worker has a step. ``recv`` returns the first observations like other rows, with
        ``first`` true. If an environment plays, its episode is cut: it counts neither as finished nor as lost. Raises
        UsageError, before anything begins, for unknown env_ids and bad tasks, between ``step()`` calls, with the tasks
        of a reset, and if ``recv`` has not returned the first observation of the last ``begin``.

        Args:
            env_ids: The environments in which an episode begins.
            tasks: A Task, options or a seed for each of these. By default, seeds are derived.
        """
        with self._named["begin"]:
            self._use.require(_SEND_RECV)
            book = self._table.book
            if not book.is_on_call:
                raise UsageError('begin() needs a manager with episodes="on_demand", and a reset without tasks.')
            ids = self._commands.ids(env_ids).tolist()
            given = [Task()] * len(ids) if tasks is None else list(tasks)
            if len(given) != len(ids):
                raise UsageError(f"begin() got {len(given)} tasks for {len(ids)} environments.")
            book.add(ids, [Task.of(each) for each in given], may_cut=not self._some_host.moves_all)

    def pool(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None, cancel_s: float = 1.0) -> Pool:
        """Reset the environments, beginning no episode, and return a pool of them for coroutines; see ``Pool``.

        Until the next reset, the pool alone begins and steps episodes. Raises UsageError if the environments cannot
        begin episodes on demand, or if those of a worker move together.

        Args:
            seed: Number from which the seeds of tasks without one are derived.
            options: Options for the environments' own reset, over which those of a task are merged.
            cancel_s: Time for which a cancelled step may go on before its worker is replaced. The restart does not
                count. A worker in which other episodes play is replaced only if they are kept.
        """
        from envmanager.kernel.pool import Pool  # asyncio is slow to import

        if self._table.kinds:
            raise UsageError(
                "a pool lends any free environment to an episode, so it needs environments of one kind: make a manager "
                "for each kind, or play tasks with a kind by reset(tasks=…)."
            )
        self.set_episodes("on_demand")
        if not self._some_host.steps_some_rows and self.n_envs != self.n_workers:
            raise UsageError(
                "a pool needs environments that are stepped one by one, not vectors of them. Of Godot games it takes "
                "engines of one arena: n_workers=n_envs."
            )
        if self._table.has_several_agents:
            raise UsageError(
                "these environments have several agents. In a pool they play as one, whose observations and actions "
                "are mappings by agent: wrap each in Together, of envmanager.adapters.together."
            )
        self._kind = SourceKind.POOL
        try:
            self.reset(seed=seed, options=options)
        finally:
            self._kind = SourceKind.ON_CALL
        self._collector.source.returns_full = True
        parts: Any = {"collector": self._collector, "recovery": self._recovery, "calls": self._calls}
        pool = Pool(self, cancel_s, self._env_rows.each_alone(), book=self.tasks, table=self._table, **parts)
        self._wake_pool = weak_callback(pool.wake)
        return pool

    def step(self, wait: Wait | str | int | None = None) -> list[StepInfo]:
        """Send actions to idle workers, wait for steps, and return StepInfos of ready workers, as ``wait`` specifies.

        Each policy is called at most once, for all acting agents of the idle workers. Raises UsageError before a reset
        or without a policy. Raises BadAction if an action violates its spec; then no action was sent. Raises the
        WorkerError of a failed worker; the next call returns the steps of other workers.

        Args:
            wait: A Wait, "any", "all" or a number of workers, in place of the manager's own.
        """
        while True:
            made: list[StepInfo] = self._made("step", _STEP, wait)
            if self._table.undelivered is made:  # else another thread has returned it
                self._table.undelivered = None  # no call or jump follows, so no interrupt or thread can intervene
                return made  # type: ignore[no-any-return]

    def send(self, actions: Tree, env_ids: Any) -> None:
        """Send actions to some environments, without waiting for their steps.

        Raises BadAction, before anything is sent, for invalid actions or env_ids, or if ``recv`` has not yet returned
        the last step of a worker involved. Raises the error of a worker that was given up, and UsageError before a
        reset or for multi-agent environments.

        Args:
            actions: An array or a tree of arrays. Row i is for ``env_ids[i]``.
            env_ids: The environments to step.
        """
        bracket = self._named["send"]
        bracket.begin()
        try:
            is_begun = self._use is _SEND_RECV
            if not is_begun:
                self._use.require(_SEND_RECV)
            if self._table.undelivered is not None:
                raise BadAction(
                    "the last recv() was interrupted before it returned its batch. Call recv() first, which returns "
                    "it. Nothing was sent."
                )
            begin = None if is_begun else partial(self._begin, _SEND_RECV)
            self._row_steps.send(actions, env_ids, begin)
        except BaseException as error:
            bracket.end(error)
            raise
        bracket.end()

    def recv(self, wait: Wait | str | int | None = None) -> Batch:
        """Wait for steps as ``wait`` specifies, and return a Batch of the ready steps.

        If called right after a reset, returns first observations. WorkerErrors are raised as by ``step()``. Raises
        UsageError before a reset, if no step is in flight or ready, and for multi-agent environments.

        Args:
            wait: As in ``step()``.
        """
        while True:
            made: Batch = self._made("recv", _SEND_RECV, wait)
            if self._table.undelivered is made:  # else another thread has returned it
                self._table.undelivered = None  # no call or jump follows, so no interrupt or thread can intervene
                return made  # type: ignore[no-any-return]

    def _made(self, call: str, use: Use, wait: Wait | str | int | None) -> Any:
        """Return the StepInfos (``step``) or the Batch (``recv``) that ``wait`` selects, or raise a worker's error.

        The result stays in the table until the caller clears ``undelivered``, because Python 3.10 may raise an
        interrupt right after this function has returned. The next call then returns the same result.
        """
        bracket, table = self._named[call], self._table
        while True:
            bracket.begin()
            try:
                is_begun = self._use is use
                if not is_begun:
                    self._use.require(use)
                chosen = self._wait if wait is None else wait if wait.__class__ is Wait else Wait.parse(wait)
                if table.undelivered is None:
                    book = table.book
                    if not book.is_automatic:
                        if book.is_on_call and use is _STEP:
                            raise UsageError(
                                'with episodes="on_demand", step() needs tasks to begin episodes with: call '
                                "reset(tasks=…), or use send(), recv() and begin()."
                            )
                        book.draw()
                        if chosen.max_lead is not None:
                            table.find_resting()
                    if use is _STEP:
                        self._policy_steps.send_actions(chosen, is_begun=is_begun)
                    elif not is_begun:
                        self._row_steps.offer_first_observations()
                    if not is_begun:
                        self._begin(use)
                    if book.seats.untold and use is _SEND_RECV:
                        self._row_steps.send_begins(book)
                    try:
                        if use is _STEP:
                            ready = self._collector.collect(chosen)
                            table.undelivered = self._policy_steps.infos_of(ready)
                        else:
                            one_kind = bool(table.kinds)
                            ready = self._collector.collect(chosen, max_lead=chosen.max_lead, one_kind=one_kind)
                            table.undelivered = self._row_steps.batch_of(ready)
                    except WorkerError as error:
                        table.undelivered = error
                    else:
                        if book.episodes is not None or book.seats.n_first:
                            if use is _STEP:
                                book.add_all(table.undelivered)
                            else:
                                book.add_batch(self._row_steps.behavior, table.undelivered)
                            if book.untold:
                                book.tell()
                made = table.undelivered
                is_error = isinstance(made, WorkerError)
            except BaseException as error:
                bracket.end(error)
                raise
            bracket.end()
            if table.undelivered is made and made is not None:
                break  # else another thread has returned it
        if is_error:
            table.undelivered = None
            raise made
        return made

    def _begin(self, use: Use) -> None:
        """Set the ``use`` allowed until a reset."""
        self._use, episodes = use, self._table.book.episodes
        if use is _SEND_RECV and episodes is not None:
            episodes.begin_rows(self.n_envs, goes_on=self._table.book.is_restored)

    def call(
        self,
        name: str | Callable[..., Any],
        /,
        *args: Any,
        env_ids: Any = None,
        repeat: bool | None = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``env.name(*args, **kwargs)`` in all environments, or in ``env_ids`` only. Return the results in order.

        A step in flight is completed first, within ``Timeouts.call_s``. Raises EnvRaised if a call raises; the worker
        stays usable. Raises another WorkerError if a worker fails.

        Args:
            name: A method's name, or a function: sent with cloudpickle, and run as ``name(env, *args, **kwargs)``.
            *args: Arguments of the method or function.
            env_ids: The environments, by default all. A method's own parameter of this name is passed by position, and
                so is one named ``repeat``.
            repeat: Whether it may be repeated in its place when the present episode is begun again elsewhere, with
                ``RestartPolicy(keep_episodes=True)``. If not, and if it raises, that episode is not kept. None
                says that it only reads, so that there is nothing to repeat.
            **kwargs: Other arguments of it.
        """
        return self._ask(CommandName.CALL, env_ids, lambda rows, _: (name, args, rows, kwargs), is_repeatable=repeat)

    @property
    def keeps_episodes(self) -> bool:
        """Whether running episodes can be begun again, with their actions."""
        return self._recovery.keeper is not None

    def positions(self, env_ids: Any = None) -> list[Task | None]:
        """Return where each environment, or each of ``env_ids``, stands: a task with seed, options and actions so far.

        An episode that is begun with it goes on from the row that was delivered last, if the environment is repeatable;
        see ``check_environment``. The task has each ``call`` and ``set_attr`` amid the episode too. None for an
        environment that rests or is about to begin. Raises UsageError without ``RestartPolicy(keep_episodes=True)``,
        with which a manager keeps the actions, and for an episode that it does not keep.
        """
        self._calls.require_usable("positions")
        keeper = self._recovery.keeper
        if keeper is None:
            raise UsageError(
                "positions() needs the actions of the running episodes, which a manager keeps with "
                "restarts=RestartPolicy(keep_episodes=True)."
            )
        asked = map(self._table.book.seats.all.__getitem__, self._commands.ids(env_ids).tolist())
        return [keeper.position(self._table.entries[seat.worker_id], seat.row) for seat in asked]

    def get_attr(self, name: str, env_ids: Any = None) -> list[Any]:
        """Return the attribute ``name`` of each environment, or each of ``env_ids``. Errors are as in ``call``."""
        return self._ask(CommandName.GET_ATTR, env_ids, lambda rows, _: (name, rows))

    def set_attr(self, name: str, values: Any, env_ids: Any = None) -> None:
        """Set the attribute ``name`` in all environments, or only in ``env_ids``. Errors are as in ``call``.

        A Sequence, such as a list, or an array with at least one axis must have one value for each environment. Text,
        bytes, a mapping, an array without axes or an object that cannot be indexed is one value for all. To set the
        same list in n environments, pass ``[the_list] * n``. Raises UsageError for a wrong number of values, and for
        any other object with ``len()`` and ``[i]``.
        """
        ids = self._commands.ids(env_ids)
        each = one_for_each(values, len(ids))
        self._ask(CommandName.SET_ATTR, ids, lambda rows, places: (name, [each[k] for k in places], rows))

    def render(self, env_ids: Any = None) -> list[Any]:
        """Return the results of ``env.render()`` in all environments, or in ``env_ids``. Errors are as in ``call``."""
        return self._ask(CommandName.RENDER, env_ids, lambda rows, _: rows)

    def stats(self) -> ManagerStats:
        """Return a ManagerStats with the counters and times of all workers and a verdict on what limits the speed."""
        self._calls.require_owner("stats")
        entries, host, policies = self._table.entries, self._some_host, self._policy_steps.policies
        known = ManagerStats(
            tuple(host.describe(entry, entry.stats()) for entry in entries),
            steps=sum(entry.steps for entry in entries),
            env_steps=self._table.env_steps,
            late_replies=self.events.count(LateReplyDiscarded),
            restarts=sum(entry.restarts for entry in entries),
            steps_lost=self._recovery.steps_lost,
            **({} if self._recovery.keeper is None else self._recovery.keeper.counts()),
            wait_share=wait_share([entry.times for entry in entries], self._collector.waits),
            placement=self.placement,
            random_policy=self._use is _STEP and all(getattr(each, "is_random", False) for each in policies.values()),
        )
        return host.describe_all(known)

    def serve(
        self, port: int = 0, host: str = "127.0.0.1", token: str | None = None, *, episodes: Episodes | None = None
    ) -> Server:
        """Serve a page that shows the workers at work, and metrics for Prometheus, until the manager is closed.

        Return the server; its ``url`` is the page's address, which has the ``token`` that every request needs.
        ``port``: 0 means a free one. ``host``: the address to listen on; ``"0.0.0.0"`` lets other machines in.
        ``token``: ASCII text, or None for one made by chance. ``episodes``: the counters to show, if the trainer has
        its own; else ``manager.episodes``. Raises UsageError if the server cannot listen there.
        """
        self._calls.require_usable("serve")
        watch = self.watched(episodes)
        make_server = pkgutil.resolve_name("envmanager.serving.server:Server")
        with interrupts.defer_interrupts():
            server: Server = make_server(watch, port, host, token)
            self._servers.append(server)
            weakref.finalize(self, server.close)
        if self._calls.closed:  # by another thread
            server.close()
        return server

    def watched(self, episodes: Episodes | None = None) -> Watch:
        """Return the numbers that ``serve`` shows, for a server of another kind. It does not keep the manager alive."""
        counted = weakref.proxy(self.episodes) if episodes is None else episodes
        parts = (self._table, self._calls, self._collector.waits, counted)
        made: Watch = pkgutil.resolve_name("envmanager.serving.watch:Watch")(weakref.ref(self), *parts)
        return made

    def move(self, worker_ids: Iterable[int]) -> None:
        """Start healthy workers again elsewhere: in other processes, which on a cluster may be on other nodes.

        With ``keep_episodes`` their episodes go on there, as soon as a step in flight has been delivered. Otherwise
        each is replaced as by ``recycle_after_steps``. No other worker waits. Does not wait for the new workers, and
        does nothing for those that are being replaced, or were given up. Raises UsageError for unknown worker_ids.
        """
        with self._named["move"]:
            given = [plain(worker_id) for worker_id in worker_ids]
            if not all(isinstance(each, int) and 0 <= each < self.n_workers for each in given):
                raise UsageError(f"move() takes worker_ids from 0 to {self.n_workers - 1}, not {given}.")
            for worker_id in given:
                self._recovery.move(self._table.entries[worker_id])

    def stop_waiting(self, within_s: float = 0.0) -> None:
        """Let ``step`` and ``recv`` wait for at most ``within_s`` seconds from now on; then they raise CallStopped.

        A signal handler or another thread may call this, before ``state()`` and ``close()``. No step is lost: ``state``
        has those in flight. Then ``close`` gives busy workers 0.3 s. Environments in this process are not stopped.
        """
        if self._host is not None:
            self._collector.stops_at = min(self._collector.stops_at, time.monotonic() + within_s)
            self._host.hurry()

    def close(self) -> None:
        """Stop all workers and release all resources, within ``Timeouts.close_s``. May be called repeatedly.

        A call in progress (in another thread, or one whose policy closes the manager) raises ManagerClosed. The memory
        that the call uses is released when the call ends. Does nothing in a process forked from the manager's process.
        """
        if self._calls.owner_pid != os.getpid():
            return
        self._calls.closed = True  # a call that waits in another thread now raises ManagerClosed
        self._leave_interrupts()
        if self._host is not None:
            self._host.wake()
        self._wake_pool()
        for server in self._servers:
            server.close()
        self._calls.end(None if self._host is None else self._host.stop)

    def __repr__(self) -> str:
        state = "closed" if self._calls.closed else "open"
        return f"<{type(self).__name__}: {self.n_envs} environments over {self.n_workers} workers, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Internals.

    def _ask(self, name: CommandName, env_ids: Any, payload: Callable[..., Any], **how: bool | None) -> list[Any]:
        """Send a command; see ``Commands.ask``. It may have read what coroutines of a pool wait for."""
        try:
            return self._commands.ask(name, env_ids, payload, **how)
        finally:
            self._wake_pool()

    @property
    def _some_host(self) -> WorkerHost:
        if self._host is None:
            raise UsageError(f"{type(self).__name__} has no workers: its constructor must call start(host).")
        return self._host

    def _give_back(self) -> None:
        """Release the arrays, the host and the trace file. Run by ``close()``, or at the end of a call in progress."""
        self._table.clear()  # with zero_copy the table's arrays would keep the shared memory alive
        if not self._given_back:
            with allow_interrupts():
                if self._host is not None:
                    self._host.close()
            if self._tracer is not None:
                self._tracer.close()
            self._given_back = True


_create_worker = EnvManager.create_worker
