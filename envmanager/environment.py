"""The abstract classes Environment and EnvGroup (all environments of one worker).

This module depends on no environment library. ``adapters`` has an adapter for each library, and ``adapters.choosing``
chooses the adapter for a user's object.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np

from envmanager.data.casting import Casting
from envmanager.data.specs import BehaviorSpecs, SpecMismatch
from envmanager.data.steps import AGENT_BITS, Begin, Call, RowBuffer, Steps
from envmanager.data.trees import Tree, snapshot


@attrs.frozen
class EnvContext:
    """A description of the environment to make, passed to factories that take an argument.

    ``slot`` is a number of its own in this program, whatever managers make environments, for ports and file names.
    ``generation`` is the number of times that the worker was replaced. ``seed`` is derived from the manager's seed and
    is None if the manager has none. ``n_envs`` is the worker's number of environments, for vector environments.
    """

    env_id: int
    worker_id: int
    generation: int = 0
    slot: int = attrs.field(factory=itertools.count().__next__)
    seed: int | None = None
    log_dir: str | None = None
    n_envs: int = 1


class Environment(ABC):
    """The base class of the environments that workers run. An environment has any number of agents.

    ``as_environment`` wraps environments of other libraries. A subclass defines ``behavior_specs``, ``reset``, ``step``
    and ``close``. An environment numbers its agents 0, 1, … in order of their first appearance. When its episode ends,
    ``step`` begins the next episode at once. The steps then have the new episode's first observation as ``obs``, and
    the ended episode's last observation as ``final_obs``.
    """

    partial_actions = False
    """Whether ``step`` accepts actions for only some of the behaviors."""
    can_rest = False
    """Whether ``step`` obeys ``rests``."""
    rests = False
    """Whether the environment rests after an episode. Then ``step`` does not begin the next episode, and its result has
    the last observations as ``obs`` and ``final_obs``, and ``acting`` False. ``reset`` begins the next episode."""
    casting: Casting | None = None
    """Casting that the adapter uses, which then also copies objects; None if the worker casts and copies the values."""

    @property
    def max_agents(self) -> Mapping[str, int]:
        """Expected maximum number of agents per behavior. Steps with more agents are sent pickled, which is slower."""
        return dict.fromkeys(self.behavior_specs, 1)

    @property
    @abstractmethod
    def behavior_specs(self) -> BehaviorSpecs:
        """The specs of all behaviors that have appeared so far. More may appear later."""

    @abstractmethod
    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        """Begin an episode. Return its first observations by behavior, with reward 0.

        ``seeds`` has one entry; in an EnvGroup, one per environment. A seed of None keeps the random generator's state.
        """

    @abstractmethod
    def step(self, actions: Mapping[str, Tree]) -> Steps:
        """Take one environment step and return the results by behavior.

        ``actions`` maps each behavior to a tree of ``[n, …]``: one row per ``acting`` row of the last result, in order.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the environment's resources."""

    # A step in halves: ``steps_of(wrapped.step(action_of(actions)))`` is what ``step(actions)`` returns.

    @property
    def wrapped(self) -> Any:
        """The environment to step, which an adapter wraps. An Environment that wraps none is its own."""
        return self

    def action_of(self, actions: Mapping[str, Tree]) -> Any:
        """Return ``actions`` in the form that ``wrapped.step`` takes. By default, return them unchanged."""
        return actions

    def steps_of(self, result: Any) -> Steps:
        """Convert the result of ``wrapped.step`` to the result of ``step``. By default, return it unchanged."""
        return result  # type: ignore[no-any-return]

    @property
    def subject(self) -> Any:
        """The object on which ``call``, ``get_attr``, ``set_attr`` and ``render`` act: by default ``wrapped``."""
        return self.wrapped


class EnvGroup(Environment):
    """The environments of one worker as a single Environment. Some groups can also step a subset of them."""

    env_ids: tuple[int, ...]
    casting: Casting
    behavior = "default"
    """Name of the behavior of a group that has one."""
    steps_some_rows = True
    """Whether ``step`` accepts ``rows``, to step only some of the environments."""
    batch_size = 0
    """Maximum number of environments in a result of ``step`` with ``rows``; 0 if each result has exactly ``rows``.
    If not 0, a result has the next ready environments. An episode's last step comes once the next episode began."""
    returns_new_arrays = False
    """Whether each step returns arrays that no later step changes, unless a buffer was offered."""
    begins_on_demand = False
    begins_when_ready = False
    """Whether the group obeys a Begin that is not ``at_once``. Then each environment must have one agent."""
    takes_actions = False
    """Whether the group obeys ``Begin.actions``."""
    not_begun: Mapping[int, tuple[Begin, int, Any]] = MappingProxyType({})
    """Episodes that could not begin since the worker last responded, by env_id: the number of the action at which the
    episode ended or failed, and the error, None for an end. For one that has begun: what ``Begin.counted_from`` asks
    for."""
    on_demand: OnDemand | None = None
    """State of the environments while episodes begin on demand; None while they begin by themselves."""
    _as_made: Mapping[tuple[int, str], Any] = MappingProxyType({})
    """Values that attributes had before they were first set, by row and name."""
    _before_calls: Mapping[str, Any] = MappingProxyType({})
    """Values of the attributes that the calls of the episode to begin set, by name."""
    current_env_id: int | None = None
    """Id of the environment whose code is running, for error messages."""

    def name_behaviors(self, kind: str) -> None:
        """Give the only behavior the name of its kind of environment. A group of several behaviors overrides this."""
        self.behavior_specs = {kind: self.behavior_specs[self.behavior]}  # type: ignore[misc]  # no property there
        self.behavior = kind

    def accept_device_arrays(self) -> bool:
        """Stop converting PyTorch and JAX arrays to NumPy, if supported. Return whether this group supports it."""
        return False

    @abstractmethod
    def step(self, actions: Mapping[str, Tree], rows: np.ndarray | None = None) -> Steps:
        """Step all environments, or only those at ``rows``, which must have one agent each. Return the steps."""

    def reset_on_demand(self, begins: Sequence[Begin]) -> Steps:
        """Begin these episodes, and return their first observations. Until ``reset``, episodes begin on demand.

        The other environments rest, and so does each environment after an episode: it has no rows and takes no actions.
        ``step`` then steps the environments that play, and begins the episodes in ``on_demand``.
        """
        raise NotImplementedError

    def _could_not_begin(self, begin: Begin, step: int, error: Exception | None) -> None:
        """Let an environment rest whose episode has ended or failed within its actions, and note it.

        Its attributes get the values that they had before.
        """
        for name, value in self._before_calls.items():
            with suppress(Exception):  # of any kind: it is the environment's own code
                self._put(begin.row, name, value)
        self.not_begun = {**self.not_begun, self.env_ids[begin.row]: (begin, step, error)}
        if self.on_demand is not None:
            self.on_demand.plays[begin.row] = False

    def _has_repeated(self, begin: Begin, rewards: Sequence[Any]) -> None:
        """Note the return and the length of an episode of one agent, if asked for, whose actions had these rewards."""
        if begin.counted_from is not None:
            counted = np.array(rewards[begin.counted_from :], np.float32).reshape(-1).tolist()
            env_id = self.env_ids[begin.row]
            total = float(np.cumsum([0.0, *counted])[-1])  # one after the other, as they are counted; sum() is exacter
            counts = {env_id << AGENT_BITS: (total, len(counted))}
            self.not_begun = {**self.not_begun, env_id: (begin, len(rewards), counts)}

    def _calls_of(self, begin: Begin) -> dict[int, list[Callable[[], Any]]]:
        """Return functions that repeat the calls amid an episode, by the number of actions that come before."""
        calls: dict[int, list[Callable[[], Any]]] = {}
        for call in begin.calls:
            calls.setdefault(call.after, []).append(partial(self.repeat, begin.row, call))
        names = {call.name for call in begin.calls if isinstance(call.name, str) and call.command != "call"}
        self._before_calls = {name: _value_of(self.subjects[begin.row], name) for name in names}
        return calls

    def repeat(self, row: int, call: Call) -> list[Any] | None:
        """Do once more to the environment at ``row`` what was done amid an episode. Return the result of a call."""
        if call.command == "call":
            return self.call(call.name, call.args, [row], call.kwargs or {})
        assert isinstance(call.name, str)
        if call.command == "set_attr":
            self.set_attr(call.name, call.args, [row])
        elif (row, call.name) in self._as_made:
            self._put(row, call.name, self._as_made[row, call.name])
        return None

    def _put(self, row: int, name: str, value: Any) -> None:
        """Set an attribute to an earlier value, which may be that it was missing."""
        if value is not _MISSING:
            self.set_attr(name, [value], [row])
        elif _value_of(self.subjects[row], name) is not _MISSING:
            delattr(self.subjects[row], name)

    @property
    @abstractmethod
    def subjects(self) -> Sequence[Any]:
        """The objects on which ``call``, ``get_attr``, ``set_attr`` and ``render`` act, one per environment."""

    def offer_rows(self, buffer: RowBuffer) -> None:
        """Accept a buffer into which the group may write its next steps. The base class ignores the buffer."""

    def _each(self, rows: Iterable[int]) -> Iterator[int]:
        """Yield each of ``rows``. Meanwhile ``current_env_id`` is the id of the environment at that row."""
        for row in rows:
            self.current_env_id = self.env_ids[row]
            yield row
        self.current_env_id = None

    def _at(self, rows: Iterable[int]) -> Iterable[Any]:
        subjects = self.subjects
        return (subjects[row] for row in self._each(rows))

    def call(
        self,
        name: str | Callable[..., Any],
        args: Sequence[Any],
        rows: Sequence[int],
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Any]:
        """Call ``env.name(…)`` or the function ``name(env, …)`` on the environments at ``rows``. Return the results."""
        if callable(name):
            return [name(subject, *args, **kwargs) for subject in self._at(rows)]
        return [attribute_of(subject, name)(*args, **kwargs) for subject in self._at(rows)]

    def get_attr(self, name: str, rows: Sequence[int]) -> list[Any]:
        """Return a list with the attribute ``name`` of each environment at the indices ``rows``."""
        return [attribute_of(subject, name) for subject in self._at(rows)]

    def set_attr(self, name: str, values: Sequence[Any], rows: Sequence[int]) -> None:
        """Set the attribute ``name`` of each environment at the indices ``rows``. ``values`` has one value per row."""
        for row, subject, value in zip(rows, self._at(rows), values, strict=True):
            if (row, name) not in self._as_made:
                self._as_made = {**self._as_made, (row, name): _value_of(subject, name)}
            set_attribute = getattr(subject, "set_wrapper_attr", partial(setattr, subject))
            set_attribute(name, value)

    def render(self, rows: Sequence[int]) -> list[Any]:
        """Render each environment at the indices ``rows``. Return a list of the results."""
        return [snapshot(subject.render()) for subject in self._at(rows)]


def behavior_of(kind: str, behavior: str) -> str:
    """Return the name that a ``behavior`` of an environment has in a manager of several kinds."""
    return kind if behavior == "default" else f"{kind}/{behavior}"


class OnDemand:
    """The environments of a group whose episodes begin on demand: which of them play, and what they begin next."""

    def __init__(self, n_envs: int, begins: Iterable[Begin]) -> None:
        self.plays = bytearray(n_envs)  # 1 for each that plays; a 0 is found sooner than in a list
        self.now: dict[int, Begin] = {}
        """Episodes to begin with the next step, by row."""
        self.ready: dict[int, Begin] = {}
        """Episodes to begin when the environment's present one has ended, by row."""
        self._playing: dict[int, Begin] = {}
        self.add(begins)

    def add(self, begins: Iterable[Sequence[Any]]) -> None:
        """Store episodes to begin, each a Begin or a tuple of its fields, as links send it.

        One that is to begin at once takes the place of all else in its environment.
        """
        for begin in map(Begin._make, begins):
            if begin.at_once:
                self.now[begin.row] = begin
                self.ready.pop(begin.row, None)
            else:
                self.ready[begin.row] = begin

    def ended(self, row: int) -> Begin | None:
        """Return the episode that the environment at ``row`` begins after one that has ended, or None if it rests."""
        begin = self.ready.pop(row, None) or self._playing[row].following
        self.plays[row] = begin is not None
        if begin is not None:
            self._playing[row] = begin
        return begin

    def rows(self, rows: np.ndarray | None) -> tuple[list[int], dict[int, Begin]]:
        """Return the rows of the next step and, by row, the episodes that it begins, whose environments play from now.

        ``rows``: the environments to step, in ascending order, by default all that play. Those that begin are added.
        """
        begins, self.now = self.now, {}
        self._playing.update(begins)
        stepped = [row for row, plays in enumerate(self.plays) if plays] if rows is None else rows.tolist()
        for row in begins:
            self.plays[row] = True
        return (sorted({*stepped, *begins}) if begins else stepped), begins


def repeated(calls: dict[int, list[Callable[[], Any]]], after: int, seen: Any, copied: Any = snapshot) -> Any:
    """Repeat the calls that came after so many actions. Return what was ``seen`` before, a copy if there are any."""
    if after in calls:
        seen = copied(seen)
        for call in calls.pop(after):
            call()
    return seen


def check_repeated(calls: Mapping[int, Any]) -> None:
    """Raise SpecMismatch if there are calls after numbers of actions that no step has completed."""
    if calls:
        raise SpecMismatch("the calls to begin with", "after actions of the episode", f"one after {min(calls)}")


_MISSING = object()


def _value_of(subject: Any, name: str) -> Any:
    try:
        return attribute_of(subject, name)
    except Exception:  # of any kind: it may be a property of the environment
        return _MISSING


def attribute_of(subject: Any, name: str) -> Any:
    """Return the attribute ``name`` of ``subject``. For a Gymnasium wrapper, also search the wrapped environments."""
    through_wrappers = getattr(subject, "get_wrapper_attr", None)
    return getattr(subject, name) if through_wrappers is None else through_wrappers(name)


class RowGroup(EnvGroup):
    """A group that can step its environments one by one. A step has two halves, which a caller may also use itself.

    ::

        actions ── actions_of ──▶ an action each ── envs[row].step(action) ──▶ a result each ── joined ──▶ Steps

    ``step`` does it with the environments in turn. Another caller may step them in its own way in between, for example
    all at the same time. Checks of results, ends of episodes, infos and the resets that follow are in ``joined``.
    """

    _environments: Sequence[Any]

    @property
    def envs(self) -> Sequence[Any]:
        """The objects whose ``step`` takes an action from ``actions_of``, one per environment."""
        return self._environments

    @abstractmethod
    def actions_of(self, actions: Mapping[str, Tree], rows: np.ndarray | None = None) -> Iterable[Any]:
        """Return the action of each environment at ``rows`` (None: all), in the form that its own ``step`` takes."""

    @abstractmethod
    def joined(self, results: Iterable[Any], rows: np.ndarray | None = None) -> Steps:
        """Check the results of ``step`` of each environment at ``rows`` (None: all), and join them to Steps.

        If an episode ended, the environment is reset. The results must not share arrays, as all may be read first.
        """

    def close(self) -> None:
        """Close all environments, even if some raise, then raise the first error."""
        first_error: BaseException | None = None
        for env_id, environment in zip(self.env_ids, self._environments, strict=True):
            try:
                environment.close()
            except (Exception, SystemExit) as error:
                if first_error is None:
                    first_error, self.current_env_id = error, env_id
        if first_error is not None:
            raise first_error
