"""The rollouts of ``Pool.play``: an agent in an episode for each task, alone or in groups of siblings.

::

    source ── a task ──▶ a group of siblings ── begin ──▶ agent(episode) ── returned ──▶ enough of them? ──▶ delivered
                                  ▲                             │
                                  └────────── played again ◀────┘ lost (reported after ``attempts``), or too old

A task that is played alone is a group of one. All runs in the event loop of the caller, with a task for each rollout.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Container, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs

from envmanager.data.seeding import task_seed
from envmanager.data.steps import AGENT_BITS
from envmanager.errors import EpisodeNotBegun, LostEpisode, ManagerClosed, StalePolicy, UsageError
from envmanager.observe.episodes import FinishedEpisode
from envmanager.options import at_least, seconds
from envmanager.tasks import GroupResult, Task, TaskResult, TaskTimes, source_of

if TYPE_CHECKING:
    from typing_extensions import Self

_ASK_AGAIN_S = 0.02
_OF_INFRASTRUCTURE = LostEpisode, EpisodeNotBegun, StalePolicy, OSError, TimeoutError, asyncio.TimeoutError

_optional = attrs.validators.optional


@attrs.define(eq=False)
class _Rollout:
    index: int
    task: Task
    group: _Group
    attempts: int = 0
    running: asyncio.Task[None] | None = None


@attrs.define(eq=False)
class _Group:
    index: int
    task: Task
    keep: int | None
    """Number of siblings with which it is over; None for all."""
    is_alone: bool
    is_open: bool
    """Whether the source may give further siblings."""
    left: list[_Rollout] = attrs.field(factory=list)
    """Siblings that have neither ended nor been given up."""
    results: list[TaskResult] = attrs.field(factory=list)
    lost: list[TaskResult] = attrs.field(factory=list)
    n_told: int = 0

    @property
    def has_enough(self) -> bool:
        return self.keep is not None and len(self.results) >= self.keep

    @property
    def is_over(self) -> bool:
        return not self.is_open and (self.has_enough or not self.left)

    @property
    def result(self) -> TaskResult | GroupResult:
        if self.is_alone:
            return (*self.results, *self.lost)[0]
        is_whole = self.has_enough if self.keep is not None else not self.lost
        return GroupResult(self.index, self.task, tuple(self.results), tuple(self.lost), is_whole)


@attrs.frozen(kw_only=True)
class PlayOptions:
    """The arguments of ``Pool.play``, which explains them."""

    attempts: int = attrs.field(default=3, validator=at_least(1))
    timeout_s: float | None = attrs.field(default=None, validator=_optional(seconds(unlimited=False)))
    concurrency: int = attrs.field(validator=at_least(1))
    group: int | None = attrs.field(default=None, validator=_optional(at_least(1)))
    keep: int | None = attrs.field(default=None, validator=_optional(at_least(1)))
    max_policy_lag: int | None = attrs.field(default=None, validator=_optional(at_least(0)))

    def __attrs_post_init__(self) -> None:
        if self.keep is not None and self.group is not None and self.keep > self.group:
            raise UsageError(f"keep={self.keep} is above group={self.group}: no group could be complete.")


class Play:
    """An asynchronous iterator of results, as they come: TaskResults, or GroupResults of siblings.

    ``aclose``, or the end of an ``async with`` block, cancels what plays. Else that goes on until the event loop ends.
    """

    def __init__(
        self,
        pool: Any,
        tasks: Any,
        agent: Callable[[Any], Awaitable[Any]],
        options: PlayOptions,
        done_ids: Container[Any],
        state: Mapping[str, Any] | None,
    ) -> None:
        self.version = 0
        """Version of the policy, with which episodes begin. Set it when the policy has changed."""
        self.n_ended = self.n_lost = 0
        """Number of rollouts that have ended, and of those that were given up."""
        self._pool, self._agent, self._options, self._done_ids = pool, agent, options, done_ids
        self._source, _ = source_of(tasks)
        self._is_exhausted = self._is_paused = self._is_closed = False
        self._n_given = self._n_groups = self._n_rollouts = 0
        self._groups: dict[_Group, None] = {}
        """Groups that were not delivered, in the order of their tasks."""
        self._open: _Group | None = None
        self._coming: deque[_Rollout] = deque()
        self._ready: deque[_Group] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        if state is not None:
            self._restore(state)

    # The caller.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TaskResult | GroupResult:
        while True:
            self._fill()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._ready:
                group = self._ready[0]
                if self._is_fresh(group):
                    self._tell(group)
                    self._ready.popleft()
                    del self._groups[group]
                    return group.result
                self._ready.popleft()
                continue
            if self._is_closed or (self._is_exhausted and not self._groups):
                await self.aclose()
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            is_idle = self._is_paused and not self._running
            await asyncio.wait([self._waiter], timeout=_ASK_AGAIN_S if is_idle else None)

    async def aclose(self) -> None:
        """Cancel all rollouts that play, and wait for their ends."""
        self._is_closed, running = True, list(self._running)
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        n = len(self._running)
        return f"<{type(self).__name__}: {n:,} rollouts play, {self.n_ended:,} ended, {self.n_lost:,} lost>"

    def state(self) -> dict[str, Any]:
        """Return what ``Pool.play(state=…)`` goes on from: what was delivered is done, what has ended is kept.

        It can be pickled if what the agents return can. What plays begins again.
        """
        has_place = callable(getattr(self._source, "state", None))
        return {
            "counts": (self._n_given, self._n_groups, self._n_rollouts, self.n_ended, self.n_lost, self.version),
            "source": self._source.state() if has_place else None,
            "groups": [
                (
                    (each.index, each.task, each.keep, each.is_alone, each.is_open),
                    [(own.index, own.task, own.attempts - (own.running is not None)) for own in each.left],
                    [*each.results],
                    [*each.lost],
                )
                for each in self._groups
            ],
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        n_given, self._n_groups, self._n_rollouts, self.n_ended, self.n_lost, self.version = state["counts"]
        self._n_given = n_given
        for facts, left, results, lost in state["groups"]:
            group = _Group(*facts)
            group.results, group.lost = [*results], [*lost]
            group.left = [_Rollout(index, task, group, attempts) for index, task, attempts in left]
            self._groups[group] = None
            self._coming.extend(() if group.is_over else group.left)
            self._open = group if group.is_open else self._open
            if group.is_over:
                self._ready.append(group)
        if state["source"] is not None:
            self._source.restore(state["source"])
            return
        try:
            for _ in range(n_given):
                self._source.next_task(-1)
        except StopIteration:
            raise UsageError(f"the state has taken {n_given} tasks, but there are fewer.") from None

    # Rollouts.

    def _fill(self) -> None:
        """Begin rollouts while there is room: as many may play as wait to be taken."""
        most = 0 if self._is_closed else self._options.concurrency
        self._is_paused = False
        while self._error is None and len(self._running) < most and len(self._ready) < most:
            while self._coming and self._coming[0] not in self._coming[0].group.left:
                self._coming.popleft()
            if not self._coming:
                try:
                    if not self._ask():
                        return
                except Exception as error:
                    self._error = error
                continue
            rollout = self._coming.popleft()
            rollout.attempts += 1
            rollout.running = task = asyncio.get_running_loop().create_task(self._run(rollout))
            self._running.add(task)
            task.add_done_callback(self._has_ended)

    def _ask(self) -> bool:
        """Ask the source for a task. Return whether there may be more."""
        if self._is_exhausted:
            return False
        try:
            given = self._source.next_task(-1)
        except StopIteration:
            self._is_exhausted = True
            self._close_group(None)
            return False
        self._is_paused = given is None
        if given is None:
            return False
        self._n_given += 1
        task, options = Task.of(given), self._options
        label = task.group
        self._close_group(label)
        if (task.id if label is None else label) in self._done_ids:
            return True
        group = self._open
        if group is None:
            is_alone = label is None and options.group is None
            keep = options.keep if options.keep is not None or label is not None else options.group or 1
            group = _Group(self._n_groups, self._seeded(task, self._n_groups), keep, is_alone, label is not None)
            self._n_groups += 1
            self._groups[group] = None
            self._open = group if group.is_open else None
        own = self._seeded(task, group.index)
        for _ in range(1 if label is not None else options.group or 1):
            if not group.has_enough:
                group.left.append(_Rollout(self._n_rollouts, own, group))
                self._coming.append(group.left[-1])
            self._n_rollouts += 1
        return True

    def _close_group(self, label: Any) -> None:
        """Note that no further sibling comes for the group of labelled tasks, unless ``label`` is that of the group."""
        group = self._open
        if group is not None and (label is None or label != group.task.group):
            was_over, group.is_open, self._open = group.is_over, False, None
            if group.is_over and not was_over:
                self._ready.append(group)

    def _seeded(self, task: Task, index: int) -> Task:
        """Return a task with the seed of its group, so that siblings and further attempts begin alike."""
        seed = self._pool.seed
        if seed is None or task.seed is not None or not task.inherits:
            return task
        return attrs.evolve(task, seed=task_seed(seed, index))

    async def _run(self, rollout: _Rollout) -> None:
        """Play an episode. Note its result, unless it is cancelled."""
        began, episode, env_id = time.perf_counter(), self._pool.begin(rollout.task), -1
        episode.version = self.version
        value, error = None, None
        try:
            async with episode:
                env_id = -1 if episode.env_id is None else episode.env_id
                playing = self._agent(episode)
                limit_s = self._options.timeout_s
                value = await (playing if limit_s is None else asyncio.wait_for(playing, limit_s))
        except Exception as raised:
            error = raised
            is_none_left = env_id < 0 and not isinstance(error, LostEpisode | EpisodeNotBegun)
            if is_none_left or isinstance(error, UsageError | ManagerClosed):
                self._error, rollout.running, rollout.attempts = error, None, rollout.attempts - 1
                self._coming.appendleft(rollout)
                return
        if rollout not in rollout.group.left:
            return
        error = error or episode.lost  # the agent may have caught it
        behavior = next(iter(self._pool.specs), "default")
        agents = [] if error is not None else [(behavior, env_id << AGENT_BITS, episode.total, episode.length)]
        took_s, waited_s, stepped_s = time.perf_counter() - began, episode.waited_s, episode.stepped_s
        result = TaskResult(
            rollout.index,
            rollout.task,
            env_id,
            episode.terminated,
            rollout.attempts,
            error,
            cut=not episode.is_over,
            episodes=tuple(FinishedEpisode(*each) for each in agents),
            value=value,
            times=TaskTimes(waited_s, stepped_s, max(0.0, took_s - waited_s - stepped_s)),
            versions=tuple(episode.versions) or (episode.version,),
        )
        rollout.running = None
        self._take(rollout, result)

    def _take(self, rollout: _Rollout, result: TaskResult) -> None:
        """Put a result to those of its group, or let the rollout be played again."""
        group, error = rollout.group, result.error or self._staleness(result)
        if error is not None and rollout.attempts < self._options.attempts:
            self._coming.appendleft(rollout)
            return
        group.left.remove(rollout)
        if error is None:
            self.n_ended += 1
            group.results.append(result)
        else:
            self.n_lost += 1
            group.lost.append(result._replace(error=error, value=None, episodes=()))
            if not self.n_ended and not isinstance(error, _OF_INFRASTRUCTURE):
                self._error = error  # an error of the agent's code: it would be that of all
        if group.has_enough:
            for sibling in group.left:
                if sibling.running is not None:
                    sibling.running.cancel()
            group.left.clear()
        if group.is_over:
            self._ready.append(group)

    def _staleness(self, result: TaskResult) -> StalePolicy | None:
        lag, most = self.version - min(result.versions), self._options.max_policy_lag
        return None if most is None or lag <= most else StalePolicy(lag=lag, max_policy_lag=most)

    def _is_fresh(self, group: _Group) -> bool:
        """Return whether no result of a group has become too old. Those that have are played again, or given up."""
        stale = [each for each in group.results if self._staleness(each) is not None]
        for result in stale:
            group.results.remove(result)
            self.n_ended -= 1
            group.left.append(_Rollout(result.index, result.task, group, result.attempts))
        for rollout, result in zip(group.left[-len(stale) :], stale, strict=False) if stale else ():
            self._take(rollout, result)
        return not stale

    def _tell(self, group: _Group) -> None:
        """Tell the source what came of a group, each result once. Raises the errors of its methods."""
        for result in (*group.results, *group.lost)[group.n_told :]:
            group.n_told += 1
            if result.error is None and hasattr(self._source, "ended"):
                self._source.ended(result)
            elif result.error is not None and hasattr(self._source, "lost"):
                self._source.lost(result.task, result.error)

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._fill()
