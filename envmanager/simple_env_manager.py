"""A manager whose environments run in the trainer's process.

One worker runs all environments. It executes a step when the response is requested, or when a command other than a
reset follows. So an environment's exception is raised by the same call as with worker processes.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from typing import Any

import attrs

from envmanager.adapters.factories import EnvFactory, factories_for
from envmanager.adapters.kinds import Kinds, count_kinds
from envmanager.data.steps import StartReport
from envmanager.env_manager import EnvManager
from envmanager.hosts.hosting import GroupFactory
from envmanager.hosts.local_worker import LocalStepQueue, LocalWorker
from envmanager.kernel.host import EnvWorker, WorkerHost
from envmanager.observe.stats import ManagerStats
from envmanager.options import ProcessOptions, takes


class SimpleEnvManager(EnvManager):
    """A manager of ``n_envs`` environments that run one after the other in the trainer's process, as one worker.

    Several kinds of environments are a worker each.

    Use it for cheap environments, and to debug environments with breakpoints. The parameters are those of
    SubprocessEnvManager, but ``n_workers``, ``local_envs``, ``start_method``, ``transport``, ``timeouts`` and
    ``worker_env`` have no effect. If an environment hangs, crashes or calls ``os._exit``, so does the trainer.

    Args:
        restarts: Whether the environments are made again after an exception, as a RestartPolicy. Other faults are none.
        log_dir: Passed on to the environments, in EnvContext.
        order: Path of a recording. The environments are split into as many workers as there, whatever kind recorded it.
    """

    @takes(ProcessOptions, count_kinds)
    def __init__(self, env_factory: EnvFactory, options: ProcessOptions) -> None:
        workers: Any = [range(options.n_envs)]
        kinds: Sequence[str] = ()
        if (several := Kinds.of(env_factory, options)) is not None:
            env_factory, (workers, kinds) = several.factories, several.blocks(len(several.recipes))
        if options.order is not None:
            recorded = pkgutil.resolve_name("envmanager.recording.data:about")(options.order)["env_ids"]
            if several is None and sum(map(len, recorded)) == options.n_envs:
                workers = recorded
        super().__init__(workers, kinds=kinds, zero_copy=options.zero_copy, **options.of_the_manager)
        self.start(LocalHost(factories_for(env_factory, options.n_envs), options))


class LocalHost(WorkerHost):
    """The host of a SimpleEnvManager, with one worker that runs all environments in the trainer's process."""

    def __init__(self, factories: Sequence[Any], options: ProcessOptions) -> None:
        super().__init__()
        self.factories = factories
        self._options = options
        self.rewrites_arrays = not options.zero_copy
        self.step_queue = LocalStepQueue(self.workers)

    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        for replaced in self.workers[worker_id : worker_id + 1]:
            replaced.close_quietly()
        entry, options = self.context.entries[worker_id], self._options
        factory = GroupFactory.of(self.factories, entry, options)
        return LocalWorker(worker_id, factory, entry.times, self.context.events, rotates=options.zero_copy, lends=True)

    def await_start(self) -> dict[int, StartReport]:
        reports = {worker.worker_id: worker.start() for worker in self.workers}
        self.rewrites_arrays &= not all(worker.lends for worker in self.workers)
        self.accepts_device_arrays = all(worker.accepts_device_arrays for worker in self.workers)
        return reports

    def describe_all(self, known: ManagerStats) -> ManagerStats:
        """Return ``known`` with ``in_process=True`` and with ``wait_share`` set to the share of time spent in steps."""
        share = 1.0 - known.workers[0].idle_share if self.context.entries[0].times.steps else 0.0
        return attrs.evolve(known, wait_share=share, in_process=True)

    def close(self) -> None:
        for worker in self.workers:
            worker.close_quietly()
