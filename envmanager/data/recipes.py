"""An environment with its arguments and its wrappers, as a config or a program says it.

The rule: a recipe that exists has the right shape, and nothing is imported to find that out. Whether what it names can
be found is seen where it is prepared, before a worker starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from envmanager.errors import UsageError

_WRAPPER = "'module:Class' or {'module:Class': {its arguments}}"


def check_kwargs(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A validator: UsageError for anything but None or a mapping of names to values."""
    if value is not None:
        _check_arguments(attribute.name, value)


def _check_arguments(what: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise UsageError(f"{what} must be a mapping of arguments by name, not {value!r}.")
    for name in value:
        if not isinstance(name, str):
            raise UsageError(f"{what} must have names as keys, not {name!r}.")


def check_name(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A validator: UsageError for anything but None or a text that is not empty."""
    if value is not None and (not isinstance(value, str) or not value):
        raise UsageError(f"{attribute.name} must be a text, not {value!r}.")


def as_tuple(value: Any) -> Any:
    """A converter: a list as a tuple, None as an empty one; what is neither is left to the validator."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else value


def check_modules(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A validator: UsageError for anything but a sequence of modules' names."""
    if not isinstance(value, tuple):
        raise UsageError(f"{attribute.name} must be a list of modules, such as [my_envs], not {value!r}.")
    for name in value:
        if not isinstance(name, str) or not name.replace(".", "_").isidentifier():
            raise UsageError(f"{attribute.name} must name modules, such as my_envs, not {name!r}.")


def check_wrappers(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A validator: UsageError for anything but a sequence of what ``call_of`` reads."""
    if not isinstance(value, tuple):
        raise UsageError(f"{attribute.name} must be a list, each {_WRAPPER}, not {value!r}.")
    for place, entry in enumerate(value):
        call_of(entry, f"{attribute.name}[{place}]")


def call_of(entry: Any, what: str) -> tuple[Any, Mapping[str, Any]]:
    """What an entry of ``wrappers`` calls, a text or a callable, and with which arguments; UsageError for no entry."""
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
    """UsageError when both say how to render."""
    if render_mode is not None and "render_mode" in (env_kwargs or {}):
        raise UsageError("render_mode is given twice, the other time in env_kwargs: leave one out.")


@attrs.frozen
class EnvRecipe:
    """What to make an environment of; any manager takes it as its ``env_factory``.

    ``env``: a callable, a Gymnasium id or ``"module:callable"``. ``env_kwargs``: arguments for it, by name; with an id
    also those of ``gymnasium.make``, such as ``max_episode_steps``. ``render_mode``: one more of these. ``wrappers``:
    what is put around the environment, in this order, so that the last is the outermost: ``"module:Class"``,
    ``{"module:Class": {"size": 4}}``, or callables in their place. ``imports``: modules that are imported before, in
    this process and in that of the environment, because they register ids or spaces.

    Raises UsageError for what has another shape. Whether all of it can be found is seen by the manager, before it
    starts anything.
    """

    env: Any
    env_kwargs: Mapping[str, Any] | None = attrs.field(default=None, kw_only=True, validator=check_kwargs)
    wrappers: Sequence[Any] = attrs.field(default=(), kw_only=True, converter=as_tuple, validator=check_wrappers)
    render_mode: str | None = attrs.field(default=None, kw_only=True, validator=check_name)
    imports: Sequence[str] = attrs.field(default=(), kw_only=True, converter=as_tuple, validator=check_modules)

    def __attrs_post_init__(self) -> None:
        if isinstance(self.env, EnvRecipe):
            raise UsageError("env is an EnvRecipe already: put everything into one.")
        check_render_mode(self.env_kwargs, self.render_mode)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the environment is made with, ``render_mode`` among it."""
        rendered = {} if self.render_mode is None else {"render_mode": self.render_mode}
        return {**(self.env_kwargs or {}), **rendered}


RECIPE_OPTIONS = tuple(field.name for field in attrs.fields(EnvRecipe) if field.name != "env")
"""The options of a manager that are about how its environments are made."""
