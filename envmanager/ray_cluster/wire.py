"""The bytes between a manager and its actors.

::

    command   COMMAND, then actions or a pickle                                               manager ▶ actor
    answer    ANSWER, then steps, then a pickle of what else there is                         actor ▶ manager
              where the steps are large, these without them, and them as an array: Ray puts
              it into its object store, and the manager reads it there

Steps and actions are parts of the worker's rows, as they lie in memory; what does not fit into rows is in the pickle.

The rule: what is pickled here is pickled by this library, so what cannot be is an error of one environment's step and
never one of Ray's. What a manager unpickles comes from its own actors, and what an actor unpickles from its manager.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from envmanager.data.steps import CommandName, StartReport, Steps
from envmanager.data.trees import Tree
from envmanager.hosts.shared_rows import Block, BlockLayout, WorkerRows
from envmanager.hosts.wire import CODES, NAMES, STEP_CODE, dumps_command

COMMAND = struct.Struct("<BB")
"""command code, flags."""
ANSWER = struct.Struct("<BBxxIQQ")
"""command code, flags, final rows, bytes of steps, busy ns."""
LARGE_BYTES = 100_000
"""The size in bytes from which the steps of an answer are sent as an array, which Ray does not copy to send it."""


class Answer(NamedTuple):
    """An actor's response to one command: its code and flags, the rows of a step, and a pickle."""

    code: int
    flags: int
    n_ended: int
    steps: Any
    """A buffer: the steps of the worker's rows; empty when there are none."""
    busy_ns: int
    data: bytes
    """The pickle of all else."""


class SentRows:
    """The rows of one worker in memory of this process, of which parts are sent and received as bytes."""

    def __init__(self, report: StartReport, env_ids: Sequence[int]) -> None:
        """Lay out the rows of a worker that has started with this report; both sides come to the same layout."""
        layout = BlockLayout.of(report.specs, [report.max_agents], n_slots=1)
        block = Block(layout, bytearray(Block(layout).size_bytes))
        self.rows = WorkerRows(block, 0, env_ids)
        memory = memoryview(block.memory)
        self._all_steps = memory[: block.actions_at]
        self._steps_without_finals = memory[: block.finals_at]
        self._actions = memory[block.actions_at :]

    def put_steps(self, steps: Steps) -> tuple[int, int, memoryview]:
        """Return flags, number of final rows, and the part of the memory to send, empty if the steps do not fit."""
        flags, n_ended = self.rows.put(0, steps)
        if not flags:
            return 0, 0, self._all_steps[:0]
        has_finals = any(own.final_obs is not None for own in steps.values())
        return flags, n_ended, self._all_steps if has_finals else self._steps_without_finals

    def receive_steps(self, sent: Any) -> None:
        """Copy the steps that the other side has sent into the rows."""
        self._all_steps[: len(sent)] = sent

    def pack_step(self, name: CommandName, payload: Any) -> bytes:
        """Return the command to take a step; UsageError when its actions neither fit nor can be pickled."""
        rows, actions = (None, payload) if name is CommandName.STEP else payload
        flags = self.rows.write_actions(actions, rows)
        if not flags:
            return pack_command(name, payload)
        return COMMAND.pack(CODES[name], flags) + self._actions

    def step_payload(self, name: CommandName, flags: int, data: memoryview) -> Tree:
        """Return the payload of a step that was sent in the memory."""
        self._actions[:] = data
        return self.rows.read_payload(name, flags)


def pack_command(name: CommandName, payload: Any) -> bytes:
    """Return a command with its payload pickled; UsageError when it cannot be pickled."""
    return COMMAND.pack(CODES[name], 0) + dumps_command(payload)  # an actor's __main__ is another one


def unpack_command(command: bytes) -> tuple[CommandName, int, memoryview]:
    """Return the name and the flags of a command, and its actions or its pickle."""
    code, flags = COMMAND.unpack_from(command)
    return NAMES[code], flags, memoryview(command)[COMMAND.size :]


def pack_answer(answer: Answer) -> Any:
    """Return an answer as bytes; if its steps are large, as a pair of bytes and an array with the steps."""
    code, flags, n_ended, steps, busy_ns, data = answer
    header = ANSWER.pack(code, flags, n_ended, len(steps), busy_ns)
    if len(steps) < LARGE_BYTES:
        return b"".join((header, steps, data))
    return header + data, np.frombuffer(steps, np.uint8)


def brings_step(future: Any) -> bool:
    """Return whether an answer is a step: no failure, no other response, and not the actor's end."""
    if future.exception() is not None:
        return False
    value = future.result()
    head = value[0] if value.__class__ is tuple else value
    return head.__class__ is bytes and head[0] == STEP_CODE


def unpack_answer(value: Any) -> Answer:
    """Return the answer that was packed."""
    head, large = value if value.__class__ is tuple else (value, None)
    code, flags, n_ended, n_bytes, busy_ns = ANSWER.unpack_from(head)
    if large is not None:
        return Answer(code, flags, n_ended, large, busy_ns, head[ANSWER.size :])
    end = ANSWER.size + n_bytes
    return Answer(code, flags, n_ended, memoryview(head)[ANSWER.size : end], busy_ns, head[end:])
