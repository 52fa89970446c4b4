"""Environments in the trainer's own process: no process, no pipe, the same contract.

The rule: one worker hosts all environments, and its step is taken when it is asked for, so exceptions come out where
they would with processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from envmanager.env_manager import EnvManager, EnvWorker
from envmanager.factories import EnvFactory, factories_for
from envmanager.hosting import GroupFactory
from envmanager.local_worker import LocalStepQueue, LocalWorker
from envmanager.options import ManagerOptions, RestartPolicy, StartMethod, Timeouts, Wait, WorkerCount
from envmanager.stats import ManagerStats
from envmanager.weak_calls import weakly


class SimpleEnvManager(EnvManager):
    """Runs ``n_envs`` environments one after the other in this process, as one worker.

    The choice for cheap environments, and for debugging: a breakpoint in the environment works. The parameters are
    those of SubprocessEnvManager; ``n_workers``, ``local_envs``, ``start_method``, ``timeouts``, ``worker_env`` and
    ``log_dir`` (but for the factory's EnvContext) mean nothing here, and only exceptions can be faults for
    ``restarts``. Nobody can stop an environment that hangs or crashes this process.
    """

    def __init__(
        self,
        env_factory: EnvFactory,
        n_envs: int = 1,
        *,
        n_workers: WorkerCount = None,
        local_envs: int = 0,
        start_method: StartMethod | None = None,
        wait: Wait | str | int = "any",
        timeouts: Timeouts | None = None,
        restarts: RestartPolicy | None = None,
        zero_copy: bool = False,
        infos: bool = False,
        check_values: bool = False,
        seed: int | None = None,
        worker_env: Mapping[str, str] | None = None,
        log_dir: str | None = None,
        trace: str | None = None,
    ) -> None:
        options = ManagerOptions(
            kind="simple",
            n_envs=n_envs,
            n_workers=n_workers,
            local_envs=local_envs,
            start_method=start_method,
            wait=wait,
            timeouts=Timeouts() if timeouts is None else timeouts,
            restarts=RestartPolicy() if restarts is None else restarts,
            zero_copy=zero_copy,
            infos=infos,
            check_values=check_values,
            seed=seed,
            worker_env=worker_env,
            log_dir=log_dir,
            trace=trace,
        )
        super().__init__(
            [range(n_envs)],
            wait=options.wait,
            seed=seed,
            restarts=options.restarts,
            zero_copy=zero_copy,
            check_values=check_values,
            trace=options.trace,
        )
        self._options = options
        self._factories = factories_for(env_factory, n_envs)
        worker = self._new_worker()
        try:
            report = worker.start()
        except BaseException:
            self.close()
            raise
        self.env_workers.append(worker)
        self.step_queue = LocalStepQueue(self.env_workers)
        self._partial_actions = report.partial_actions
        self._learn_specs(report.specs, 0)

    def _new_worker(self) -> LocalWorker:
        options, generation = self._options, self._table.entries[0].generation
        factory = GroupFactory.of(
            self._factories,
            range(options.n_envs),
            options,
            worker_id=0,
            generation=generation,
            first_slot=generation * options.n_envs,
        )
        return LocalWorker(
            0,
            factory,
            self._times[0],
            self.events,
            on_news=weakly(self._hear),
            rotates=options.zero_copy,
        )

    def _replace(self, worker_id: int) -> EnvWorker:
        self.env_workers[worker_id].close_quietly()
        return self._new_worker()

    def _own(self, payload: Any) -> Any:
        if self._zero_copy:
            return payload
        return {behavior: steps.copy() for behavior, steps in payload.items()}

    def stats(self) -> ManagerStats:
        """Counters and times; while the environments are stepped, the trainer waits for them."""
        known = super().stats()
        return attrs.evolve(known, wait_share=1.0 - known.workers[0].idle_share if self._times[0].steps else 0.0)

    def _close(self) -> None:
        for worker in self.env_workers:
            worker.close_quietly()
