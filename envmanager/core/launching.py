"""Launches worker generations, and resets them as the last reset asked, with seeds of their own."""

from __future__ import annotations

import attrs

from envmanager.core.hosts import WorkerHost
from envmanager.core.table import Entry
from envmanager.data.seeding import reseeded
from envmanager.data.steps import EnvironmentResponse
from envmanager.options import ResetConfig


class Launcher:
    """Launches the workers of one manager again, and knows what they are to be reset with."""

    def __init__(self, seed: int | None) -> None:
        self.host: WorkerHost
        self.last_config = ResetConfig(seed=seed)
        """What the last reset asked for, with the last seed that any did."""

    def asked(self, config: ResetConfig) -> None:
        """A reset with this begins."""
        seed = self.last_config.seed if config.seed is None else config.seed
        self.last_config = attrs.evolve(config, seed=seed)

    def launch_again(self, entry: Entry) -> EnvironmentResponse | None:
        """Start the entry's generation and have it reset; the response, or None when the step queue brings it."""
        host, worker_id = self.host, entry.worker_id
        host.workers[worker_id] = host.launch(worker_id, entry.generation)
        seed = reseeded(self.last_config.seed, entry.generation)
        return host.begin_again(worker_id, attrs.evolve(self.last_config, seed=seed))
