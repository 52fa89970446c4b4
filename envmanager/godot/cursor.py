"""Reads the body of a frame block by block, and trusts nothing that it says of its own size."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from envmanager.data.trees import Tree
from envmanager.godot.engine_specs import MAX_NUMBERS, ArrayLayout
from envmanager.godot.frames import BadFrame

_ZEROS = tuple(bytes(n) for n in range(4))


class Cursor:
    """Reads a body from its beginning to its end; BadFrame when that comes too soon or too late."""

    def __init__(self, body: Any) -> None:
        self.where = ""
        """Of which behavior, for the reasons."""
        self._body = memoryview(body)
        self._at = 0

    def unpack(self, layout: struct.Struct, what: str) -> tuple[Any, ...]:
        """The numbers of a head."""
        at = self._advance(layout.size, what)
        return layout.unpack_from(self._body, at)

    def arrays(self, layouts: tuple[ArrayLayout, ...], n: int, what: str) -> Tree:
        """One array, or a dict of several, each ``[n, …]``."""
        if len(layouts) == 1:
            return self.array(layouts[0], n, what)
        return {layout.name: self.array(layout, n, what) for layout in layouts}

    def array(self, layout: ArrayLayout, n: int, what: str) -> np.ndarray:
        """The next block as an array ``[n, …]``; a view, if that is aligned."""
        n_numbers = n * layout.n_numbers
        if n_numbers > MAX_NUMBERS:
            raise BadFrame(
                f"{n_numbers} numbers in {what} {layout.name!r}{self.where}, where {MAX_NUMBERS} are the most"
            )
        itemsize = layout.dtype.itemsize
        at = self._advance(n_numbers * itemsize, what)
        flat = np.frombuffer(self._body, layout.dtype, n_numbers, at) if n_numbers else np.empty(0, layout.dtype)
        if itemsize > 4 and not flat.flags.aligned:
            flat = flat.copy()
        return flat.reshape(n, *layout.shape) if layout.shape else flat

    def block(self, n_bytes: int, what: str) -> memoryview:
        """The next block as it is."""
        at = self._advance(n_bytes, what)
        return self._body[at : at + n_bytes]

    def finish(self) -> None:
        """BadFrame unless this is the end."""
        if self._at != len(self._body):
            raise BadFrame(f"{len(self._body) - self._at} bytes left over after the infos")

    def _advance(self, n_bytes: int, what: str) -> int:
        """Where the next block begins; the one after it begins at the next multiple of 4."""
        at = self._at
        self._at = end = at + n_bytes + (-n_bytes % 4)
        if end > len(self._body):
            have = len(self._body) - at
            raise BadFrame(f"bytes missing: {what}{self.where} should have {end - at}, but {have} are left")
        if n_bytes % 4 and self._body[at + n_bytes : end] != _ZEROS[-n_bytes % 4]:
            raise BadFrame(f"padding that is not 0 after {what}{self.where}")
        return at
