"""Differences between two steps that should be equal, such as a step and its repetition. NaN equals NaN."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from reprlib import Repr
from typing import Any, NamedTuple

import numpy as np

from envmanager.data.specs import describe_value

_shown = Repr()
_shown.maxstring = _shown.maxother = 60


class Difference(NamedTuple):
    """A place where two values differ: its path, such as ``obs['camera'][3, 1]``, and what is there in each.

    None stands for a value that is missing. In arrays of one shape the place is the first unequal element.
    """

    path: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        return f"{self.path} was {_described(self.expected)} and is {_described(self.got)}"


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return describe_value(value)
    return str(value) if isinstance(value, np.generic) else _shown.repr(value)


def differences(expected: Any, got: Any, path: str = "") -> Iterator[Difference]:
    """Yield the differences between two values, one for each pair of arrays or other leaves that differ.

    Looks into mappings, lists, tuples and arrays. ``path``: name of the values, with which each path begins.
    """
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        for key in dict.fromkeys([*expected, *got]):
            where = f"{path}[{key!r}]" if path else str(key)
            if key in expected and key in got:
                yield from differences(expected[key], got[key], where)
            else:
                yield Difference(where, expected.get(key), got.get(key))
    elif isinstance(expected, list | tuple) and isinstance(got, list | tuple) and len(expected) == len(got):
        for index, pair in enumerate(zip(expected, got, strict=True)):
            yield from differences(*pair, f"{path}[{index}]")
    elif isinstance(expected, np.ndarray) and isinstance(got, np.ndarray):
        if expected.shape != got.shape or expected.dtype != got.dtype:
            yield Difference(path, expected, got)
        elif expected.dtype.hasobject:
            for index in np.ndindex(expected.shape):
                yield from differences(expected[index], got[index], _element(path, index))
        elif expected.tobytes() != got.tobytes():
            places = np.argwhere((expected != got) & ((expected == expected) | (got == got)))
            for place in map(tuple, places[:1].tolist()):
                yield Difference(_element(path, place), expected[place], got[place])
    elif not _is_equal(expected, got):
        yield Difference(path, expected, got)


def is_same(expected: Any, got: Any) -> bool:
    """Return whether two values have no differences."""
    return not any(True for _ in differences(expected, got))


def _element(path: str, index: Sequence[int]) -> str:
    return f"{path}[{', '.join(map(str, index))}]" if index else path


def _is_equal(expected: Any, got: Any) -> bool:
    try:
        return bool(expected == got or (expected != expected and got != got))
    except Exception:  # of any kind: it is the object's own code, or only one is an array
        return False


def first_difference(expected: Iterable[Any], got: Iterable[Any]) -> tuple[int, list[Difference]] | None:
    """Return the number of the first unequal step of two streams of steps and its differences, or None if all agree.

    If one stream is longer, its further steps do not count.
    """
    for at_step, pair in enumerate(zip(expected, got, strict=False)):
        if found := list(differences(*pair)):
            return at_step, found
    return None
