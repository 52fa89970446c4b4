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
from envmanager.data.env_rows import split_evenly
from envmanager.env_manager import EnvManager
from envmanager.hosts.hosting import GroupFactory, make_contexts
from envmanager.options import ProcessOptions, takes
from envmanager.placing.probing import place
from envmanager.processes.child import worker

__all__ = ["GroupFactory", "SubprocessEnvManager", "make_contexts", "worker"]

_HOSTS = {
    "native": "envmanager.processes.native:NativeHost",
    "portable": "envmanager.processes.portable:PortableHost",
}
"""Hosts by transport. The native host is imported only when it is used, because it needs Linux."""


class SubprocessEnvManager(EnvManager):
    """A manager that runs ``n_envs`` environments in ``n_workers`` processes (by default one per environment).

    With ``n_workers="auto"``, a probe chooses the number. The probe is a worker that steps the first environment for a
    short time before the others start; ``stats().placement`` has the number and the reason. The last ``local_envs``
    environments run in the trainer's process, in the local worker. ``n_workers`` does not include this worker. The
    local worker steps when the trainer would otherwise wait, and no other response is received meanwhile. If the local
    worker crashes or hangs, so does the trainer. With ``local_envs="auto"``, a probe chooses ``local_envs`` and, unless
    given, ``n_workers``.

    ``env_factory``: a callable, a Gymnasium id, ``"module:callable"``, or a list of these, one per environment. It may
    be defined anywhere, even in a notebook or in a script without a ``__main__`` guard. ``start_method``: "forkserver"
    (default on Linux) or "spawn". ``transport``: "native" (default on Linux) or "portable", which needs no Linux and
    starts each worker in a new Python process. ``zero_copy``: return views of shared memory, see StepInfo. ``infos``:
    also return the environments' info dicts, which are pickled. ``check_values``: also refuse casts, numbers that
    are not finite, and observations out of bounds. ``worker_env``: environment variables of the workers, instead of the
    trainer's. ``log_dir``: folder with a file for the output of each worker. Errors quote the end of the worker's file.

    The constructor returns when all workers are ready. A worker process may take ``timeouts.start_s`` to start. The
    constructor raises UsageError for options or a factory that cannot work. If workers cannot start, all other workers
    are stopped and the first WorkerError is raised.
    """

    @takes(ProcessOptions)
    def __init__(self, env_factory: EnvFactory, options: ProcessOptions) -> None:
        host = pkgutil.resolve_name(_HOSTS[options.chosen_transport()])
        if "auto" in (options.n_workers, options.local_envs):
            placement = place(SubprocessEnvManager, env_factory, options, in_process=False)
            self.placement = str(placement)
            options = attrs.evolve(options, n_workers=placement.n_workers, local_envs=placement.local_envs)
        n_envs, local_envs = options.n_envs, options.local_envs
        assert isinstance(local_envs, int)
        n_apart = n_envs - local_envs
        blocks = split_evenly(n_apart, options.n_workers if isinstance(options.n_workers, int) else n_apart)
        if local_envs:
            blocks.append(range(n_apart, n_envs))
        super().__init__(blocks, zero_copy=options.zero_copy, **options.of_the_manager)
        self.start(host(env_factory, options))
