"""The arrays of a file, each read when it is asked for.

A checkpoint holds a replay of gigabytes beside the weights; who only wants to act reads the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from envmanager.extras import needed_by

with needed_by("envmanager.training", extra="torch"):
    from safetensors import safe_open


class ArrayFile(Mapping[str, np.ndarray]):
    """A file of safetensors as arrays by name. It may be deleted meanwhile: what is open stays readable.

    Raises OSError or SafetensorError when it cannot be read, at once.
    """

    def __init__(self, path: Path) -> None:
        self._file = cast(Any, safe_open(path, framework="numpy"))
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self:
            raise KeyError(name)
        array: np.ndarray = self._file.get_tensor(name)
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
