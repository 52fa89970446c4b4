"""Arrays in a file, each read on first use.

A checkpoint may hold a replay of gigabytes beside the weights. A program that only acts reads the weights alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from envmanager.importing import needed_by

with needed_by("envmanager.training", extra="torch"):
    from safetensors import safe_open


class ArrayFile(Mapping[str, np.ndarray]):
    """The arrays of a safetensors file, by name. An open file stays readable when it is deleted.

    The constructor raises OSError or SafetensorError when the file cannot be read.
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
