"""Calls to ``env.reset`` with only the arguments that it accepts. Some environments accept no seed or no options.

The rule: UsageError is raised if a seed or options are given to a ``reset`` that does not accept them.
"""

from __future__ import annotations

import inspect
from typing import Any

from envmanager.errors import UsageError

_ARGUMENTS = ("seed", "options")


class Resetter:
    """A callable that calls ``env.reset`` and passes a seed and options only if ``reset`` accepts them."""

    def __init__(self, env: Any) -> None:
        self._named, self._takes_any = parameters_of(env.reset)
        self._takes_both = self._named.issuperset(_ARGUMENTS)

    def __call__(self, env: Any, *, seed: Any, options: Any) -> Any:
        """Return the result of ``env.reset``. Raises UsageError if ``seed`` or ``options`` is set but not accepted."""
        if self._takes_both:
            return env.reset(seed=seed, options=options)
        arguments = {}
        for name, value in zip(_ARGUMENTS, (seed, options), strict=True):
            is_given = value is not None and value != {}
            if is_given and name not in self._named and not self._takes_any:
                raise UsageError(
                    f"{type(env).__qualname__}.reset() has no parameter {name!r}, but the manager's reset was "
                    f"given {name}: write `def reset(self, *, seed=None, options=None)`, or reset without {name}."
                )
            if is_given or name in self._named:
                arguments[name] = value
        return env.reset(**arguments)


def parameters_of(reset: Any) -> tuple[set[str], bool]:
    """Return the names of the parameters of ``reset`` that can be passed by name, and whether it takes ``**kwargs``."""
    parameters = signature_of(reset)
    if parameters is None:
        return set(_ARGUMENTS), False
    named = {each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}
    return named, any(each.kind is each.VAR_KEYWORD for each in parameters)


def signature_of(called: Any) -> list[inspect.Parameter] | None:
    """Return the parameters of a callable, or None if it has no signature, as some builtins."""
    try:
        return list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return None
