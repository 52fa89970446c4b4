"""Functions that check the user's ``env_factory``, convert it to one factory per environment, and pickle it.

The checks may import modules, but make no environment. Workers make environments with ``call_factory``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, get_type_hints

import cloudpickle

from envmanager.adapters.names import GymnasiumId, VectorId, find_environment, loaded
from envmanager.adapters.recipes import EnvRecipe, Prepared, name_of, prepare
from envmanager.adapters.resets import signature_of
from envmanager.data.specs import describe_value
from envmanager.environment import EnvContext, Environment
from envmanager.errors import UsageError

EnvFactory = Callable[..., Any] | str | Mapping[str, Any] | EnvRecipe | Sequence[Any]
"""A callable, a Gymnasium id, ``"module:callable"``, an EnvRecipe, or a list of these, one per environment.
``{"vector": id}`` is the vectorised form of a Gymnasium id, or an EnvPool: ``{"vector": "envpool:Pong-v5"}``.
``{"openenv": url}`` is a session on an OpenEnv server each; a list of addresses is of several.
``{"mcp": command}`` or ``{"mcp": url}`` is a session with an MCP server each.
``"module:id"`` is an id that the module registers when it is imported."""


_FINDERS = {
    "vector": "envmanager.adapters.names:find_vector",
    "openenv": "envmanager.adapters.openenv:OpenEnv",
    "mcp": "envmanager.adapters.mcp:Mcp",
}
"""Import names of the functions that return a factory, by the key of a mapping."""


def factories_for(env_factory: Any, n_envs: int) -> list[Any]:
    """Return a list of one factory per environment. Raises UsageError or MissingExtra for a bad ``env_factory``."""
    if isinstance(env_factory, list | tuple):
        found = {id(entry): resolve(entry) for entry in env_factory}
        factories = [found[id(entry)] for entry in env_factory]
        if len(factories) != n_envs:
            raise UsageError(f"env_factory is a list of {len(factories)} factories for n_envs={n_envs} environments.")
        return factories
    return [resolve(env_factory)] * n_envs


def count_envs(env_factory: Any, env_kwargs: Mapping[str, Any] | None = None) -> int:
    """Return the number for which ``n_envs="auto"`` stands: the sessions of OpenEnv servers, which are asked.

    Raises UsageError for other environments, and if a server does not say it.
    """
    if isinstance(env_factory, EnvRecipe):
        env_factory, env_kwargs = env_factory.env, env_factory.env_kwargs
    if not isinstance(env_factory, Mapping) or [*env_factory] != ["openenv"]:
        raise UsageError('n_envs="auto" is for {openenv: an address} alone, whose server has a number of sessions.')
    n_sessions: int = resolve(env_factory).n_sessions((env_kwargs or {}).get("headers"))
    return n_sessions


def resolve(env_factory: Any) -> Any:
    """Convert a callable, a name, a mapping of one name or an EnvRecipe to a factory that ``call_factory`` accepts.

    Raises UsageError for any other object or an unknown name, and MissingExtra if a required library is missing.
    """
    if isinstance(env_factory, EnvRecipe):
        if env_factory.behavior is not None:
            raise UsageError(
                f"env_factory names a kind of environment, {env_factory.behavior!r}. Several kinds run in managers of "
                "the kinds simple, subprocess and asyncio: leave n and behavior out, or take one of these."
            )
        return prepare(env_factory, resolve)
    if isinstance(env_factory, str):
        return find_environment(env_factory)
    if isinstance(env_factory, Mapping):
        kind, named = next(iter(env_factory.items()), ("", None))
        if len(env_factory) != 1 or kind not in _FINDERS:
            raise UsageError(
                f"env must be an id, a callable, {{vector: an id}}, {{openenv: an address}} or "
                f"{{mcp: a command or a URL}}, not "
                f"{[*env_factory] if kind in _FINDERS else dict(env_factory)!r}."
            )
        return pkgutil.resolve_name(_FINDERS[kind])(named)
    if env_factory is None:
        raise UsageError("there is no environment: pass env_factory (a callable, a Gymnasium id or 'module:callable').")
    if isinstance(env_factory, Environment) or (hasattr(env_factory, "reset") and not inspect.isclass(env_factory)):
        raise UsageError(
            f"env_factory is {describe_value(env_factory)}, an environment. Pass a function that makes one, such as "
            "`lambda: MyEnv()`: each worker calls it."
        )
    if not callable(env_factory):
        raise UsageError(f"env_factory must be callable, a Gymnasium id or 'module:callable', not {env_factory!r}.")
    return env_factory


def vectorised(env_factory: Any) -> EnvRecipe | None:
    """Return an EnvRecipe for the vectorised form of ``env_factory``, or None if ``env_factory`` has no such form.

    A Gymnasium id without arguments and wrappers has this form if a ``vector_entry_point`` is registered for it.
    """
    if isinstance(env_factory, list | tuple):
        return None
    factory = resolve(env_factory)
    imports: Sequence[str] = ()
    if isinstance(factory, Prepared):
        if factory.wrappers or factory.make[1]:
            return None
        imports, (factory, _) = factory.imports, factory.make
    if type(factory) is not GymnasiumId or factory.spec.vector_entry_point is None:
        return None
    return EnvRecipe(VectorId(factory.env_id, factory.spec, factory.module), imports=imports)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that also takes by value what decorators of functools make of a script's functions and methods."""

    def reducer_override(self, obj: Any) -> Any:
        kind = obj.__class__
        if kind is _CACHED and not _is_importable(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters()), vars(obj)
        if kind is functools.cached_property:  # up to Python 3.11 it has a lock
            return kind, (obj.func,), {"attrname": obj.attrname}
        if kind is FunctionType and obj.__code__ is _DISPATCH and not _is_importable(obj):
            return _dispatching, (obj.__wrapped__, dict(obj.registry))
        return super().reducer_override(obj)


_CACHED = type(functools.lru_cache(len))
_DISPATCH = functools.singledispatch(len).__code__  # type: ignore[attr-defined]


def _is_importable(function: Any) -> bool:
    """Return whether another process finds the function by its name, as it does not find those of the script."""
    module, by_value = function.__module__, ("__main__", *cloudpickle.list_registry_pickle_by_value())
    try:
        named = pkgutil.resolve_name(f"{module}:{function.__qualname__}")
    except Exception:  # a local function
        return False
    return named is function and not any(f"{module}.".startswith(f"{each}.") for each in by_value)


def _cached(function: Any, parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _dispatching(function: Any, implementations: Mapping[type, Any]) -> Any:
    made = functools.singledispatch(function)
    for kind, implementation in implementations.items():
        made.register(kind, implementation)
    return made


def pickled(value: Any) -> bytes:
    """Return a pickle of ``value`` for another process, which need not know the user's script."""
    with io.BytesIO() as file:
        _Pickler(file, protocol=5).dump(value)
        return file.getvalue()


def why_unpicklable(value: Any, error: Exception) -> str:
    """Return the text of ``error``, which ``pickled(value)`` raised, and the names that lead to the cause."""
    path: list[str] = []
    known, parts = [value], _parts(value)
    while (found := next(parts, None)) is not None:
        name, part = found
        if not any(part is each for each in known):
            known.append(part)
            try:
                pickled(part)
            except Exception:
                path += [name] * bool(name)
                parts = _parts(part)
    return f"it cannot be pickled: {error}" + (f" ({' → '.join(path)})" if path else "")


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects of which a pickle of ``value`` consists, each with its name, or "" if it has none."""
    named: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        named = [("" if str(key).startswith("__") else key, each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        named = [("", each) for each in value]
    else:
        if isinstance(value, FunctionType):
            named += inspect.getclosurevars(value).nonlocals.items()
        with contextlib.suppress(Exception):  # of the object's own code
            how = _Pickler(io.BytesIO()).reducer_override(value)
            named += [("", each) for each in (value.__reduce_ex__(5) if how is NotImplemented else how)]
    for name, part in named:
        yield str(name or getattr(part, "__name__", "")), part


def check_travel(factories: Sequence[Any]) -> None:
    """Raise UsageError unless ``factories`` can be pickled, which is necessary to send them to a worker."""
    try:
        pickled(factories)
    except Exception as error:
        advice = "Make locks, generators, files and connections inside the factory, not outside of it."
        what = "env_factory"
        made_by = [factory.make[0] if isinstance(factory, Prepared) else factory for factory in factories]
        if any(isinstance(each, GymnasiumId) for each in made_by):
            what = "env_factory, or the EnvSpec that Gymnasium has registered for its id,"
            advice = "Register only arguments that can be pickled, or pass a function that makes the environment."
        raise UsageError(
            f"{what} cannot be sent to a worker, because {why_unpicklable(factories, error)}. {advice}"
        ) from error


def call_factory(env_factory: Any, context: EnvContext) -> Any:
    """Call the factory, with ``context`` if it takes one, and return the result. Raises UsageError if it is None.

    A name or an EnvRecipe is resolved first, in this process.
    """
    if isinstance(env_factory, str | EnvRecipe):
        env_factory = resolve(env_factory)
    if isinstance(env_factory, Prepared):
        return env_factory.wrapped(call_factory(env_factory.inner(), context))
    env_factory = loaded(env_factory)
    made = env_factory(context) if _wants_context(env_factory) else env_factory()
    if made is None:
        raise UsageError(
            f"env_factory {name_of(env_factory)} returned None for env {context.env_id}; is a `return` missing?"
        )
    return made


def _wants_context(env_factory: Any) -> bool:
    """Return whether to pass an EnvContext: to the only required argument, or to an optional first one of that type."""
    parameters = signature_of(env_factory) or []
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not positional:
        return False
    required = [p for p in positional if p.default is p.empty]
    return len(required) == 1 or (not required and _is_context(env_factory, positional[0]))


def _is_context(env_factory: Any, parameter: inspect.Parameter) -> bool:
    if parameter.annotation is EnvContext:
        return True
    if not isinstance(parameter.annotation, str):
        return False
    target = env_factory.__init__ if inspect.isclass(env_factory) else env_factory
    try:
        return get_type_hints(target).get(parameter.name) is EnvContext
    except Exception:  # the user's hint cannot be evaluated, so compare its text
        return parameter.annotation.rpartition(".")[2] == "EnvContext"
