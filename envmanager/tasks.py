"""Tasks, with each of which one episode is begun, the sources that give them, and their results.

A source is a list or another iterable of tasks, or an object with a method ``next_task``; see ``TaskSource``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Protocol

import attrs
import numpy as np

from envmanager.data.differences import is_same
from envmanager.data.specs import describe_value
from envmanager.data.steps import Call
from envmanager.data.trees import snapshot
from envmanager.errors import UsageError
from envmanager.observe.episodes import FinishedEpisode
from envmanager.options import a_mapping, at_least, must_be, plain

_COMMANDS = "call", "set_attr", "unset_attr"


def _calls(given: Any) -> tuple[Call, ...]:
    try:
        calls = tuple([Call(*each)._replace(args=tuple(Call(*each).args)) for each in given or ()])
    except TypeError as error:
        raise UsageError(f"calls of a task must be a list of (after, command, name, args), not {given!r}.") from error
    wrong = [each for each in calls if not isinstance(each.after, int) or each.command not in _COMMANDS]
    if wrong:
        raise UsageError(
            f"a call of a task comes after a number of actions, and is one of {_COMMANDS}, unlike {wrong[0]}."
        )
    return snapshot(calls)  # type: ignore[no-any-return]


def is_plain(value: Any) -> bool:
    """Return whether a value has nothing but numbers, texts, bytes, None, arrays, lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.items()))
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind != "O"
    return value is None or isinstance(value, int | float | str | bytes)


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
        calls: What is repeated amid the actions, as ``EnvManager.positions`` tells it: a Call, or a list of its fields,
            for each ``call`` and ``set_attr``. What they set stays set in the environment, as after ``set_attr``.
        group: A label that siblings have, such as the rollouts of one prompt; see ``Pool.play``.
        kind: Kind of environment that plays it, in a manager of several kinds. None: any of them.
    """

    seed: int | None = attrs.field(default=None, converter=plain, validator=attrs.validators.optional(at_least(0)))
    options: Mapping[str, Any] | None = attrs.field(
        default=None, converter=snapshot, validator=attrs.validators.optional(a_mapping), hash=False
    )
    id: Any = None
    actions: Any = attrs.field(default=None, converter=snapshot, hash=False, eq=attrs.cmp_using(eq=is_same))
    calls: Sequence[Call] = attrs.field(
        default=(), converter=_calls, hash=False, eq=attrs.cmp_using(eq=is_same, class_name="Calls")
    )
    group: Any = None
    kind: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(must_be("a text", lambda value: isinstance(value, str)))
    )
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
        """Return the arguments that are set, by name, for files of the user's. Arrays stay arrays.

        Raises UsageError for a call whose function or arguments are no plain data.
        """
        given = {name: value for name, value in attrs.asdict(self, recurse=False).items() if value is not None}
        for call in given.pop("calls"):
            if not is_plain(tuple(call)):
                raise UsageError(
                    f"a task with {call.command}({call.name!r}, …) amid its actions is no plain data: name a method, "
                    "and give it numbers, texts, arrays, lists and dicts. Such a task can be begun, and pickled."
                )
            given.setdefault("calls", []).append(list(call))
        return given

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Task:
        """Return the task that ``to_dict`` has described."""
        return cls(**given)


class ExactTask(Task):
    """A task whose seed and options are passed on unchanged."""

    inherits = False


class TaskTimes(NamedTuple):
    """Durations in seconds of a rollout of ``Pool.play``, in its last attempt."""

    waiting_s: float
    """Until an environment was free."""
    stepping_s: float
    """In the reset and the steps of the environment, from the action to the response."""
    agent_s: float
    """In the agent, and all else."""


class TaskResult(NamedTuple):
    """The end of one task: of the episode that was begun with it, or of the attempts to play it.

    ``index``: number of the task in the order in which the source gave them. ``env_id``: the environment of the last
    attempt. ``terminated``: whether the episode was terminated rather than truncated. ``attempts``: number of times
    that the task was begun. ``error``: the error of the last attempt, if the task was given up; then it has no return.
    ``cut``: whether ``begin`` began another episode before its end. ``episodes``: the episode of each agent.

    Of ``Pool.play`` alone: ``value`` is what the agent has returned, ``times`` where the time went, ``versions`` the
    version of the policy at each step. There ``cut`` says that the agent has returned before the episode's end.
    """

    index: int  # type: ignore[assignment]  # takes the place of tuple.index
    task: Task
    env_id: int
    terminated: bool
    attempts: int
    error: Exception | None = None
    cut: bool = False
    episodes: tuple[FinishedEpisode, ...] = ()
    value: Any = None
    times: TaskTimes | None = None
    versions: tuple[int, ...] = ()

    @property
    def total(self) -> float:
        """Sum of the rewards of all agents."""
        return sum([each.total for each in self.episodes])

    @property
    def length(self) -> int:
        """Number of steps of the agent that took most."""
        return max([each.length for each in self.episodes], default=0)


class GroupResult(NamedTuple):
    """The rollouts of one group of ``Pool.play``. ``index``: number of the group. ``task``: that of the first sibling.

    ``results``: those that have ended, in that order. ``lost``: those that were given up, each with its ``error``.
    ``is_whole``: whether as many have ended as were to be kept.
    """

    index: int  # type: ignore[assignment]
    task: Task
    results: tuple[TaskResult, ...]
    lost: tuple[TaskResult, ...]
    is_whole: bool


class TaskSource(Protocol):
    """An object that gives tasks, such as a curriculum. All methods but ``next_task`` may be missing.

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

    def state(self) -> Any:
        """Return where the source stands, as plain data, for ``EnvManager.state``."""

    def restore(self, state: Any) -> None:
        """Go on from a state that ``state`` returned."""


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
