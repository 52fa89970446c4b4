"""The group of one environment whose ``reset`` and ``step`` are awaited, and the factory that makes it.

::

    action ── rows.actions_of ──▶ await env.step(action) ── an end? await env.reset() ──▶ rows.joined ──▶ Steps

The checks, the casts and the rows are those of Gymnasium's group. It needs no state between two steps, so all
environments with equal spaces share one, ``rows``. An environment without spaces has observations and actions that are
objects. ``rows`` resets no environment itself: it receives what the awaited ``reset`` has returned before.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from envmanager.adapters.choosing import ADAPTERS, VECTORS
from envmanager.adapters.names import base_names
from envmanager.adapters.resets import Resetter
from envmanager.adapters.rows import flag
from envmanager.data.specs import BehaviorSpecs
from envmanager.data.steps import AgentSteps, Begin, Steps, only_agents
from envmanager.data.trees import Tree, snapshot
from envmanager.environment import EnvGroup, OnDemand, check_repeated
from envmanager.errors import ServerFull
from envmanager.hosts.hosting import GroupFactory

_GYMNASIUM = "gymnasium.core.Env"
_NONE_GIVEN = np.zeros(0, np.int64)


class Runner(Protocol):
    """The interface of a session, which runs an environment, for its group."""

    @property
    def returns_full(self) -> bool:
        """Whether an episode that finds its server full is not begun."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the environment, in its thread if it has one. Return the result, or an awaitable of it."""

    async def run_reset(self, reset: Callable[..., Any], *args: Any) -> Any:
        """Call ``reset`` as ``run`` does, and return its awaited result. Await a server that is gone or full."""


class SharedRows:
    """What environments of one class with equal spaces share: their group of rows, and the way to reset them."""

    def __init__(self, env: Any, kind: str, *, infos: bool, check_values: bool) -> None:
        """``kind``: the kind of environment, "" without kinds."""
        gymnasium_adapter = importlib.import_module("envmanager.adapters.gymnasium")
        self.spaces = spaces_of(env)
        self.key = kind, type(env), self.spaces
        """What environments have in common that share it."""
        self.observation_space, self.action_space = self.spaces
        self.reset_of = Resetter(env)
        self.first: Any = None
        """Result of the ``reset`` that was awaited last."""
        self.rows = gymnasium_adapter.GymnasiumEnvironment([self], infos=infos, check_values=check_values)
        if kind:
            self.rows.name_behaviors(kind)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        """Return the result of the ``reset`` that was awaited last."""
        return self.first


def spaces_of(env: Any) -> tuple[Any, Any]:
    """Return the observation space and the action space of Gymnasium, each None if the environment declares none."""
    declared = [getattr(env, name, None) for name in ("observation_space", "action_space")]
    known = [each if "gymnasium.spaces.space.Space" in base_names(each) else None for each in declared]
    return known[0], known[1]


class AwaitedEnvironment(EnvGroup):
    """An environment with the methods of a Gymnasium one, of which each may be a coroutine function.

    A synchronous one is called in its thread. Its methods ``reset`` and ``step`` are those of a group, but awaited.
    """

    begins_on_demand = begins_when_ready = takes_actions = returns_new_arrays = True

    def __init__(self, env: Any, env_id: int, shared: SharedRows) -> None:
        self.env_ids = (env_id,)
        self.runner: Runner
        self._env = env
        self._shared = shared
        self._agent_id = only_agents(self.env_ids)
        self._agent_id.flags.writeable = False
        self._options: Mapping[str, Any] | None = None

    @property
    def behavior_specs(self) -> BehaviorSpecs:
        return self._shared.rows.behavior_specs  # type: ignore[no-any-return]

    @property
    def subjects(self) -> Sequence[Any]:
        return [self._env]

    async def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:  # type: ignore[override]
        self._options, self.on_demand = None if options is None else dict(options), None
        return await self._begun(seeds[0], self._options)

    async def reset_on_demand(self, begins: Sequence[Begin]) -> Steps:  # type: ignore[override]
        self.on_demand = OnDemand(1, begins)
        return await self.step({}, _NONE_GIVEN)

    async def step(self, actions: Mapping[str, Tree], rows: np.ndarray | None = None) -> Steps:  # type: ignore[override]
        shared, on_demand = self._shared, self.on_demand
        if on_demand is not None:
            chosen, begins = on_demand.rows(rows)
            if begins:
                begin = begins[0]
                if begin.actions is not None:
                    return await self._after_actions(begin, begin.actions)
                try:
                    return await self._begun(begin.seed, begin.options)
                except ServerFull as error:
                    if not self.runner.returns_full:
                        raise
                    self._could_not_begin(begin, 0, error)
                    return shared.rows.joined([], _NONE_GIVEN)  # type: ignore[no-any-return]
            if not chosen:
                return shared.rows.joined([], _NONE_GIVEN)  # type: ignore[no-any-return]
        (action,) = shared.rows.actions_of(actions)
        del actions
        result = self.runner.run(self._env.step, action)
        while result.__class__ is not tuple and inspect.isawaitable(result):
            result = await result
        rests, first = False, None
        if _has_ended(result, shared.rows.casting):
            laid = None if on_demand is None else on_demand.ended(0)
            rests = on_demand is not None and laid is None
            if not rests:
                result = snapshot(result)  # the reset may overwrite its parts
                seed, options = (None, self._options) if laid is None else (laid.seed, laid.options)
                first = await self.runner.run_reset(self._reset, seed, options)
        shared.rows.rests, shared.first = rests, first
        steps = shared.rows.joined([result])[shared.rows.behavior]
        return self._own(steps, acting=np.zeros(1, np.bool_) if rests else None)

    async def _begun(self, seed: int | None, options: Mapping[str, Any] | None) -> Steps:
        """Begin an episode. Return its first observation."""
        return self._first(await self.runner.run_reset(self._reset, seed, options))

    def _first(self, result: Any) -> Steps:
        """Return the first steps of an episode, whose ``reset`` has returned ``result``."""
        self._shared.first = result  # after the wait, in which other environments use it
        rows = self._shared.rows
        return self._own(rows.reset(seeds=[None], options=None)[rows.behavior])

    async def _after_actions(self, begin: Begin, actions: Mapping[str, Tree]) -> Steps:
        """Begin an episode and take its actions. Return its first steps, which are none if it could not begin."""
        rows, step, rewards, calls = self._shared.rows, 0, list[Any](), self._calls_of(begin)
        try:
            await self._repeated(calls, -1, None)
            result = await self.runner.run_reset(self._reset, begin.seed, begin.options)
            obs, info = await self._repeated(calls, 0, result)
            n = begin.n_repeated
            for step, action in enumerate(rows.actions_of(actions, np.arange(n)) if n else (), 1):
                result = self.runner.run(self._env.step, action)
                while result.__class__ is not tuple and inspect.isawaitable(result):
                    result = await result
                obs, reward, _, _, info = result
                rewards.append(reward)
                if _has_ended(result, rows.casting):
                    self._could_not_begin(begin, step, None)
                    break
                if calls:
                    obs, info = await self._repeated(calls, step, (obs, info))
            else:
                check_repeated(calls)
                self._has_repeated(begin, rewards)
                return self._first((obs, info))
        except ConnectionError:  # the server is gone, not the episode
            raise
        except Exception as error:
            self._could_not_begin(begin, step, error)
        return rows.joined([], _NONE_GIVEN)  # type: ignore[no-any-return]

    async def _repeated(self, calls: dict[int, list[Callable[[], Any]]], after: int, seen: Any) -> Any:
        """Await the calls that came after so many actions. Return what was ``seen`` before, a copy if there are any."""
        if after in calls:
            seen = snapshot(seen)
            for call in calls.pop(after):
                result = self.runner.run(call)
                result = await result if inspect.isawaitable(result) else result
                for each in result or ():
                    if inspect.isawaitable(each):
                        await each
        return seen

    def _reset(self, seed: int | None, options: Mapping[str, Any] | None) -> Any:
        given = None if options is None else dict(options)
        return self._shared.reset_of(self._env, seed=seed, options=given)

    def _own(self, steps: AgentSteps, acting: np.ndarray | None = None) -> Steps:
        """Return a copy of ``steps``, which are in the shared rows, as the steps of this environment."""
        own = steps.copy()
        own.agent_id, own.acting = self._agent_id, acting
        return {self._shared.rows.behavior: own}

    def close(self) -> Any:
        """Close the environment, if it has a method ``close``. Return the result, which may be an awaitable."""
        return getattr(self._env, "close", lambda: None)()


def _has_ended(result: Any, casting: Any) -> bool:
    """Return whether a result of ``step`` ends the episode. False for no such result, which ``joined`` refuses."""
    if not isinstance(result, tuple) or len(result) != 5:
        return False
    terminated, truncated = flag(result[2], "terminated", casting), flag(result[3], "truncated", casting)
    return terminated or truncated


@attrs.frozen
class SessionFactory(GroupFactory):
    """A factory of the group of one environment. ``known``: shared rows that were made so far, to which it adds."""

    known: list[SharedRows] = attrs.field(factory=list, kw_only=True)

    def build(self, made: list[Any], env_ids: list[int]) -> EnvGroup:
        """Return an AwaitedEnvironment for what is like a Gymnasium environment, else the group of its adapter.

        An awaitable of an environment is returned unchanged: the session awaits it.
        """
        (env,) = made
        if inspect.isawaitable(env):
            return env  # type: ignore[return-value]
        names = base_names(env)
        is_other = any(name in names for name in (*ADAPTERS, *VECTORS, "envmanager.environment.Environment"))
        has_methods = callable(getattr(env, "reset", None)) and callable(getattr(env, "step", None))
        if (is_other and _GYMNASIUM not in names) or not has_methods:
            return super().build(made, env_ids)
        key = self.kind, type(env), spaces_of(env)
        shared = next((each for each in self.known if each.key == key), None)
        if shared is None:
            shared = SharedRows(env, self.kind, infos=self.infos, check_values=self.check_values)
            self.known.append(shared)
        return AwaitedEnvironment(env, env_ids[0], shared)
