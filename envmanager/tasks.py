"""Tasks, with each of which one episode is begun, the sources that give them, and their results.

A source is a list or another iterable of tasks, or an object with a method ``next_task``; see ``TaskSource``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Protocol

import attrs

from envmanager.data.differences import is_same
from envmanager.data.specs import describe_value
from envmanager.data.trees import snapshot
from envmanager.errors import UsageError
from envmanager.observe.episodes import FinishedEpisode
from envmanager.options import a_mapping, plain


def _seed(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise UsageError(f"{attribute.name} of a task must be a whole number from 0 up or None, not {value!r}.")


@attrs.frozen
class Task:
    """The arguments with which an episode begins.

    Args:
        seed: Seed for the environment's ``reset``, or None for one from the manager's seed and the task's number.
        options: Copied, and merged over the options of the manager's ``reset``.
        id: A name of the user's, which is not sent anywhere.
        actions: Actions that the environment takes right after its reset, before its first observation is delivered: an
            array ``[T, …]``, a tree of them, or a list of T objects. With several behaviors a mapping from each to its
            actions, of all agents in the order in which they act. Returns and lengths count only later steps. If the
            episode ends within them, the task is given up with EpisodeNotBegun.
    """

    seed: int | None = attrs.field(default=None, converter=plain, validator=_seed)
    options: Mapping[str, Any] | None = attrs.field(
        default=None, converter=snapshot, validator=attrs.validators.optional(a_mapping), hash=False
    )
    id: Any = None
    actions: Any = attrs.field(default=None, converter=snapshot, hash=False, eq=attrs.cmp_using(eq=is_same))
    inherits: ClassVar[bool] = True
    """Whether a seed is derived if it is None, and the reset's options are merged. If False, both are passed on as is,
    and a seed is derived only for the first episode after a worker was replaced."""

    @classmethod
    def of(cls, value: Any) -> Task:
        """Return a task as it is, a mapping as options, or a whole number as a seed. Raises UsageError for others."""
        if isinstance(value, Task):
            return value
        if isinstance(value, Mapping):
            return cls(options=value)
        number = plain(value)
        if isinstance(number, int) and not isinstance(number, bool):
            return cls(seed=number)
        raise UsageError(
            f"a task is a Task(seed=…, options=…), a mapping of options or a seed, not {describe_value(value)}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that are set, by name, for files of the user's. Arrays stay arrays."""
        return {name: value for name, value in attrs.asdict(self, recurse=False).items() if value is not None}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Task:
        """Return the task that ``to_dict`` has described."""
        return cls(**given)


class TaskResult(NamedTuple):
    """The end of one task: of the episode that was begun with it, or of the attempts to play it.

    ``index``: number of the task in the order in which the source gave them. ``env_id``: the environment of the last
    attempt. ``terminated``: whether the episode was terminated rather than truncated. ``attempts``: number of times
    that the task was begun. ``error``: the error of the last attempt, if the task was given up; then it has no return.
    ``cut``: whether ``begin`` began another episode before its end. ``episodes``: the episode of each agent.
    """

    index: int  # type: ignore[assignment]  # takes the place of tuple.index
    task: Task
    env_id: int
    terminated: bool
    attempts: int
    error: Exception | None = None
    cut: bool = False
    episodes: tuple[FinishedEpisode, ...] = ()

    @property
    def total(self) -> float:
        """Sum of the rewards of all agents."""
        return sum([each.total for each in self.episodes])

    @property
    def length(self) -> int:
        """Number of steps of the agent that took most."""
        return max([each.length for each in self.episodes], default=0)


class TaskSource(Protocol):
    """An object that gives tasks, such as a curriculum. A method ``ended`` or ``lost`` may be missing.

    The methods run in the thread of the trainer, inside ``reset``, ``step``, ``send`` or ``recv``. An error that one
    raises is raised there, once; nothing is lost by it.
    """

    def next_task(self, env_id: int) -> Task | Mapping[str, Any] | int | None:
        """Return the next task, for environment ``env_id``, or None if there is none now.

        After None, it is asked again when a step was delivered. Raises StopIteration if there are no more tasks.
        """

    def ended(self, result: TaskResult) -> None:
        """Take note of a task whose episode has ended."""

    def lost(self, task: Task, error: Exception) -> None:
        """Take note of a task that was given up, as it failed ``attempts`` times."""


def source_of(tasks: Any) -> tuple[Any, bool]:
    """Return a TaskSource for ``tasks``, and whether it has a known, finite number of tasks. Raises UsageError."""
    if callable(getattr(tasks, "next_task", None)):
        return tasks, False
    if isinstance(tasks, Iterable) and not isinstance(tasks, str | bytes | Mapping):
        left = iter(tasks)
        return SimpleNamespace(next_task=lambda _: Task.of(next(left))), isinstance(tasks, Sized)
    raise UsageError(
        f"tasks must be a list or another iterable of tasks, or have a method next_task(env_id), unlike "
        f"{describe_value(tasks)}."
    )
