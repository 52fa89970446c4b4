"""Counters of environment steps and episodes, and the return and length of each episode.

::

    StepInfo ── add ────────┐                                 ┌──▶ recent, take(), mean_of_recent()
                            ├──▶ return and length so far, ──┤
    Batch ───── add_batch ──┘    of each agent                └──▶ on_end(FinishedEpisode)

An episode that was cut because its worker was replaced has no return. It counts as lost, not as finished. Episodes
in progress at a call of ``ignore_running`` do not count as finished either.

This code runs for each StepInfo that is counted. For speed, the agents of a worker's rows are looked up once and
cached until they change.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import attrs
import numpy as np

from envmanager.data.steps import AGENT_BITS, AgentSteps, Batch, StepInfo

RECENT = 100
"""Number of most recent episodes that the means cover."""
_KEPT_OF_A_MANAGER = 10_000
"""Number of episodes that a manager keeps (2 MB). With thousands of environments, many episodes end at once."""
_UNSEEN = -(1 << 62)
"""Initial length of an episode that began before counting. The length stays negative, so the episode is ignored."""
_NO_INFO: Mapping[str, Any] = {}
_COUNTS = ("env_steps", "worker_steps", "count", "lost", "_n_taken")


class _EpisodeFields(NamedTuple):
    behavior: str
    agent_id: int
    total: float
    length: int


class FinishedEpisode(_EpisodeFields):
    """A finished episode of one agent. ``total`` is the return: the sum of the agent's rewards.

    ``length``: number of the agent's steps; steps in which only other agents acted do not count. ``task``: index of the
    task with which the environment began the episode, or -1. ``numbers``: those in the agent's info at the end, with
    tasks or measures and ``infos=True``. These two are no fields, so an episode unpacks to the other four.
    """

    task = -1
    numbers: Mapping[str, float] = _NO_INFO

    @property
    def env_id(self) -> int:
        """Id of the environment in which the agent acted."""
        return self.agent_id >> AGENT_BITS


@attrs.frozen
class _RowOwners:
    """The agents of the rows in one worker's StepInfos, and the array indices of their running returns and lengths."""

    agent_ids: tuple[tuple[str, bytes], ...]
    places: tuple[np.ndarray, ...]  # per behavior, the index of each row in the running returns and lengths
    env_ids: frozenset[int]


@attrs.define(repr=False)
class Episodes:
    """Counters of steps and episodes. ``returns`` maps each agent_id to the returns of its episodes, oldest first.

    ``recent``: the last ``n_recent`` finished episodes. ``count``: number of finished episodes. ``lost``: number of
    episodes cut because their worker was replaced. ``on_end`` is called with each finished episode. Without
    ``keeps_returns``, ``returns`` stays empty, and memory does not grow with the number of episodes.
    """

    on_end: Callable[[FinishedEpisode], Any] | None = None
    keeps_returns: bool = True
    n_recent: int = RECENT
    env_steps: int = 0
    worker_steps: int = 0
    """Number of worker steps in StepInfos. Steps in batches do not count, because a batch does not name its workers."""
    count: int = 0
    lost: int = 0
    measures: Sequence[str] = ()
    """Names of numbers in the infos at the end of an episode, such as ``is_success``."""
    returns: dict[int, list[float]] = attrs.field(factory=dict)
    recent: deque[FinishedEpisode] = attrs.Factory(lambda own: deque(maxlen=own.n_recent), takes_self=True)
    of_tasks: Callable[[FinishedEpisode], Any] | None = attrs.field(default=None, init=False)
    """Callback that sets the ``task`` of each finished episode, before ``on_end``. The manager sets it."""
    _n_taken: int = attrs.field(default=0, init=False)
    _places_of: dict[int, dict[int, int]] = attrs.field(factory=dict, init=False)  # by env_id, then agent_id
    _agent_at: list[int] = attrs.field(factory=list, init=False)
    _free: list[int] = attrs.field(factory=list, init=False)
    _running: np.ndarray = attrs.field(factory=lambda: np.zeros(64), init=False)
    _lengths: np.ndarray = attrs.field(factory=lambda: np.zeros(64, np.int64), init=False)
    _owners_of: dict[int, _RowOwners] = attrs.field(factory=dict, init=False)
    _rows: np.ndarray = attrs.field(factory=lambda: np.zeros(0, np.intp), init=False)  # places, by env_id

    def __repr__(self) -> str:
        means = (
            f", mean return {self.mean_of_recent():.4g}, mean length {self.mean_length():.4g}" if self.recent else ""
        )
        return f"<{type(self).__name__}: {self.count:,} ended, {self.lost:,} lost{means}>"

    @classmethod
    def of_manager(cls, under_way: Sequence[StepInfo], n_envs: int, measures: Sequence[str]) -> Episodes:
        """Return counters that ignore the episodes in progress. ``under_way``: the manager's latest StepInfos."""
        episodes = cls(keeps_returns=False, n_recent=_KEPT_OF_A_MANAGER, measures=measures)
        if under_way:
            episodes.ignore_running(under_way, n_envs)
        return episodes

    # Counting.

    def add_all(self, infos: Iterable[StepInfo]) -> None:
        """Count the steps of several StepInfos, and the episodes that end in them."""
        for info in infos:
            self.add(info)

    def add(self, info: StepInfo, n_begun: int = 0) -> None:
        """Count the step of one StepInfo, and the episodes that end in it.

        ``n_begun``: number of environments whose rows are no step, but the first of an episode that began on demand.
        The first StepInfo after a reset or replacement is not a step. Episodes truncated by a loss count as ``lost``.
        """
        before, lost = self._owners_of.get(info.worker_id), info.lost
        owners = self._owners(info, before)
        if info.is_step:
            assert info.previous is not None
            self.worker_steps += 1
            self.env_steps += len(owners.env_ids) - n_begun
            for places, (behavior, steps) in zip(owners.places, info.current.items(), strict=True):
                self._running[places] += steps.reward
                self._lengths[_who_acted(info.previous.get(behavior), steps, places, is_same=owners is before)] += 1
                ended = steps.terminated | steps.truncated
                if lost is not None:
                    ended &= ~lost.holds(steps.agent_id)
                if np.count_nonzero(ended):  # cheaper than any()
                    self._end_episodes(behavior, places[ended], _rows_of(steps.info, ended))
        if info.previous is None or lost is not None:
            env_ids = owners.env_ids if before is None else owners.env_ids | before.env_ids
            if lost is not None:
                env_ids = env_ids.intersection(lost.env_ids)
                truncated = [steps.truncated & lost.holds(steps.agent_id) for steps in info.current.values()]
                self.lost += sum(map(int, map(np.count_nonzero, truncated)))
                self.env_steps -= len(owners.env_ids & env_ids) if info.is_step else 0
            everywhere = [place for env_id in env_ids for place in self._places_of.get(env_id, {}).values()]
            self._forget(np.array(everywhere, np.intp))  # also of agents without rows

    def begin_rows(self, n_envs: int, *, goes_on: bool = False) -> None:
        """Begin a new episode in each of ``n_envs`` environments after a reset, to be counted with ``add_batch``.

        ``goes_on``: whether the episodes that ``restore`` has restored go on instead.
        """
        self._rows = np.array([self._place(env_id << AGENT_BITS) for env_id in range(n_envs)], np.intp)
        if not goes_on:
            self._forget(self._rows)

    def add_batch(
        self, behavior: str, batch: Batch, first: np.ndarray | None = None, again: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Count the steps of a batch and the episodes that end in it. Return which rows ended, or None if none did.

        ``first``: which rows are the first of an episode that a reset or a task began, and no steps. ``again``: which
        rows were counted before, and show where a restored manager stands.
        """
        places = self._rows[batch.env_ids]
        if again is not None:
            self.env_steps -= int(np.count_nonzero(self._lengths[places[again]]))
            self._lengths[places[again]] -= 1
        if first is not None:
            self._running[places[first]] = 0.0
            self._lengths[places[first]] = -1
        self._running[places] += batch.reward
        lengths = self._lengths[places] + 1
        self._lengths[places] = lengths
        self.env_steps += int(np.count_nonzero(lengths[~batch.lost]))
        ended = batch.terminated | batch.truncated
        if not (np.count_nonzero(ended) or np.count_nonzero(batch.lost)):
            return None
        self.lost += int(np.count_nonzero(batch.lost & batch.truncated))
        self._forget(places[batch.lost])
        counted = ended & ~batch.lost
        self._end_episodes(behavior, places[counted], _rows_of(batch.info, counted))
        return ended  # type: ignore[no-any-return]

    def ignore_running(self, infos: Iterable[StepInfo], n_envs: int) -> None:
        """Exclude the episodes in progress from the finished episodes. ``infos``: each worker's latest StepInfo."""
        for info in infos:
            for places in self._owners(info, self._owners_of.get(info.worker_id)).places:
                self._lengths[places] = _UNSEEN
        self.begin_rows(n_envs)
        self._lengths[self._rows] = _UNSEEN

    # Results.

    def running(self, env_id: int) -> dict[int, tuple[float, int]]:
        """Return the return and the length so far of each agent in an environment whose episode is counted."""
        places = self._places_of.get(env_id, {}).items()
        return {
            agent_id: (float(self._running[place]), int(self._lengths[place]))
            for agent_id, place in places
            if self._lengths[place] >= 0
        }

    def take(self) -> list[FinishedEpisode]:
        """Return the episodes finished since the last ``take``, oldest first, but no more than ``n_recent``."""
        n_new = min(self.count - self._n_taken, len(self.recent))
        self._n_taken = self.count
        return list(itertools.islice(self.recent, len(self.recent) - n_new, None))

    def of(
        self, *, env_id: int | None = None, behavior: str | None = None, agent_id: int | None = None
    ) -> list[FinishedEpisode]:
        """Return the episodes in ``recent`` that match every argument given, oldest first."""
        return [
            episode
            for episode in self.recent
            if env_id in (None, episode.env_id)
            and behavior in (None, episode.behavior)
            and agent_id in (None, episode.agent_id)
        ]

    def mean_of_recent(self, behavior: str | None = None) -> float:
        """Return the mean return of the last hundred episodes (of ``behavior``, if given), or NaN if there are none."""
        return _mean([episode.total for episode in self._last(behavior)])

    def mean_length(self, behavior: str | None = None) -> float:
        """Return the mean length (in agent steps) of the episodes in ``mean_of_recent``, or NaN if there are none."""
        return _mean([episode.length for episode in self._last(behavior)])

    def means_of_measures(self, behavior: str | None = None) -> dict[str, float]:
        """Return the mean of each measure over the episodes in ``mean_of_recent`` that have it, if any has."""
        return means_of_measures(list(self._last(behavior)), self.measures)

    def returns_by_env(self) -> dict[str, list[float]]:
        """Return the returns by env_id, ``{"0": […]}``. With several agents, the keys are ``"0/0"``, ``"0/1"``, …."""
        agents_of: dict[int, list[int]] = {}
        for agent_id in sorted(self.returns):
            agents_of.setdefault(agent_id >> AGENT_BITS, []).append(agent_id)
        named = {}
        for env_id, agents in agents_of.items():
            for agent_id in agents:
                name = str(env_id) if len(agents) == 1 else f"{env_id}/{agent_id & (1 << AGENT_BITS) - 1}"
                named[name] = self.returns[agent_id]
        return named

    def _last(self, behavior: str | None) -> Iterator[FinishedEpisode]:
        own = (episode for episode in reversed(self.recent) if behavior in (None, episode.behavior))
        return itertools.islice(own, RECENT)

    # States.

    def state(self) -> dict[str, Any]:
        """Return what is counted so far, and the returns and lengths of running episodes, as plain data."""
        running = {agent_id: place for own in self._places_of.values() for agent_id, place in own.items()}
        places, recent = np.array(list(running.values()), np.intp), list(self.recent)
        numbers = [dict(each.numbers) for each in recent]
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "returns": [[agent_id, list(returns)] for agent_id, returns in self.returns.items()],
            "recent": [each.behavior for each in recent],
            "recent_numbers": numbers if any(numbers) else None,
            "recent_ids": np.array([(each.agent_id, each.length, each.task) for each in recent]).reshape(-1, 3),
            "recent_totals": np.array([each.total for each in recent]),
            "running": list(running),
            "totals": self._running[places],
            "lengths": self._lengths[places],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.returns = {agent_id: list(returns) for agent_id, returns in state["returns"]}
        self.recent.clear()
        numbers = state["recent_numbers"] or [_NO_INFO] * len(state["recent"])
        ids, totals = state["recent_ids"].astype(np.int64).tolist(), state["recent_totals"].tolist()
        for behavior, (agent_id, length, task), total, own in zip(state["recent"], ids, totals, numbers, strict=True):
            episode = FinishedEpisode(behavior, agent_id, total, length)
            episode.task, episode.numbers = task, own
            self.recent.append(episode)
        self._places_of, self._agent_at, self._free, self._owners_of = {}, [], [], {}
        places = np.array([self._place(agent_id) for agent_id in state["running"]], np.intp)
        self._running[places], self._lengths[places] = state["totals"], state["lengths"]

    # Internals.

    def _end_episodes(self, behavior: str, places: np.ndarray, infos: Iterable[Mapping[str, Any]]) -> None:
        totals, lengths = self._running[places].tolist(), self._lengths[places].tolist()
        self._forget(places)
        for place, total, length, info in zip(places.tolist(), totals, lengths, infos, strict=False):
            if length < 0:
                continue
            episode = FinishedEpisode(behavior, self._agent_at[place], total, length)
            if info and (self.measures or self.of_tasks is not None):
                episode.numbers = _numbers_in(info)
            if self.of_tasks is not None:
                self.of_tasks(episode)
            self.count += 1
            if self.keeps_returns:
                self.returns[episode.agent_id].append(total)
            self.recent.append(episode)
            if self.on_end is not None:
                self.on_end(episode)

    def _forget(self, places: np.ndarray) -> None:
        self._running[places] = 0.0
        self._lengths[places] = 0

    def _owners(self, info: StepInfo, owners: _RowOwners | None) -> _RowOwners:
        """Return the agents of the rows in ``info``. ``owners``: the result for the worker's previous StepInfo.

        If the agents have changed, store the result, and free the array indices of agents that left between episodes.
        """
        agent_ids = tuple([(behavior, steps.agent_id.tobytes()) for behavior, steps in info.current.items()])
        if owners is None or owners.agent_ids != agent_ids:
            current = list(info.current.values())
            places = [np.array([self._place(each) for each in steps.agent_id.tolist()], np.intp) for steps in current]
            env_ids = frozenset(env_id for steps in current for env_id in steps.env_id.tolist())
            new = _RowOwners(agent_ids, tuple(places), env_ids)
            left = set() if owners is None else set().union(*(each.tolist() for each in owners.places))
            for place in left.difference(*(each.tolist() for each in places)):
                if self._running[place] == 0.0 and self._lengths[place] == 0:
                    agent_id = self._agent_at[place]
                    del self._places_of[agent_id >> AGENT_BITS][agent_id]
                    self._free.append(place)
            owners = self._owners_of[info.worker_id] = new
        return owners

    def _place(self, agent_id: int) -> int:
        own = self._places_of.setdefault(agent_id >> AGENT_BITS, {})
        if agent_id not in own:
            if not self._free:
                self._free.append(len(self._agent_at))
                self._agent_at.append(agent_id)
            own[agent_id] = place = self._free.pop()
            self._agent_at[place] = agent_id
            if place == len(self._running):
                self._running = np.append(self._running, np.zeros(place))
                self._lengths = np.append(self._lengths, np.zeros(place, np.int64))
            if self.keeps_returns:
                self.returns.setdefault(agent_id, [])
        return own[agent_id]


def means_of_measures(episodes: Sequence[FinishedEpisode], measures: Sequence[str]) -> dict[str, float]:
    """Return the mean of each measure over the ``episodes`` that have it. A measure that none has is left out."""
    values = {name: [each.numbers[name] for each in episodes if name in each.numbers] for name in measures}
    return {name: _mean(own) for name, own in values.items() if own}


def _numbers_in(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in an info, also those that are arrays without dimensions, such as JAX's."""
    numbers = {}
    for name, own in info.items():
        if isinstance(own, int | float) or (getattr(own, "shape", None) == () and not isinstance(own, str | bytes)):
            with suppress(TypeError, ValueError, OverflowError):
                numbers[name] = float(own)
    return numbers


def _rows_of(infos: Sequence[Mapping[str, Any]] | None, rows: np.ndarray) -> Iterable[Mapping[str, Any]]:
    return itertools.repeat(_NO_INFO) if infos is None else itertools.compress(infos, rows)


def _who_acted(before: AgentSteps | None, now: AgentSteps, places: np.ndarray, *, is_same: bool) -> np.ndarray:
    """Return the ``places`` of agents in ``now`` that acted in ``before``. ``is_same``: whether the agents match."""
    if before is None:
        return places[:0]
    if is_same:
        return places if before.acting is None else places[before.acting]
    acted: np.ndarray = places[np.isin(now.agent_id, before.agent_id[before.acting_rows])]
    return acted


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values) if values else math.nan
