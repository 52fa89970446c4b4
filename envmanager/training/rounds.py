"""Rounds of training: all environments play a number of steps with fixed policies, then one group of behaviors learns.

::

    round 1  hero learns    │ 40 steps of every environment │ update hero   │
    round 2  target learns  │ 40 steps of every environment │ update target │
    round 3  hero learns    │ …

The rule: trainers update their policies only between two rounds. Within a round, faster environments can play more
steps than slower environments, unless the manager waits for all workers at each step (``wait``).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import attrs

from envmanager.errors import UsageError
from envmanager.importing import SIMILAR
from envmanager.options import at_least, plain_numbers

_EXAMPLE = "a list of lists of behaviors, one list per round, such as [[hero], [target]]"


def _groups(value: Any) -> Any:
    """Convert a list of lists to a tuple of tuples; return any other value unchanged, for the validator to reject."""
    if not _is_list(value) or not all(_is_list(group) for group in value):
        return value
    return tuple(tuple(group) for group in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check_groups(_: Any, __: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, tuple) or not value or not all(_is_group(group) for group in value):
        raise UsageError(f"train must be {_EXAMPLE}, not {value!r}.")
    for group in value:
        twice = sorted({behavior for behavior in group if group.count(behavior) > 1})
        if twice:
            raise UsageError(f"train names the behavior {twice[0]!r} twice in one round.")


def _is_group(group: Any) -> bool:
    return isinstance(group, tuple) and bool(group) and all(isinstance(behavior, str) for behavior in group)


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class Rounds:
    """The table ``training.rounds`` of a config: the length of a round, and the behaviors that learn in each round."""

    steps: int = attrs.field(default=0, validator=at_least(1))
    """Minimum number of steps that each environment takes in a round."""
    train: Any = attrs.field(default=(), converter=_groups, validator=_check_groups)
    """Behaviors that learn: one list per round, repeated in order. Other behaviors are frozen during the round."""

    @property
    def behaviors(self) -> set[str]:
        """Behaviors that learn in at least one round."""
        return {behavior for group in self.train for behavior in group}

    def group(self, number: int) -> tuple[str, ...]:
        """Return the behaviors that learn in round ``number``, counted from 1."""
        group: tuple[str, ...] = self.train[(number - 1) % len(self.train)]
        return group

    def next_with(self, learners: Collection[str], number: int) -> int:
        """Return the first round >= ``number`` in which any of ``learners`` learns, or raise StopIteration."""
        return next(each for each in range(number, number + len(self.train)) if set(self.group(each)) & set(learners))

    def check(self, behaviors: Iterable[str]) -> None:
        """Raise UsageError if ``train`` names a behavior that is not in ``behaviors``."""
        known = list(behaviors)
        for behavior in sorted(self.behaviors):
            if behavior not in known:
                raise UsageError(f"training.rounds.train names {unknown_behavior(behavior, known)}")


@attrs.define
class RoundCount:
    """The steps of each worker in round ``number``, counted from ``steps``, which is 0 unless training was resumed."""

    number: int = attrs.field(default=1, validator=at_least(1))
    steps: int = attrs.field(default=0, validator=at_least(0))
    _steps_of: dict[int, int] = attrs.field(factory=dict, init=False)

    def add(self, worker_id: int) -> None:
        """Count one step of a worker, in which all of the worker's environments step."""
        self._steps_of[worker_id] = self._steps_of.get(worker_id, 0) + 1

    def played(self, worker_ids: Iterable[int]) -> int:
        """Return the lowest step count of the workers ``worker_ids`` in the round, including steps before a resume."""
        return self.steps + min((self._steps_of.get(worker_id, 0) for worker_id in worker_ids), default=0)


def unknown_behavior(behavior: Any, known: Sequence[str]) -> str:
    """Return the end of an error message about an unknown behavior, with a similar name and all known names."""
    near = difflib.get_close_matches(str(behavior), known, n=1, cutoff=SIMILAR)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"the behavior {behavior!r}, which is not known{hint}; known are {', '.join(map(repr, known)) or 'none'}."
