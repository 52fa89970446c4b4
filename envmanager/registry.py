"""Makes a manager from a config.

::

    mapping ── structure ──▶ ManagerOptions ── kind ──▶ KINDS, or an entry point ──▶ EnvManager

The rule: a config is understood wholly or refused wholly. Every key that is not known is named together with the
nearest known one, and nothing is started before all of it has been checked. Files are read by the command line.

A package adds a kind of its own with an entry point in its ``pyproject.toml``::

    [project.entry-points."envmanager.managers"]
    cluster = "my_package.managers:ClusterEnvManager"

which names a callable that is used like the managers here: ``ClusterEnvManager(env_factory, n_envs, wait=…, …)``.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn

from envmanager.data.specs import describe_value
from envmanager.errors import ConfigError, MissingExtra, UsageError
from envmanager.options import LocalCount, ManagerOptions, RestartPolicy, StartMethod, Timeouts, Wait, WorkerCount

if TYPE_CHECKING:
    from envmanager.env_manager import EnvManager

KINDS = {
    "auto": "envmanager.auto_env_manager:auto_env_manager",
    "simple": "envmanager.simple_env_manager:SimpleEnvManager",
    "subprocess": "envmanager.subprocess_env_manager:SubprocessEnvManager",
}
"""The kinds that come with this library, imported when they are chosen."""

ENTRY_POINT_GROUP = "envmanager.managers"

PROCESS_OPTIONS = frozenset(
    {"n_workers", "local_envs", "start_method", "timeouts", "restarts", "worker_env", "log_dir"}
)
"""Options about worker processes: a kind that has none may leave them out, and they are then unused."""

Options = TypeVar("Options")


def make_manager(config: Mapping[str, Any] | ManagerOptions, env_factory: Any = None) -> EnvManager:
    """The manager that ``config`` describes, started: ``{"kind": "subprocess", "n_envs": 8, "env": "CartPole-v1"}``.

    The keys are the fields of :class:`~envmanager.options.ManagerOptions`; ``wait`` may be ``"any"``, ``"all"``, a
    number of workers or a mapping, ``timeouts`` a mapping. The environment is ``config["env"]`` or ``env_factory``.
    Raises ConfigError for what cannot be understood, and MissingExtra for a kind that is known but not installed.
    """
    options = config if isinstance(config, ManagerOptions) else structure(ManagerOptions, config)
    if (options.env is None) == (env_factory is None):
        found = "neither is given" if env_factory is None else "both are given"
        raise ConfigError(f"The environment is either the config's `env` or the argument env_factory; {found}.")
    make = _find_kind(options.kind)
    chosen = _options_for(make, options)
    manager: EnvManager = make(options.env if env_factory is None else env_factory, options.n_envs, **chosen)
    return manager


def known_kinds() -> list[str]:
    """The names of all kinds, those that other packages add included."""
    return sorted({*KINDS, *(entry_point.name for entry_point in entry_points(group=ENTRY_POINT_GROUP))})


def _find_kind(kind: str) -> Callable[..., Any]:
    if kind in KINDS:
        module, _, name = KINDS[kind].partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return found
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=kind):
        try:
            loaded: Callable[..., Any] = entry_point.load()
        except MissingExtra:
            raise
        except ImportError as error:
            raise _missing(entry_point, error) from error
        return loaded
    kinds = known_kinds()
    raise ConfigError(f"There is no manager kind {kind!r}{_nearest(kind, kinds)} Known kinds: {', '.join(kinds)}.")


def _missing(entry_point: EntryPoint, error: ImportError) -> MissingExtra:
    """What to install so that the entry point can be imported."""
    package = entry_point.dist.name if entry_point.dist is not None else "envmanager"
    extra = entry_point.extras[0] if entry_point.extras else None
    if extra is None and package == "envmanager":
        extra = entry_point.name
    what = f"the manager kind {entry_point.name!r}" + ("" if package == "envmanager" else f" of {package}")
    return MissingExtra(what, library=error.name or str(error), extra=extra, package=package)


def _options_for(make: Callable[..., Any], options: ManagerOptions) -> dict[str, Any]:
    """The options as keyword arguments, without those about processes that this kind does not have."""
    parameters = inspect.signature(make).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    defaults = ManagerOptions()
    chosen = {}
    for field in attrs.fields(ManagerOptions):
        value = getattr(options, field.name)
        if field.name in ("kind", "env", "n_envs"):
            continue
        if takes_all or field.name in parameters:
            chosen[field.name] = value
        elif field.name not in PROCESS_OPTIONS and value != getattr(defaults, field.name):
            raise ConfigError(f"The manager kind {options.kind!r} has no option {field.name}; it was set to {value!r}.")
    return chosen


def structure(cls: type[Options], config: Any, *, where: str = "") -> Options:
    """``config``, a mapping, as an object of the attrs class ``cls``; ConfigError names every mistake in it.

    ``where`` goes before the keys in messages: with ``"run"`` an unknown key reads ``run.stepps``.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{where or 'A config'} should be a mapping of option names, but is {describe_value(config)}."
        )
    try:
        return _CONVERTER.structure(config, cls)
    except (ClassValidationError, UsageError) as error:
        raise ConfigError("\n".join(_complaints(error, where))) from error


class _Misfit(ValueError):
    """A value of the wrong type; the key is not known here."""

    def __init__(self, expected: str, value: Any) -> None:
        super().__init__(f"should be {expected}, but is {describe_value(value)}")


def _strict(expected: str, *accepted: type) -> Callable[[Any, Any], Any]:
    def check(value: Any, _: Any) -> Any:
        # bool is an int to Python, but `n_envs: true` is a mistake.
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
            raise _Misfit(expected, value)
        return value

    return check


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    # cattrs would turn "8" into 8 and "no" into True.
    converter.register_structure_hook(int, _strict("a whole number", int))
    converter.register_structure_hook(float, _strict("a number", int, float))
    converter.register_structure_hook(bool, _strict("true or false", bool))
    converter.register_structure_hook(str, _strict("text", str))
    # ManagerOptions checks start_method, worker_env, n_workers and local_envs itself.
    converter.register_structure_hook_func(
        lambda wanted: wanted in (StartMethod, Mapping[str, str], WorkerCount, LocalCount), lambda value, _: value
    )
    _accept_objects(converter, Wait, lambda value: Wait.parse(value) if isinstance(value, str | int) else None)
    _accept_objects(converter, Timeouts, lambda _: None)
    _accept_objects(converter, RestartPolicy, lambda _: None)
    return converter


def _accept_objects(converter: cattrs.Converter, cls: type, shorthand: Callable[[Any], Any]) -> None:
    """Take an object of ``cls`` as it is, a shorthand for one, or a mapping."""
    from_mapping: Callable[[Any, Any], Any] = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)

    def hook(value: Any, _: Any) -> Any:
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return from_mapping(value, cls)
        try:
            short = None if isinstance(value, bool) else shorthand(value)
        except UsageError:
            short = None
        if short is None:
            raise _Misfit(_EXPECTED[cls], value)
        return short

    converter.register_structure_hook(cls, hook)


_EXPECTED: dict[type, str] = {
    Wait: '"any", "all", a number of workers or a mapping',
    Timeouts: "a mapping",
    RestartPolicy: "a mapping",
}
_CONVERTER = _converter()


def _complaints(error: BaseException, path: str) -> Iterator[str]:
    """One sentence per mistake that cattrs found, with the key written as a path."""
    if isinstance(error, ForbiddenExtraKeysError):
        known = [field.alias for field in attrs.fields(error.cl)]
        for key in sorted(map(str, error.extra_fields)):
            near = _nearest(key, known, prefix=path)
            yield f"There is no option {_join(path, key)}{near} Known options: {', '.join(known)}."
    elif isinstance(error, ClassValidationError):
        noted, alone = error.group_exceptions()
        for child, note in noted:
            yield from _complaints(child, _join(path, note.name))
        for child in alone:
            yield from _complaints(child, path)
    elif isinstance(error, UsageError):  # an object's own check; its text begins with the option's name
        yield _join(path, str(error))
    else:
        yield f"{path or 'The config'} {error if isinstance(error, _Misfit) else f'cannot be used: {error}'}."


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _nearest(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {_join(prefix, matches[0])}?" if matches else "."
