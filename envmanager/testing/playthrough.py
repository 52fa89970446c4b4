"""Play one environment with random actions and remember, compactly, what it gave.

The rule: nothing is judged here. A :class:`Playthrough` says what happened; ``environment_check`` says what that means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import attrs
import cloudpickle
import numpy as np

from envmanager.core.policy_calls import call_policies
from envmanager.data.seeding import derive_seed
from envmanager.data.specs import BehaviorSpec, BehaviorSpecs, SpecMismatch
from envmanager.data.steps import ActionInfo, AgentSteps, StepInfo, Steps
from envmanager.data.trees import leaves_like, paths
from envmanager.environment import EnvGroup, check_steps
from envmanager.policy import RandomPolicy

Phase = Literal["reset", "step", "restart"]
Digest = Mapping[str, int]
"""A number per array of one step, equal when the arrays are equal."""


@attrs.frozen
class Mismatch:
    """Values that do not fit the spec, where they were first seen."""

    at_step: int
    phase: Phase
    error: SpecMismatch


@attrs.define
class Playthrough:
    """What one reset and the steps after it gave. ``failure`` is what ended it early, raised in ``failed_in``."""

    digests: list[Digest] = attrs.field(factory=list)
    mismatches: dict[tuple[Phase, str], Mismatch] = attrs.field(factory=dict)
    episode_lengths: list[int] = attrs.field(factory=list)
    failure: Exception | None = None
    failed_in: Phase = "reset"

    @property
    def n_steps(self) -> int:
        """How many steps were taken."""
        return max(0, len(self.digests) - 1)

    def first_difference(self, other: Playthrough) -> tuple[int, list[str]] | None:
        """The step (0: the reset) from which on ``other`` gave other data, and in which arrays; None when equal."""
        for at_step, (ours, theirs) in enumerate(zip(self.digests, other.digests, strict=False)):
            if ours != theirs:
                names = dict.fromkeys([*ours, *theirs])
                return at_step, [name for name in names if ours.get(name) != theirs.get(name)]
        return None


def play(
    group: EnvGroup, *, n_steps: int, seed: int, env_seed: int | None, resets: Callable[[], int] = lambda: 0
) -> Playthrough:
    """Reset ``group`` (of one environment) with ``env_seed`` and take ``n_steps`` random steps, or as many as it can.

    The actions follow from ``seed`` and the step alone. ``resets`` tells how often the environment was reset so far, so
    that an exception can be blamed on the restart of an episode.
    """
    played = Playthrough()
    policies: dict[str, ByRow] = {}
    n_resets = resets()
    try:
        steps = group.reset(seeds=[None if env_seed is None else derive_seed(env_seed, 0)], options=None)
        _record(played, steps, group.behavior_specs)
        length = 0
        for _ in range(n_steps):
            played.failed_in, n_resets = "step", resets()
            for behavior, spec in group.behavior_specs.items():
                policies.setdefault(behavior, ByRow(spec, seed))
            taken = call_policies([StepInfo(None, steps, None, 0)], policies, group.behavior_specs)[0]
            steps = group.step({behavior: info.action for behavior, info in taken.items()})
            _record(played, steps, group.behavior_specs)
            length += 1
            if any(current.ended.any() for current in steps.values()):
                played.episode_lengths.append(length)
                length = 0
    except Exception as error:
        played.failure = error
        if played.failed_in == "step" and resets() > n_resets:
            played.failed_in = "restart"
    return played


class ByRow:
    """Random actions by row, so that agents who get new numbers after a second reset still do the same."""

    def __init__(self, spec: BehaviorSpec, seed: int) -> None:
        self._policy = RandomPolicy(spec, seed)

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return self._policy.get_action(attrs.evolve(steps, agent_id=np.arange(len(steps))))


def _record(played: Playthrough, steps: Steps, specs: BehaviorSpecs) -> None:
    at_step = len(played.digests)
    for behavior, current in steps.items():
        try:
            check_steps(specs[behavior], current, check_numbers=True)
        except SpecMismatch as error:
            phase: Phase = "reset" if at_step == 0 else "step"
            if at_step and error.path.startswith("obs") and current.ended.any():
                phase = "restart"  # where an episode ended, obs is the next one's first
            played.mismatches.setdefault((phase, error.path), Mismatch(at_step, phase, error))
    played.digests.append(_digest(steps, specs))


def _digest(steps: Steps, specs: BehaviorSpecs) -> dict[str, int]:
    digest = {}
    for behavior, current in steps.items():
        prefix = "" if len(steps) == 1 else f"{behavior}: "
        for name in ("reward", "terminated", "truncated"):
            digest[prefix + name] = hash(getattr(current, name).tobytes())
        spec = specs[behavior].observation
        for root in ("obs", "final_obs"):
            tree = getattr(current, root)
            if tree is not None:
                for path, leaf in zip(paths(spec, root), leaves_like(spec, tree), strict=True):
                    digest[prefix + path] = _hash(leaf)
    return digest


def _hash(leaf: np.ndarray) -> int:
    if leaf.dtype.kind != "O":
        return hash(leaf.tobytes())
    return hash(tuple(cloudpickle.dumps(entry) for entry in leaf))


class ArrayWatch:
    """Looks at the arrays that an environment itself returns, before anything copies them.

    ``n_resets`` counts its resets. ``reused`` tells whether it returned an array object again, ``changed`` whether an
    array that it had returned earlier held other values later.
    """

    KEPT = 8

    def __init__(self) -> None:
        self.n_resets = 0
        self.reused = self.changed = False
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []

    def attach(self, subject: Any) -> bool:
        """Look at what ``reset`` and ``step`` of this object return from now on; False when it does not allow that."""
        try:
            subject.reset = self._watching(subject.reset, is_reset=True)
            subject.step = self._watching(subject.step, is_reset=False)
        except AttributeError:
            return False
        return True

    def _watching(self, call: Callable[..., Any], *, is_reset: bool) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.n_resets += is_reset
            result = call(*args, **kwargs)
            self._look(result)
            return result

        return watched

    def _look(self, result: Any) -> None:
        self.changed |= any(not _same(array, copy) for array, copy in self._kept)
        for array in _arrays(_observation(result)):
            self.reused |= any(array is kept for kept, _ in self._kept)
            self._kept.append((array, array.copy()))
        del self._kept[: -self.KEPT]


def _same(array: np.ndarray, copy: np.ndarray) -> bool:
    return array.dtype.kind == "O" or array.tobytes() == copy.tobytes()


def _observation(result: Any) -> Any:
    """The part of what reset or step returned that a learner keeps."""
    if hasattr(result, "observation"):  # dm_env's TimeStep
        return result.observation
    return result[0] if isinstance(result, tuple) and result else result  # Gymnasium and PettingZoo: (observation, …)


def _arrays(result: Any) -> Iterator[np.ndarray]:
    if isinstance(result, np.ndarray):
        yield result
    elif isinstance(result, AgentSteps):
        yield from _arrays([result.obs, result.reward, result.terminated, result.truncated, result.final_obs])
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _arrays(value)
    elif isinstance(result, tuple | list):
        for value in result:
            yield from _arrays(value)
