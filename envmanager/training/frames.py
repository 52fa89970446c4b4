"""Storage for stacks of frames. Shared frames are stored once, so stacks of four take about a quarter of the memory.

::

    row 7   frames 12 13 14 15          frames   … │ 12 │ 13 │ 14 │ 15 │ 16 │ …   overwritten oldest first
    row 8   frames 13 14 15 16

A frame that is known to equal one of the last ``WINDOW`` frames, in any stack, is not stored again. Older frames are
not used for a new row, so each row keeps all its frames until at least ``capacity`` newer frames have been stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envmanager.training.named_arrays import copy_into

WINDOW = 4096
"""Number of newest frames with which a new frame is compared."""


class FrameStacks:
    """A store of ``capacity`` rows, each a stack of frames. ``stacks[i]`` reads or writes the rows at indices ``i``.

    It has room for one new frame per row. If rows add more frames, as the first row of an episode does, frames of the
    oldest rows can be overwritten although the rows remain. ``first_whole`` finds the first row with all its frames.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, capacity: int) -> None:
        self._window = WINDOW + shape[0]
        self._frames = np.zeros((capacity + self._window, *shape[1:]), dtype)
        self._numbers = np.zeros((capacity, shape[0]), np.int64)
        self._n_before = np.zeros(capacity, np.int64)  # number of frames when the row was written
        self._n_frames = 0
        self._number_of: dict[int, int] = {}  # number of the newest frame, by the hash of its content

    def __getitem__(self, places: Any) -> np.ndarray:
        stacks: np.ndarray = self._frames[self._numbers[places] % len(self._frames)]
        return stacks

    def __setitem__(self, places: np.ndarray, stacks: np.ndarray) -> None:
        for place, stack in zip(places.tolist(), stacks, strict=True):
            self._n_before[place] = self._n_frames
            self._numbers[place] = [self._number(frame) for frame in stack]

    def first_whole(self, first: int, n_rows: int) -> int:
        """Return the first row not before ``first`` that surely has all its frames, or ``n_rows`` if there is none."""
        overwritten = self._n_frames - len(self._frames)
        while first < n_rows and self._n_before[first % len(self._n_before)] - self._window < overwritten:
            first += 1
        return first

    def _number(self, frame: np.ndarray) -> int:
        key = hash(frame.tobytes())
        known = self._number_of.get(key)
        if known is not None and known >= self._n_frames - WINDOW and np.array_equal(self._frame(known), frame):
            return known
        number = self._n_frames
        self._n_frames += 1
        self._frame(number)[...] = frame
        self._number_of[key] = number
        if len(self._number_of) > 2 * WINDOW:
            oldest = self._n_frames - WINDOW
            self._number_of = {key: number for key, number in self._number_of.items() if number >= oldest}
        return number

    def _frame(self, number: int) -> np.ndarray:
        frame: np.ndarray = self._frames[number % len(self._frames)]
        return frame

    def state(self, n_rows: int) -> dict[str, np.ndarray]:
        """Return the arrays of the first ``n_rows`` rows by name, for a checkpoint."""
        return {
            "frames": self._frames[: self._n_frames],
            "numbers": self._numbers[:n_rows],
            "n_before": self._n_before[:n_rows],
            "n_frames": np.array([self._n_frames]),
        }

    def restore(self, arrays: Mapping[str, np.ndarray], n_rows: int) -> None:
        """Restore ``n_rows`` rows from the arrays that ``state`` returned. Rows added later share no frames with them.

        Raises KeyError or ValueError for arrays that do not fit.
        """
        n_frames = np.zeros(1, np.int64)
        copy_into(n_frames, arrays, "n_frames")
        self._n_frames = n_frames.item()
        copy_into(self._frames[: self._n_frames], arrays, "frames")
        copy_into(self._numbers[:n_rows], arrays, "numbers")
        copy_into(self._n_before[:n_rows], arrays, "n_before")
        self._number_of.clear()
