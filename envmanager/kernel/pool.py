"""A pool of a manager's environments for coroutines, each of which plays one episode in one environment.

::

    begin ──▶ a free environment ── manager.begin ──▶ first observation
    step  ── manager.send ──▶ worker ──▶ the source rings ── manager.recv, without a wait ──▶ the coroutine goes on
    the end of the block, a cancellation ──▶ the environment is free, once its worker has responded

All of it runs in the event loop of the coroutines. No task is made, and nothing waits for a response in a call.
The rule: each environment is free, or held by one episode, or in a worker that is in use for neither: one that has yet
to respond to an episode that was left, or is being replaced, or was given up. A worker that is to be recycled gets no
episodes, unless none goes on for long: those that it plays may wait for the one that waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec, object_array
from envmanager.data.steps import Batch
from envmanager.data.trees import is_foreign, map_tree, take_rows
from envmanager.errors import (
    BadAction,
    EpisodeNotBegun,
    LostEpisode,
    ManagerClosed,
    ServerFull,
    UsageError,
    WorkerError,
)
from envmanager.kernel.calls import Calls
from envmanager.kernel.collecting import Collector
from envmanager.kernel.play import Play, PlayOptions
from envmanager.kernel.players import Player, Table
from envmanager.kernel.recovery import Recovery
from envmanager.kernel.seats import SeatState
from envmanager.kernel.table import RECYCLED, Entry, WorkerState, WorkerTable
from envmanager.kernel.tasks import TaskBook
from envmanager.observe.events import PoolShrunk
from envmanager.options import Wait
from envmanager.system.interrupts import defer_interrupts
from envmanager.tasks import Task

if TYPE_CHECKING:
    from typing_extensions import Self

_NOW = Wait.any(timeout_s=0)
_FIRST_TRY_S, _LONGEST_TRY_S = 0.05, 0.75
"""First and longest time (s) before an environment is tried again whose server was full."""
PATIENCE_S = 30.0
"""Time (s) without a response after which a worker that is to be recycled takes an episode that waits."""

Step = tuple[Any, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info."""


class Episode:
    """An episode in an environment of a pool, which it holds while its ``async with`` block runs."""

    def __init__(self, pool: Pool, task: Task) -> None:
        self.task = task
        self.obs: Any = None
        """The last observation."""
        self.info: dict[str, Any] = {}
        """The last info. Empty unless the manager has ``infos=True``, or observations or actions are objects."""
        self.is_over = self.terminated = False
        """Whether the episode was terminated or truncated; ``terminated`` says which."""
        self.total, self.length = 0.0, 0
        """Sum of the rewards, and number of steps, so far."""
        self.version = 0
        """Version of the policy that decides the next steps, a whole number of the user's."""
        self.versions: list[int] = []
        """The version of the policy at each step."""
        self.waited_s = self.stepped_s = 0.0
        """Time until an environment was free, and in its reset and steps."""
        self.env_id: int | None = None
        """The environment that plays; None before and after the block, and once its worker is replaced."""
        self.lost: LostEpisode | None = None
        """Error that says why the episode was lost, if it was."""
        self.has_begun = False
        """Whether the first observation has arrived."""
        self._is_entered = self._is_cancelled = False
        self._pool = pool
        self._awaited: asyncio.Future[Step] | None = None
        """Response that the coroutine awaits, or the environment."""

    @property
    def position(self) -> Task | None:
        """The task that begins where the episode stands; see ``EnvManager.positions``. None if it does not play."""
        if self.env_id is None:
            return None
        (task,) = self._pool._manager.positions([self.env_id])
        return task  # type: ignore[no-any-return]

    async def __aenter__(self) -> Self:
        """Wait for a free environment, begin the episode there, and wait for its first observation, ``obs``.

        Raises LostEpisode if the worker fails meanwhile, EpisodeNotBegun if the episode ends within the task's actions,
        and the error of the last worker if all were given up.
        """
        if self._is_entered:
            raise UsageError("an episode can be entered once: call begin() for another one.")
        self._is_entered = True
        await self._pool._enter(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool._leave(self)

    async def step(self, action: Any) -> Step:
        """Take a step with one action. Return observation, reward, terminated, truncated and info, as Gymnasium does.

        Raises LostEpisode if the worker failed; BadAction for an invalid action, after which the episode goes on; and
        UsageError outside of the block, after the end, and beside another ``step`` of the same episode. If the call is
        cancelled, the episode takes no more steps.
        """
        began = time.perf_counter()
        step = await self._pool._step(self, action)
        self.stepped_s += time.perf_counter() - began
        self.total += step[1]
        self.length += 1
        self.versions.append(self.version)
        return step

    async def play_each(self, agents: Mapping[Any, Callable[[Player], Awaitable[Any]]]) -> dict[Any, Any]:
        """Let coroutines play the agents of an environment that is wrapped in Together. Return what they return.

        Raises the error of the first that raises one, which cancels the others, and UsageError if no coroutine plays an
        agent that is to act.

        ``agents``: for each, the coroutine function that a Player is passed to.
        """
        return await Table(self, agents).play()


class Pool:
    """The environments of a manager, for coroutines of one event loop at a time. ``EnvManager.pool`` makes it."""

    def __init__(
        self,
        manager: Any,
        cancel_s: float,
        groups: Sequence[Any],
        *,
        book: TaskBook,
        table: WorkerTable,
        collector: Collector,
        recovery: Recovery,
        calls: Calls,
    ) -> None:
        """Take a manager right after a reset that began no episode. ``book`` and the rest are its parts."""
        self._manager, self._cancel_s, self._book, self._table = manager, cancel_s, book, table
        self._collector, self._recovery, self._calls = collector, recovery, calls
        self._entries = [entry for entry in table.entries for _ in entry.env_ids]
        self._groups = groups
        """What the manager takes for the env_id of each environment."""
        self._free = dict.fromkeys(range(manager.n_envs))
        """Environments that no episode holds. They cannot be taken while their worker is being replaced."""
        self._waiting: dict[Episode, None] = {}
        """Episodes that wait for a free environment, in the order of their coming."""
        self._held: dict[int, Episode] = {}
        self._left: dict[int, float] = {}
        """Environments whose episode was left while it played, and whose worker has yet to respond, with the time
        (monotonic seconds) from which on the worker is replaced; never if the step in flight is not theirs."""
        self._queued: dict[int, dict[int, Any]] = {}
        """Actions by env_id, by worker_id, that wait until the worker has responded to another step."""
        self._full: dict[int, None] = {}
        """Environments whose server had no room for another session when an episode was to begin. While episodes wait,
        one of them is tried again from time to time."""
        self._full_since = math.inf
        """Time (monotonic seconds) since which no episode plays, because all servers are full."""
        self._try_at, self._try_s = 0.0, _FIRST_TRY_S
        self._until_over: list[asyncio.Future[None]] = []
        self._n_awaited = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._is_coming = False
        self._timer: asyncio.TimerHandle | None = None
        self._quiet_until = 0.0

    def begin(self, task: Task | Mapping[str, Any] | int | None = None) -> Episode:
        """Return an episode of ``task`` for an ``async with`` block, which waits for a free environment.

        A task is a Task, a mapping of options for the environment's ``reset``, or a seed.
        """
        return Episode(self, Task() if task is None else Task.of(task))

    def play(
        self,
        tasks: Any,
        agent: Callable[[Episode], Awaitable[Any]],
        *,
        attempts: int = 3,
        timeout_s: float | None = None,
        concurrency: int | None = None,
        group: int | None = None,
        keep: int | None = None,
        max_policy_lag: int | None = None,
        done_ids: Container[Any] = (),
        state: Mapping[str, Any] | None = None,
    ) -> Play:
        """Play each task once, and return an asynchronous iterator of the results, as they come; see ``Play``.

        A task that was lost ``attempts`` times is a result with its ``error``. The iterator raises the source's errors,
        the error of the last worker if all were given up, and an error of the agent's code if no rollout has ended yet.

        Args:
            tasks: A list or another iterable of tasks, or an object with ``next_task``, as for ``EnvManager.reset``.
                Such an object is asked with env_id -1.
            agent: A coroutine function that plays the episode, which has begun, and returns anything picklable. If it
                raises, or the episode is lost, the task is played again with the same seed and options.
            attempts: Number of times that a task is begun.
            timeout_s: Time that the agent may take for one episode.
            concurrency: Number of episodes that play at once, by default one in each environment.
            group: Number of siblings of each task, which are delivered together, as a GroupResult. Tasks with a
                ``group`` of their own are siblings of those before and after them with an equal one.
            keep: Number of siblings with which a group is complete. The others are cancelled.
            max_policy_lag: Number of versions that the policy of a step may be behind ``Play.version`` when its result
                is delivered. An older result is played again, or lost with StalePolicy.
            done_ids: The ids (of labelled groups, the labels) of tasks to skip.
            state: What ``Play.state`` of another run returned, to go on from there with the same tasks.
        """
        options = PlayOptions(
            attempts=attempts,
            timeout_s=timeout_s,
            concurrency=self.n_envs if concurrency is None else concurrency,
            group=group,
            keep=keep,
            max_policy_lag=max_policy_lag,
        )
        return Play(self, tasks, agent, options, done_ids, state)

    @property
    def n_envs(self) -> int:
        """Number of environments of the manager."""
        return len(self._entries)

    @property
    def specs(self) -> Mapping[str, BehaviorSpec]:
        """The spaces of the agents, by behavior. Empty if observations and actions are objects."""
        return self._table.specs

    @property
    def seed(self) -> int | None:
        """The number from which the seeds of tasks without one are derived, if there is one."""
        return self._book.seed

    async def until_over(self) -> None:
        """Listen until the manager is closed or reset, then raise ManagerClosed or UsageError."""
        closing: asyncio.Future[None] = self._join().create_future()
        self._until_over.append(closing)
        try:
            await closing
        finally:
            self._until_over.remove(closing)
            self._part()

    def __repr__(self) -> str:
        n_free = sum(self._entries[env_id].is_nominal for env_id in self._free)
        n_out = sum(len(each.env_ids) for each in self._table.entries if each.error is not None)
        more = f", {len(self._full)} without a session on their server" if self._full else ""
        more += f", {n_out} of {self.n_envs} out" if n_out else ""
        return f"<{type(self).__name__}: {len(self._held)} episodes, {n_free} environments free{more}>"

    # What episodes do.

    async def _enter(self, episode: Episode) -> None:
        self._require_loop()
        began = time.perf_counter()
        try:
            is_first, free_at = False, began
            while not episode.has_begun:
                while episode.env_id is None:  # again if its worker failed before the coroutine could go on
                    episode.lost = None
                    await self._take(episode, is_first=is_first)
                free_at = time.perf_counter()
                self._manager.begin([episode.env_id], [episode.task])
                try:
                    await self._response_to(episode)
                except EpisodeNotBegun as error:
                    if getattr(error.failure, "type_name", "") != ServerFull.__name__:
                        raise
                    self._set_aside(episode, error)
                    is_first = True
                else:
                    episode.has_begun = True
            episode.waited_s, episode.stepped_s = free_at - began, time.perf_counter() - free_at
        except BaseException:
            self._leave(episode)
            raise

    async def _take(self, episode: Episode, *, is_first: bool) -> None:
        """Wait for a free environment for an episode. The first that waits is the first to get one."""
        if not self._waiting:
            entries = self._entries
            usable = (each for each in self._free if entries[each].is_nominal and not entries[each].is_old)
            env_id = next(usable, None)
            if env_id is not None:
                if self._entries[env_id].state is not WorkerState.IDLE:
                    env_id = next((each for each in usable if self._entries[each].state is WorkerState.IDLE), env_id)
                self._assign(env_id, episode)
                return
        self._require_some_worker()
        try:
            if is_first:  # it has waited before
                self._waiting = {episode: None, **self._waiting}
            else:
                self._waiting[episode] = None
            if self._full:
                self._look_soon()
            await self._response_to(episode)
        finally:
            self._waiting.pop(episode, None)

    def _set_aside(self, episode: Episode, error: EpisodeNotBegun) -> None:
        """Take its environment, whose server is full, from an episode, which waits for another one.

        Raises LostEpisode if all servers have been full for ``start_s``, and none is because of an episode that plays.
        """
        now, env_id = time.monotonic(), episode.env_id
        assert env_id is not None
        del self._held[env_id]
        episode.env_id, self._full[env_id] = None, None
        self._try_at, self._try_s = now + self._try_s, min(2 * self._try_s, _LONGEST_TRY_S)
        is_idle = not self._left and not any(each.has_begun for each in self._held.values())
        self._full_since = min(self._full_since, now) if is_idle else math.inf
        if now - self._full_since > self._collector.source.start_s:
            self._full_since, cause = math.inf, error.failure or error
            for each in self._waiting:
                _answer(each, LostEpisode(cause, task=each.task, env_id=env_id))
            raise LostEpisode(cause, task=episode.task, env_id=env_id)

    def _require_some_worker(self) -> None:
        errors = [entry.error for entry in self._table.entries if entry.error is not None]
        if len(errors) == len(self._table.entries):
            raise errors[-1].with_traceback(None)

    async def _step(self, episode: Episode, action: Any) -> Step:
        self._require_loop()
        if episode.lost is not None:
            raise episode.lost.with_traceback(None)
        if episode.is_over or episode._is_cancelled or episode._awaited is not None:
            state = "is over" if episode.is_over else "awaits another step, or one that was cancelled"
            raise UsageError(f"the episode {state}: it takes no step.")
        env_id = episode.env_id
        if env_id is None:
            raise UsageError("the episode takes no step outside of its `async with` block.")
        self._send(self._entries[env_id], env_id, _row_of(action, next(iter(self._table.specs.values()), None)))
        return await self._response_to(episode)

    def _send(self, entry: Entry, env_id: int, row: Any) -> None:
        """Send an action, or queue it if the worker has another step in flight. Raises BadAction."""
        with defer_interrupts():
            if entry.state is WorkerState.IN_FLIGHT or entry.state is WorkerState.READY:
                self._queued.setdefault(entry.worker_id, {})[env_id] = row
            elif entry.is_nominal:
                self._manager.send(row, self._groups[env_id])
            # else the failure was not yet told to the episode

    async def _response_to(self, episode: Episode) -> Step:
        """Wait for the response to an episode, or for its environment."""
        awaited: asyncio.Future[Step] | None = None
        try:
            with defer_interrupts():
                awaited = episode._awaited = self._join().create_future()
            return await awaited
        except asyncio.CancelledError:
            episode._is_cancelled = True
            raise
        finally:
            with defer_interrupts():
                if awaited is not None and awaited.done() and not awaited.cancelled():
                    awaited.exception()  # else the loop would report that no coroutine has seen it
                if episode._awaited is not None:
                    episode._awaited = None
                    self._part()

    def _leave(self, episode: Episode) -> None:
        """Give back the environment of an episode, unless it was lost. It is free once its worker has responded."""
        with defer_interrupts():
            env_id, episode.env_id = episode.env_id, None
            if env_id is None:
                return
            del self._held[env_id]
            queued = self._queued.get(self._entries[env_id].worker_id, {})
            awaited = episode._awaited
            is_cancelled = episode._is_cancelled or (
                awaited is not None and (awaited.cancelled() or not awaited.done())
            )
            is_sent = queued.pop(env_id, queued) is queued and is_cancelled
            self._book.withdraw(env_id)
            self._release(env_id, time.monotonic() + self._cancel_s if is_sent else math.inf)
            if is_sent and env_id in self._left:
                self._look_soon()  # which sets the timer

    def _assign(self, env_id: int, episode: Episode) -> None:
        with defer_interrupts():
            self._free.pop(env_id, None)
            episode.env_id, self._held[env_id] = env_id, episode

    def _release(self, env_id: int, cancel_at: float = math.inf) -> None:
        """Give an environment that no episode holds to the first episode that waits, once it can begin another."""
        entry = self._entries[env_id]
        cancel_at = self._left.pop(env_id, cancel_at)
        if not entry.is_nominal or env_id in self._held:
            return
        if entry.state is not WorkerState.IDLE and self._book.seats.all[env_id].state is not SeatState.RESTS:
            self._left[env_id] = cancel_at
            return
        if not entry.is_old and self._give(env_id):
            return
        self._free[env_id] = None
        is_over = self._calls.closed or self._table.book is not self._book
        rests = entry.state is WorkerState.IDLE and self._held.keys().isdisjoint(entry.env_ids)
        if entry.is_old and rests and not is_over:
            self._recovery.recycle(entry)
            self._look_soon()

    def _give(self, env_id: int) -> bool:
        """Give an environment to the first episode that waits. Return whether there was one."""
        for episode in self._waiting:
            if episode._awaited is not None and not episode._awaited.done():
                del self._waiting[episode]
                self._assign(env_id, episode)
                _answer(episode, (None, 0.0, False, False, {}))
                return True
        return False

    # What the manager has for them.

    def require_usable(self) -> None:
        """Raise ManagerClosed if the manager is closed, and UsageError if it was reset."""
        self._calls.require_usable("a call of a pool")
        if self._table.book is not self._book:
            raise UsageError("this pool has ended with a later reset() or pool() of its manager.")

    def _require_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        self.require_usable()
        if self._loop not in (None, loop):
            raise UsageError("the pool is in use in another event loop: use one loop, or a manager for each.")
        return loop

    def _join(self) -> asyncio.AbstractEventLoop:
        """Listen to the source while coroutines wait, so that nothing is left in their event loop afterwards."""
        loop = self._require_loop()
        if self._loop is None:
            self._loop, self._is_coming = loop, False
            self._stop_listening = self._collector.source.listen(loop, self._look)
            self._look_soon()  # for what has happened since
        elif self._collector.source.steps_when_asked or self._book.seats.untold or self._table.unusual:
            self._look_soon()
        self._n_awaited += 1
        return loop

    def _part(self) -> None:
        self._n_awaited -= 1
        if self._n_awaited == 0:
            if self._stop_listening is not None:
                self._stop_listening()
            if self._timer is not None:
                self._timer.cancel()
            self._loop = self._stop_listening = self._timer = None

    def wake(self) -> None:
        """Look at the manager soon, which was closed or reset, perhaps in another thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._look)

    def _look_soon(self) -> None:
        if self._loop is not None and not self._is_coming:
            self._is_coming = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Give what has arrived to the episodes, until nothing more is there."""
        self._is_coming = False
        if self._loop is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        is_over = True
        try:
            self.require_usable()
            is_over = False
            with defer_interrupts():  # what recv has returned must reach the episodes
                while self._receive():
                    pass
                if self._left:
                    self._end_cancelled()
            self._require_some_worker()
        except Exception as error:
            for episode in [*self._waiting, *self._held.values()]:
                _answer(episode, error)
            for closing in self._until_over:
                if (is_over or isinstance(error, ManagerClosed)) and not closing.done():
                    closing.set_exception(error)
            return
        if self._full and self._waiting and time.monotonic() >= self._try_at:
            env_id = next(iter(self._full))
            del self._full[env_id]
            self._release(env_id)
        entries, free = self._entries, list(self._free) if self._waiting else []
        for env_id in free:
            if entries[env_id].is_old and entries[env_id].state is WorkerState.IDLE:
                self._release(env_id)  # its worker was moved after the episode had been left
        old = [each for each in free if entries[each].is_old and entries[each].is_nominal]
        if old and time.monotonic() >= self._quiet_until:
            self._give(old[0])
        quiet_until = self._quiet_until if old else math.inf
        quiet_until = min(quiet_until, self._try_at if self._full and self._waiting else math.inf)
        due_at = min(self._recovery.next_start_at(), self._collector.source.due_at(), quiet_until)
        due_s = min([due_at, *self._left.values()]) - time.monotonic()
        if due_s < math.inf:
            self._timer = self._loop.call_later(max(0.001, due_s), self._look)

    def _end_cancelled(self) -> None:
        """Replace workers in which a cancelled step goes on for too long, unless that would lose other episodes."""
        now = time.monotonic()
        for env_id in [env_id for env_id, cancel_at in self._left.items() if cancel_at <= now]:
            entry = self._entries[env_id]
            is_alone = entry.log is not None or self._held.keys().isdisjoint(entry.env_ids)
            if env_id in self._left and not (is_alone and self._recovery.abandon(entry, env_id)):
                self._left[env_id] = now + self._cancel_s

    def _receive(self) -> bool:
        """Take the responses that are there. Return whether there may be more."""
        try:
            batch = self._manager.recv(_NOW)
        except WorkerError as failure:  # the worker's entry has it, and the next batch shows it to the episodes
            if failure.worker_id >= 0 and self._table.entries[failure.worker_id].error is failure:
                self._recovery.events.add(self._shrunk(failure))
            return True
        for row, env_id in enumerate(batch.env_ids.tolist()):
            if not batch.lost[row]:
                self._deliver(env_id, batch, row)
        if len(batch):
            self._quiet_until = time.monotonic() + PATIENCE_S
        for env_id in tuple(self._left):
            self._release(env_id)
        not_begun = self._book.not_begun
        for env_id in not_begun.keys() & self._held.keys():
            _answer(self._held[env_id], not_begun[env_id])
        cuts = list(self._book.cuts)
        for _, cause, env_ids in cuts:
            self._lose(env_ids, cause)
            for env_id in env_ids:
                self._release(env_id)
        for entry in list(self._table.unusual):
            error = entry.error if entry.replacement is None else entry.replacement.cause
            if error is not None:
                self._lose(entry.env_ids, error)
        for worker_id in list(self._queued):
            self._send_next(self._table.entries[worker_id])
        return bool(len(batch) or cuts or not_begun)

    def _shrunk(self, error: WorkerError) -> PoolShrunk:
        """Return the event that tells of a worker that was given up."""
        generation = self._table.entries[error.worker_id].generation
        n_left = sum(len(entry.env_ids) for entry in self._table.entries if entry.error is None)
        told = {"worker_id": error.worker_id, "generation": generation, "error": error}
        return PoolShrunk(**told, n_left=n_left, n_envs=self.n_envs)  # type: ignore[arg-type]

    def _deliver(self, env_id: int, batch: Batch, row: int) -> None:
        episode = self._held.get(env_id)
        if episode is None:
            if env_id in self._left:
                self._left[env_id] = math.inf  # what is in flight is not its own any more
            return
        obs = take_rows(batch.obs, row)
        if batch.is_view:
            obs = map_tree(np.copy, obs)
        self._full_since, self._try_s = math.inf, _FIRST_TRY_S
        episode.obs, episode.info = obs, {} if batch.info is None else batch.info[row]
        terminated, truncated = bool(batch.terminated[row]), bool(batch.truncated[row])
        episode.is_over, episode.terminated = terminated or truncated, terminated
        _answer(episode, (obs, float(batch.reward[row]), terminated, truncated, episode.info))

    def _lose(self, env_ids: Sequence[int], cause: Exception) -> None:
        """Tell episodes of a worker that they are lost, unless they are over or begin once it has been recycled."""
        for env_id in env_ids:
            self._queued.get(self._entries[env_id].worker_id, {}).pop(env_id, None)
            episode = self._held.get(env_id)
            if episode is None or (not episode.is_over and getattr(cause, "phase", "") == RECYCLED):
                continue
            del self._held[env_id]
            episode.env_id = None
            if not episode.is_over:
                episode.lost = LostEpisode(cause, task=episode.task, env_id=env_id)
                _answer(episode, episode.lost)

    def _send_next(self, entry: Entry) -> None:
        """Send a queued action to a worker that has responded. An invalid one is told to its episode."""
        queued = self._queued[entry.worker_id]
        while queued and entry.state is WorkerState.IDLE and entry.is_nominal:
            env_id = next(iter(queued))
            try:
                self._manager.send(queued.pop(env_id), self._groups[env_id])
            except BadAction as error:
                _answer(self._held[env_id], error)
        if not queued:
            del self._queued[entry.worker_id]


def _answer(episode: Episode, answer: Step | Exception) -> None:
    """Let the coroutine of an episode go on with a response or an error, if it awaits one."""
    awaited = episode._awaited
    if awaited is not None and not awaited.done():
        if isinstance(answer, Exception):
            awaited.set_exception(answer)
        else:
            awaited.set_result(answer)


def _row_of(action: Any, spec: BehaviorSpec | None) -> Any:
    """Return one action as actions of one environment. Raises BadAction if its structure is not that of the spec."""
    if spec is None:
        return [action]

    def row(leaf: ArraySpec, value: Any) -> Any:
        if leaf.is_object:
            return object_array([value])
        return (value if is_foreign(value) else np.asarray(value))[None]

    try:
        return map_tree(row, spec.action, action)
    except (KeyError, TypeError, ValueError) as error:
        raise BadAction(f"step: the action has not the structure of its spec ({error!r}). Nothing was sent.") from error
