"""The interface of metrics writers, and the facts about a training run that are passed to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs


class MetricsWriter(Protocol):
    """Interface of objects that write the metrics of a training run to a file or a service."""

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> Any:
        """Write ``scalars``, values by name (``"default/loss"``). ``step``: the training's number of agent steps.

        ``step`` may be smaller than in the previous call, if that call was for other metrics.
        """
        ...

    def close(self) -> Any:
        """Write all buffered values and close the file or the connection."""
        ...


@attrs.frozen
class RunFacts:
    """Facts about a training run that every metrics writer receives: its folder, its id and its config as plain data.

    A resumed training run keeps its ``run_id``. ``resumed_at``: number of agent steps when it was resumed, else None.
    """

    directory: Path
    run_id: str
    config: Mapping[str, Any]
    resumed_at: int | None = None
