"""The interface of a metrics writer, and the facts about a training that it gets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs


class MetricsWriter(Protocol):
    """A writer of scalars to a file or a service."""

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> Any:
        """Write these values, by name (``"default/loss"``), at ``step`` agent steps of the training.

        Between behaviors ``step`` may go back: one behavior's scalars may come after later ones of another.
        """
        ...

    def close(self) -> Any:
        """Flush everything and close."""
        ...


@attrs.frozen
class RunFacts:
    """The facts about a training for a writer. ``directory`` is its folder, ``config`` its whole config as plain data.

    ``run_id`` stays the same when the training is resumed; ``resumed_at`` is then its number of agent steps.
    """

    directory: Path
    run_id: str
    config: Mapping[str, Any]
    resumed_at: int | None = None
