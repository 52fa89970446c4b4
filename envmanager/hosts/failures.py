"""Failures: what the code in a worker raised, as an error of the library, and that error as bytes."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence

from envmanager.data.specs import SpecConflict, SpecMismatch
from envmanager.errors import BadObservation, EnvManagerError, EnvRaised
from envmanager.hosts.wire import dumps

_UNKNOWN_ID = "gymnasium.error.UnregisteredEnv"
"""Name of Gymnasium's error for an id that is not registered; Gymnasium is not imported for this."""
_ADVICE = """\
That id is not registered in the process of this environment; what another one, such as the trainer's, has registered \
or imported is not known there. Name the module that registers it in `imports` (imports: [my_envs] in a config, \
EnvRecipe(…, imports=['my_envs']) in Python), or import it inside env_factory.
"""


def describe_failure(error: BaseException, *, worker_id: int, env_ids: Sequence[int], phase: str) -> EnvManagerError:
    """Return an error of the library for ``error``, which code in a worker raised.

    At the start the library's own errors (no adapter, no such environment) are returned unchanged; later they come from
    the environment, which may use the library itself.
    """
    if phase == "start" and isinstance(error, EnvManagerError):
        return error
    if isinstance(error, SpecMismatch | SpecConflict):
        return BadObservation(
            worker_id=worker_id, env_ids=env_ids, phase=phase, path=error.path, expected=error.expected, got=error.got
        )
    return env_raised(error, worker_id=worker_id, env_ids=env_ids, phase=phase)


def env_raised(error: BaseException, *, worker_id: int, env_ids: Sequence[int], phase: str) -> EnvRaised:
    """Return EnvRaised for ``error``, with its traceback as text and ``error`` as the cause."""
    try:
        text = str(error) or repr(error)
    except Exception as broken:  # a __str__ that raises must not hide the error
        text = f"(its text cannot be shown: {type(broken).__name__})"
    # An environment that finds a library missing may raise an error of its own, which says all.
    says_what_to_install = phase == "start" and isinstance(error.__cause__, ModuleNotFoundError)
    lines = [] if says_what_to_install else traceback.format_exception(type(error), error, error.__traceback__)
    is_unknown_id = _UNKNOWN_ID in (f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__)
    raised = EnvRaised(
        worker_id=worker_id,
        env_ids=env_ids,
        phase=phase,
        type_name=type(error).__qualname__,
        cause=text,
        remote_traceback="".join(lines),
        advice=_ADVICE if is_unknown_id else "",
    )
    raised.__cause__ = error
    return raised


def dumps_failure(error: EnvManagerError) -> bytes:
    """Return the pickle of an error with its cause, without the cause if that cannot be pickled and unpickled."""
    original = None
    if error.__cause__ is not None:
        try:
            original = dumps(error.__cause__)
            pickle.loads(original)
        except Exception:  # a lock inside, a constructor with two arguments: the text must suffice
            original = None
    try:
        return pickle.dumps((error, original), protocol=5)
    except Exception:  # a user's subclass of our errors
        return pickle.dumps((EnvManagerError(str(error)), None), protocol=5)


def loads_failure(data: bytes) -> EnvManagerError:
    """Return the error, with its cause if it was sent."""
    error, original = pickle.loads(data)
    if original is not None:
        try:
            error.__cause__ = pickle.loads(original)
        except Exception:  # a class that only the worker could import
            error.__cause__ = None
    return error  # type: ignore[no-any-return]
