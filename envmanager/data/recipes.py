"""A recipe for an environment: its id or factory, its arguments and its wrappers, as in a config.

The rule: every recipe has the right shape, which is checked without importing anything. The names in it are resolved
when a manager prepares it, before a worker starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from envmanager.errors import UsageError

_WRAPPER = "'module:Class' or {'module:Class': {its arguments}}"


def check_kwargs(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validator: raise UsageError for anything but None or a mapping of names to values."""
    if value is not None:
        _check_arguments(attribute.name, value)


def _check_arguments(what: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise UsageError(f"{what} must be a mapping of arguments by name, not {value!r}.")
    for name in value:
        if not isinstance(name, str):
            raise UsageError(f"{what} must have names as keys, not {name!r}.")


def check_name(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validator: raise UsageError for anything but None or a non-empty string."""
    if value is not None and (not isinstance(value, str) or not value):
        raise UsageError(f"{attribute.name} must be a text, not {value!r}.")


def as_tuple(value: Any) -> Any:
    """Converter: return a list as a tuple, None as an empty tuple, anything else unchanged for the validator."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else value


def check_modules(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validator: raise UsageError for anything but a tuple of module names."""
    if not isinstance(value, tuple):
        raise UsageError(f"{attribute.name} must be a list of modules, such as [my_envs], not {value!r}.")
    for name in value:
        if not isinstance(name, str) or not name.replace(".", "_").isidentifier():
            raise UsageError(f"{attribute.name} must name modules, such as my_envs, not {name!r}.")


def check_wrappers(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validator: raise UsageError for anything but a tuple of entries that ``call_of`` accepts."""
    if not isinstance(value, tuple):
        raise UsageError(f"{attribute.name} must be a list, each {_WRAPPER}, not {value!r}.")
    for place, entry in enumerate(value):
        call_of(entry, f"{attribute.name}[{place}]")


def call_of(entry: Any, what: str) -> tuple[Any, Mapping[str, Any]]:
    """Return what an entry of ``wrappers`` calls, a text or a callable, and its arguments.

    Raises UsageError, which names the entry ``what``, if it has another shape.
    """
    target, arguments = entry, None
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((target, arguments),) = entry.items()
    arguments = {} if arguments is None else arguments
    if not isinstance(target, str) and not callable(target):
        raise UsageError(f"{what} must be {_WRAPPER}, not {entry!r}.")
    if isinstance(target, str):
        module, _, name = target.partition(":")
        if not module or not name:
            near = f"gymnasium.wrappers:{target.strip(':') or 'TimeAwareObservation'}"
            raise UsageError(f"{what} must be {_WRAPPER}, such as {near!r}, not {target!r}.")
    _check_arguments(f"{what}, the arguments of {target!r},", arguments)
    return target, arguments


def check_render_mode(env_kwargs: Mapping[str, Any] | None, render_mode: str | None) -> None:
    """Raise UsageError if both arguments give a render mode."""
    if render_mode is not None and "render_mode" in (env_kwargs or {}):
        raise UsageError("render_mode is given twice, as an option and in env_kwargs: leave one out.")


@attrs.frozen
class EnvRecipe:
    """An environment with its arguments and wrappers; every manager accepts one as its ``env_factory``.

    ``env``: a callable, a Gymnasium id or ``"module:callable"``. ``env_kwargs``: its arguments by name; with an id
    also those of ``gymnasium.make``, such as ``max_episode_steps``. ``render_mode``: another of its arguments.
    ``wrappers``: the wrappers of the environment, the last one outermost, each ``"module:Class"``,
    ``{"module:Class": {"size": 4}}``, or a callable in place of the text. ``imports``: modules to import before, in
    this process and in that of the environment, because they register ids or spaces.

    Raises UsageError for values of another shape. The manager raises UsageError for names that cannot be found, before
    it starts a worker.
    """

    env: Any
    env_kwargs: Mapping[str, Any] | None = attrs.field(default=None, kw_only=True, validator=check_kwargs)
    wrappers: Sequence[Any] = attrs.field(default=(), kw_only=True, converter=as_tuple, validator=check_wrappers)
    render_mode: str | None = attrs.field(default=None, kw_only=True, validator=check_name)
    imports: Sequence[str] = attrs.field(default=(), kw_only=True, converter=as_tuple, validator=check_modules)

    def __attrs_post_init__(self) -> None:
        if isinstance(self.env, EnvRecipe):
            raise UsageError("env is an EnvRecipe already: put all options into one EnvRecipe.")
        check_render_mode(self.env_kwargs, self.render_mode)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the environment by name, with ``render_mode`` if it is given."""
        rendered = {} if self.render_mode is None else {"render_mode": self.render_mode}
        return {**(self.env_kwargs or {}), **rendered}


RECIPE_OPTIONS = tuple(field.name for field in attrs.fields(EnvRecipe) if field.name != "env")
"""Names of the manager options that say how environments are made."""
