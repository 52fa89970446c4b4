"""The functions that the bridges call where an environment is, by ``manager.call(function, …)``.

The rule: a worker imports this module, so it imports no library but Gymnasium.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envmanager.adapters.rows import stack_rows
from envmanager.data.trees import Tree
from envmanager.environment import attribute_of
from envmanager.extras import needed_by

with needed_by("envmanager.interop", extra="gymnasium"):
    from gymnasium import Env, Wrapper


def begin_episode(
    env: Any, seed: int | None, options: Mapping[str, Any], observation: Tree, has_infos: bool
) -> tuple[Tree, dict[str, Any]]:
    """``env.reset(…)``: the observation as a tree of one row each, and the info. Raises SpecMismatch."""
    obs, info = env.reset(seed=seed, options=dict(options)) if options else env.reset(seed=seed)
    return stack_rows(observation, [obs], ["obs"]), dict(info) if has_infos else {}


def is_gymnasium_env(env: Any) -> bool:
    """Whether it is an environment of Gymnasium, possibly in wrappers."""
    return isinstance(env, Env)


def call_method(env: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``env.name(*args, **kwargs)``."""
    return attribute_of(env, name)(*args, **kwargs)


def call_or_get(env: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """As above; ``env.name`` where that is no function."""
    value = attribute_of(env, name)
    return value(*args, **kwargs) if callable(value) else value


def has_attribute(env: Any, name: str) -> bool:
    """Whether the environment or a wrapper around it has the attribute."""
    return bool(env.has_wrapper_attr(name)) if hasattr(env, "has_wrapper_attr") else hasattr(env, name)


def names_of_wrappers(env: Any) -> set[str]:
    """The classes of all wrappers around an environment, and those that they inherit from."""
    names: set[str] = set()
    while isinstance(env, Wrapper):
        names.update(map(full_name, type(env).__mro__))
        env = env.env
    return names


def full_name(cls: type[Any]) -> str:
    """The class's name, with its module's: what a worker can tell of a class without sending it."""
    return f"{cls.__module__}.{cls.__name__}"  # a class that travelled by value has lost its __qualname__
