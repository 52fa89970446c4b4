"""Functions that choose the adapter for an object that a factory returned, and that group a worker's environments.

::

    user's object ──┐
    user's object ──┼── build_group ──▶ EnvGroup (all environments of one worker)
    user's object ──┘

The rule: importing this module imports no environment library. An adapter is chosen by the names of the object's class
and base classes, before the adapter is imported.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from envmanager.adapters.names import base_names
from envmanager.adapters.resets import parameters_of
from envmanager.adapters.side_by_side import SideBySide
from envmanager.data.specs import describe_value
from envmanager.environment import EnvGroup, Environment
from envmanager.errors import UsageError

ADAPTERS = {
    "gymnasium.core.Env": "envmanager.adapters.gymnasium:GymnasiumEnvironment.wrap",
    "pettingzoo.utils.env.ParallelEnv": "envmanager.adapters.pettingzoo:ParallelEnvironment",
    "pettingzoo.utils.env.AECEnv": "envmanager.adapters.pettingzoo:ParallelEnvironment",
    "envmanager.adapters.turns.Turns": "envmanager.adapters.pettingzoo:ParallelEnvironment",
    "dm_env._environment.Environment": "envmanager.adapters.dm_env:DmEnvironment",
    "textarena.core.Env": "envmanager.adapters.texts:TextEnvironment",
    "gem.core.Env": "envmanager.adapters.texts:TextEnvironment",
    "envmanager.adapters.together.Together": "envmanager.adapters.texts:TextEnvironment",
    "mlagents_envs.base_env.BaseEnv": "envmanager.adapters.mlagents:MlagentsEnvironment",
}
"""Import names of the adapters, by the name of the base class that each wraps."""

VECTORS = {
    "envpool.python.envpool.EnvPoolMixin": "envmanager.adapters.envpool:pool_group",
    "gymnasium.vector.vector_env.VectorEnv": "envmanager.adapters.late_vector:vector_group",
}
"""Import names of the adapters for vector environments, by the name of the base class that each wraps."""

ENVIRONMENTS = {*ADAPTERS, *VECTORS, "envmanager.environment.Environment"}
"""Names of the base classes by which ``innermost`` recognizes environments."""


def _foreign_advice(subject: Any) -> str:
    """Return advice for an object of no known class. The methods of environments tell which class it should have."""
    if not (callable(getattr(subject, "reset", None)) and callable(getattr(subject, "step", None))):
        return f"it is {describe_value(subject)}"
    name = f"{type(subject).__module__}.{type(subject).__qualname__}"
    if not {"state", "env_state"}.isdisjoint(parameters_of(subject.step)[0]):
        return (
            f"its class {name} is functional, as in libraries of JAX: step() takes a state and returns the next one. "
            "Let a VectorEnv over jax.jit(jax.vmap(step)) keep the states (docs/vectorised-environments.md shows it in "
            "20 lines), or use the library's own wrapper for Gymnasium"
        )
    if any(inspect.iscoroutinefunction(getattr(subject, method)) for method in ("reset", "step")):
        return f"the methods of its class {name} are coroutines, which run with kind: asyncio (AsyncioEnvManager)"
    if hasattr(subject, "possible_agents"):
        missing = "the methods of a PettingZoo environment: let it derive from pettingzoo.ParallelEnv or AECEnv"
    elif hasattr(subject, "observation_spec"):
        missing = "the methods of a dm_env environment: let it derive from dm_env.Environment"
    elif "seed" in parameters_of(subject.reset)[0]:
        missing = "the methods of a Gymnasium environment: let it derive from gymnasium.Env"
    else:
        missing = (
            "the methods of the old gym package: wrap it in a gymnasium.Env whose reset(seed=…, options=…) returns "
            "(obs, info) and whose step(action) returns (obs, reward, terminated, truncated, info)"
        )
    return f"its class {name} derives from no known class of environments, but has {missing}"


_OPEN_SPIEL = (
    "it is a game of OpenSpiel, with states and players of its own: shimmy's OpenSpielCompatibilityV0 makes an AECEnv "
    "of a game, and envmanager.adapters.turns.Turns(env, mask_from_info=True) has its masks in the observations"
)
UNSUPPORTED = {
    "gym.vector.vector_env.VectorEnv": "it is a vector of the old gym package: write a gymnasium.vector.VectorEnv that "
    "calls it, and declare its autoreset_mode (docs/vectorised-environments.md)",
    "gym.core.Env": "it is an environment of the old gym package: turn it into a gymnasium.Env (shimmy does that)",
    "open_spiel.python.rl_environment.Environment": _OPEN_SPIEL,
    "pyspiel.Game": _OPEN_SPIEL,
    "pyspiel.State": _OPEN_SPIEL,
    **dict.fromkeys(
        VECTORS,
        "it is a vector environment: pass the function that makes it to a manager as env_factory, with n_envs=num_envs",
    ),
}
"""Advice for the user, by the name of a base class that ``as_environment`` refuses."""


def _entry_for(subject: Any, table: Mapping[str, str]) -> str | None:
    return next((table[name] for name in base_names(subject) if name in table), None)


def as_environment(subject: Any) -> Environment:
    """Return ``subject`` unchanged if it is an Environment, else wrapped in the adapter for its library.

    Args:
        subject: An environment of Gymnasium, PettingZoo, dm_env, ML-Agents, TextArena or GEM, or an Environment. For
            any other object and a vector environment, UsageError is raised.
    """
    if isinstance(subject, Environment):
        return subject
    adapter = _entry_for(subject, ADAPTERS)
    if adapter is not None:
        return pkgutil.resolve_name(adapter)(subject)  # type: ignore[no-any-return]
    advice = _entry_for(subject, UNSUPPORTED)
    raise UsageError(
        f"{advice or _foreign_advice(subject)}. An environment is a gymnasium.Env, a PettingZoo ParallelEnv or "
        "AECEnv, a dm_env Environment, an ML-Agents BaseEnv, an Env of TextArena or GEM, or an "
        "envmanager.Environment. A factory may also return a gymnasium VectorEnv or an EnvPool, for all environments "
        "of a worker. With kind: asyncio, any object with the methods reset(*, seed, options) and step(action) is one."
    )


def n_envs_of(subject: Any) -> int | None:
    """Return the number of environments in a vector environment, or None for any other object."""
    is_vector = _entry_for(subject, VECTORS) is not None
    return int(getattr(subject, "num_envs", 0) or len(subject)) if is_vector else None


def holds_all_of(subject: Any, factories: Sequence[Any]) -> bool:
    """Return whether ``subject``, which the first of a worker's ``factories`` returned, is a vector environment.

    A vector environment holds all environments of the worker, so UsageError is raised if ``factories`` differ.
    """
    is_vector = _entry_for(subject, VECTORS) is not None
    if is_vector and any(factory is not factories[0] for factory in factories):
        raise UsageError(
            "a factory returned a vector of all environments of its worker, which have different factories. Pass one "
            "function as env_factory, or a list with the same function for all environments of a worker."
        )
    return is_vector


SAME_ENVIRONMENT = (
    "env_factory returned the same environment twice, perhaps in new wrappers; each call must make a new one."
)
"""Text of the error for it."""
_INWARDS = ("subject", "unwrapped", "env")
"""Attributes in which wrappers (of this library, Gymnasium, PettingZoo and others) keep the wrapped object."""


def innermost(subject: Any) -> Any:
    """Return the environment inside all wrappers of ``subject``, or ``subject`` itself if it wraps no environment."""
    seen = {id(subject)}
    while True:
        inner = next((each for each in _wrapped_by(subject) if id(each) not in seen), None)
        if inner is None:
            return subject
        subject = inner
        seen.add(id(subject))


def _wrapped_by(subject: Any) -> Iterable[Any]:
    for name in _INWARDS:
        try:
            inner = getattr(subject, name, None)
        except Exception:  # a property of foreign code
            continue
        if inner is not None and not ENVIRONMENTS.isdisjoint(base_names(inner)):
            yield inner


def build_group(
    subjects: Sequence[Any], env_ids: Sequence[int], *, infos: bool = False, check_values: bool = False
) -> EnvGroup:
    """Return the EnvGroup of a worker's ``subjects``. Gymnasium environments with equal spaces share one fast adapter.

    A vector environment must be the only entry of ``subjects``, and hold one environment per id in ``env_ids``. Raises
    UsageError as ``as_environment`` does, and if two entries of ``subjects`` are, or wrap, the same environment.
    """
    vector = _entry_for(subjects[0], VECTORS)
    if vector is not None:
        return pkgutil.resolve_name(vector)(subjects[0], env_ids, infos=infos, check_values=check_values)  # type: ignore[no-any-return]
    if len({id(innermost(subject)) for subject in subjects}) < len(subjects):
        raise UsageError(SAME_ENVIRONMENT)
    names = ("observation_space", "action_space")
    if all("gymnasium.core.Env" in base_names(subject) for subject in subjects) and all(
        getattr(subject, name) == getattr(subjects[0], name) for subject in subjects[1:] for name in names
    ):
        adapter = pkgutil.resolve_name("envmanager.adapters.gymnasium:GymnasiumEnvironment")
        return adapter(subjects, env_ids, infos=infos, check_values=check_values)  # type: ignore[no-any-return]
    environments = [as_environment(subject) for subject in subjects]
    return SideBySide(environments, env_ids, infos=infos, check_values=check_values)
