"""SubprocessEnvManager, a manager whose environments run in worker processes.

With the native transport::

    trainer                                         worker 0          worker 1
    SubprocessEnvManager ── a socket for each ──▶   envs 0 1 2        envs 3 4 5
          ▲                 shared memory ◀──────▶  their rows        their rows
          └── one step pipe ◀── records ────────────┴─────────────────┘

The rule: no environment is made in the trainer's process, except with ``local_envs``.
"""

from __future__ import annotations

import pkgutil

import attrs

from envmanager.adapters.factories import EnvFactory
from envmanager.adapters.kinds import Kinds, count_kinds
from envmanager.data.env_rows import split_evenly
from envmanager.env_manager import EnvManager
from envmanager.hosts.hosting import GroupFactory, make_contexts
from envmanager.options import ProcessOptions, takes
from envmanager.placing.probing import place
from envmanager.processes.child import worker

__all__ = ["GroupFactory", "SubprocessEnvManager", "make_contexts", "worker"]

_HOSTS = {"native": "envmanager.processes.native:NativeHost", "portable": "envmanager.processes.portable:PortableHost"}
"""Hosts by transport. The native host is imported only when it is used, because it needs Linux."""


class SubprocessEnvManager(EnvManager):
    """A manager that runs environments in worker processes.

    The probe that chooses for ``"auto"`` is a worker that steps the first environment for a short time before the
    others start; ``stats().placement`` has the numbers and the reason. The local worker steps when the trainer would
    otherwise wait, and no other response is received meanwhile. If it crashes or hangs, so does the trainer.

    The constructor returns when all workers are ready. It raises UsageError for options or a factory that cannot work.
    If workers cannot start, all other workers are stopped and the first WorkerError is raised.

    Args:
        env_factory: A callable, a Gymnasium id, ``"module:callable"``, or a list of these, one per environment. It may
            be defined anywhere, even in a notebook or in a script without a ``__main__`` guard. Several kinds of
            environments are a list of an ``EnvRecipe(…, n=…, behavior=…)`` each.
        n_envs: Number of environments.
        n_workers: Number of processes, without the local worker. By default one per environment; "auto": by a probe.
        wait: A Wait, "any", "all" or a number of workers; the default of ``step`` and ``recv``.
        timeouts: Limits, as Timeouts, after which a worker counts as hung.
        restarts: Whether and how often workers that fail are replaced, as a RestartPolicy.
        infos: Whether to return the environments' info dicts too, which are pickled.
        measures: Names of numbers in the infos, which ``episodes`` keeps from the end of each. Sets ``infos``.
        check_values: Whether to refuse casts, numbers that are not finite, and observations out of bounds.
        seed: Seed of the first ``reset``.
        start_at_most: Number of workers that make their environments at once; by default the cores, and at least 2.
        memory_limit_mb: Memory of a worker, in MiB, above which it is killed; see WorkerOutOfMemory. Needs Linux.
        worker_env: Environment variables of the workers, instead of the trainer's.
        log_dir: Folder with a file for the output of each worker. Errors quote the end of the worker's file.
        trace: Path of a trace file.
        record: Path of a recording.
        order: Path of the recording in whose order responses are delivered.
        record_observations: Whether the recording has the observations.
        episodes: "automatic", or "on_demand" for environments that rest until ``begin``.
        local_envs: Number of environments, the last ones, in the trainer's process; "auto": by a probe.
        start_method: "forkserver" (default on Linux) or "spawn".
        transport: "native" (default on Linux) or "portable", which needs no Linux: each worker is a new Python.
        zero_copy: Whether to return views of shared memory; see StepInfo.
    """

    @takes(ProcessOptions, count_kinds)
    def __init__(self, env_factory: EnvFactory, options: ProcessOptions) -> None:
        host = pkgutil.resolve_name(_HOSTS[options.chosen_transport()])
        several = Kinds.of(env_factory, options)
        if "auto" in (options.n_workers, options.local_envs):
            placement = place(SubprocessEnvManager, env_factory, options, in_process=False)
            self.placement = str(placement)
            options = attrs.evolve(options, n_workers=placement.n_workers, local_envs=placement.local_envs)
        n_envs, local_envs = options.n_envs, options.local_envs
        assert isinstance(local_envs, int)
        n_apart = n_envs - local_envs
        n_workers, kinds = options.n_workers if isinstance(options.n_workers, int) else n_apart, list[str]()
        if several is None:
            blocks = split_evenly(n_apart, n_workers)
        else:
            env_factory, (blocks, kinds) = several.factories, several.blocks(n_workers)
        if local_envs:
            blocks.append(range(n_apart, n_envs))
        super().__init__(blocks, kinds=kinds, zero_copy=options.zero_copy, **options.of_the_manager)
        self.start(host(env_factory, options))
