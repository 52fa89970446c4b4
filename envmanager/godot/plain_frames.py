"""The steps frame that nearly all are like: nobody came, left or ended, and all act.

The rule: every byte of such a frame is a number of an observation or of a reward, or is known beforehand. Whatever
has all the known bytes in their places has been checked; all else is read with care, by ``StepsDecoder``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from envmanager.data.steps import AgentSteps
from envmanager.godot.engine_specs import ArrayLayout, BehaviorLayout

SAME_ROWS, SOME_ENDED, ALL_ACT = 1, 2, 4
"""Flags of a section of steps."""
TERMINATED, TRUNCATED, ACTING = 1, 2, 4
"""Bits of a row."""

COUNT = struct.Struct("<I")
STEPS_HEAD = struct.Struct("<II")
"""busy_us, number of sections."""
STEPS_SECTION = struct.Struct("<HBBI")
"""Behavior, flags, 0, n."""

_REWARD = ArrayLayout("reward", np.dtype(np.float32), (), 1)


class _Place(NamedTuple):
    """Where an array is."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    at: int

    def view(self, body: Any) -> np.ndarray:
        """The array in this body."""
        array: np.ndarray = np.ndarray(self.shape, self.dtype, body, self.at)
        return array


class _PlainSection(NamedTuple):
    behavior: str
    agent_id: np.ndarray
    observations: tuple[_Place, ...]
    reward: _Place


class PlainFrame:
    """What is known of the frame that has the rows of the last one."""

    def __init__(self, sections: Sequence[tuple[BehaviorLayout, np.ndarray]]) -> None:
        """``sections``: behaviors in the order of the last frame, and the ``agent_id`` of their rows."""
        self._size = COUNT.size  # busy_us is not known
        self._known: list[tuple[int, bytes]] = []
        """From where on which bytes are."""
        self._sections: list[_PlainSection] = []
        self._expect(COUNT.pack(len(sections)))
        for behavior, agent_id in sections:
            n = len(agent_id)
            self._expect(STEPS_SECTION.pack(behavior.number, SAME_ROWS | ALL_ACT, 0, n))
            observations = tuple(self._leave_out(layout, n) for layout in behavior.observations)
            self._sections.append(_PlainSection(behavior.name, agent_id, observations, self._leave_out(_REWARD, n)))
            self._expect(bytes([ACTING]) * n + bytes(-n % 4))
        self._expect(COUNT.pack(0))  # no infos

    def _expect(self, known: bytes) -> None:
        if known and self._known and self._known[-1][0] + len(self._known[-1][1]) == self._size:
            start, before = self._known.pop()
            self._known.append((start, before + known))
        elif known:
            self._known.append((self._size, known))
        self._size += len(known)

    def _leave_out(self, layout: ArrayLayout, n: int) -> _Place:
        place = _Place(layout.name, (n, *layout.shape), layout.dtype, self._size)
        n_bytes = n * layout.n_numbers * layout.dtype.itemsize
        self._size += n_bytes
        self._expect(bytes(-n_bytes % 4))
        return place

    def read(self, body: Any) -> dict[str, AgentSteps] | None:
        """The steps by behavior, as views of ``body``; None when it is another frame."""
        if len(body) != self._size:
            return None
        for start, known in self._known:
            if bytes(body[start : start + len(known)]) != known:
                return None
        return {section.behavior: _steps(section, body) for section in self._sections}


def _steps(section: _PlainSection, body: Any) -> AgentSteps:
    n, places = len(section.agent_id), section.observations
    one = len(places) == 1
    return AgentSteps(
        section.agent_id.copy(),  # the decoder's own must not change with what a trainer does
        places[0].view(body) if one else {place.name: place.view(body) for place in places},
        section.reward.view(body),
        np.zeros(n, np.bool_),
        np.zeros(n, np.bool_),
    )
