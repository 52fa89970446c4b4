"""Functions that the Gymnasium and Stable-Baselines3 bridges run in the workers with ``manager.call(function, …)``.

Workers import this module, so it imports no optional library except Gymnasium.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envmanager.environment import attribute_of
from envmanager.importing import needed_by

with needed_by("envmanager.interop", extra="gymnasium"):
    from gymnasium import Wrapper


def call_method(env: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the method ``name`` of ``env``, or of an environment that ``env`` wraps, and return the result."""
    return attribute_of(env, name)(*args, **kwargs)


def call_or_get(env: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the attribute ``name`` of ``env`` or of an environment that it wraps, or its result if it is callable."""
    value = attribute_of(env, name)
    return value(*args, **kwargs) if callable(value) else value


def has_attribute(env: Any, name: str) -> bool:
    """Return whether ``env``, or an environment that ``env`` wraps, has the attribute ``name``."""
    return bool(env.has_wrapper_attr(name)) if hasattr(env, "has_wrapper_attr") else hasattr(env, name)


def names_of_wrappers(env: Any) -> set[str]:
    """Return the full names of the classes and base classes of all wrappers in the chain that begins with ``env``."""
    names: set[str] = set()
    while isinstance(env, Wrapper):
        names.update(map(full_name, type(env).__mro__))
        env = env.env
    return names


def full_name(cls: type[Any]) -> str:
    """Return ``module.name`` of a class, so that processes can compare classes without pickling them."""
    return f"{cls.__module__}.{cls.__name__}"  # a class that was pickled by value has lost its __qualname__
