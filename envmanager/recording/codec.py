"""The form in which commands and responses are recorded, and back. It shares nothing with them, and is quick to make.

::

    array         (dtype, shape, bytes), or (dtype, shape, checksum) if observations are not recorded
    AgentSteps    the bytes of its columns, its observations as such arrays, its infos pickled
    all others    pickled
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from envmanager.data.steps import COLUMNS, AgentSteps, CommandName, EnvironmentResponse
from envmanager.data.trees import Tree, map_tree

_STEPS = (CommandName.STEP, CommandName.RESET)
_INT64, _FLOAT32, _BOOL = COLUMNS["agent_id"], COLUMNS["reward"], COLUMNS["acting"]


class Unrecorded(NamedTuple):
    """What stands for an object that cannot be pickled. A replay takes any other for it."""

    kind: str


def pickled(value: Any) -> bytes:
    """Return a pickle of a value, with an Unrecorded for each object in it that cannot be pickled."""
    for dumps in (pickle.dumps, cloudpickle.dumps):
        try:
            return dumps(value, protocol=5)
        except Exception:  # of any kind: it is the object's own code
            continue
    try:
        parts: bytes = cloudpickle.dumps(_without_unrecordable(value), protocol=5)
    except Exception:  # a list that contains itself, say
        return pickle.dumps(Unrecorded(type(value).__qualname__))
    return parts


def _without_unrecordable(value: Any) -> Any:
    kind = value.__class__
    if kind is dict:
        return {key: _without_unrecordable(part) for key, part in value.items()}
    if kind in (list, tuple):
        return kind(map(_without_unrecordable, value))
    if kind is np.ndarray and value.dtype == object:
        parts = np.empty(value.shape, object)
        for index, part in enumerate(value.flat):
            parts.reshape(-1)[index] = _without_unrecordable(part)
        return parts
    try:
        cloudpickle.dumps(value)
    except Exception:
        return Unrecorded(kind.__qualname__)
    return value


class Missing:
    """What stands for an object whose class cannot be imported here, such as one of the script that was recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what the class takes."""

    def ignore(self, *_: Any) -> None:
        """Take a part of the object."""

    __setstate__ = __setitem__ = append = extend = ignore

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__}>"


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return type(name, (Missing,), {"__module__": module})


def unpickled(data: bytes) -> Any:
    """Return the value of a pickle, with a Missing for each object whose class cannot be imported."""
    try:
        return pickle.loads(data)
    except (ImportError, AttributeError):
        return _Reader(io.BytesIO(data)).load()


def frozen(tree: Tree) -> Any:
    """Return the recorded form of an array or a tree."""
    if tree.__class__ is np.ndarray and not tree.dtype.hasobject:
        return tree.dtype.str, tree.shape, tree.tobytes()
    return None if tree is None else pickled(tree)


def checksum(tree: Tree) -> Any:
    """Return the form of observations that are not recorded: dtype, shape and CRC-32 of each array."""
    if tree.__class__ is np.ndarray:
        if tree.dtype.hasobject:
            return tree.dtype.str, tree.shape, 0
        data = tree if tree.flags.c_contiguous else np.ascontiguousarray(tree)
        return tree.dtype.str, tree.shape, zlib.crc32(data.data)
    return None if tree is None else pickled(map_tree(lambda leaf: checksum(np.asarray(leaf)), tree))


def thawed(form: Any) -> Any:
    """Return the array or the tree of a recorded form. Of a checksum, return the form."""
    if form.__class__ is tuple:
        dtype, shape, data = form
        return np.frombuffer(bytearray(data), dtype).reshape(shape) if data.__class__ is bytes else form
    return None if form is None else unpickled(form)


def frozen_steps(steps: AgentSteps, *, observations: bool) -> tuple[Any, ...]:
    """Return the recorded form of steps."""
    keep, acting, infos = frozen if observations else checksum, steps.acting, None
    if steps.info is not None or steps.reset_info is not None:
        infos = pickled((steps.info, steps.reset_info))
    return (
        steps.agent_id.tobytes(),
        keep(steps.obs),
        steps.reward.tobytes(),
        steps.terminated.tobytes(),
        steps.truncated.tobytes(),
        None if steps.final_obs is None else keep(steps.final_obs),
        None if acting is None else acting.tobytes(),
        infos,
    )


def thawed_steps(form: tuple[Any, ...]) -> AgentSteps:
    """Return the steps of a recorded form, with arrays of their own."""
    agent_id, obs, reward, terminated, truncated, final_obs, acting, infos = form
    info, reset_info = (None, None) if infos is None else unpickled(infos)
    return AgentSteps(
        np.frombuffer(bytearray(agent_id), _INT64),
        thawed(obs),
        np.frombuffer(bytearray(reward), _FLOAT32),
        np.frombuffer(bytearray(terminated), _BOOL),
        np.frombuffer(bytearray(truncated), _BOOL),
        thawed(final_obs),
        None if acting is None else np.frombuffer(bytearray(acting), _BOOL),
        info,
        reset_info,
    )


def frozen_response(response: EnvironmentResponse, *, observations: bool) -> tuple[Any, ...]:
    """Return the recorded form of a response: its name, worker, payload, and new specs."""
    payload, specs = response.payload, response.specs
    if response.name in _STEPS and isinstance(payload, Mapping):
        form: Any = {behavior: frozen_steps(steps, observations=observations) for behavior, steps in payload.items()}
    else:
        form = pickled(payload)
    new = None if specs is None else pickled(specs)
    return response.name.value, response.worker_id, form, new


def thawed_response(form: tuple[Any, ...]) -> EnvironmentResponse:
    """Return the response of a recorded form."""
    name, worker_id, payload, specs = form
    if isinstance(payload, dict):
        payload = {behavior: thawed_steps(steps) for behavior, steps in payload.items()}
    else:
        payload = unpickled(payload)
    return EnvironmentResponse(name, worker_id, payload, None if specs is None else unpickled(specs))
