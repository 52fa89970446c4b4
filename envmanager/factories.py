"""From what a user passes as ``env_factory`` to one callable per environment, refused early when it cannot work.

The rule: no environment is made here; the trainer's process only looks at the factory.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import attrs

from envmanager.environment import EnvContext, Environment
from envmanager.errors import MissingExtra, UsageError
from envmanager.specs import describe_value

EnvFactory = Callable[..., Any] | str | Sequence[Any]
"""A callable, a Gymnasium id, ``"module:callable"``, or a list of these, one per environment."""

NAMESPACES = {"ALE": ("ale_py", "atari")}
"""Gymnasium namespaces that only exist once a library was imported: the library, and the extra that brings it."""


@attrs.frozen
class GymnasiumId:
    """A factory that makes the environment registered under ``env_id``."""

    env_id: str

    def __call__(self) -> Any:
        return _gymnasium_for(self.env_id).make(self.env_id)


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
    module, colon, attribute = text.partition(":")
    if colon and attribute.replace(".", "_").isidentifier():
        if not module or module.startswith("."):
            raise UsageError(f"env {text!r} names no module: write 'module:callable' with the module's full name.")
        importable = Importable(module, attribute)
        try:
            found = importable.load()
        except MissingExtra:
            raise
        except (ImportError, AttributeError) as error:
            raise UsageError(f"env {text!r} cannot be found: {error}.") from error
        if not callable(found):
            raise UsageError(f"env {text!r} is {describe_value(found)}, not a callable that makes an environment.")
        return importable
    gymnasium = _gymnasium_for(text)
    try:
        gymnasium.spec(text)
    except gymnasium.error.Error as error:
        raise UsageError(f"Gymnasium knows no environment {text!r}: {error}") from error
    except ImportError as error:
        raise UsageError(f"env {text!r} cannot be found: {error}.") from error
    return GymnasiumId(text)


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
