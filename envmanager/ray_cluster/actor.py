"""The Ray actor that hosts the environments of one worker, and the format of its commands and answers.

::

    command   header COMMAND, then actions or a pickle                                        manager ▶ actor
    answer    header MESSAGE with the number of final observations and the size of the steps, actor ▶ manager
              then the steps, then a pickle of everything else.
              Large steps are sent beside these bytes, as an array, which Ray puts into
              its object store for the manager to read

Steps and actions are the bytes of the worker's rows in memory. Values that do not fit into rows are in the pickle.

The rule: the actor is a plain class that does not use Ray, so a test can run it. An error of the environment, or a
result that cannot be pickled, is reported in the answer and not raised. So the manager treats an error from Ray as the
end of the actor. A manager unpickles only bytes from its own actors, and an actor only bytes from its manager.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import STEPPING, CommandName, StartReport
from envmanager.environment import EnvGroup
from envmanager.hosts.hosting import COMMANDS, failed, take_not_begun
from envmanager.hosts.shared_rows import IN_MEMORY, Block, BlockLayout, SharedRows
from envmanager.hosts.wire import (
    CODES,
    COMMAND,
    FAILED_CODE,
    MESSAGE,
    NAMES,
    STEP_CODE,
    Message,
    dumps_failure,
    response_message,
    step_message,
)

WHO_CODE = 0
"""Code of a command that asks for process id, host name and node of the actor, and shows whether it still runs."""
WHO = COMMAND.pack(0, WHO_CODE, 0, 0, 0, 0)
LARGE_BYTES = 100_000
"""Size in bytes from which the steps of an answer are sent as an array, because Ray sends arrays without a copy."""


class SentRows:
    """The rows of one worker, and views of the parts that are sent. Actor and manager each have their own copy."""

    def __init__(self, report: StartReport, env_ids: Sequence[int]) -> None:
        """Allocate rows in the layout that ``report`` implies, so that actor and manager use the same layout."""
        layout = BlockLayout.of(report.specs, [report.max_agents], n_slots=1)
        block = Block(layout, bytearray(Block(layout).size_bytes))
        memory = memoryview(block.memory)
        self.rows = SharedRows(block, 0, env_ids)
        self.steps = memory[: block.actions_at]
        self.steps_without_finals = memory[: block.finals_at]
        self.actions = memory[block.actions_at :]


@attrs.define(eq=False)
class Answer(Message):
    """The answer of an actor to one command. ``data``: pickle of the part of the result that is not in ``steps``."""

    steps: Any = b""
    """Buffer with the steps in the worker's rows; empty if there are none."""


def pack_answer(
    ticket: int, code: int, flags: int, busy_ns: int, data: bytes, n_ended: int = 0, steps: Any = b""
) -> Any:
    """Return an answer as bytes or, if ``steps`` has at least LARGE_BYTES, as a pair of bytes and an array."""
    header = MESSAGE.pack(ticket, code, flags, 0, n_ended, len(steps), busy_ns, 0)
    if len(steps) < LARGE_BYTES:
        return b"".join((header, steps, data))
    return header + data, np.frombuffer(steps, np.uint8)


def unpack_answer(value: Any, at_ns: int) -> Answer:
    """Convert a result of ``pack_answer`` to an Answer. ``at_ns``: time of arrival, from ``time.perf_counter_ns``."""
    head, large = value if value.__class__ is tuple else (value, None)
    ticket, code, flags, _, n_ended, n_bytes, busy_ns, _ = MESSAGE.unpack_from(head)
    if large is not None:
        return Answer(ticket, code, flags, head[MESSAGE.size :], busy_ns, at_ns, n_ended, large)
    end = MESSAGE.size + n_bytes
    return Answer(ticket, code, flags, head[end:], busy_ns, at_ns, n_ended, memoryview(head)[MESSAGE.size : end])


def _node_id() -> str:
    ray = sys.modules.get("ray")  # not in a test
    return "" if ray is None else str(ray.get_runtime_context().get_node_id())


class EnvActor:
    """The class of a Ray actor that hosts the environments of one worker and executes the manager's commands."""

    def __init__(self, worker_id: int, env_ids: tuple[int, ...], pickled_factory: bytes) -> None:
        self._worker_id = worker_id
        self._env_ids = env_ids
        self._pickled_factory = pickled_factory
        self._group: EnvGroup | None = None
        self._rows: SentRows | None = None
        self._n_reported = 0
        """Number of behaviors in the specs last sent, initially 0. The answer to "start" does not count."""

    def obey(self, command: bytes) -> Any:
        """Execute a packed command and return the packed answer. Report an error of the command in the answer."""
        began_ns = time.perf_counter_ns()
        ticket, code, _, flags, n_begins, length = COMMAND.unpack_from(command)
        if code == WHO_CODE:
            return pack_answer(ticket, code, 0, 0, pickle.dumps((os.getpid(), socket.gethostname(), _node_id())))
        name = NAMES[code]
        try:
            payload = memoryview(command)[COMMAND.size :]
            if n_begins and self._group is not None and self._group.on_demand is not None:
                self._group.on_demand.add(pickle.loads(payload[length:]))
            result = self._carried_out(name, flags, payload[:length])
            return self._answer(ticket, name, result, time.perf_counter_ns() - began_ns)
        except BaseException as error:  # also SystemExit, KeyboardInterrupt and MemoryError of the environment
            response = failed(error, name, worker_id=self._worker_id, env_ids=self._env_ids, group=self._group)
            busy_ns = time.perf_counter_ns() - began_ns
            return pack_answer(ticket, FAILED_CODE, 0, busy_ns, dumps_failure(response.payload))

    def _carried_out(self, name: CommandName, flags: int, data: memoryview) -> Any:
        if name is CommandName.CLOSE:
            group, self._group = self._group, None
            if group is not None:
                group.close()
            return None
        if name is CommandName.START:
            self._group = pickle.loads(self._pickled_factory)()
        group, rows = self._group, self._rows
        if group is None:
            raise RuntimeError("its environments could not be made")
        if rows is not None and flags & IN_MEMORY:
            rows.actions[:] = data
            return COMMANDS[name](group, rows.rows.read_payload(name, flags))
        result = COMMANDS[name](group, pickle.loads(data) if data else None)
        if name is CommandName.START:
            self._rows = SentRows(result, group.env_ids)
            buffer = self._rows.rows.buffers[0]
            if buffer is not None:
                group.offer_rows(buffer)
        return result

    def _answer(self, ticket: int, name: CommandName, result: Any, busy_ns: int) -> Any:
        group, rows, specs = self._group, self._rows, None
        not_begun = None if group is None else take_not_begun(group, self._worker_id)
        if group is not None and name is not CommandName.START and len(group.behavior_specs) != self._n_reported:
            specs = dict(group.behavior_specs)
        if name in STEPPING and rows is not None:
            flags, n_ended = rows.rows.put(0, result)
            has_finals = any(own.final_obs is not None for own in result.values())
            steps = (rows.steps if has_finals else rows.steps_without_finals) if flags else b""
            flags, data = step_message(result, flags, specs, not_begun) or (flags, b"")
            packed = pack_answer(ticket, STEP_CODE, flags, busy_ns, data, n_ended, steps)
        else:
            flags, data = response_message(result, specs, not_begun)
            packed = pack_answer(ticket, CODES[name], flags, busy_ns, data)
        if specs is not None:
            self._n_reported = len(specs)
        return packed
