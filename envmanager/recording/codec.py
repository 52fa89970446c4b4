"""The form in which commands and responses are recorded, and back: data, by whose reading no code of the file runs.

::

    plain values      None, numbers, text, bytes, lists, tuples, sets, dicts: as pickle writes them
    arrays, own ones  a call of ``_made`` with a name of ``_MAKERS`` and plain values
    all others        a call of ``_made`` for an Apart, with the pickle of the object as bytes

The rule: ``_made`` is all that a file can call. So the objects that it can make are those of ``_MAKERS``, whatever was
written into it. What is apart is unpickled only by ``Apart.load``, at the reader's wish.
"""

from __future__ import annotations

import builtins
import io
import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import cloudpickle
import numpy as np

from envmanager import errors
from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import AgentSteps, Begin, Call, CommandName, EnvironmentResponse, StartReport
from envmanager.data.trees import as_numpy, is_foreign, map_tree
from envmanager.errors import UsageError
from envmanager.options import ResetConfig, RestartPolicy, Wait

_CLASSES = AgentSteps, ArraySpec, BehaviorSpec, EnvironmentResponse, ResetConfig, RestartPolicy, StartReport, Wait
_OWN: dict[str, Any] = {each.__name__: each for each in _CLASSES}
"""Classes of attrs whose objects are written as their fields."""


@attrs.frozen(repr=False)
class Apart:
    """What stands for an object of a class that is neither plain nor an array. ``kind`` names the class.

    ``data`` is its pickle, or None if it cannot be pickled.
    """

    kind: str
    data: bytes | None = None

    def load(self) -> Any:
        """Unpickle the object, which may run any code. Return this Apart if its class cannot be imported here."""
        try:
            return self if self.data is None else pickle.loads(self.data)
        except (ImportError, AttributeError):
            return self

    def refuse(self) -> Any:
        """Raise UsageError, if there is an object that ``load`` could make."""
        if self.data is not None:
            raise UsageError(
                f"the recording holds an object of the class {self.kind}, as a pickle, which can run any code when it "
                "is read. Pass trust=True if you trust the file as you would a program."
            )
        return self

    def leave(self) -> Any:
        """Return this Apart."""
        return self

    def __repr__(self) -> str:
        why = "which cannot be pickled" if self.data is None else "pickled: trust=True reads it"
        return f"<{self.kind}, {why}>"


def kind_of(value: Any) -> str:
    """Return the name of a value's class, as in ``Apart.kind``."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _apart(value: Any) -> tuple[str, str, bytes | None]:
    for dumps in (pickle.dumps, cloudpickle.dumps):
        try:
            return "apart", kind_of(value), dumps(value, protocol=5)
        except Exception:  # of any kind: it is the object's own code
            continue
    return "apart", kind_of(value), None


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufcmMSUV" and dtype.names is None


def _made(name: str, *parts: Any) -> Any:
    """Stand for ``_Reader.made`` in what is written."""
    raise NotImplementedError


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, *, observations: bool) -> None:
        super().__init__(file, protocol=5)
        self._observations = observations

    def reducer_override(self, value: Any) -> Any:
        return NotImplemented if value is _made else (_made, self._parts(value))

    def _parts(self, value: Any) -> tuple[Any, ...]:
        """Return the name of a maker, and what it takes."""
        kind = type(value)
        if kind is np.ndarray and _is_plain(value.dtype) and value.dtype.itemsize:
            return "array", value.dtype.str, value.shape, value.tobytes()
        if kind is np.ndarray and value.dtype == object:
            return "objects", value.shape, value.reshape(-1).tolist()
        if isinstance(value, np.generic) and _is_plain(value.dtype):
            array = np.asarray(value)
            return "scalar", array.dtype.str, array.tobytes()
        if kind is CommandName:
            return "text", value.value
        if kind is complex:
            return "complex", value.real, value.imag
        if kind is Begin:
            return "begin", *value
        if kind is Call:
            return "call", *value
        if _OWN.get(kind.__name__) is kind:
            fields = {field.name: getattr(value, field.name) for field in attrs.fields(kind) if field.init}
            if kind is ArraySpec:
                fields["dtype"] = value.dtype.str
            elif kind is AgentSteps and not self._observations:
                for name in ("obs", "final_obs"):
                    fields[name] = None if fields[name] is None else map_tree(_checksum, fields[name])
            return "own", kind.__name__, fields
        if _error_class(kind.__name__) is kind:
            return "error", kind.__name__, value.args, value.__dict__
        if kind is Apart:
            return "apart", value.kind, value.data
        if is_foreign(value):
            return self._parts(as_numpy(value))
        return _apart(value)


def packed(value: Any, *, observations: bool = True) -> bytes:
    """Return the recorded form of a value, which shares nothing with it.

    Without ``observations``, those of AgentSteps are their checksums.
    """
    file = io.BytesIO()
    _Writer(file, observations=observations).dump(value)
    return file.getvalue()


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, read_apart: Callable[[Apart], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._makers = {**_MAKERS, "apart": lambda kind, data: read_apart(Apart(kind, data))}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != (_made.__module__, _made.__name__):
            raise pickle.UnpicklingError(f"{module}.{name} is not what a recording has")
        return self.made

    def made(self, name: str, *parts: Any) -> Any:
        return self._makers[name](*parts)


def unpacked(data: bytes, read_apart: Callable[[Apart], Any] = Apart.leave) -> Any:
    """Return the value of a recorded form, with what ``read_apart`` returns in place of each object that is apart."""
    return _Reader(data, read_apart).load()


# What a recorded form can make.


def _array(dtype: str, shape: Sequence[int], data: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(data), dtype).reshape(shape)  # never of objects, which NumPy refuses


def _objects(shape: Sequence[int], parts: list[Any]) -> np.ndarray:
    array = np.empty(len(parts), object)
    for index, part in enumerate(parts):
        array[index] = part
    return array.reshape(shape)


def _checksum(leaf: Any) -> tuple[str, tuple[int, ...], int]:
    """Return what stands for an array of observations that is not recorded: dtype, shape and CRC-32."""
    array = np.asarray(leaf)
    return array.dtype.str, array.shape, zlib.crc32(array.tobytes()) if _is_plain(array.dtype) else 0


def _error_class(name: str) -> Any:
    """Return a class of errors, of this library or of Python, or None if there is none of that name."""
    found = getattr(errors, name, getattr(builtins, name, None))
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _error(name: str, args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    kind = _error_class(name)
    error: Exception = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    error.args = args
    return error


_MAKERS: dict[str, Callable[..., Any]] = {
    "array": _array,
    "begin": Begin,
    "call": Call,
    "complex": complex,
    "error": _error,
    "objects": _objects,
    "own": lambda name, fields: _OWN[name](**fields),
    "scalar": lambda dtype, data: np.frombuffer(data, dtype)[0],
    "text": str,
}
