"""What a metrics writer is, and what it receives of a training when it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs


class MetricsWriter(Protocol):
    """Takes scalars."""

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> Any:
        """Note these values, by name (``"default/loss"``), after so many steps of agents.

        Steps may come late: the scalars of one behavior after later ones of another.
        """
        ...

    def close(self) -> Any:
        """Nothing more comes: what was noted is to be where it belongs when this returns."""
        ...


@attrs.frozen
class RunFacts:
    """What a writer is told of the training. ``directory`` is its folder, ``config`` the whole of it as plain data.

    ``run_id`` stays the same when the training is resumed; then ``resumed_at`` is after how many steps.
    """

    directory: Path
    run_id: str
    config: Mapping[str, Any]
    resumed_at: int | None = None
