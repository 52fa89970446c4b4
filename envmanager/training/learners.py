"""The trainers of a manager: which of them learn, which only act, and which steps each receives.

::

    frozen, or not in this round ──▶ its greedy policy acts; the trainer gets no steps
    learning                     ──▶ its own policy acts; the trainer gets the steps that this policy chose

The rule: a trainer receives a step only if its own policy chose the actions, and only after the trainer has received
the observations for which they were chosen. So a trainer that is unfrozen begins new sequences of steps, as after a
reset. It never receives the steps that were in flight when it was frozen or unfrozen.

Rounds are numbers of steps that all environments play with fixed policies; then one group of behaviors learns::

    round 1  hero learns    │ 40 steps of every environment │ update hero   │
    round 2  target learns  │ 40 steps of every environment │ update target │

Within a round, faster environments can play more steps than slower environments, unless the manager waits for all
workers at each step (``wait``).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import attrs

from envmanager.data.steps import AgentSteps, StepInfo, Steps
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.importing import nearest
from envmanager.observe.events import Note
from envmanager.options import at_least, plain_numbers
from envmanager.training.trainer import Trainer, require_finite

KEPT = 1000
"""Number of latest changes kept in memory."""
_logger = logging.getLogger("envmanager")
NOTE = "toggle_frozen"
"""Name of the event of a freeze key. A game's script may send it too, for example for a button."""
_EXAMPLE = "a list of lists of behaviors, one list per round, such as [[hero], [target]]"


def _groups(value: Any) -> tuple[tuple[str, ...], ...]:
    """Convert a list of lists of behaviors to a tuple of tuples. Raises UsageError for anything else."""

    def is_list_of(is_right: Callable[[Any], bool], given: Any) -> bool:
        is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
        return is_list and len(given) > 0 and all(map(is_right, given))

    if not is_list_of(lambda group: is_list_of(lambda behavior: isinstance(behavior, str), group), value):
        raise UsageError(f"train must be {_EXAMPLE}, not {value!r}.")
    for group in value:
        twice = sorted({behavior for behavior in group if group.count(behavior) > 1})
        if twice:
            raise UsageError(f"train names the behavior {twice[0]!r} twice in one round.")
    return tuple(map(tuple, value))


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class Rounds:
    """The table ``training.rounds`` of a config: the length of a round, and the behaviors that learn in each round."""

    steps: int = attrs.field(default=0, validator=at_least(1))
    """Minimum number of steps that each environment takes in a round."""
    train: Any = attrs.field(default=(), converter=_groups)
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
        """Raise UsageError if ``train`` names a behavior that is not in ``behaviors``, which have trainers."""
        known = list(behaviors)
        for behavior in sorted(self.behaviors.difference(known)):
            raise UsageError(
                f"training.rounds.train names {behavior!r}, which has no trainer{nearest(behavior, known)} "
                f"There are trainers for {', '.join(map(repr, known))}."
            )


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
    names = ", ".join(map(repr, known)) or "none"
    return f"the behavior {behavior!r}, which is not known{nearest(str(behavior), known)} Known are {names}."


@attrs.frozen(kw_only=True)
class LearnersChanged:
    """A report that behaviors were frozen or unfrozen. ``learning`` names all behaviors that learn from now on.

    ``cause`` is a string such as ``"control.toml"``, ``"freeze"`` or ``"round 3"``. ``is_round`` says whether a new
    round caused the change, rather than a request.
    """

    frozen: tuple[str, ...]
    unfrozen: tuple[str, ...]
    learning: tuple[str, ...]
    n_steps: int
    cause: str
    is_round: bool = False

    def __str__(self) -> str:
        frozen = f"{', '.join(self.frozen)} frozen, " if self.frozen else ""
        waiting = [behavior for behavior in self.unfrozen if behavior not in self.learning]
        later = f"{', '.join(waiting)} learning in a later round, " if waiting else ""
        return f"{frozen}{later}{', '.join(self.learning)} learning from agent step {self.n_steps:,} on ({self.cause})"


@attrs.frozen(kw_only=True)
class LearnersState:
    """The frozen behaviors and the round's progress, for a checkpoint. ``round`` is None if training has no rounds."""

    frozen: tuple[str, ...]
    round: RoundCount | None = None


class Learners:
    """The trainers of one manager. Freezes and unfreezes trainers, and passes steps to the trainers that learn.

    ``frozen`` has the behaviors frozen on request, ``resting`` the behaviors that do not learn in the current round.
    """

    def __init__(self, manager: EnvManager, trainers: Mapping[str, Trainer]) -> None:
        self.trainers = dict(trainers)
        self.frozen = {behavior for behavior, trainer in self.trainers.items() if trainer.frozen}
        self.resting: Set[str] = frozenset()
        self.in_flight: dict[int, dict[str, int]] = {}
        """Versions of the acting policies, by behavior, of each worker's step that was sent and has not come."""
        self.changes: deque[LearnersChanged] = deque(maxlen=KEPT)
        self.on_change: Callable[[LearnersChanged], Any] | None = None
        self._manager = manager
        self._seen: dict[str, set[int]] = {behavior: set() for behavior in self.trainers}
        """Ids of the workers whose latest observations a behavior's trainer has received, by behavior."""

    @property
    def learning(self) -> tuple[str, ...]:
        """The behaviors whose trainers learn now."""
        return tuple(behavior for behavior, trainer in self.trainers.items() if not trainer.frozen)

    def require_known(self, behavior: str) -> None:
        """Raise UsageError for a behavior without a trainer. The message suggests a similar name."""
        if behavior not in self.trainers:
            raise UsageError(f"there is no trainer for {unknown_behavior(behavior, list(self.trainers))}")

    def begin(self) -> None:
        """Prepare trainers for a reset of all environments. Discard the steps in flight. Set each behavior's policy."""
        self.in_flight.clear()
        for behavior, trainer in self.trainers.items():
            trainer.environments_were_reset()
            self._seen[behavior].clear()
        self.set_policies()

    def set_policies(self) -> None:
        """Set the policy of each behavior."""
        for behavior, trainer in self.trainers.items():
            self._manager.set_policy(behavior, trainer.greedy_policy() if trainer.frozen else trainer.policy)

    def state(self) -> dict[str, Any]:
        """Return what is known of each worker, as plain data."""
        seen = {behavior: sorted(worker_ids) for behavior, worker_ids in self._seen.items()}
        return {"seen": seen, "in_flight": [[worker_id, dict(own)] for worker_id, own in self.in_flight.items()]}

    def restore(self, state: Mapping[str, Any], worker_ids: Collection[int], n_before: int) -> None:
        """Go on from what ``state`` of ``n_before`` workers returned. ``worker_ids``: those that wait for an action."""
        self.set_policies()
        sent = [(worker_id, own) for worker_id, own in state["in_flight"] if worker_id not in worker_ids]
        self.in_flight = {worker_id: dict(own) for worker_id, own in sent}
        for behavior in self.trainers.keys() & state["seen"].keys():
            seen, n_workers = state["seen"][behavior], self._manager.n_workers
            if n_workers != n_before:
                seen = range(n_workers) if len(seen) == n_before else ()
            self._seen[behavior] = set(seen)

    def change(self, *, frozen: Set[str], resting: Set[str], n_steps: int, cause: str, is_round: bool = False) -> None:
        """Freeze the ``frozen`` and ``resting`` behaviors and unfreeze the others. Log and report any change."""
        only_act = frozen | resting
        stopped = [name for name, trainer in self.trainers.items() if name in only_act and not trainer.frozen]
        resumed = [name for name, trainer in self.trainers.items() if name not in only_act and trainer.frozen]
        for behavior in stopped:
            trainer = self.trainers[behavior]
            trainer.pause()
            self._manager.set_policy(behavior, trainer.greedy_policy())
            for versions in self.in_flight.values():  # so that it does not learn from these steps
                versions.pop(behavior, None)
            trainer.frozen = True
        for behavior in resumed:
            trainer = self.trainers[behavior]
            self._manager.set_policy(behavior, trainer.policy)
            trainer.environments_were_reset()
            self._seen[behavior].clear()
            trainer.frozen = False
        # A resting behavior that is frozen or unfrozen keeps resting, but the request is reported.
        newly = [name for name in self.trainers if name in stopped or name in frozen - self.frozen]
        again = [name for name in self.trainers if name in resumed or name in self.frozen - frozen]
        self.frozen, self.resting = set(frozen), frozenset(resting)
        if newly or again:
            change = LearnersChanged(
                frozen=tuple(newly),
                unfrozen=tuple(again),
                learning=self.learning,
                n_steps=n_steps,
                cause=cause,
                is_round=is_round,
            )
            self.changes.append(change)
            _logger.log(logging.DEBUG if is_round else logging.INFO, "%s", change)
            if self.on_change is not None:
                self.on_change(change)

    def sent(self, worker_ids: Collection[int]) -> None:
        """Record that the learning trainers' current policies choose the next actions of the workers ``worker_ids``."""
        versions = {name: trainer.version for name, trainer in self.trainers.items() if not trainer.frozen}
        self.in_flight.update(dict.fromkeys(worker_ids, versions))

    def oldest_in_flight(self, behavior: str) -> float:
        """Return the oldest version of a behavior's policy among the steps in flight, or ``inf`` if there is none."""
        return min((versions.get(behavior, math.inf) for versions in self.in_flight.values()), default=math.inf)

    def require_finite(self, info: StepInfo, n_steps: int) -> None:
        """Raise NotFinite if ``give`` would pass a reward or an observation on that is not finite."""
        for behavior, trainer in self.trainers.items():
            is_new = info.worker_id not in self._seen[behavior]
            for steps in () if trainer.frozen else (info.previous if is_new else None, info.current):
                if steps is not None and behavior in steps:
                    require_finite(behavior, steps[behavior], n_steps)

    def give(self, info: StepInfo) -> int:
        """Pass a step, or only observations, to learning trainers. Return the number of agent steps to learn from."""
        chosen_by, n_steps = self.in_flight.pop(info.worker_id, {}), 0
        for behavior, trainer in self.trainers.items():
            if trainer.frozen:
                continue
            seen, given = self._seen[behavior], info
            if info.previous is not None and behavior not in chosen_by:
                given = _beginning(info, info.current, behavior)
            elif info.previous is not None and info.worker_id not in seen:
                trainer.add(_beginning(info, info.previous, behavior))
            seen.add(info.worker_id)
            n_steps += trainer.add(given)
        return n_steps


def _beginning(info: StepInfo, steps: Steps, behavior: str) -> StepInfo:
    """Return a StepInfo as after a reset, with the observations of ``behavior`` in ``steps`` as first observations."""
    seen = steps.get(behavior)
    first = None if seen is None else AgentSteps.first(agent_id=seen.agent_id, obs=seen.obs, acting=seen.acting)
    own = {} if first is None else {behavior: first}
    return StepInfo(None, own, None, info.worker_id, None, info.specs)


class FreezeKeys:
    """A reader of the freeze keys that were pressed in the windows of a manager's games, such as numpad 2.

    The engine reports each press as a ``Note`` event with the behavior, for example ``{"behavior": "target"}``.
    """

    def __init__(self, manager: EnvManager) -> None:
        self._events = manager.events
        self._n_seen = self._events.count(Note)

    def pressed(self) -> list[str]:
        """Return the behaviors whose keys were pressed since the last call, once per press. Names are not checked."""
        n_new = self._events.count(Note) - self._n_seen
        if n_new == 0:
            return []
        self._n_seen += n_new
        new = [event for event in self._events if isinstance(event, Note)][-n_new:]
        return [str(note.data.get("behavior")) for note in new if note.name == NOTE]
