"""Adapter for dm_env environments, each of which has one agent.

An episode is terminated if the discount of its last step is 0, and truncated if the discount is any other number.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envmanager.adapters.rows import (
    RowReader,
    compact_bound,
    read_array,
    read_dict,
    read_tuple,
    real_number,
    stack_rows,
)
from envmanager.data.casting import Casting
from envmanager.data.specs import ArraySpec, BehaviorSpec, BehaviorSpecs, SpecMismatch, describe_value
from envmanager.data.steps import AgentSteps, Steps
from envmanager.data.trees import Tree
from envmanager.environment import Environment
from envmanager.errors import UsageError
from envmanager.importing import needed_by

with needed_by("envmanager.adapters.dm_env", extra="dm-env"):
    import dm_env
    from dm_env import specs as dm_specs

BEHAVIOR = "default"


class DmEnvironment(Environment):
    """A dm_env environment as an Environment with one agent. Lists in specs become tuples.

    ``reset`` passes a seed to the environment's ``seed`` method, or to the random state of a dm_control environment. If
    there is neither, ``reset`` warns that the factory should use ``context.seed``. Reset options raise UsageError.
    """

    can_rest = True

    def __init__(self, env: Any) -> None:
        self._env = env
        self.casting: Casting = Casting()
        action_spec = env.action_spec()
        self._spec = BehaviorSpec(to_spec(env.observation_spec()), to_spec(action_spec))
        self._read_action = row_reader(action_spec)

    @property
    def behavior_specs(self) -> BehaviorSpecs:
        return {BEHAVIOR: self._spec}

    @property
    def wrapped(self) -> Any:
        return self._env

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        if options:
            raise UsageError("a dm_env environment takes no reset options.")
        if seeds[0] is not None:
            _seed(self._env, seeds[0])
        return self._steps(self._first_obs())

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        return self.steps_of(self._env.step(self.action_of(actions)))

    def action_of(self, actions: Mapping[str, Tree]) -> Any:
        return self._read_action(actions[BEHAVIOR], 0)

    def steps_of(self, result: Any) -> Steps:
        _check_type(result, "step", (dm_env.StepType.MID, dm_env.StepType.LAST))
        reward = real_number(result.reward, "reward", self.casting)
        if result.step_type == dm_env.StepType.MID:
            return self._steps(result.observation, reward)
        terminated = real_number(result.discount, "the discount of the last step") == 0
        # Copied before the next episode, which may overwrite the environment's arrays.
        final_obs = stack_rows(self._spec.observation, [result.observation], ["obs"], self.casting)
        obs = result.observation if self.rests else self._first_obs()
        steps = self._steps(obs, reward, terminated, not terminated, final_obs)
        if self.rests:
            steps[BEHAVIOR].acting = np.zeros(1, np.bool_)
        return steps

    def close(self) -> None:
        self._env.close()

    def _first_obs(self) -> Any:
        step = self._env.reset()
        _check_type(step, "reset", (dm_env.StepType.FIRST,))
        return step.observation

    def _steps(
        self, obs: Any, reward: float = 0.0, terminated: bool = False, truncated: bool = False, final_obs: Tree = None
    ) -> Steps:
        rows = stack_rows(self._spec.observation, [obs], ["obs"], self.casting)
        steps = AgentSteps.stepped(
            agent_id=np.zeros(1, np.int64),
            obs=rows,
            reward=np.array([reward], np.float32),
            terminated=np.array([terminated]),
            truncated=np.array([truncated]),
            final_obs=final_obs,
        )
        return {BEHAVIOR: steps}


def _check_type(step: Any, what: str, allowed: tuple[Any, ...]) -> None:
    if not isinstance(step, dm_env.TimeStep):
        raise SpecMismatch(f"the result of {what}", "a dm_env.TimeStep", describe_value(step))
    if step.step_type not in allowed:
        expected = " or ".join(kind.name for kind in allowed)
        raise SpecMismatch(f"the result of {what}", f"a step of type {expected}", f"of type {step.step_type!r}")


def _seed(env: Any, seed: int) -> None:
    seed_method = getattr(env, "seed", None)
    if callable(seed_method):
        seed_method(seed)
        return
    # dm_control's suite keeps the random state in the task, its composer in the environment.
    for holder in (getattr(env, "task", None), env):
        for name in ("random", "random_state"):
            state = getattr(holder, name, None)
            if isinstance(state, np.random.RandomState):
                state.seed(seed)
                return
    warnings.warn(
        f"{type(env).__qualname__} is a dm_env environment that cannot be seeded: dm_env has no seeds and this one has "
        "no seed method. To make its episodes repeatable, let its factory use context.seed.",
        stacklevel=2,
    )


def to_spec(spec: Any) -> Tree:
    """Convert a tree of dm_env specs to a tree of ArraySpec. A spec of strings or objects gets dtype object."""
    if isinstance(spec, Mapping):
        return {key: to_spec(child) for key, child in spec.items()}
    if isinstance(spec, tuple | list):
        return tuple(to_spec(child) for child in spec)
    if _is_object(spec):
        return ArraySpec(dtype=object, name=spec.name or "")
    minimum = maximum = None
    if isinstance(spec, dm_specs.BoundedArray):
        minimum, maximum = compact_bound(spec.minimum), compact_bound(spec.maximum)
    return ArraySpec(spec.shape, spec.dtype, minimum, maximum, spec.name or "")


def row_reader(spec: Any) -> RowReader:
    """Return a function ``(batch, row)`` that reads an action, structured like ``spec``, from one row of a batch."""
    if isinstance(spec, Mapping):
        return read_dict({key: row_reader(child) for key, child in spec.items()})
    if isinstance(spec, tuple | list):
        return read_tuple([row_reader(child) for child in spec], list if isinstance(spec, list) else tuple)
    return operator.getitem if _is_object(spec) or spec.shape == () else read_array


def _is_object(spec: Any) -> bool:
    return spec.dtype.kind not in "biufc"
