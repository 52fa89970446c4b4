"""The values between a manager and its actors.

::

    command   bytes: one for its name, the rest a pickle                          manager ▶ actor
    answer    bytes: a pickle of Answer's fields, where they are small            actor ▶ manager
              the fields themselves, where they are many arrays: Ray puts these   actor ▶ manager
              into its object store, and the manager's are read-only views of it

The rule: what is pickled here is pickled by this library, so what cannot be is an error of one environment's step and
never one of Ray's. What a manager unpickles comes from its own actors, and what an actor unpickles from its manager.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np

from envmanager._workers.wire import CODES, NAMES, dumps, dumps_command
from envmanager.data.reports import News
from envmanager.data.steps import AgentSteps, CommandName, Steps
from envmanager.data.trees import leaves, map_tree

LARGE_BYTES = 100_000
"""From so many bytes on, Ray keeps an answer in its object store, where arrays need not be copied to be sent."""
STEPPING = (CommandName.STEP, CommandName.STEP_ROWS)


class Answer(NamedTuple):
    """What an actor answers: ``payload`` is packed steps, a pickled failure, or what was asked for."""

    code: int
    busy_ns: int
    payload: Any
    news: News | None


def pack_command(name: CommandName, payload: Any) -> bytes:
    """A command; UsageError when its payload cannot be pickled."""
    data = dumps(payload) if name in STEPPING else dumps_command(payload)  # an actor's __main__ is another one
    return bytes((CODES[name],)) + data


def name_of(command: bytes) -> CommandName:
    """Which command it is."""
    return NAMES[command[0]]


def payload_of(command: bytes) -> Any:
    """What comes with it."""
    return pickle.loads(memoryview(command)[1:])


def pack_steps(steps: Steps) -> dict[str, tuple[Any, ...]]:
    """Steps as plain tuples, which travel faster than objects."""
    return {
        name: (
            own.agent_id,
            own.obs,
            own.reward,
            own.terminated,
            own.truncated,
            own.final_obs,
            own.acting,
            own.info,
            own.reset_info,
        )
        for name, own in steps.items()
    }


def unpack_steps(packed: dict[str, tuple[Any, ...]]) -> dict[str, AgentSteps]:
    """The steps again."""
    return {name: AgentSteps(*fields) for name, fields in packed.items()}


def pack_answer(answer: Answer, steps: Steps | None = None) -> Any:
    """An answer as it travels; ``steps`` are those in it."""
    if steps is not None and _is_large(steps):
        return tuple(answer._replace(payload=pack_steps(_contiguous(steps))))
    return dumps(tuple(answer))


def unpack_answer(value: Any) -> Answer:
    """The answer again."""
    return Answer(*(pickle.loads(value) if value.__class__ is bytes else value))


def _is_large(steps: Steps) -> bool:
    """Whether most of it is arrays of numbers, and more than Ray sends in a message."""
    n_bytes = 0
    for own in steps.values():
        if own.info is not None:
            return False
        for leaf in (*leaves(own.obs), *([] if own.final_obs is None else leaves(own.final_obs))):
            if leaf.dtype == object:
                return False
            n_bytes += leaf.nbytes
    return n_bytes >= LARGE_BYTES


def _contiguous(steps: Steps) -> Steps:
    contiguous = {}
    for name, own in steps.items():
        final = None if own.final_obs is None else map_tree(np.ascontiguousarray, own.final_obs)
        contiguous[name] = AgentSteps(
            own.agent_id,
            map_tree(np.ascontiguousarray, own.obs),
            own.reward,
            own.terminated,
            own.truncated,
            final,
            own.acting,
        )
    return contiguous
