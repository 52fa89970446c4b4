"""Lookup of environments and wrappers by name: Gymnasium ids, tasks of EnvPool, and callables in modules.

Names are looked up in the trainer's process, and an unknown name raises UsageError there. For a Gymnasium id, a worker
receives the EnvSpec that is registered under the id.
"""

from __future__ import annotations

import dataclasses
import importlib
import operator
import os
import socket
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import attrs

from envmanager.data.specs import describe_value
from envmanager.errors import EnvManagerError, UsageError
from envmanager.importing import import_failure, nearest, needed_by

if TYPE_CHECKING:
    from envmanager.environment import EnvContext

NAMESPACES = {"ALE": ("ale_py", "atari")}
"""Library that registers each Gymnasium namespace when imported, and this package's extra that installs it."""


@attrs.frozen
class GymnasiumId:
    """A factory of the environment that is registered with Gymnasium under ``env_id``.

    ``spec`` is the registered EnvSpec. It is sent to the worker, which may not have registered ``env_id`` itself.
    The worker imports ``module`` first, unless ``module`` is empty.
    """

    env_id: str
    spec: Any = attrs.field(eq=False, repr=False)
    module: str = ""

    def __call__(self, **arguments: Any) -> Any:
        return self._gymnasium().make(self.spec, **arguments)

    @property
    def entry_point(self) -> Any:
        """The class or function that makes the environment, or its import name."""
        return self.spec.entry_point

    def _gymnasium(self) -> Any:
        if self.module:
            importlib.import_module(self.module)
        return _gymnasium_for(self.env_id)


class VectorId(GymnasiumId):
    """A factory of a worker's vector environment, which is registered with Gymnasium under ``env_id``."""

    def __call__(self, context: EnvContext, **arguments: Any) -> Any:  # type: ignore[override]
        return self._gymnasium().make_vec(self.spec, context.n_envs, "vector_entry_point", **arguments)

    @property
    def entry_point(self) -> Any:
        return self.spec.vector_entry_point


@attrs.frozen
class PoolId:
    """A factory of a worker's EnvPool for the task ``env_id``. The pool is seeded with ``context.seed`` by default."""

    env_id: str

    def __call__(self, context: EnvContext, **arguments: Any) -> Any:
        seed = {} if context.seed is None else {"seed": context.seed}
        own = {"env_type": "gymnasium", "num_envs": context.n_envs, **seed, **arguments}
        return importlib.import_module("envpool").make(self.env_id, **own)


@attrs.frozen
class Importable:
    """A factory or wrapper given by name. Only the name is sent to a worker, which imports the object."""

    module: str
    attribute: str

    def load(self) -> Any:
        """Import and return the named object. Raises ImportError or AttributeError if it cannot be found."""
        return operator.attrgetter(self.attribute)(importlib.import_module(self.module))


def base_names(subject: Any) -> list[str]:
    """Return the full names of the class of ``subject`` and of its base classes."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(subject).__mro__]


def loaded(named: Any) -> Any:
    """Import and return the object that an Importable names. Return any other object unchanged."""
    return named.load() if isinstance(named, Importable) else named


def import_all(modules: Iterable[str]) -> None:
    """Import modules that register environments.

    Raises UsageError if a module cannot be imported, and ImportFailed if a library that it imports cannot.
    """
    for module in modules:
        _import(
            module,
            f"imports: {module!r}",
            f" This is process {os.getpid()} on {socket.gethostname()}. The module must be on the path of the trainer "
            "and of every process that makes environments.",
        )


TEXTS = ("textarena", "gem", "reasoning_gym")
"""Libraries of environments of texts, which have registries of their own; see ``adapters.texts``."""


def find_environment(text: str) -> Any:
    """Return the factory that ``text`` names as a Gymnasium id, ``"module:Id-v0"`` or ``"module:callable"``.

    With a module of ``TEXTS``, as in ``"textarena:TicTacToe-v0"``, the id is one of that library.

    Raises UsageError if there is no such environment, and ImportFailed if a library that it needs cannot be imported.
    """
    module, colon, name = text.partition(":")
    if module.endswith(".py"):
        stem = os.path.splitext(os.path.basename(module))[0]
        raise UsageError(f"env {text!r} names a file. Write the module and what makes one: {stem}:{name or 'NAME'}.")
    if not colon:
        return GymnasiumId(text, _registered(text, text))
    if not module or module.startswith("."):
        raise UsageError(f"env {text!r} names no module: write 'module:callable' with the module's full name.")
    if module in TEXTS:
        return importlib.import_module("envmanager.adapters.texts").find_text(module, name)
    _import(module, f"env {text!r}")
    is_id = not name.replace(".", "_").isidentifier()
    registry = getattr(sys.modules.get("gymnasium"), "registry", ())
    if is_id or (name in registry and not hasattr(sys.modules[module], name)):
        return GymnasiumId(name, _registered(name, text), module)
    return find_callable(text, f"env {text!r}", "a callable that makes an environment")


def find_vector(text: Any) -> Callable[..., Any]:
    """Return a factory for a vector environment: an EnvPool, or the vectorised form of an environment.

    An EnvPool has a name such as ``"envpool:Pong-v5"``. Any other environment is a Gymnasium id, as in
    ``find_environment``.
    Raises UsageError if the environment or its vectorised form does not exist, and ImportFailed if a library that it
    needs cannot be imported.
    """
    if not isinstance(text, str):
        raise UsageError(f"env: {{vector: …}} names an id such as ALE/Pong-v5, not {describe_value(text)}.")
    module, colon, name = text.partition(":")
    if colon and module == "envpool":
        with needed_by(f"the vector {text!r}", extra="envpool"):
            known = importlib.import_module("envpool").list_all_envs()
        if name not in known:
            raise UsageError(f"EnvPool has no environment {name!r}{nearest(name, known)}")
        return PoolId(name)
    found = find_environment(text)
    if not isinstance(found, GymnasiumId):
        raise UsageError(f"{text!r} is no id. If it makes vector environments, write env: {text}, without vector.")
    if found.spec.vector_entry_point is None:
        raise UsageError(f"Gymnasium knows no vectorised form of {text!r}: write env: {text} for single environments.")
    return VectorId(found.env_id, found.spec, found.module)


def find_callable(text: str, what: str, meaning: str) -> Importable:
    """Return the callable named ``"module:name"`` as an Importable.

    Raises UsageError if there is none, and ImportFailed if a library that its module needs cannot be imported. Error
    messages say ``what`` was looked for, and the ``meaning`` of the callable.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise UsageError(f"{what} names no callable: it should be module:name.")
    importable = Importable(module, name)
    _import(module, what)
    try:
        found = importable.load()
    except AttributeError as error:
        near = nearest(str(error.name), [name for name in dir(error.obj) if not name.startswith("_")])
        raise UsageError(f"{what} cannot be found: {error}{near}") from error
    except ImportError as error:  # Gymnasium raises it for the old name of a renamed wrapper
        raise UsageError(f"{what} cannot be found: {error}") from error
    if not callable(found):
        raise UsageError(f"{what} is {describe_value(found)}, not {meaning}.")
    return importable


def _import(module: str, what: str, advice: str = "") -> None:
    try:
        importlib.import_module(module)
    except EnvManagerError:
        raise
    except ImportError as error:
        failed = import_failure(error, what, extra=None, module=module)
        said = "found" if isinstance(error, ModuleNotFoundError) else f"imported: {type(error).__name__}"
        raise failed or UsageError(f"{what} cannot be {said}: {error}.{advice}") from error


def _registered(env_id: str, text: str) -> Any:
    """Return the EnvSpec registered under ``env_id``. If there is none, raise a UsageError that quotes ``text``."""
    gymnasium = _gymnasium_for(env_id)
    try:
        spec = gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        advice = "" if ":" in text else " If a module of yours registers it, name that: imports: [module]."
        said = str(error).removesuffix(".") + ("" if str(error).endswith("?") else ".")
        raise UsageError(f"Gymnasium knows no environment {text!r}: {said}{advice}") from error
    except ImportError as error:
        raise UsageError(f"env {text!r} cannot be found: {error}.") from error
    # An entry point "__main__:name" is replaced by its object, because workers run another main module.
    module, _, name = spec.entry_point.partition(":") if isinstance(spec.entry_point, str) else ("", "", "")
    entry_point = getattr(sys.modules["__main__"], name, None) if module == "__main__" else None
    return spec if entry_point is None else dataclasses.replace(spec, entry_point=entry_point)


def _gymnasium_for(env_id: str) -> Any:
    what, namespace = f"the environment id {env_id!r}", env_id.partition("/")[0] if "/" in env_id else ""
    with needed_by(what, extra="gymnasium"):
        gymnasium = importlib.import_module("gymnasium")
    if namespace in NAMESPACES:
        library, extra = NAMESPACES[namespace]
        with needed_by(what, extra=extra):
            importlib.import_module(library)
    return gymnasium
