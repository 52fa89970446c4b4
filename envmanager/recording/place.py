"""The place at which an environment of a recording stands before a step: the beginning of its episode, and its actions.

::

    facts ──▶ Place: what its worker was told of it, what it returned ──▶ position(): a Task that leads there
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from envmanager.data.seeding import derive_seeds
from envmanager.data.steps import AGENT_BITS, AgentSteps, Begin, Call, CommandName, EnvironmentResponse, Steps
from envmanager.data.trees import Tree, take_rows
from envmanager.errors import UsageError
from envmanager.keeping.log import calls_in, joined_actions, n_actions, with_values_before
from envmanager.options import ResetConfig
from envmanager.recording.codec import Apart, packed, unpacked
from envmanager.recording.data import about, facts, specs_of
from envmanager.recording.file import Fact
from envmanager.tasks import Task

Actions = Mapping[str, Tree]


@attrs.define(eq=False)
class Place:
    """What an environment of a recording has done, as far as its facts were read."""

    env_id: int
    worker_id: int
    row: int
    has_obs: bool
    generation: int = 0
    n_steps: int = 0
    """Number of steps that its worker was sent."""
    begin: Begin | None = None
    """The beginning of what plays, or None if it rests."""
    begins_itself: bool = False
    """Whether later episodes begin by themselves. Then ``begin`` is that of the first after a reset."""
    n_ended: int = 0
    """Number of episodes since ``begin`` that were followed by others without one."""
    actions: list[Actions] = attrs.field(factory=list)
    """Actions since ``begin``, one entry for each step."""
    calls: list[tuple[int, Call]] = attrs.field(factory=list)
    """What was called in it since ``begin``, with the number of steps before."""
    held: dict[str, Any] = attrs.field(factory=dict)
    """Values of the attributes that were set before ``begin``, by name."""
    asked: tuple[str, Any] = ("", None)
    """The last command to its worker that has a response of its own."""
    steps: Steps = attrs.field(factory=dict)
    """Its last rows."""
    coming: Begin | None = None
    """What its next row begins."""
    laid: Begin | None = None
    """What begins when the present episode has ended."""
    is_restored: bool = False
    """Whether the next response repeats the last one, as its worker was replaced and the episode goes on."""

    def read(self, fact: Fact, read_apart: Callable[[Apart], Any]) -> Actions | None:
        """Take note of a fact. Return the actions of the environment if the fact is a step that has some."""
        what, worker_id, _ = fact
        if what in ("take", "get"):
            _, responses = fact.content(read_apart)
            for response in responses:
                if response.worker_id == self.worker_id:
                    self._arrived(response)
        if worker_id != self.worker_id:
            return None
        if what == "step":
            return self._stepped(*fact.content(read_apart))
        if what == "lost":
            lost = fact.content()
            if not isinstance(lost, tuple) or self.env_id in lost[1]:
                self.begin = self.coming = self.laid = None
            return None
        if what in ("launch", "send", "begin_again", "recv"):
            asked, answer, *_ = fact.content(read_apart)
            if what == "launch":
                self.generation = asked
            elif what == "send" and asked == CommandName.BEGIN:
                self._told(answer)
            elif what == "begin_again" and self.begin is not None and isinstance(asked, list):
                self.is_restored = True
            elif what == "send" and asked in (CommandName.CALL, CommandName.SET_ATTR):
                self.asked = asked, answer
            elif what == "begin_again" or (what == "send" and asked == CommandName.RESET):
                self._reset(asked if what == "begin_again" else answer)
            if what in ("begin_again", "recv") and isinstance(answer, EnvironmentResponse):
                self._arrived(answer)
        return None

    def _was_called(self) -> None:
        self.calls += [(len(self.actions), call) for row, call in calls_in(*self.asked) if row == self.row]

    def _begins(self, begin: Begin) -> None:
        """Take note of a new episode. What was set in the one before still holds."""
        self.held.update({str(call.name): call.args[0] for _, call in self.calls if call.command != "call"})
        self.begin, self.actions, self.calls = begin, [], []

    def calls_so_far(self) -> list[Call]:
        """Return what is repeated amid the actions of the episode, those with which it began first."""
        assert self.begin is not None
        own = [
            call._replace(after=n_actions(self.begin.actions, *self.actions[:n_steps])) for n_steps, call in self.calls
        ]
        return with_values_before([*self.begin.calls, *own], self.held)

    def _stepped(self, _: Any, actions: Actions, agents: Mapping[str, list[int]], __: Any) -> Actions | None:
        self.n_steps += 1
        own = {}
        for behavior, taken in actions.items():
            rows = [row for row, agent_id in enumerate(agents[behavior]) if agent_id >> AGENT_BITS == self.env_id]
            if rows:
                own[behavior] = take_rows(taken, rows)
        if own:
            self.actions.append(own)
        return own or None

    def _told(self, begins: Sequence[Begin]) -> None:
        for begin in begins:
            if begin.row == self.row:
                self.coming, self.laid = (begin, None) if begin.at_once else (self.coming, begin)

    def _reset(self, config: Any) -> None:
        self.begin = self.coming = self.laid = None
        self.begins_itself = not isinstance(config, list)
        if isinstance(config, list):
            self._told(config)
            return
        wanted = ResetConfig.of(config)
        (seed,) = derive_seeds(wanted.seed, [self.env_id], wanted.generation)
        self.coming = Begin(self.row, True, seed, wanted.options)

    def _arrived(self, response: EnvironmentResponse) -> None:
        if response.name in (CommandName.CALL, CommandName.SET_ATTR):
            self._was_called()
        if response.name not in (CommandName.STEP, CommandName.RESET):
            return
        if self.is_restored and response.name is CommandName.RESET:
            self.is_restored = False
            return
        if self.env_id in (response.not_begun or ()):
            self.begin = self.coming = None
        own = {name: _of_env(steps, self.env_id, self.has_obs) for name, steps in response.payload.items()}
        own = {name: steps for name, steps in own.items() if len(steps)}
        if not own:
            return
        self.steps = own
        acts = any(len(steps.acting_rows) for steps in own.values())
        begins_anew = any(steps.ended[steps.acting_rows].any() for steps in own.values())
        if self.coming is not None:
            self._begins(self.coming)
            self.coming, self.n_ended = None, 0
        elif begins_anew and self.laid is not None:
            self._begins(self.laid)
            self.laid, self.n_ended = None, 0
        elif begins_anew and self.begin is not None and self.begin.following is not None:
            self._begins(self.begin.following)
        elif begins_anew and self.begins_itself:
            self.n_ended += 1
        elif not acts and any(steps.ended.any() for steps in own.values()):
            self.begin = None


def _of_env(steps: AgentSteps, env_id: int, has_obs: bool) -> AgentSteps:
    rows = np.flatnonzero(steps.env_id == env_id)
    if not has_obs:
        n_ended = np.count_nonzero(steps.ended)
        steps = attrs.evolve(steps, obs=np.zeros(len(steps)), final_obs=np.zeros(n_ended) if n_ended else None)
    return attrs.evolve(steps, info=None, reset_info=None).take(rows)


def walk(
    path: str | Path, env_id: int, step: int, read_apart: Callable[[Apart], Any] = Apart.leave
) -> tuple[Place, Iterator[tuple[Sequence[Call], Actions, Steps]]]:
    """Return the place of an environment before a step of its worker, and its later steps.

    Each has what was called before, the actions, and their result.

    Raises UsageError if there is no such environment or step, or if the environment takes no action in it.
    """
    first, later = about(path), facts(path)
    if not 0 <= env_id < first["n_envs"]:
        raise UsageError(f"{path} has no environment {env_id}, only 0 to {first['n_envs'] - 1}.")
    worker_id, env_ids = next((number, own) for number, own in enumerate(first["env_ids"]) if env_id in own)
    place = Place(env_id, worker_id, env_ids.index(env_id), first["observations"])
    where = f"step {step} of worker {worker_id}"
    for fact in later:
        if fact.what == "step" and fact.worker_id == worker_id and place.n_steps == step:
            break
        place.read(fact, read_apart)
    else:
        raise UsageError(f"{path} has no {where}, which took {place.n_steps:,} steps.")
    here = attrs.evolve(place, actions=list(place.actions), calls=list(place.calls), held=dict(place.held))
    action = place.read(fact, read_apart)
    if here.begin is None or action is None:
        raise UsageError(f"env {env_id} plays no episode in {where}: it rests, or is about to begin one.")
    return here, _later(place, action, later, read_apart)


def _later(
    place: Place, action: Actions, later: Iterator[Fact], read_apart: Callable[[Apart], Any]
) -> Iterator[tuple[Sequence[Call], Actions, Steps]]:
    """Yield calls and actions that follow in the same episode, or in those that begin by themselves, and results."""
    begin, before, calls, n_calls = place.begin, place.steps, list[Call](), len(place.calls)
    for fact in later:
        taken = place.read(fact, read_apart)
        if place.steps is not before and action is not None and fact.what in ("take", "get"):
            yield calls, action, place.steps
            action, before = None, place.steps  # type: ignore[assignment]
        if place.begin is not begin or place.coming is not None:
            return
        if taken is not None:
            action, calls = taken, [call for _, call in place.calls[n_calls:]]
            n_calls = len(place.calls)


def position(path: str | Path, env_id: int, step: int, *, trust: bool = False) -> Task:
    """Return a task that begins where an environment stood before a step of its worker, numbered from 0.

    The task has the seed, the options, the actions and the calls of the episode. ``trust``: whether to unpickle objects
    of classes in these, which can run any code; without it they raise UsageError. Raises UsageError if there is no such
    environment or step, if no episode plays there, and if it began without a known seed: by itself, after others.
    """
    place, _ = walk(path, env_id, step)
    told = packed((place.begin, place.actions, place.begin and place.calls_so_far()))
    begin, actions, calls = unpacked(told, Apart.load if trust else Apart.refuse)
    if place.n_ended or begin.seed is None:
        why = "by itself, after others" if place.n_ended else "and the manager had none"
        raise UsageError(
            f"the episode of env {env_id} in step {step} of worker {place.worker_id} began without a known seed, "
            f"{why}. Give the manager a seed, and begin episodes with tasks, episodes='on_demand' or keep_episodes. "
            "`envmanager replay --live` goes there from the reset, through all episodes since."
        )
    taken = joined_actions([begin.actions, *actions])
    if taken is not None and len(specs_of(path)) == 1:
        (taken,) = taken.values()
    kinds = about(path).get("kinds")
    return Task(begin.seed, begin.options, None, taken, calls=calls, kind=kinds[place.worker_id] if kinds else None)
