"""Recipes for environments. A recipe is an environment id or a factory, with arguments and wrappers.

::

    EnvRecipe ── prepare, in the trainer's process ──▶ Prepared ── call_factory, in the worker ──▶ environment

The constructor of a recipe imports nothing. ``prepare`` looks up the recipe's environment and wrappers before any
environment is made. For an unknown name it raises UsageError, which suggests a similar known name if there is one.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs

from envmanager.adapters.names import GymnasiumId, Importable, find_callable, import_all, loaded
from envmanager.adapters.resets import signature_of
from envmanager.errors import ConfigError, UsageError
from envmanager.importing import nearest
from envmanager.options import at_least, must_be

_WRAPPER = "'module:Class' or {'module:Class': {its arguments}}"


def check_kwargs(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Raise UsageError unless ``value`` is None or a mapping with string keys. An attrs validator."""
    if value is not None:
        _check_arguments(attribute.name, value)


def _check_arguments(what: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise UsageError(f"{what} must be a mapping of arguments by name, not {value!r}.")
    for name in value:
        if not isinstance(name, str):
            raise UsageError(f"{what} must have names as keys, not {name!r}.")


check_name = attrs.validators.optional(must_be("a text", lambda value: isinstance(value, str) and value != ""))
"""An attrs validator that accepts None and non-empty strings."""


def as_tuple(value: Any) -> Any:
    """Convert a list to a tuple and None to an empty tuple; return other values unchanged. An attrs converter."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else value


def check_modules(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Raise UsageError unless ``value`` is a tuple of module names. An attrs validator."""
    if not isinstance(value, tuple):
        raise UsageError(f"{attribute.name} must be a list of modules, such as [my_envs], not {value!r}.")
    for name in value:
        if not isinstance(name, str) or not name.replace(".", "_").isidentifier():
            raise UsageError(f"{attribute.name} must name modules, such as my_envs, not {name!r}.")


def check_wrappers(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Raise UsageError unless ``value`` is a tuple of entries that ``call_of`` accepts. An attrs validator."""
    if not isinstance(value, tuple):
        raise UsageError(f"{attribute.name} must be a list, each {_WRAPPER}, not {value!r}.")
    for place, entry in enumerate(value):
        call_of(entry, f"{attribute.name}[{place}]")


def call_of(entry: Any, what: str) -> tuple[Any, Mapping[str, Any]]:
    """Split an entry of ``wrappers`` into the wrapper (a string or a callable) and its arguments by name.

    Raises UsageError for a malformed entry. ``what``: the name of the entry in the error message.
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
    """Raise UsageError if both ``render_mode`` and ``env_kwargs`` set the render mode."""
    if render_mode is not None and "render_mode" in (env_kwargs or {}):
        raise UsageError("render_mode is given twice, as an option and in env_kwargs: leave one out.")


_check_behavior = attrs.validators.optional(
    must_be(
        'a name without "/", and not "*"',
        lambda value: isinstance(value, str) and value not in ("", "*") and "/" not in value,
    )
)


@attrs.frozen
class EnvRecipe:
    """A description of an environment, its arguments and wrappers, which managers accept as ``env_factory``.

    ``env``: a callable, a Gymnasium id, ``"module:callable"``, or ``{"vector": id}`` for a vector environment.
    ``env_kwargs``: arguments by name, for ids also gymnasium.make's ``max_episode_steps`` and ``disable_env_checker``.
    ``render_mode``: the environment's render mode. ``wrappers``: the wrappers of the environment, innermost first. Each
    is ``"module:Class"`` or, with arguments, ``{"module:Class": {"size": 4}}``; a callable may replace the string.
    ``imports``: modules to import first, in the trainer's process and the worker, because they register ids or spaces.
    ``behavior``: name of the kind of environment. A list of recipes with names is that of the kinds in a manager, each
    with ``n`` environments. Its only behavior has this name, others the names ``"behavior/its own name"``.

    Raises UsageError for an invalid option. A manager looks up all names before it starts a worker, and raises
    UsageError for a name that cannot be found.
    """

    env: Any
    env_kwargs: Mapping[str, Any] | None = attrs.field(default=None, kw_only=True, validator=check_kwargs)
    wrappers: Sequence[Any] = attrs.field(default=(), kw_only=True, converter=as_tuple, validator=check_wrappers)
    render_mode: str | None = attrs.field(default=None, kw_only=True, validator=check_name)
    imports: Sequence[Any] = attrs.field(default=(), kw_only=True, converter=as_tuple, validator=check_modules)
    n: int = attrs.field(default=1, kw_only=True, validator=at_least(1))
    behavior: str | None = attrs.field(default=None, kw_only=True, validator=_check_behavior)

    def __attrs_post_init__(self) -> None:
        if isinstance(self.env, EnvRecipe):
            raise UsageError("env is an EnvRecipe already: put all options into one EnvRecipe.")
        if self.n != 1 and self.behavior is None:
            raise UsageError(f"n={self.n} is the number of environments of one kind of several: name it by behavior.")
        check_render_mode(self.env_kwargs, self.render_mode)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the environment by name, including ``render_mode`` if it is set."""
        rendered = {} if self.render_mode is None else {"render_mode": self.render_mode}
        return {**(self.env_kwargs or {}), **rendered}


RECIPE_OPTIONS = tuple(each.name for each in attrs.fields(EnvRecipe) if each.name not in ("env", "n", "behavior"))
"""Names of the manager options that say how environments are made."""


Call = tuple[Any, Mapping[str, Any]]
"""A callable or Importable, and its arguments by name."""


def with_recipe(env_factory: Any, options: Any) -> Any:
    """Return ``env_factory``, wrapped in an EnvRecipe if the ManagerOptions set an option of one, such as ``wrappers``.

    In a list, each factory is wrapped. Raises ConfigError if a factory is an EnvRecipe and such an option is set.
    """
    given = {name: getattr(options, name) for name in RECIPE_OPTIONS}
    if not any(given.values()):
        return env_factory
    if isinstance(env_factory, list | tuple):
        return [with_recipe(each, options) for each in env_factory]
    if isinstance(env_factory, EnvRecipe):
        said = ", ".join(name for name, value in given.items() if value)
        raise ConfigError(f"The environment is an EnvRecipe, and {said} set besides: put all of it into the recipe.")
    return EnvRecipe(env_factory, **given)


@attrs.frozen
class Prepared:
    """A checked EnvRecipe: the call that makes the environment, the wrappers, and the modules to import first."""

    make: Call
    wrappers: Sequence[Call] = ()
    imports: Sequence[str] = ()

    def inner(self) -> Callable[..., Any]:
        """Import the modules in ``imports``, then return the factory of the unwrapped environment."""
        import_all(self.imports)
        return _bound(self.make)

    def wrapped(self, environment: Any) -> Any:
        """Apply all wrappers to ``environment`` and return the result. If a wrapper fails, close the environment."""
        try:
            for call in self.wrappers:
                wrapped = _bound(call)(environment)
                if wrapped is None:
                    raise UsageError(f"the wrapper {name_of(call[0])} returned None; is a `return` missing?")
                environment = wrapped
        except BaseException:
            with suppress(Exception):  # the wrapper's error matters more
                environment.close()
            raise
        return environment


def prepare(recipe: EnvRecipe, resolve: Callable[[Any], Any]) -> Prepared:
    """Check a recipe and return a Prepared. ``resolve`` finds its factory. Raises UsageError or MissingExtra."""
    import_all(recipe.imports)
    factory, arguments = resolve(recipe.env), recipe.arguments
    maker = _maker(factory)
    if arguments and maker is not None:
        known = _OF_GYMNASIUM_MAKE if isinstance(factory, GymnasiumId) else ()
        _check_names(maker, arguments, f"env {name_of(recipe.env)}", also=known)
        _check_render_mode(maker, arguments.get("render_mode"), recipe.env, by_id=isinstance(factory, GymnasiumId))
    return Prepared((factory, arguments), [_wrapper(entry) for entry in recipe.wrappers], recipe.imports)


_OF_GYMNASIUM_MAKE = ("max_episode_steps", "disable_env_checker")


def _maker(factory: Any) -> Any:
    """Return the callable whose parameters ``factory`` accepts, or None if this process cannot import the callable."""
    maker = factory.entry_point if isinstance(factory, GymnasiumId) else loaded(factory)
    try:
        return pkgutil.resolve_name(maker) if isinstance(maker, str) else maker
    except Exception:  # perhaps only the worker can import it; else the worker's error says so
        return None


def _wrapper(entry: Any) -> Call:
    target, arguments = call_of(entry, "wrappers")
    what, meaning = f"the wrapper {name_of(target)}", "a class or function that wraps an environment"
    found = find_callable(target, what, meaning) if isinstance(target, str) else target
    called = loaded(found)
    _check_names(called, arguments, what, skip=1)
    _check_complete(called, arguments, what)
    return found, arguments


def _check_names(
    called: Any, arguments: Mapping[str, Any], what: str, *, skip: int = 0, also: Iterable[str] = ()
) -> None:
    """Raise UsageError if an argument is neither in ``also`` nor among the parameters ``[skip:]`` of ``called``."""
    parameters = signature_of(called)
    if parameters is None or any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [*(each.name for each in parameters[skip:] if each.kind in by_name), *also]
    for name in arguments:
        if name not in known:
            takes = f"It takes: {', '.join(known)}." if known else "It takes none."
            raise UsageError(f"{what} takes no argument {name!r}{nearest(name, known)} {takes}")


def _check_complete(called: Any, arguments: Mapping[str, Any], what: str) -> None:
    parameters = signature_of(called)
    if parameters is None:
        return
    try:
        inspect.Signature(parameters).bind(None, **arguments)
    except TypeError as error:
        raise UsageError(f"{what} cannot be called with an environment and {dict(arguments)!r}: {error}.") from error


def _check_render_mode(maker: Any, mode: Any, env: Any, *, by_id: bool) -> None:
    """Raise UsageError if ``maker`` declares render modes without ``mode``. ``by_id``: allow those Gymnasium adds."""
    metadata = getattr(maker, "metadata", None)
    modes = list(metadata.get("render_modes") or ()) if isinstance(metadata, Mapping) else []
    if mode is None or not modes:
        return
    known = [*modes, *_made_by_gymnasium(modes)] if by_id else modes
    if mode not in known:
        raise UsageError(
            f"env {name_of(env)} has no render_mode {mode!r}{nearest(str(mode), known)} It has: {', '.join(known)}."
        )


def _made_by_gymnasium(modes: Sequence[str]) -> Iterable[str]:
    if "human" not in modes and ("rgb_array" in modes or "rgb_array_list" in modes):
        yield "human"
    for mode in modes:
        if f"{mode}_list" not in modes and not mode.endswith("_list"):
            yield f"{mode}_list"


def _bound(call: Call) -> Callable[..., Any]:
    """Return the callable of ``call`` with its arguments bound. Lists and dicts in the arguments are copied."""
    target, arguments = call
    called: Callable[..., Any] = loaded(target)
    return functools.partial(called, **_own(dict(arguments))) if arguments else called


def _own(value: Any) -> Any:
    if type(value) is dict:
        return {key: _own(each) for key, each in value.items()}
    return [_own(each) for each in value] if type(value) is list else value


def name_of(target: Any) -> str:
    """Return the name of an environment, factory or wrapper for an error message."""
    target = target.func if isinstance(target, functools.partial) else target
    if isinstance(target, Importable):
        return f"'{target.module}:{target.attribute}'"
    return repr(target) if isinstance(target, str) else str(getattr(target, "__qualname__", None) or repr(target))
