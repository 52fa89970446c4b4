"""A recording as data: its episodes, and a table of its steps.

::

    facts ──▶ episodes(): one agent's episode each, in the order of their ends ──▶ table()
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from envmanager.data.specs import BehaviorSpecs
from envmanager.data.steps import AGENT_BITS, AgentSteps, Begin, CommandName, EnvironmentResponse
from envmanager.data.trees import Tree, concat_rows, take_rows
from envmanager.recording.codec import Apart
from envmanager.recording.file import Fact, parts_of, read_facts


@attrs.define(eq=False)
class RecordedEpisode:
    """One agent's episode of T steps.

    ``obs`` is a tree of ``[T + 1, …]``, or None if observations were not recorded; ``actions`` a tree of ``[T, …]``;
    ``rewards`` float32[T]. ``task``: index of its task, or -1; ``seed`` and ``options``: those with which it was begun
    on demand; ``begun_with``: the actions of its task, by behavior, which came before its first observation. ``error``:
    why it was lost, if it was. ``is_cut``: whether it was still running at a reset, or at the end of its part of the
    recording. ``ended_ns``: time of its end, in ns since the epoch. ``part``: number of the part, from 1; environments
    and agents of another part are others.
    """

    behavior: str
    worker_id: int
    generation: int
    env_id: int
    agent_id: int
    task: int = -1
    seed: int | None = None
    options: Mapping[str, Any] | None = None
    begun_with: Mapping[str, Tree] | None = None
    terminated: bool = False
    truncated: bool = False
    error: Exception | None = None
    is_cut: bool = False
    ended_ns: int = 0
    rewards: np.ndarray = attrs.field(factory=lambda: np.zeros(0, np.float32))
    obs: Tree = None
    actions: Tree = None
    infos: list[dict[str, Any]] | None = None
    times_ns: np.ndarray = attrs.field(factory=lambda: np.zeros(0, np.int64))
    part: int = 1

    @property
    def total(self) -> float:
        """Sum of its rewards."""
        return float(self.rewards.sum(dtype=np.float64))

    @property
    def length(self) -> int:
        """Number T of its steps."""
        return len(self.rewards)


@attrs.define(eq=False)
class _Running:
    """An episode that goes on, and its steps so far."""

    episode: RecordedEpisode
    obs: list[Tree]
    steps: list[list[Any]] = attrs.field(factory=list)
    """Action, reward, info and time of each step."""

    def ended(self, time_ns: int, **how: Any) -> RecordedEpisode:
        actions, rewards, infos, times_ns = map(list, zip(*self.steps, strict=True)) if self.steps else ([],) * 4
        return attrs.evolve(
            self.episode,
            ended_ns=time_ns,
            obs=None if self.obs[0] is None else concat_rows(self.obs),
            actions=concat_rows(actions) if actions else None,
            rewards=np.array(rewards, np.float32),
            times_ns=np.array(times_ns, np.int64),
            infos=infos if any(info is not None for info in infos) else None,
            **how,
        )


@attrs.define(eq=False)
class _Worker:
    """What a worker plays, as far as the facts say."""

    worker_id: int
    env_ids: list[int]
    has_obs: bool
    generation: int = 0
    running: dict[tuple[str, int], _Running] = attrs.field(factory=dict)
    """Episodes by behavior and agent_id."""
    sent: dict[tuple[str, int], Tree] = attrs.field(factory=dict)
    """Actions whose results have not arrived, by behavior and agent_id."""
    begins: dict[int, Begin] = attrs.field(factory=dict)
    """What was begun on demand in environments, by env_id, until its first observation arrives."""

    is_restored: bool = False
    """Whether the next response repeats what the last one told, as the worker was replaced and its episodes go on."""

    def cut(self, time_ns: int, env_ids: Sequence[int] | None = None, **how: Any) -> list[RecordedEpisode]:
        """End the running episodes, or only those of ``env_ids``."""
        lost = [key for key in self.running if env_ids is None or key[1] >> AGENT_BITS in env_ids]
        ended = [self.running.pop(key).ended(time_ns, **how) for key in lost]
        for key in lost:
            self.sent.pop(key, None)
        if env_ids is None:
            self.sent, self.begins, self.is_restored = {}, {}, False
        return ended

    def begin(self, begins: list[Begin]) -> None:
        self.begins.update((self.env_ids[begin.row], begin) for begin in begins)

    def arrived(self, response: EnvironmentResponse, time_ns: int) -> list[RecordedEpisode]:
        ended: list[RecordedEpisode] = []
        if self.is_restored and response.name is CommandName.RESET:
            self.is_restored = False
        elif response.name in _WITH_ROWS:
            has_begun: set[int] = set()
            for behavior, steps in response.payload.items():
                ended += self._joined(behavior, steps, time_ns, has_begun)
            for env_id in has_begun:
                self.begins.pop(env_id, None)
            for env_id in response.not_begun or ():
                self.begins.pop(env_id)
                for key in [key for key in self.running if key[1] >> AGENT_BITS == env_id]:
                    ended.append(self.running.pop(key).ended(time_ns, is_cut=True))
        return ended

    def _joined(self, behavior: str, steps: AgentSteps, time_ns: int, has_begun: set[int]) -> list[RecordedEpisode]:
        """Add steps to the episodes of their agents. Add the environments that have begun one to ``has_begun``."""
        ended, is_ended = [], steps.ended
        final_row = np.cumsum(is_ended) - 1
        acts = np.ones(len(steps), np.bool_) if steps.acting is None else steps.acting
        for row, agent_id in enumerate(steps.agent_id.tolist()):
            key, env_id = (behavior, agent_id), agent_id >> AGENT_BITS
            action, running = self.sent.pop(key, None), self.running.get(key)
            is_over, obs = bool(is_ended[row]), self._row(steps.obs, row)
            if running is not None and action is None and env_id in self.begins and self.begins[env_id].at_once:
                ended.append(self.running.pop(key).ended(time_ns, is_cut=True))
                running = None
            elif running is not None:
                seen = self._row(steps.final_obs, final_row[row]) if is_over else obs
                info = None if steps.info is None else steps.info[row]
                if action is not None:
                    running.steps.append([action, float(steps.reward[row]), info, time_ns])
                    running.obs.append(seen)
                else:  # it did not act: it acts on what it sees now, and its reward belongs to its last action
                    running.obs[-1] = seen
                    if running.steps:
                        running.steps[-1][1] += float(steps.reward[row])
                        running.steps[-1][2] = info
                if is_over:
                    how = {"terminated": bool(steps.terminated[row]), "truncated": bool(steps.truncated[row])}
                    ended.append(self.running.pop(key).ended(time_ns, **how))
                    running = None
            if running is None and (acts[row] or not is_over):
                self.running[key] = _Running(self._begun(behavior, agent_id), [obs])
                has_begun.add(env_id)
        return ended

    def _row(self, tree: Tree, row: int) -> Tree:
        return take_rows(tree, [row]) if self.has_obs else None  # a copy, so that the other rows can be freed

    def _begun(self, behavior: str, agent_id: int) -> RecordedEpisode:
        env_id = agent_id >> AGENT_BITS
        episode = RecordedEpisode(behavior, self.worker_id, self.generation, env_id, agent_id)
        of_task: Begin | RecordedEpisode | None = self.begins.get(env_id)
        if of_task is None:  # an agent that comes later plays the task of the others
            others = (each.episode for each in self.running.values() if each.episode.env_id == env_id)
            of_task = next(others, None)
        if of_task is not None:
            episode.task, episode.seed, episode.options = of_task.task, of_task.seed, of_task.options
            episode.begun_with = of_task.actions if isinstance(of_task, Begin) else of_task.begun_with
        return episode


def about(path: str | Path) -> Mapping[str, Any]:
    """Return what a recording says of itself: ``kind``, ``n_envs``, ``env_ids`` of each worker, ``seed``, …

    Raises UsageError if there is no file, and BadRecording if it is none.
    """
    first: Mapping[str, Any] = next(read_facts(path))
    return first


def specs_of(path: str | Path) -> BehaviorSpecs:
    """Return the specs of a recording's behaviors at the start, by name."""
    for fact in facts(path):
        if fact.what == "await_start":
            _, (reports, _), _ = fact.content()
            return {name: spec for report in reports.values() for name, spec in report.specs.items()}
    return {}


def facts(path: str | Path) -> Iterator[Fact]:
    """Yield the facts of a recording."""
    return itertools.islice(read_facts(path), 1, None)


def episodes(path: str | Path, *, trust: bool = False) -> Iterator[RecordedEpisode]:
    """Yield the episodes of a recording and its further parts, in the order of their ends.

    Last in each part are those that were running at its end. ``trust``: whether to unpickle the objects of classes in
    infos, options, observations and actions, which can run any code; without it, an Apart stands for each of them.
    Raises UsageError if there is no file, and BadRecording if it is damaged. Needs memory for the running ones only.
    """
    for number, part in enumerate(parts_of(path), 1):
        for episode in _episodes_of(part, Apart.load if trust else Apart.leave):
            episode.part = number
            yield episode


def _episodes_of(path: str, read_apart: Callable[[Apart], Any]) -> Iterator[RecordedEpisode]:
    first = about(path)
    workers = [_Worker(number, env_ids, first["observations"]) for number, env_ids in enumerate(first["env_ids"])]
    time_ns = 0
    for fact in facts(path):
        what, worker_id, _ = fact
        if what not in _OF_EPISODES:
            continue
        content, worker = fact.content(read_apart), workers[worker_id]
        if worker_id < 0:  # responses of any workers
            time_ns, responses = content
            for response in responses:
                yield from workers[response.worker_id].arrived(response, time_ns)
        elif what == "step":
            _, actions, agents, _ = content
            for behavior, taken in actions.items():
                for row, agent_id in enumerate(agents[behavior]):
                    worker.sent[behavior, agent_id] = take_rows(taken, slice(row, row + 1))
        elif what == "lost":
            error, env_ids = content if isinstance(content, tuple) else (content, None)
            yield from worker.cut(time_ns, env_ids, error=error)
        else:
            asked, answer, *_ = content
            if what == "launch":
                worker.generation = asked
            elif what == "send":
                if asked == CommandName.RESET:
                    yield from worker.cut(time_ns, is_cut=True)
                if asked == CommandName.BEGIN or (asked == CommandName.RESET and isinstance(answer, list)):
                    worker.begin(answer)
            else:
                if isinstance(asked, list) and worker.running:  # else they are lost
                    worker.is_restored = True
                elif isinstance(asked, list):
                    worker.begin(asked)
                if answer is not None:
                    yield from worker.arrived(answer, time_ns)
    for worker in workers:
        yield from worker.cut(time_ns, is_cut=True)


_OF_EPISODES = ("take", "get", "step", "send", "lost", "launch", "begin_again", "recv")
"""Facts that tell of episodes."""
_WITH_ROWS = (CommandName.STEP, CommandName.RESET)
_NUMBERS = ("part", "worker_id", "generation", "env_id", "agent_id", "episode", "task", "step")
_COLUMNS: dict[str, Any] = {
    "time_ns": np.int64,
    "behavior": "<U1",
    **dict.fromkeys(_NUMBERS, np.int64),
    "reward": np.float32,
    **dict.fromkeys(("terminated", "truncated", "lost"), np.bool_),
}
"""Dtypes of the columns of a table of no steps. A text is as long as the longest of its column."""


def table(path: str | Path) -> dict[str, np.ndarray]:
    """Return a table of all steps of a recording, as columns: ``pandas.DataFrame(table(path))``, or ``pyarrow.table``.

    The columns are ``time_ns``, ``behavior``, ``part`` (see ``episodes``), ``worker_id``, ``generation``, ``env_id``,
    ``agent_id``, ``episode`` (a number), ``task``, ``step`` in the episode, ``reward``, ``terminated``, ``truncated``
    and ``lost``.
    """
    columns: dict[str, list[Any]] = {name: [np.zeros(0, dtype)] for name, dtype in _COLUMNS.items()}
    for number, each in enumerate(episodes(path)):
        n = each.length
        last = np.arange(n) == n - 1
        columns["time_ns"].append(each.times_ns)
        for name in ("behavior", "part", "worker_id", "generation", "env_id", "agent_id", "task"):
            columns[name].append(np.full(n, getattr(each, name)))
        columns["episode"].append(np.full(n, number))
        columns["step"].append(np.arange(n))
        columns["reward"].append(each.rewards)
        columns["terminated"].append(last & each.terminated)
        columns["truncated"].append(last & each.truncated)
        columns["lost"].append(last & (each.error is not None))
    return {name: np.concatenate(parts) for name, parts in columns.items()}
