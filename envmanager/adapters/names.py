"""Environments and wrappers that are named by a text: Gymnasium ids, and callables in modules.

The rule: what a text names is looked up in this process, so that what cannot be found is refused early; into a worker
goes the name, or what Gymnasium has registered under it.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import socket
import sys
from collections.abc import Iterable
from typing import Any

import attrs

from envmanager.data.specs import describe_value
from envmanager.errors import MissingExtra, UsageError
from envmanager.structuring import nearest
from envmanager.system.importing import imported

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

    def __call__(self, **arguments: Any) -> Any:
        if self.module:
            importlib.import_module(self.module)
        return _gymnasium_for(self.env_id).make(self.spec, **arguments)


@attrs.frozen
class Importable:
    """A factory that is looked up by name in the worker, so that nothing but the name travels."""

    module: str
    attribute: str

    def load(self) -> Any:
        """The callable itself."""
        return imported(f"{self.module}:{self.attribute}")


def loaded(named: Any) -> Any:
    """What an Importable stands for; anything else is itself."""
    return named.load() if isinstance(named, Importable) else named


def import_all(modules: Iterable[str]) -> None:
    """Import modules because of what they register; UsageError when one cannot be found."""
    for module in modules:
        try:
            importlib.import_module(module)
        except MissingExtra:
            raise
        except ImportError as error:
            raise UsageError(
                f"imports names {module!r}, which cannot be imported in process {os.getpid()} on "
                f"{socket.gethostname()}: {error}. It must be on the path of every process that makes environments, "
                "and of the trainer's."
            ) from error


def find_environment(text: str) -> GymnasiumId | Importable:
    """What ``"CartPole-v1"``, ``"module:Id-v0"`` or ``"module:callable"`` names; UsageError when that is nothing."""
    module, colon, name = text.partition(":")
    if not colon:
        return GymnasiumId(text, _registered(text, text))
    if not module or module.startswith("."):
        raise UsageError(f"env {text!r} names no module: write 'module:callable' with the module's full name.")
    _import(module, f"env {text!r}")
    if not name.replace(".", "_").isidentifier():
        return GymnasiumId(name, _registered(name, text), module)
    importable = Importable(module, name)
    try:
        found = importable.load()
    except AttributeError as error:
        if _has_registered(name):
            return GymnasiumId(name, _registered(name, text), module)
        raise UsageError(f"env {text!r} cannot be found: {error}{_nearest(error)}") from error
    if not callable(found):
        raise UsageError(f"env {text!r} is {describe_value(found)}, not a callable that makes an environment.")
    return importable


def find_wrapper(text: str) -> Importable:
    """What ``"module:Class"`` names; UsageError when that is nothing, or nothing that can be called."""
    module, _, name = text.partition(":")
    importable, what = Importable(module, name), f"the wrapper {text!r}"
    _import(module, what)
    try:
        found = importable.load()
    except AttributeError as error:
        raise UsageError(f"{what} cannot be found: {error}{_nearest(error)}") from error
    except ImportError as error:  # Gymnasium says so of a wrapper that has another name now
        raise UsageError(f"{what} cannot be found: {error}") from error
    if not callable(found):
        raise UsageError(f"{what} is {describe_value(found)}, not a class or function that wraps an environment.")
    return importable


def _import(module: str, what: str) -> None:
    try:
        importlib.import_module(module)
    except MissingExtra:
        raise
    except ImportError as error:
        raise UsageError(f"{what} cannot be found: {error}.") from error


def _nearest(error: AttributeError) -> str:
    return nearest(str(error.name), [name for name in dir(error.obj) if not name.startswith("_")])


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
        advice = "" if ":" in text else " If a module of yours registers it, name that: imports: [module]."
        said = str(error).removesuffix(".") + ("" if str(error).endswith("?") else ".")
        raise UsageError(f"Gymnasium knows no environment {text!r}: {said}{advice}") from error
    except ImportError as error:
        raise UsageError(f"env {text!r} cannot be found: {error}.") from error


def _without_main(spec: Any) -> Any:
    """The EnvSpec with what it finds in ``__main__`` by name put into it: a worker's ``__main__`` is another one."""
    module, _, name = spec.entry_point.partition(":") if isinstance(spec.entry_point, str) else ("", "", "")
    entry_point = getattr(sys.modules["__main__"], name, None) if module == "__main__" else None
    return spec if entry_point is None else dataclasses.replace(spec, entry_point=entry_point)


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
