"""Evaluation of policies over a set of episodes that is fixed in advance: tasks, or a share for each environment.

Counting whichever episodes end first would favour short episodes. With tasks, any free environment plays the next one,
and one that was lost with its worker is played again. Where episodes cannot begin on demand, a fixed number of episodes
is counted for each seat of each environment, however long they take. An agent that joins takes the seat of an agent
that has left.

An ``Evaluator`` evaluates while a training is paused, in environments of its own::

    training's manager    step ─ step ─ update ─ step ─ │             │ step ─ update ─ …
    evaluator's manager                                 │ 20 episodes │

The rule: such an evaluation does not affect the training. The training's environments, their episodes, the steps in
flight and PyTorch's random generators (CPU and CUDA) are unchanged afterwards.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from envmanager.data.seeding import derive_seed, task_seed
from envmanager.data.specs import describe_value
from envmanager.data.steps import AGENT_BITS, StepInfo
from envmanager.env_manager import EnvManager
from envmanager.errors import CallStopped, ConfigError, EnvManagerError, UsageError
from envmanager.keeping.state import checksum_of, packed, told, unpacked
from envmanager.kernel.tasks import TaskBook
from envmanager.observe import events
from envmanager.observe.episodes import Episodes, FinishedEpisode, means_of_measures
from envmanager.observe.files import replacing, write_atomically
from envmanager.options import Wait, plain
from envmanager.policy import Policy
from envmanager.registry import ManagerOptions, live, make_manager
from envmanager.simple_env_manager import SimpleEnvManager
from envmanager.system.machine import count_cores
from envmanager.tasks import Task, TaskResult
from envmanager.training.curriculum import Curriculum
from envmanager.training.trainer import Trainer, generator_states, restore_generators

_GENERATION = 2**31 - 1
"""Generation for ``derive_seed`` that no worker reaches, so that evaluations share no seed with the training."""
COLUMNS = ("task", "id", "seed", "options", "env_id", "behavior", "agent", "return", "length", "terminated",
           "attempts", "error")  # fmt: skip
"""Columns of the table of an evaluation."""
MOST_TASKS = 1_000_000  # of an iterator, which seems to have no end if there are more
_N_TOLD = 3
"""Number of lost tasks that a warning tells the errors of."""
_FACTS = "facts"
"""Name, beside those of arrays, of the JSON data in the file from which an evaluation goes on."""
_WRITTEN_EVERY_S, _MOST_OFTEN = 1.0, 50
"""Seconds after which that file is written again, and how many times as long as writing takes that is at least."""
_logger = logging.getLogger("envmanager")


@attrs.frozen
class Evaluation:
    """The result of an evaluation: for each behavior, the returns and lengths of its agents' evaluated episodes.

    A return is the sum of one agent's rewards in one episode; a length is the number of this agent's steps. The returns
    and lengths of a behavior are in the same order. ``n_episodes`` is the number of episodes evaluated, each of which
    has one return per agent.
    """

    returns_of: Mapping[str, list[float]]
    lengths_of: Mapping[str, list[int]] = attrs.field(factory=dict)
    n_episodes: int = 0
    results: Sequence[TaskResult] = ()
    """Results of the tasks, in their order, if the evaluation had tasks. A lost task has no return; see its error."""
    lost: int = 0
    """Number of tasks that were given up. Without tasks, number of episodes that failed workers have cut: others were
    played instead, but not those of dropped workers. Long episodes are lost more often than short ones."""
    unplayed: int = 0
    """Number of episodes that had not ended when an error or a Ctrl-C ended the evaluation."""
    episodes: Sequence[FinishedEpisode] = ()
    """Evaluated episode of each agent."""
    measures: Sequence[str] = ()
    """Names of numbers in the infos at the end of the episodes, such as ``is_success``: those of the manager."""

    def __repr__(self) -> str:
        mean = f"mean return {self.mean:.4g}" if self.returns else "no return"
        unplayed = f", {self.unplayed:,} not played" if self.unplayed else ""
        return f"<Evaluation: {self.n_episodes:,} episodes, {mean}, {self.lost:,} lost{unplayed}>"

    @classmethod
    def of(cls, episodes: Sequence[FinishedEpisode], behaviors: Iterable[str], **more: Any) -> Evaluation:
        """Return an Evaluation of ``episodes``. ``more``: its other fields."""
        returns_of: dict[str, list[float]] = {behavior: [] for behavior in behaviors}
        lengths_of: dict[str, list[int]] = {behavior: [] for behavior in returns_of}
        for episode in episodes:
            returns_of.setdefault(episode.behavior, []).append(episode.total)
            lengths_of.setdefault(episode.behavior, []).append(episode.length)
        return cls(returns_of, lengths_of, episodes=episodes, **more)

    @classmethod
    def of_tasks(
        cls, tasks: Sequence[Any], behaviors: Iterable[str], book: TaskBook | None, cut_by: BaseException | None = None
    ) -> Evaluation:
        """Return an Evaluation of ``tasks`` as far as ``book`` says that they were played; None: none has begun.

        ``cut_by``: what ended the evaluation. It is the error of the tasks that were not played to their end.
        """
        played = {} if book is None else {result.index: result for result in book.results}
        running = {} if book is None else book.running
        why = "interrupted" if isinstance(cut_by, KeyboardInterrupt) else getattr(cut_by, "headline", cut_by)

        def unplayed(index: int) -> TaskResult:
            where = "" if running.get(index) is None else f" in env {running[index]}"
            error = EnvManagerError(f"not {f'finished{where}' if index in running else 'played'}: {why}")
            return TaskResult(index, Task.of(tasks[index]), -1, False, 0, error)

        results = [played.get(index) or unplayed(index) for index in range(len(tasks))]
        n_lost = sum(result.error is not None for result in played.values())
        return cls.of(
            [episode for result in results for episode in result.episodes],
            behaviors,
            n_episodes=len(played) - n_lost,
            results=results,
            lost=n_lost,
            unplayed=len(tasks) - len(played),
        )

    @property
    def is_complete(self) -> bool:
        """Whether all episodes were played. Means of incomplete evaluations cannot be compared with others."""
        return not (self.lost or self.unplayed)

    def means_of_measures(self, behavior: str) -> dict[str, float]:
        """Return the mean of each measure over the episodes of a behavior that have it, such as the success rate."""
        return means_of_measures([each for each in self.episodes if each.behavior == behavior], self.measures)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row of COLUMNS and measures for each agent of each task, or of each episode if there were no tasks.

        Rows may lack columns. A lost task has one row, with its error.
        """
        for each in self.results:
            row = {"task": each.index, "id": each.task.id, "seed": each.task.seed, "options": each.task.options}
            if each.attempts:  # else it was not played
                row |= {"env_id": each.env_id, "terminated": each.terminated, "attempts": each.attempts}
            row["error"] = _headline(each)
            yield from ({**row, **self._of_agent(episode)} for episode in each.episodes)
            if not each.episodes:
                yield row
        if not self.results:
            yield from map(self._of_agent, self.episodes)

    def _of_agent(self, episode: FinishedEpisode) -> dict[str, Any]:
        agent = episode.agent_id & (1 << AGENT_BITS) - 1
        facts = {"env_id": episode.env_id, "behavior": episode.behavior, "agent": agent}
        numbers = {name: episode.numbers[name] for name in self.measures if name in episode.numbers}
        return {**facts, "return": episode.total, "length": episode.length, **numbers}

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a table of ``rows``. Options and ids are written as JSON. Raises NotWritten."""
        write_csv(path, [({}, self)])

    @property
    def returns(self) -> list[float]:
        """Episode returns of all agents of all behaviors."""
        return [one for returns in self.returns_of.values() for one in returns]

    @property
    def lengths(self) -> list[int]:
        """Episode lengths of all agents of all behaviors."""
        return [one for lengths in self.lengths_of.values() for one in lengths]

    @property
    def mean(self) -> float:
        """Mean of the returns of all agents of all behaviors."""
        return mean_and_spread(self.returns)[0]

    @property
    def spread(self) -> float:
        """Standard deviation of the returns of all agents of all behaviors."""
        return mean_and_spread(self.returns)[1]


def _headline(result: TaskResult) -> str | None:
    return None if result.error is None else str(result.error).partition("\n")[0].removesuffix(".")


def write_csv(path: str | os.PathLike[str], evaluations: Sequence[tuple[Mapping[str, Any], Evaluation]]) -> None:
    """Write one table of several evaluations, each with the first cells of its rows by column. Raises NotWritten."""
    text = io.StringIO(newline="")
    measures = (name for _, evaluation in evaluations for name in evaluation.measures)
    table = csv.DictWriter(text, list(dict.fromkeys([*evaluations[0][0], *COLUMNS, *measures])))
    table.writeheader()
    for first, evaluation in evaluations:
        for row in evaluation.rows():
            cells = {**first, **row}
            others = [name for name, own in cells.items() if not isinstance(own, str | int | float | None)]
            table.writerow({**cells, **{name: json.dumps(cells[name], default=str) for name in others}})
    write_atomically(Path(path), text.getvalue())


def mean_and_spread(returns: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation of ``returns``."""
    return float(np.mean(returns)), float(np.std(returns))


def shares(n_episodes: int, n_envs: int) -> list[int]:
    """Split ``n_episodes`` evenly among ``n_envs`` environments. Return the number of episodes for each environment."""
    each, rest = divmod(n_episodes, n_envs)
    return [each + (env_id < rest) for env_id in range(n_envs)]


def evaluate(
    manager: EnvManager,
    policies: Mapping[str, Policy],
    *,
    episodes_per_env: int | Sequence[int] | None = None,
    tasks: Iterable[Any] | None = None,
    config: Mapping[str, Any] | None = None,
    resume: str | os.PathLike[str] | None = None,
) -> Evaluation:
    """Reset ``manager``, play with ``policies`` until every agent has finished its episodes, and return the results.

    Pass ``tasks``, or where episodes cannot begin on demand, or environments are unlike, ``episodes_per_env``. Raises
    UsageError for bad ones. After a Ctrl-C, ``manager.tasks.results`` has what was played.

    Args:
        manager: The manager to play in.
        policies: Policies by behavior.
        episodes_per_env: Number for all environments, or a list with one for each. Another episode is played for each
            that is lost with a failed worker; those of a dropped worker are left out. ``Evaluation.lost`` counts both.
        tasks: One episode is played of each, in whichever environment is free, so no environment waits for a slower
            one; see ``EnvManager.reset``. Results do not depend on ``n_envs``. An endless iterator is refused.
        config: Passed to ``manager.reset``.
        resume: A file in which the evaluation of ``tasks`` says each second where it stands. If it is there, the
            evaluation goes on from it, or is over at once. The manager must keep episodes, the tasks be plain data, and
            the policies depend on nothing but the rows. Raises UsageError for a file with other tasks, policies or
            environments, and NotWritten.
    """
    given: Any = {"episodes_per_env": episodes_per_env, "tasks": tasks, "config": config, "resume": resume}
    evaluation = evaluate_until(lambda _: False, manager, policies, **given)
    assert evaluation is not None
    return evaluation


def evaluate_until(
    is_over: Callable[[Callable[[], int]], bool],
    manager: EnvManager,
    policies: Mapping[str, Policy],
    *,
    episodes_per_env: int | Sequence[int] | None = None,
    tasks: Iterable[Any] | None = None,
    config: Mapping[str, Any] | None = None,
    on_cut: Callable[[Evaluation], Any] | None = None,
    resume: str | os.PathLike[str] | None = None,
    label: Any = None,
) -> Evaluation | None:
    """Evaluate as ``evaluate`` does, but call ``is_over`` before each step and return None once it returns True.

    Its argument is a function that returns the number of episodes that have ended. Logs a warning about lost episodes.
    If an error or a Ctrl-C ends the evaluation, ``on_cut`` is called with what was played, before the error is raised.
    ``label``: JSON data about the environments, by which a file of others is refused.
    """
    given = None if tasks is None else _listed(tasks)
    course: _Shares | _Tasks
    if given is None and episodes_per_env is not None:
        course = _Shares(manager, episodes_per_env)
    elif given is not None and episodes_per_env is None:
        course = _Tasks(manager, given)
    else:
        raise UsageError("evaluate() takes either tasks or episodes_per_env.")
    place = None if resume is None else _Place(Path(resume), manager, policies, given, config, label)
    for behavior, policy in policies.items():
        manager.set_policy(behavior, policy)
    with logged_as_evaluation():
        try:
            state = None if place is None else place.read()
            begun: Any = {"config": config} if state is None else {"state": state}
            infos = manager.reset(**begun, tasks=given)
            while not course.are_played(infos):
                if is_over(course.count):
                    return None
                if place is not None:
                    place.write_if_due()
                infos = manager.step()
            if place is not None:
                place.write()
        except BaseException as error:
            if on_cut is not None:
                on_cut(course.evaluation(policies, error))
            raise
        evaluation = course.evaluation(policies)
        if evaluation.lost:
            _logger.warning("%s", _losses(evaluation))
    return evaluation


class _Place:
    """The file from which a killed evaluation goes on: the manager's state, and checksums of what is evaluated."""

    def __init__(
        self,
        path: Path,
        manager: EnvManager,
        policies: Mapping[str, Policy],
        tasks: Sequence[Any] | None,
        config: Mapping[str, Any] | None,
        label: Any,
    ) -> None:
        if tasks is None:
            raise UsageError("an evaluation goes on from a file if it plays tasks: pass tasks in place of episodes.")
        self._path, self._manager, self._due = path, manager, -math.inf
        arrays: dict[str, np.ndarray] = {}
        plain_tasks = packed(told([config, [Task.of(task) for task in tasks]]), arrays)
        sums = [checksum_of(np.ascontiguousarray(each)) for each in arrays.values()]
        specs = sorted((name, repr(spec)) for name, spec in manager.behavior_specs.items())
        sources = sorted((name, getattr(own, "source", type(own).__qualname__)) for name, own in policies.items())
        of = {"tasks": [plain_tasks, sums], "policies": sources, "environments": [label, specs]}
        self._of = {name: checksum_of(own) for name, own in of.items()}

    def read(self) -> Any:
        """Return the state in the file, None if there is none. Raises UsageError if it is another file, or damaged."""
        if not os.path.lexists(self._path):
            return None
        try:
            with open(self._path, "rb") as file:
                arrays = dict(np.load(file, allow_pickle=False))
            facts = json.loads(arrays.pop(_FACTS).tobytes())
            state, others = (
                unpacked(facts["state"], arrays),
                [own for own in self._of if facts["of"][own] != self._of[own]],
            )
        except Exception as error:  # what any other content makes of NumPy, zipfile and JSON
            text = f"{self._path} is no file of an evaluation, or is damaged: {error}. Name another one, or remove it"
            raise UsageError(f"{text} to begin again.") from error
        if others:
            text = f"{self._path} is of an evaluation with other {' and other '.join(others)}: name another file"
            raise UsageError(f"{text}, or remove it to begin again.")
        return state

    def write_if_due(self) -> None:
        """Write the file if it was not written in the last second, or longer if writing takes long."""
        began = time.monotonic()
        if began >= self._due:
            self.write()
            self._due = time.monotonic() + max(_WRITTEN_EVERY_S, _MOST_OFTEN * (time.monotonic() - began))

    def write(self) -> None:
        """Replace the file. Raises NotWritten, and the errors of ``EnvManager.state``."""
        arrays: dict[str, Any] = {}
        facts = {"of": self._of, "state": packed(self._manager.state(), arrays)}
        arrays[_FACTS] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        with replacing(self._path) as file:
            np.savez(file, **arrays)


def _listed(tasks: Iterable[Any]) -> list[Any]:
    """Return ``tasks`` as a list. Raises UsageError for a source of another kind, and one that seems to have no end."""
    if not isinstance(tasks, Iterable):
        raise UsageError(f"evaluate() needs a list or another iterable of tasks, not {describe_value(tasks)}.")
    given = list(tasks if isinstance(tasks, Sized) else islice(tasks, MOST_TASKS + 1))
    if len(given) > MOST_TASKS and not isinstance(tasks, Sized):
        raise UsageError(
            f"evaluate() plays each task once, but {describe_value(tasks)} has given {MOST_TASKS:,} and has more: pass "
            "itertools.islice(tasks, n) to play the first n, or a list."
        )
    return given


def _losses(evaluation: Evaluation) -> str:
    """Return a sentence about the lost episodes of an evaluation."""
    if not evaluation.results:
        return f"{evaluation.lost:,} episodes were lost with failed workers, so the results are incomplete."
    lost, n = [each for each in evaluation.results if each.error], len(evaluation.results)
    told = [f"task {each.index} (seed {each.task.seed}): {_headline(each)}" for each in lost[:_N_TOLD]]
    more = "; and others" if len(lost) > _N_TOLD else ""
    return f"{len(lost):,} of {n:,} tasks were lost, so the results are incomplete. {'; '.join(told)}{more}"


def episodes_for(
    manager: EnvManager, n_episodes: int, seed: int | None, curriculum: Curriculum | None = None
) -> dict[str, Any]:
    """Return the arguments with which ``evaluate`` plays ``n_episodes`` episodes that ``seed`` determines.

    These are tasks or a share for each environment, where episodes cannot begin on demand, or where agents may end
    theirs while the environment goes on for ever. With ``curriculum`` they are tasks with the values of the last
    lessons.
    """
    if manager.begins_on_demand and (curriculum is not None or manager.ends_episodes):
        return {"tasks": tasks_for(n_episodes, seed, curriculum, manager.kinds)}
    return {"episodes_per_env": shares(n_episodes, manager.n_envs), "config": {"seed": seed}}


def tasks_for(
    n_episodes: int, seed: int | None, curriculum: Curriculum | None = None, kinds: Sequence[str] = ()
) -> list[Task]:
    """Return ``n_episodes`` tasks that ``seed`` determines, with the values of the last lessons of ``curriculum``.

    ``kinds``: those of the environments, if there are several, which get the tasks in turn.
    """
    tasks = seeded([Task()] * n_episodes if curriculum is None else curriculum.final_tasks(n_episodes), seed)
    return [attrs.evolve(task, kind=kinds[place % len(kinds)]) for place, task in enumerate(tasks)] if kinds else tasks


def seeded(tasks: Sequence[Task], seed: int | None) -> list[Task]:
    """Return ``tasks`` with the seeds that a manager with ``seed`` derives for those that have none."""
    if seed is None:
        return list(tasks)
    seeds = (task_seed(seed, index) if task.seed is None else task.seed for index, task in enumerate(tasks))
    return [attrs.evolve(task, seed=own) for task, own in zip(tasks, seeds, strict=True)]


@contextmanager
def logged_as_evaluation() -> Iterator[None]:
    """Begin the lines that this thread logs in the block with ``evaluation:``, to tell them from the training's."""
    thread = threading.get_ident()

    def name(record: logging.LogRecord) -> bool:
        if record.thread == thread:
            record.msg = f"evaluation: {record.msg}"
        return True

    _logger.addFilter(name)
    try:
        yield
    finally:
        _logger.removeFilter(name)


@attrs.define
class _Seat:
    """The episodes to evaluate of one agent, and of later agents that took its place."""

    behavior: str
    episodes: list[FinishedEpisode] = attrs.field(factory=list)
    began: int | None = None
    """Step in which the current episode began; None after its end."""
    seen: int = -1
    """Last step with a row for the agent."""


@attrs.define
class _EnvEpisodes:
    """The first ``wanted`` episodes of each seat in one environment.

    An agent has left when another agent has begun and finished an episode since the last row for it.
    """

    wanted: int
    lost: int = 0
    seats: dict[int, _Seat] = attrs.field(factory=dict)
    """Seats by the agent_id of the last agent, in the order in which their last episodes ended."""
    newest: int = -1
    """Step in which the newest of the finished episodes began."""

    @property
    def is_over(self) -> bool:
        """Whether each seat has its episodes, but for seats of agents that have left."""
        done = (len(seat.episodes) == self.wanted or seat.seen < self.newest for seat in self.seats.values())
        return not self.wanted or (bool(self.seats) and all(done))

    def seat(self, behavior: str, agent_id: int) -> _Seat:
        """Return the seat of an agent. A new agent gets the seat that is free for longest, or else a new seat."""
        if agent_id not in self.seats:
            free = (
                before
                for before, seat in self.seats.items()
                if seat.behavior == behavior and (seat.began is None or seat.seen < self.newest)
            )
            left = self.seats.pop(next(free, -1), _Seat(behavior))
            self.seats[agent_id] = attrs.evolve(left, began=None, seen=-1)
        return self.seats[agent_id]

    def end(self, episode: FinishedEpisode) -> None:
        """Add an episode that has ended. Its seat is behind those that are free already."""
        seat = self.seat(episode.behavior, episode.agent_id)
        if len(seat.episodes) < self.wanted:
            seat.episodes.append(episode)
        self.newest, seat.began = max(self.newest, seat.began or 0), None
        self.seats[episode.agent_id] = self.seats.pop(episode.agent_id)


class _Shares:
    """An evaluation in progress that plays a fixed number of episodes in each environment."""

    def __init__(self, manager: EnvManager, episodes_per_env: int | Sequence[int]) -> None:
        given = plain(episodes_per_env)
        wanted = [given] * manager.n_envs if isinstance(given, int) else list(given)
        if len(wanted) != manager.n_envs or min(wanted) < 0 or not any(wanted):
            raise UsageError(f"episodes_per_env must be a number, or {manager.n_envs} of them, not {episodes_per_env}.")
        self._manager, self._envs = manager, [_EnvEpisodes(n) for n in wanted]
        self._episodes = Episodes(
            lambda episode: self._envs[episode.env_id].end(episode), keeps_returns=False, measures=manager.measures
        )
        self._now = 0
        """Number of the step."""
        self._n_dropped = -1  # so that the first check includes workers dropped earlier

    def are_played(self, infos: Iterable[StepInfo]) -> bool:
        """Add the steps that the manager has returned, and return whether all episodes are played."""
        for info in infos:
            self._add(info)
        self._now += 1
        n_dropped = self._manager.events.count(events.Dropped)
        if n_dropped > self._n_dropped:
            self._n_dropped = n_dropped
            for worker in self._manager.stats().workers:
                for env_id in worker.env_ids if worker.dropped else ():
                    self._envs[env_id] = _EnvEpisodes(0, self._envs[env_id].lost + self._envs[env_id].wanted)
        return all(env.is_over for env in self._envs)

    def count(self) -> int:
        """Return the number of episodes played so far."""
        return sum(max((len(seat.episodes) for seat in env.seats.values()), default=0) for env in self._envs)

    def evaluation(self, behaviors: Iterable[str], cut_by: BaseException | None = None) -> Evaluation:
        """Return what was played. ``cut_by``: what ended the evaluation before its end."""
        episodes = [each for env in self._envs for seat in env.seats.values() for each in seat.episodes]
        n_wanted, n_lost = sum(env.wanted for env in self._envs), sum(env.lost for env in self._envs)
        n_episodes = n_wanted if cut_by is None else self.count()
        counts = {"n_episodes": n_episodes, "lost": n_lost, "unplayed": n_wanted - n_episodes}
        return Evaluation.of(episodes, behaviors, **counts, measures=self._manager.measures)

    def _add(self, info: StepInfo) -> None:
        self._episodes.add(info)
        envs, now = self._envs, self._now
        if info.lost is not None:
            ended = (steps.env_id[steps.truncated].tolist() for steps in info.current.values())
            for env_id in set().union(*ended).intersection(info.lost.env_ids):
                envs[env_id].lost += not envs[env_id].is_over
                for seat in envs[env_id].seats.values():
                    seat.began = None
        for behavior, steps in info.current.items():
            present = steps.agent_id if steps.acting is None else steps.agent_id[steps.acting | ~steps.ended]
            # Agents with a seat come first, so that new agents do not take it.
            for agent_id in sorted(present.tolist(), key=lambda each: each not in envs[each >> AGENT_BITS].seats):
                seat = envs[agent_id >> AGENT_BITS].seat(behavior, agent_id)
                seat.seen, seat.began = now, now if seat.began is None else seat.began


class _Tasks:
    """An evaluation in progress that plays ``tasks``, each in whichever environment is free."""

    def __init__(self, manager: EnvManager, tasks: Sequence[Any]) -> None:
        self._manager, self._tasks = manager, tasks

    def are_played(self, _: Iterable[StepInfo]) -> bool:
        return self._manager.tasks.done

    def count(self) -> int:
        return len(self._manager.tasks.results)

    def evaluation(self, behaviors: Iterable[str], cut_by: BaseException | None = None) -> Evaluation:
        """Return what was played. ``cut_by``: what ended the evaluation before its end."""
        book = None
        with suppress(UsageError):  # the reset may have been refused
            book = self._manager.tasks if self._manager.tasks.given is self._tasks else None
        evaluation = Evaluation.of_tasks(self._tasks, behaviors, book, cut_by)
        return attrs.evolve(evaluation, measures=self._manager.measures)


def evaluation_seed(seed: int) -> int:
    """Return the seed of the evaluations of a training that has ``seed``."""
    return derive_seed(seed, 0, generation=_GENERATION)


class Evaluator:
    """A context manager that evaluates greedy policies in its own environments, on the same episodes each time.

    ``options``, ``manager``, ``seed``, ``curriculum``: those of the training. The evaluator makes a second manager
    and closes it on exit. Each evaluation plays ``n_episodes`` episodes. Raises the errors of ``options_for`` and
    ``make_manager``.
    """

    def __init__(
        self,
        options: ManagerOptions,
        manager: EnvManager,
        *,
        n_episodes: int,
        seed: int,
        curriculum: Curriculum | None = None,
    ) -> None:
        with logged_as_evaluation():
            self.manager = make_manager(options_for(options, manager, n_episodes=n_episodes))
        self._episodes = episodes_for(self.manager, n_episodes, evaluation_seed(seed), curriculum)

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def evaluate(self, trainers: Mapping[str, Trainer], is_over: Callable[[], bool]) -> Evaluation | None:
        """Pause the trainers, play the episodes and return the evaluation, or None as soon as ``is_over()`` is True."""
        for trainer in trainers.values():
            trainer.pause()  # so that the weights stay equal to those in a checkpoint written now
        policies = {behavior: trainer.greedy_policy() for behavior, trainer in trainers.items()}
        before = generator_states()
        try:
            return evaluate_until(lambda _: is_over(), self.manager, policies, **self._episodes)
        except CallStopped:
            return None
        finally:
            restore_generators(before)


def options_for(options: ManagerOptions, manager: EnvManager, *, n_episodes: int) -> ManagerOptions:
    """Return the training's options, changed for an evaluation's manager with at most ``n_episodes`` environments.

    Raises ConfigError when the training is attached to a running game, which cannot be started a second time.
    """
    options = live(options)
    kind = options.kind
    if kind == "auto":
        kind = "simple" if isinstance(manager, SimpleEnvManager) else "subprocess"
    engine = None if options.engine is None else {**options.engine, "window": False, "pin": False}
    if engine is not None and engine.get("attach") is not None:
        raise ConfigError(
            "training.evaluate_every needs a second game for its evaluations, but engine.attach gives only one: leave "
            "out one of the two."
        )
    n_envs = options.n_envs if manager.kinds else min(options.n_envs, n_episodes)
    n_workers = None if kind == "asyncio" else options.n_workers  # there, each environment is a worker
    if n_workers == "auto" or options.kind == "auto":
        n_workers = count_cores()
    return attrs.evolve(
        options,
        kind=kind,
        n_envs=n_envs,
        n_workers=None if n_workers is None else min(n_workers, n_envs),
        local_envs=0,
        wait=Wait.all(),  # so that policies see the same batches each time
        seed=None,
        trace=None,
        record=None,
        order=None,
        log_dir=None if options.log_dir is None else os.path.join(options.log_dir, "evaluation"),
        engine=engine,
    )
