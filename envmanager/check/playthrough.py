"""The record of one reset of an environment and the random steps after it, which can be compared with another.

A :class:`Playthrough` only records the data; ``check.environment`` derives the findings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np

from envmanager.adapters.side_by_side import check_steps
from envmanager.data.differences import Difference, first_difference
from envmanager.data.specs import BehaviorSpecs, SpecMismatch
from envmanager.data.steps import AgentSteps, Steps
from envmanager.placing.pair import INFOS, plain_steps

_NUMBER = re.compile(r"(?<=as low as |s high as ).*")
"""Pattern of the number in the text about a value that is out of bounds."""
Phase = Literal["reset", "step", "restart"]
"""Origin of data: a reset, a step, or the reset inside a step in which an episode ends."""


@attrs.frozen
class Mismatch:
    """A value found in ``phase`` that does not fit its spec. ``path`` names its array; ``text`` says what is wrong.

    ``is_known``: whether the same was found in another phase before, but perhaps another number.
    """

    phase: Phase
    path: str
    text: str
    is_known: bool = False

    def is_like(self, other: Mismatch) -> bool:
        """Return whether both are the same mistake in data of one array, whatever the numbers."""
        ours, theirs = (_NUMBER.sub("", each.text).replace("final_obs", "obs") for each in (self, other))
        return ours == theirs


@attrs.frozen
class Moment:
    """The data of one reset or step, its infos, mismatches with the spec, and whether an episode ended."""

    data: Mapping[str, Any]
    infos: Mapping[str, Any]
    mismatches: Sequence[Mismatch]
    has_ended: bool

    @classmethod
    def of(cls, steps: Steps, specs: BehaviorSpecs, *, is_reset: bool) -> Moment:
        """Return the Moment of a reset or step: check ``steps`` against ``specs``."""
        mismatches = []
        for behavior, current in steps.items():
            if current.env_id.any():  # a vector, of one agent per environment
                current = attrs.evolve(current, agent_id=current.env_id)
            try:
                check_steps(specs[behavior], current, check_numbers=True)
            except SpecMismatch as error:
                phase: Phase = "reset" if is_reset else "step"
                if not is_reset and error.path.startswith("obs") and current.ended.any():
                    phase = "restart"  # obs is the first observation of the next episode
                mismatches.append(Mismatch(phase, error.path, str(error)))
        has_ended = any(current.ended.any() for current in steps.values())
        return cls(plain_steps(steps), plain_steps(steps, INFOS), mismatches, has_ended)


@attrs.frozen
class Failure:
    """A failed call to the environment. ``text`` says what happened, and ``phase`` where, if not while it is made.

    ``evidence``: end of the process output. ``path``: name of the value that does not fit its spec.
    """

    text: str
    kind: Literal["raised", "mismatch", "refused", "not seeded", "died", "timed out"] = "raised"
    evidence: str = ""
    path: str = ""
    phase: Phase = "reset"


@attrs.define
class Playthrough:
    """The data of one reset and the steps after it."""

    data: list[Mapping[str, Any]] = attrs.field(factory=list)
    infos: list[Mapping[str, Any]] = attrs.field(factory=list)
    mismatches: dict[tuple[Phase, str], tuple[int, Mismatch]] = attrs.field(factory=dict)
    """First mismatch of each array in each phase, with the number of the step."""
    episode_lengths: list[int] = attrs.field(factory=list)
    failure: Failure | None = None

    @property
    def n_steps(self) -> int:
        """Number of completed steps. A step that failed does not count."""
        return max(0, len(self.data) - 1)

    @property
    def ended_process(self) -> bool:
        """Whether the environment's process died, or was killed because a call did not return."""
        return self.failure is not None and self.failure.kind in ("died", "timed out")

    def of_phase(self, phase: Phase) -> list[tuple[int, Mismatch]]:
        """Return the first mismatch of each array in ``phase``, as pairs of step number and Mismatch."""
        return [found for found in self.mismatches.values() if found[1].phase == phase]

    def first_difference(self, other: Playthrough, part: str = "data") -> tuple[int, list[Difference]] | None:
        """Return the first step (0: the reset) whose data differ, or infos, and its differences. None if all agree."""
        return first_difference(getattr(self, part), getattr(other, part))


class ArrayWatch:
    """A monitor of the arrays that an environment returns in observations or AgentSteps, before these are copied.

    ``reused``: whether the environment returned the same array object again.
    ``changed``: whether a returned array changed later. Both consider only the last ``KEPT`` arrays. ``on_reset`` is
    called before each reset. ``lingering``: the agents of a ParallelEnv that ended in two steps in a row, because they
    stayed in ``agents``.
    """

    KEPT = 8

    def __init__(self, on_reset: Callable[[], Any]) -> None:
        self.reused = self.changed = False
        self._on_reset = on_reset
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []
        self.lingering: dict[Any, None] = {}
        self._have_ended: Sequence[Any] = ()

    def attach(self, subject: Any) -> bool:
        """Replace ``subject.reset`` and ``subject.step`` with watched versions. Return False if that is impossible."""
        try:
            subject.reset = self._watching(subject, "reset")
            subject.step = self._watching(subject, "step")
        except AttributeError:
            return False
        return True

    def _watching(self, subject: Any, name: str) -> Callable[..., Any]:
        call = getattr(subject, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if name == "reset":
                self._on_reset()
            result = call(*args, **kwargs)
            self._look(result)
            if isinstance(result, tuple) and len(result) == 5 and all(isinstance(each, Mapping) for each in result):
                agents = list(getattr(subject, "agents", ()))
                ended = [agent for agent in agents if result[2].get(agent) or result[3].get(agent)]
                self.lingering.update(dict.fromkeys(agent for agent in ended if agent in self._have_ended))
                self._have_ended = ended if len(ended) < len(agents) else ()  # after the end of all, the next begins
            return result

        return watched

    def _look(self, result: Any) -> None:
        numbers = [(array, copy) for array, copy in self._kept if array.dtype.kind != "O"]
        self.changed |= any(array.tobytes() != copy.tobytes() for array, copy in numbers)
        for array in _arrays(_observation(result)):
            self.reused |= any(array is kept for kept, _ in self._kept)
            self._kept.append((array, array.copy()))
        del self._kept[: -self.KEPT]


def _observation(result: Any) -> Any:
    """Return the observation in the result of a reset or step. Other results, such as Steps, are returned unchanged."""
    if hasattr(result, "observation"):  # dm_env's TimeStep
        return result.observation
    return result[0] if isinstance(result, tuple) and result else result  # Gymnasium and PettingZoo: (observation, …)


def _arrays(result: Any) -> Iterator[np.ndarray]:
    if isinstance(result, np.ndarray):
        yield result
    elif isinstance(result, AgentSteps):
        yield from _arrays([result.obs, result.reward, result.terminated, result.truncated, result.final_obs])
    elif isinstance(result, Mapping | tuple | list):
        for value in result.values() if isinstance(result, Mapping) else result:
            yield from _arrays(value)
