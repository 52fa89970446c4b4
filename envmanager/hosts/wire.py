"""The bytes between manager and worker.

::

    step pipe (one for all)     RECORD: a step that is in shared memory             workers ▶ manager
    connection (one per worker) COMMAND, then ``length`` bytes of pickle            manager ▶ worker
                                MESSAGE, then ``length`` bytes of pickle            worker ▶ manager

The rule: a record is at most PIPE_BUF bytes, so the kernel writes it whole or not at all, and no lock is shared between
processes: a worker that is killed at any moment leaves the step pipe usable for the others. Every other response is a
message through the worker's own connection (a socket pair: one descriptor for both ways), where only it can leave half
a message. Every response repeats the ticket of its request.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

import cloudpickle

from envmanager.data.specs import BehaviorSpecs
from envmanager.data.steps import CommandName, Steps
from envmanager.errors import UsageError

COMMAND = struct.Struct("<QBBHIQ")
"""ticket, command code, slot, flags, unused, length of the pickle that follows."""

RECORD = struct.Struct("<QIIHHIQQ")
"""ticket, worker_id, generation, slot, flags, final rows, busy ns, monotonic ns of its end."""

MESSAGE = struct.Struct("<QBBHIQQQ")
"""ticket, command code, flags, unused, final rows, length of the following pickle, busy ns, monotonic ns of its end."""

CODES: dict[CommandName, int] = {name: code for code, name in enumerate(CommandName, start=1)}
NAMES: dict[int, CommandName] = {code: name for name, code in CODES.items()}

ATTACH_CODE = 0
"""Code of a command without a response: it brings the layout of the shared memory."""
STEP_CODE, FAILED_CODE = CODES[CommandName.STEP], CODES[CommandName.FAILED]

FULL = 1
"""Flag: all rows are there, all act, and the environment wrote them in place. In a command: actions for all rows."""
IN_MEMORY = 8
"""Flag: the steps (in a command, the actions) are in the block."""
WITH_SPECS = 16
"""Message flag: the pickle is a pair of the payload and the specs of all behaviors."""


class Undecoded(bytes):
    """A command's pickled payload: unpickling may fail, which is then the command's failure."""


def dumps(value: Any) -> bytes:
    """Return the pickle of ``value``, by cloudpickle if pickle refuses it (instances of classes of ``__main__``)."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        return cloudpickle.dumps(value, protocol=5)  # type: ignore[no-any-return]


def step_message(steps: Steps, flags: int, specs: BehaviorSpecs | None) -> bytes | None:
    """Return the pickle of the parts of a step that are not in memory; None if, by its ``flags``, all of it is."""
    if not flags:
        return dumps((dict(steps), specs))
    infos = {}
    for name, own in steps.items():
        if own.info is not None:
            infos[name] = (own.info, own.reset_info)
    return dumps((infos, specs)) if infos or specs is not None else None


def response_message(payload: Any, specs: BehaviorSpecs | None) -> tuple[int, bytes]:
    """Return the flags and the pickle of any other response."""
    return (0, dumps(payload)) if specs is None else (WITH_SPECS, dumps((payload, specs)))


def dumps_command(payload: Any) -> bytes:
    """Return the pickle of a command's payload. Raises UsageError if it cannot be pickled."""
    try:
        return cloudpickle.dumps(payload, protocol=5)  # type: ignore[no-any-return]
    except Exception as error:
        raise UsageError(f"this cannot be sent to a worker, because it cannot be pickled: {error}") from error
