"""Environments of one agent as coroutines, so that what is written for all kinds of managers tries those of asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from envmanager.adapters.factories import call_factory, factories_for
from envmanager.data.specs import ArraySpec
from envmanager.environment import EnvContext, Environment


class Awaiting:
    """The environment inside, with methods that a loop awaits. It gives way to others in each of them."""

    render_mode = None

    def __init__(self, inside: Environment) -> None:
        self.inside = inside
        spec = inside.behavior_specs["default"]
        self.observation_space, self.action_space = space_of(spec.observation), space_of(spec.action)
        self._next: Any = None
        """First observation of an episode that the environment has begun by itself."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(0)
        first, self._next = self._next, None
        if first is None or seed is not None or options:
            first = self.inside.reset(seeds=[seed], options=options)["default"].obs[0]
        return first, {}

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0)
        steps = self.inside.step({"default": np.asarray(action)[None]})["default"]
        if steps.final_obs is None:
            return steps.obs[0], steps.reward[0], False, False, {}
        self._next = steps.obs[0]
        return steps.final_obs[0], steps.reward[0], bool(steps.terminated[0]), bool(steps.truncated[0]), {}

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.inside.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)


def space_of(spec: Any) -> Any:
    """The Gymnasium space of an array, or none for objects."""
    if not isinstance(spec, ArraySpec) or spec.is_object:
        return None
    if spec.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, spec.shape, spec.dtype.type)
    limits = np.iinfo(spec.dtype)
    return spaces.Box(limits.min, limits.max, spec.shape, spec.dtype.type)


def awaiting(env_factory: Any, n_envs: int) -> list[Callable[[EnvContext], Any]]:
    """Factories of these environments as coroutines. Those of several agents or of other libraries stay as they are."""

    def make(factory: Any, context: EnvContext) -> Any:
        made = call_factory(factory, context)
        is_plain = isinstance(made, Environment) and made.max_agents == {"default": 1}
        return Awaiting(made) if is_plain else made

    return [
        lambda context, factory=factory: make(factory, context)  # type: ignore[misc]
        for factory in factories_for(env_factory, n_envs)
    ]
