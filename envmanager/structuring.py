"""Conversion of plain data into objects: config tables into options, and JSON files back into the objects written.

The rule: every mistake in the data is named. In a config an unknown key is a mistake, named together with the nearest
known one; in a file that this library wrote it is ignored, since a later version may have written it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import attrs
import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn

from envmanager.data.specs import BehaviorSpec, describe_value, plain_spec, spec_from_plain
from envmanager.errors import ConfigError, UsageError
from envmanager.importing import nearest
from envmanager.options import LocalCount, RestartPolicy, Timeouts, Wait, WorkerCount

Options = TypeVar("Options")

_LITERAL: tuple[Any, ...] = (Literal,)
_CHECKED_BY_THE_CLASS: tuple[Any, ...] = (Mapping[str, str], Mapping[str, Any], WorkerCount, LocalCount, Sequence[Any])


def structure(cls: type[Options], config: Any, *, where: str = "") -> Options:
    """Return the mapping ``config`` as an object of the attrs class ``cls``; ConfigError names every mistake in it.

    ``where`` goes before the keys in messages: with ``"run"`` an unknown key reads ``run.stepps``.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{where or 'A config'} should be a mapping of option names, but is {describe_value(config)}."
        )
    return _structured(_OF_CONFIGS, cls, config, where)


def from_plain(cls: type[Options], plain: Any, *, where: str = "") -> Options:
    """Return the object from which ``to_plain`` made ``plain``. Raises ConfigError; unknown keys are ignored."""
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{where or 'the whole'} should be a mapping, but is {describe_value(plain)}.")
    return _structured(_OF_FILES, cls, plain, where)


def to_plain(value: Any) -> Any:
    """Return an object of an attrs class as JSON data: dicts, lists, texts and numbers."""
    return _OF_FILES.unstructure(value)


def _structured(converter: cattrs.Converter, cls: type[Options], plain: Any, where: str) -> Options:
    try:
        return converter.structure(plain, cls)
    except (ClassValidationError, UsageError) as error:
        raise ConfigError("\n".join(_complaints(error, where))) from error


class _Misfit(ValueError):
    """A value of the wrong type; the caller adds its key."""

    def __init__(self, expected: str, value: Any) -> None:
        super().__init__(f"should be {expected}, but is {describe_value(value)}")


class _PartMisfit(Exception):
    """An error in one part of a list or of a mapping; ``place`` is ``[3]`` or ``.name``."""

    def __init__(self, place: str, error: Exception) -> None:
        super().__init__(place, error)
        self.place, self.error = place, error


def _strict(expected: str, *accepted: type) -> Callable[[Any, Any], Any]:
    def check(value: Any, _: Any) -> Any:
        # bool is an int to Python, but `n_envs: true` is a mistake.
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
            raise _Misfit(expected, value)
        return value

    return check


def _converter(*, forbid_extra_keys: bool) -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=forbid_extra_keys)
    # cattrs would turn "8" into 8 and "no" into True.
    converter.register_structure_hook(int, _strict("a whole number", int))
    converter.register_structure_hook(float, _strict("a number", int, float))
    converter.register_structure_hook(bool, _strict("true or false", bool))
    converter.register_structure_hook(str, _strict("text", str))
    # The classes check these themselves, and list the choices.
    converter.register_structure_hook_func(
        lambda wanted: get_origin(wanted) in _LITERAL or wanted in _CHECKED_BY_THE_CLASS, lambda value, _: value
    )
    _accept_objects(converter, Wait, lambda value: Wait.parse(value) if isinstance(value, str | int) else None)
    _accept_objects(converter, Timeouts, lambda _: None)
    _accept_objects(converter, RestartPolicy, lambda _: None)
    return converter


def _accept_objects(converter: cattrs.Converter, cls: type, shorthand: Callable[[Any], Any]) -> None:
    """Accept an object of ``cls``, a shorthand for one, or a mapping."""
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
_OF_CONFIGS = _converter(forbid_extra_keys=True)


def _converter_of_files() -> cattrs.Converter:
    converter = _converter(forbid_extra_keys=False)

    # cattrs would take a text for a list of texts, and the keys of a mapping for a list.
    def as_tuple(value: Any, wanted: Any) -> Any:
        if not isinstance(value, list):
            raise _Misfit("a list", value)
        return tuple(part(each, get_args(wanted)[0], f"[{index}]") for index, each in enumerate(value))

    def as_named_tuple(value: Any, wanted: Any) -> Any:
        kinds = get_type_hints(wanted)
        if not isinstance(value, list) or len(value) != len(kinds):
            raise _Misfit(f"a list of {', '.join(kinds)}", value)
        return wanted(*(part(each, kinds[name], f".{name}") for name, each in zip(kinds, value, strict=True)))

    def as_dict(value: Any, wanted: Any) -> Any:
        if not isinstance(value, dict):
            raise _Misfit("a mapping", value)
        return {key: part(each, get_args(wanted)[1], f".{key}") for key, each in value.items()}

    def part(value: Any, wanted: Any, place: str) -> Any:
        try:
            return converter.structure(value, wanted)
        except Exception as error:
            raise _PartMisfit(place, error) from error

    converter.register_structure_hook_func(_is_of(tuple), as_tuple)
    converter.register_structure_hook_func(_is_of(dict), as_dict)
    converter.register_structure_hook_func(_is_named_tuple, as_named_tuple)
    converter.register_unstructure_hook_func(_is_named_tuple, list)
    converter.register_structure_hook(BehaviorSpec, _spec)
    converter.register_unstructure_hook(BehaviorSpec, plain_spec)
    return converter


def _is_of(container: Any) -> Callable[[Any], bool]:
    return lambda wanted: get_origin(wanted) is container


def _is_named_tuple(wanted: Any) -> bool:
    return isinstance(wanted, type) and issubclass(wanted, tuple) and hasattr(wanted, "_fields")


def _spec(plain: Any, _: Any) -> BehaviorSpec:
    try:
        return spec_from_plain(plain)
    except Exception as error:
        raise _Misfit("a spec of observations and actions", plain) from error


_OF_FILES = _converter_of_files()


def _complaints(error: BaseException, path: str) -> Iterator[str]:
    """Yield one sentence per mistake that cattrs found, with the key written as a path."""
    if isinstance(error, ForbiddenExtraKeysError):
        known = [field.alias for field in attrs.fields(error.cl)]
        for key in sorted(map(str, error.extra_fields)):
            near = nearest(key, known, prefix=path)
            yield f"There is no option {_join(path, key)}{near} Known options: {', '.join(known)}."
    elif isinstance(error, ClassValidationError):
        noted, alone = error.group_exceptions()
        for child, note in noted:
            if isinstance(child, KeyError) and child.args == (note.name,):
                yield f"{_join(path, note.name)} is missing."
            else:
                yield from _complaints(child, _join(path, note.name))
        for child in alone:
            yield from _complaints(child, path)
    elif isinstance(error, _PartMisfit):
        yield from _complaints(error.error, f"{path}{error.place}")
    elif isinstance(error, UsageError):  # an object's own check; its text begins with the option's name
        yield _join(path, str(error))
    else:
        yield f"{path or 'The config'} {error if isinstance(error, _Misfit) else f'cannot be used: {error}'}."


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
