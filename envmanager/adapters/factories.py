"""Makes one callable per environment of what a user passes as ``env_factory``; what cannot work is refused early.

The rule: no environment is made here; the trainer's process only looks at the factory.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import attrs
import cloudpickle

from envmanager.data.specs import describe_value
from envmanager.environment import EnvContext, Environment
from envmanager.errors import MissingExtra, UsageError

EnvFactory = Callable[..., Any] | str | Sequence[Any]
"""A callable, a Gymnasium id, ``"module:callable"``, or a list of these, one per environment. ``"module:id"`` is an id
that is registered when the module is imported."""

NAMESPACES = {"ALE": ("ale_py", "atari")}
"""Gymnasium namespaces that only exist once a library was imported: the library, and the extra that brings it."""


@attrs.frozen
class GymnasiumId:
    """A factory that makes the environment registered under ``env_id``.

    It takes along what is registered, because a worker knows only what Gymnasium itself registers and what ``module``,
    imported there first, does.
    """

    env_id: str
    spec: Any = attrs.field(eq=False, repr=False)
    module: str = ""

    def __call__(self) -> Any:
        if self.module:
            importlib.import_module(self.module)
        return _gymnasium_for(self.env_id).make(self.spec)


@attrs.frozen
class Importable:
    """A factory that is looked up by name in the worker, so that nothing but the name travels."""

    module: str
    attribute: str

    def load(self) -> Any:
        """The callable itself."""
        found: Any = importlib.import_module(self.module)
        for part in self.attribute.split("."):
            found = getattr(found, part)
        return found


def factories_for(env_factory: Any, n_envs: int) -> list[Any]:
    """One factory per environment; UsageError when ``env_factory`` cannot make environments."""
    if isinstance(env_factory, list | tuple):
        if len(env_factory) != n_envs:
            raise UsageError(f"env_factory is a list of {len(env_factory)} factories for n_envs={n_envs} environments.")
        return [resolve(entry) for entry in env_factory]
    return [resolve(env_factory)] * n_envs


def resolve(env_factory: Any) -> Any:
    """A callable factory from a callable or a text; UsageError for anything else."""
    if isinstance(env_factory, str):
        return _resolve_text(env_factory)
    if env_factory is None:
        raise UsageError("there is no environment: pass env_factory (a callable, a Gymnasium id or 'module:callable').")
    if isinstance(env_factory, Environment) or (hasattr(env_factory, "reset") and not inspect.isclass(env_factory)):
        raise UsageError(
            f"env_factory is {describe_value(env_factory)}, an environment. Pass what makes one, such as "
            "`lambda: MyEnv()`: each worker makes its own."
        )
    if not callable(env_factory):
        raise UsageError(f"env_factory must be callable, a Gymnasium id or 'module:callable', not {env_factory!r}.")
    return env_factory


def _resolve_text(text: str) -> GymnasiumId | Importable:
    module, colon, name = text.partition(":")
    if not colon:
        return GymnasiumId(text, _registered(text, text))
    if not module or module.startswith("."):
        raise UsageError(f"env {text!r} names no module: write 'module:callable' with the module's full name.")
    try:
        importlib.import_module(module)
    except MissingExtra:
        raise
    except ImportError as error:
        raise UsageError(f"env {text!r} cannot be found: {error}.") from error
    if not name.replace(".", "_").isidentifier():
        return GymnasiumId(name, _registered(name, text), module)
    importable = Importable(module, name)
    try:
        found = importable.load()
    except AttributeError as error:
        if _has_registered(name):
            return GymnasiumId(name, _registered(name, text), module)
        raise UsageError(f"env {text!r} cannot be found: {error}.") from error
    if not callable(found):
        raise UsageError(f"env {text!r} is {describe_value(found)}, not a callable that makes an environment.")
    return importable


def _has_registered(env_id: str) -> bool:
    """Whether a module that was imported has registered ``env_id``; Gymnasium is not imported to ask it."""
    gymnasium = sys.modules.get("gymnasium")
    return gymnasium is not None and env_id in gymnasium.registry


def _registered(env_id: str, text: str) -> Any:
    """What Gymnasium knows under ``env_id``; UsageError, about the user's ``text``, when that is nothing."""
    gymnasium = _gymnasium_for(env_id)
    try:
        return _without_main(gymnasium.spec(env_id))
    except gymnasium.error.Error as error:
        raise UsageError(f"Gymnasium knows no environment {text!r}: {error}") from error
    except ImportError as error:
        raise UsageError(f"env {text!r} cannot be found: {error}.") from error


def _without_main(spec: Any) -> Any:
    """The EnvSpec with what it finds in ``__main__`` by name put into it: a worker's ``__main__`` is another one."""
    module, _, name = spec.entry_point.partition(":") if isinstance(spec.entry_point, str) else ("", "", "")
    entry_point = getattr(sys.modules["__main__"], name, None) if module == "__main__" else None
    return spec if entry_point is None else dataclasses.replace(spec, entry_point=entry_point)


def check_travel(factories: Sequence[Any]) -> None:
    """Raise UsageError unless the factories can be sent to a worker."""
    try:
        cloudpickle.dumps(factories, protocol=5)
    except Exception as error:
        advice = "Make what it holds (locks, open files, connections) inside the factory instead."
        what = "env_factory"
        if any(isinstance(factory, GymnasiumId) for factory in factories):
            what = "env_factory, or what is registered with Gymnasium under an id in it,"
            advice = "Register only arguments that can be pickled, or pass a function that makes the environment."
        raise UsageError(
            f"{what} cannot be sent to a worker, because it cannot be pickled: {error}. {advice}"
        ) from error


def _gymnasium_for(env_id: str) -> Any:
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError:
        raise MissingExtra(f"the environment id {env_id!r}", library="gymnasium", extra="gymnasium") from None
    namespace = env_id.partition("/")[0] if "/" in env_id else ""
    if namespace in NAMESPACES:
        library, extra = NAMESPACES[namespace]
        try:
            importlib.import_module(library)
        except ImportError:
            raise MissingExtra(f"the environment id {env_id!r}", library=library, extra=extra) from None
    return gymnasium


def call_factory(env_factory: Any, context: EnvContext) -> Any:
    """The environment that the factory makes; UsageError when it makes none."""
    if isinstance(env_factory, Importable):
        env_factory = env_factory.load()
    made = env_factory(context) if _wants_context(env_factory) else env_factory()
    if made is None:
        raise UsageError(
            f"env_factory {_name(env_factory)} returned None for env {context.env_id}; is a `return` missing?"
        )
    return made


def _wants_context(env_factory: Any) -> bool:
    """Whether the factory has one required positional parameter, or one annotated as EnvContext."""
    try:
        parameters = list(inspect.signature(env_factory).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return False
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
    except Exception:  # a hint that cannot be evaluated is not ours
        return parameter.annotation.rpartition(".")[2] == "EnvContext"


def _name(env_factory: Any) -> str:
    return str(getattr(env_factory, "__qualname__", None) or repr(env_factory))
