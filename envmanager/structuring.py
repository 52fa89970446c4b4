"""Conversion of config tables (mappings) to objects of the options classes.

One error lists unknown keys, missing keys and values of a wrong type, and suggests the right name of a misspelled key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar, get_origin

import attrs
import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError
from cattrs.gen import make_dict_structure_fn

from envmanager.data.specs import describe_value
from envmanager.errors import ConfigError, UsageError
from envmanager.importing import nearest
from envmanager.options import EnvCount, LocalCount, RestartPolicy, Timeouts, Wait, WorkerCount, plain

Options = TypeVar("Options")

_LITERAL: tuple[Any, ...] = (Literal,)
_CHECKED_BY_THE_CLASS: tuple[Any, ...] = (
    Mapping[str, str], Mapping[str, float], Mapping[str, Any], EnvCount, WorkerCount, LocalCount, Sequence[Any],
)  # fmt: skip


def structure(cls: type[Options], config: Any, *, where: str = "") -> Options:
    """Return an object of the attrs class ``cls`` built from ``config``. Raises a ConfigError that lists the mistakes.

    ``where`` is a prefix of the keys in messages. With ``"run"``, the key ``stepps`` is shown as ``run.stepps``.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{where or 'A config'} should be a mapping of option names, but is {describe_value(config)}."
        )
    return structured(_OF_CONFIGS, cls, config, where)


def structured(converter: cattrs.Converter, cls: type[Options], plain: Any, where: str) -> Options:
    """Convert ``plain`` (mappings, lists, …) to an object of ``cls``. Errors and ``where`` are as in ``structure``."""
    try:
        return converter.structure(plain, cls)
    except (ClassValidationError, UsageError) as error:
        raise ConfigError("\n".join(_complaints(error, where))) from error


class _Misfit(ValueError):
    """Error raised for a value of the wrong type. ``_complaints`` adds the value's key to the message."""

    def __init__(self, expected: str, value: Any) -> None:
        super().__init__(f"should be {expected}, but is {describe_value(value)}")


def _strict(expected: str, *accepted: type) -> Callable[[Any, Any], Any]:
    def check(value: Any, _: Any) -> Any:
        value = plain(value)
        # bool is an int to Python, but `n_envs: true` is a mistake.
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
            raise _Misfit(expected, value)
        return value

    return check


def make_converter() -> cattrs.Converter:
    """Return a cattrs converter that raises an error for a value of a wrong type, such as ``"8"`` for an int."""
    converter = cattrs.Converter(forbid_extra_keys=True)
    # cattrs would turn "8" into 8 and "no" into True.
    converter.register_structure_hook(int, _strict("a whole number", int))
    converter.register_structure_hook(float, _strict("a number", int, float))
    converter.register_structure_hook(bool, _strict("true or false", bool))
    converter.register_structure_hook(str, _strict("text", str))
    # The classes check these types themselves, and list the choices.
    converter.register_structure_hook_func(
        lambda wanted: get_origin(wanted) in _LITERAL or wanted in _CHECKED_BY_THE_CLASS, lambda value, _: value
    )
    _accept_objects(converter, Wait, '"any", "all", a number of workers or a mapping', Wait.parse)
    _accept_objects(converter, Timeouts, "a mapping", lambda _: None)
    _accept_objects(converter, RestartPolicy, "a number of restarts or a mapping", RestartPolicy)
    return converter


def _accept_objects(converter: cattrs.Converter, cls: type, expected: str, shorthand: Callable[[Any], Any]) -> None:
    """Make the converter accept instances of ``cls``, mappings, and any value that ``shorthand`` can convert."""
    from_mapping: Callable[[Any, Any], Any] = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)

    def hook(value: Any, _: Any) -> Any:
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return from_mapping(value, cls)
        with suppress(UsageError):
            if not isinstance(value, bool) and (short := shorthand(value)) is not None:
                return short
        raise _Misfit(expected, value)

    converter.register_structure_hook(cls, hook)


_OF_CONFIGS = make_converter()


def _complaints(error: BaseException, path: str) -> Iterator[str]:
    """Yield one message per mistake in a cattrs error. ``path`` is the prefix of the option names in the messages."""
    if isinstance(error, ForbiddenExtraKeysError):
        known = [field.alias for field in attrs.fields(error.cl)]
        other_names: Callable[..., str | None] = getattr(error.cl, "other_names", lambda *_: None)
        for key in sorted(map(str, error.extra_fields)):
            near = other_names(key, path, known) or nearest(key, known, prefix=path)
            yield f"There is no option {_join(path, key)}{near} Known options: {', '.join(known)}."
    elif isinstance(error, ClassValidationError | IterableValidationError):
        noted, alone = error.group_exceptions()
        for child, note in noted:
            at = _join(path, note.name) if hasattr(note, "name") else f"{path}[{note.index}]"
            if isinstance(child, KeyError) and child.args == (getattr(note, "name", None),):
                yield f"{at} is missing."
            else:
                yield from _complaints(child, at)
        for child in alone:
            yield from _complaints(child, path)
    elif isinstance(error, ConfigError):  # of a table in a list, whose lines name their options
        yield str(error)
    elif isinstance(error, UsageError):  # raised by a class's own check; the text begins with the option's name
        yield _join(path, str(error))
    elif isinstance(error, TypeError):  # from cattrs, which iterates over what should be a list
        yield f"{path or 'The config'} should be a list: {error}."
    else:
        yield f"{path or 'The config'} {error if isinstance(error, _Misfit) else f'cannot be used: {error}'}."


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
