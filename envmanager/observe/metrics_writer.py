"""The interface of metrics writers, and the facts about a training run that are passed to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs


class MetricsWriter(Protocol):
    """Interface of objects that write the metrics of a training run to a file or a service."""

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> Any:
        """Write ``scalars``, which maps names (``"default/loss"``) to values. ``step`` is the number of agent steps.

        ``step`` may be smaller than in the previous call, if that call was for other metrics.
        """
        ...

    def close(self) -> Any:
        """Write all buffered values and close the file or the connection."""
        ...


@attrs.frozen
class RunFacts:
    """A training run's folder, id and config (as plain data). Every metrics writer receives these facts.

    A resumed run keeps its ``run_id``. ``resumed_at`` is its number of agent steps when resumed; None for a new run.
    """

    directory: Path
    run_id: str
    config: Mapping[str, Any]
    resumed_at: int | None = None
