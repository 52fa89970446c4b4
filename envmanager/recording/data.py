"""A recording as data: its episodes, and a table of its steps.

::

    facts ──▶ episodes(): one agent's episode each, in the order of their ends ──▶ table()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from envmanager.data.specs import BehaviorSpecs
from envmanager.data.steps import AGENT_BITS, AgentSteps, Begin, CommandName, EnvironmentResponse
from envmanager.data.trees import Tree, concat_rows, take_rows
from envmanager.errors import UsageError, WorkerError
from envmanager.kernel.table import RECYCLED
from envmanager.recording.codec import thawed, thawed_response, unpickled
from envmanager.recording.file import read_records


@attrs.define(eq=False)
class RecordedEpisode:
    """One agent's episode of T steps.

    ``obs`` is a tree of ``[T + 1, …]``, or None if observations were not recorded; ``actions`` a tree of ``[T, …]``;
    ``rewards`` float32[T]. ``task``: index of its task, or -1; ``seed`` and ``options``: those with which it was begun
    on demand. ``error``: why it was lost, if it was. ``is_cut``: whether it was still running at a reset, or at the end
    of the recording. ``ended_ns``: time of its end, in ns since the epoch.
    """

    behavior: str
    worker_id: int
    generation: int
    env_id: int
    agent_id: int
    task: int = -1
    seed: int | None = None
    options: Mapping[str, Any] | None = None
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
    actions: list[Tree] = attrs.field(factory=list)
    rewards: list[float] = attrs.field(factory=list)
    infos: list[Any] = attrs.field(factory=list)
    times_ns: list[int] = attrs.field(factory=list)

    def ended(self, time_ns: int, **how: Any) -> RecordedEpisode:
        episode = self.episode
        for name, value in how.items():
            setattr(episode, name, value)
        episode.ended_ns = time_ns
        episode.obs = None if self.obs[0] is None else concat_rows(self.obs)
        episode.actions = concat_rows(self.actions) if self.actions else None
        episode.rewards = np.array(self.rewards, np.float32)
        episode.times_ns = np.array(self.times_ns, np.int64)
        episode.infos = self.infos if any(info is not None for info in self.infos) else None
        return episode


class _Worker:
    """What a worker plays, as far as the facts say."""

    def __init__(self, worker_id: int, env_ids: list[int], *, has_obs: bool) -> None:
        self.worker_id, self.env_ids, self.has_obs = worker_id, env_ids, has_obs
        self.generation = 0
        self.failure: Exception | None = None
        """Failure of a call, which may or may not be the end of the worker."""
        self.running: dict[tuple[str, int], _Running] = {}
        """Episodes by behavior and agent_id."""
        self.acting: dict[str, list[int]] = {}
        """The agents that take an action next, by behavior, in the order of their actions."""
        self.is_partial = False
        """Whether the step in flight is one of some environments; the others keep their places in ``acting``."""
        self.sent: dict[tuple[str, int], Tree] = {}
        """Actions whose results have not arrived, by behavior and agent_id."""
        self.begins: dict[int, Begin] = {}
        """What was begun on demand in environments, by env_id, until its first observation arrives."""
        self.has_begun: set[int] = set()
        """Environments in which the response that has arrived last has begun an episode."""
        self.asked = ""
        """Name of the last command to which ``recv`` returns the answer."""

    def cut(self, time_ns: int, **how: Any) -> list[RecordedEpisode]:
        ended = [running.ended(time_ns, **how) for running in self.running.values()]
        for each in (self.running, self.acting, self.sent):
            each.clear()
        return ended

    def recycled(self) -> WorkerError:
        """Return the error for a healthy worker that was replaced because of its age."""
        text = f"worker {self.worker_id} was recycled"
        return WorkerError(text, worker_id=self.worker_id, env_ids=self.env_ids, phase=RECYCLED, cause=text)

    def begin(self, begins: Any) -> None:
        for begin in (Begin(*each) for each in begins):
            env_id = self.env_ids[begin.row]
            self.begins[env_id] = begin
            if begin.at_once:
                self.acting = {name: _others(acting, {env_id}) for name, acting in self.acting.items()}

    def step(self, rows: np.ndarray | None, actions: Mapping[str, Tree]) -> None:
        self.is_partial = rows is not None
        for behavior, taken in actions.items():
            acting = self.acting.get(behavior, [])
            if rows is not None:
                wanted = [self.env_ids[row] for row in rows.tolist()]
                by_env = {_env_id_of(agent_id): agent_id for agent_id in acting}
                acting = [by_env.get(env_id, env_id << AGENT_BITS) for env_id in wanted]
            for row, agent_id in enumerate(acting):
                self.sent[behavior, agent_id] = take_rows(taken, slice(row, row + 1))

    def arrived(self, response: EnvironmentResponse, time_ns: int) -> list[RecordedEpisode]:
        if response.name is CommandName.FAILED:
            return self.cut(time_ns, error=response.payload)
        ended: list[RecordedEpisode] = []
        if response.name is CommandName.RESET:
            self.is_partial = False
        self.has_begun.clear()
        for behavior, steps in response.payload.items():
            ended += self._joined(behavior, steps, time_ns)
        for env_id in self.has_begun:
            self.begins.pop(env_id, None)
        return ended

    def _joined(self, behavior: str, steps: AgentSteps, time_ns: int) -> list[RecordedEpisode]:
        ended, n_final = [], 0
        acts = np.ones(len(steps), np.bool_) if steps.acting is None else steps.acting
        for row, agent_id in enumerate(steps.agent_id.tolist()):
            key, env_id = (behavior, agent_id), _env_id_of(agent_id)
            action, running = self.sent.pop(key, None), self.running.get(key)
            is_over = bool(steps.terminated[row] or steps.truncated[row])
            obs = self._row(steps.obs, row)
            if running is not None and action is None and env_id in self.begins and self.begins[env_id].at_once:
                ended.append(self.running.pop(key).ended(time_ns, is_cut=True))
                running = None
            elif running is not None:
                seen = obs
                if is_over:
                    seen, n_final = self._row(steps.final_obs, n_final), n_final + 1
                info = None if steps.info is None else steps.info[row]
                if action is not None:
                    running.actions.append(action)
                    running.rewards.append(float(steps.reward[row]))
                    running.obs.append(seen)
                    running.times_ns.append(time_ns)
                    running.infos.append(info)
                else:  # it did not act: it acts on what it sees now, and its reward belongs to its last action
                    running.obs[-1] = seen
                    if running.rewards:
                        running.rewards[-1] += float(steps.reward[row])
                        running.infos[-1] = info
                if is_over:
                    how = {"terminated": bool(steps.terminated[row]), "truncated": bool(steps.truncated[row])}
                    ended.append(self.running.pop(key).ended(time_ns, **how))
                    running = None
            elif is_over:
                n_final += 1
            if running is None and (acts[row] or not is_over):
                self.running[key] = _Running(self._begun(behavior, agent_id), [obs])
                self.has_begun.add(env_id)
        now = steps.agent_id[acts].tolist()
        others = _others(self.acting.get(behavior, []), set(steps.env_id.tolist())) if self.is_partial else []
        self.acting[behavior] = sorted([*others, *now], key=_env_id_of) if others else now
        return ended

    def _row(self, tree: Tree, row: int) -> Tree:
        return take_rows(tree, [row]) if self.has_obs else None  # a copy, so that the other rows can be freed

    def _begun(self, behavior: str, agent_id: int) -> RecordedEpisode:
        env_id = _env_id_of(agent_id)
        episode = RecordedEpisode(behavior, self.worker_id, self.generation, env_id, agent_id)
        of_task: Begin | RecordedEpisode | None = self.begins.get(env_id)
        if of_task is None:  # an agent that comes later plays the task of the others
            others = (each.episode for each in self.running.values() if each.episode.env_id == env_id)
            of_task = next(others, None)
        if of_task is not None:
            episode.task, episode.seed, episode.options = of_task.task, of_task.seed, of_task.options
        return episode


def _env_id_of(agent_id: int) -> int:
    return agent_id >> AGENT_BITS


def _others(agent_ids: list[int], env_ids: set[int]) -> list[int]:
    """Return the agents that are in none of these environments."""
    return [agent_id for agent_id in agent_ids if _env_id_of(agent_id) not in env_ids]


def about(path: str | Path) -> Mapping[str, Any]:
    """Return what a recording says of itself: ``kind``, ``n_envs``, ``env_ids`` of each worker, ``seed``, …

    Raises UsageError if there is no file, and BadRecording if it is none.
    """
    for record in read_records(path):
        if record.kind == "about":
            return record.content  # type: ignore[no-any-return]
    raise UsageError(f"the recording {path} is empty.")


def specs_of(path: str | Path) -> BehaviorSpecs:
    """Return the specs of a recording's behaviors at the start, by name."""
    for what, _, content in facts(path):
        if what == "started":
            reports, _ = unpickled(content)
            return {name: spec for report in reports.values() for name, spec in report.specs.items()}
    return {}


def facts(path: str | Path) -> Iterator[tuple[str, int, Any]]:
    """Yield the facts of a recording: what was asked or answered, the worker (-1: none), and the content."""
    for record in read_records(path):
        if record.kind == "facts":
            yield from record.content


def episodes(path: str | Path) -> Iterator[RecordedEpisode]:
    """Yield the episodes of a recording, in the order of their ends; last those that were running at its end.

    Raises UsageError if there is no file, and BadRecording if it is damaged. Needs memory for the running ones only.
    """
    first = about(path)
    workers: dict[int, _Worker] = {
        worker_id: _Worker(worker_id, env_ids, has_obs=first["observations"])
        for worker_id, env_ids in enumerate(first["env_ids"])
    }
    time_ns = 0
    for what, worker_id, content in facts(path):
        worker = workers.get(worker_id)
        if what in ("take", "get"):
            time_ns, forms = content
            for form in forms:
                yield from workers[form[1]].arrived(thawed_response(form), time_ns)
        elif worker is None:
            continue
        elif what == "step":
            rows, actions, _ = content
            worker.step(thawed(rows), {behavior: thawed(form) for behavior, form in actions.items()})
        elif what == "launch":
            yield from worker.cut(time_ns, error=worker.recycled())  # a failure has left no episodes
            worker.generation = content[0]
            worker.begins.clear()
        elif what == "is_gone" and content and worker.failure is not None:
            yield from worker.cut(time_ns, error=worker.failure)
        elif what == "send":
            name, payload = content[0], unpickled(content[1])
            if name == CommandName.RESET:
                yield from worker.cut(time_ns, is_cut=True)
            worker.asked = name if name != CommandName.BEGIN else worker.asked
            worker.failure = None
            if name == CommandName.BEGIN or (name == CommandName.RESET and isinstance(payload, list)):
                worker.begin(payload)
        elif what == "begin_again":
            config, form = unpickled(content[0]), content[1]
            if isinstance(config, list):
                worker.begin(config)
            if form is not None:
                yield from worker.arrived(thawed_response(form), time_ns)
        elif what == "recv" and worker.asked == CommandName.RESET:
            yield from worker.arrived(thawed_response(content), time_ns)
        elif what == "recv" and content[0] == CommandName.FAILED:
            worker.failure = thawed_response(content).payload
    for worker in workers.values():
        yield from worker.cut(time_ns, is_cut=True)


_NUMBERS = ("worker_id", "generation", "env_id", "agent_id", "episode", "task", "step")
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

    The columns are ``time_ns``, ``behavior``, ``worker_id``, ``generation``, ``env_id``, ``agent_id``, ``episode`` (a
    number), ``task``, ``step`` in the episode, ``reward``, ``terminated``, ``truncated`` and ``lost``.
    """
    columns: dict[str, list[Any]] = {name: [np.zeros(0, dtype)] for name, dtype in _COLUMNS.items()}
    for number, each in enumerate(episodes(path)):
        n = each.length
        last = np.arange(n) == n - 1
        columns["time_ns"].append(each.times_ns)
        for name in ("behavior", "worker_id", "generation", "env_id", "agent_id", "task"):
            columns[name].append(np.full(n, getattr(each, name)))
        columns["episode"].append(np.full(n, number))
        columns["step"].append(np.arange(n))
        columns["reward"].append(each.rewards)
        columns["terminated"].append(last & each.terminated)
        columns["truncated"].append(last & each.truncated)
        columns["lost"].append(last & (each.error is not None))
    return {name: np.concatenate(parts) for name, parts in columns.items()}
