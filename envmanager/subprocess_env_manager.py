"""A manager whose environments run in worker processes.

::

    trainer                                         worker 0          worker 1
    SubprocessEnvManager ── command pipe each ──▶   envs 0 1 2        envs 3 4 5
          ▲                 shared memory ◀──────▶  their rows        their rows
          └── one step pipe ◀── records ────────────┴─────────────────┘

The rule: the trainer's process makes no environment, except with ``local_envs``. The constructor sends commands only to
workers that ``create_worker`` started itself, so that tests can replace workers by fakes.
"""

from __future__ import annotations

import sys

import attrs

from envmanager.adapters.factories import EnvFactory
from envmanager.data.env_rows import split_evenly
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.hosts.hosting import GroupFactory, make_contexts
from envmanager.options import ProcessOptions, takes
from envmanager.placing.probing import place
from envmanager.processes.child import worker

__all__ = ["GroupFactory", "SubprocessEnvManager", "make_contexts", "worker"]


class SubprocessEnvManager(EnvManager):
    """A manager of ``n_envs`` environments in ``n_workers`` processes (by default one each). Linux only.

    ``n_workers="auto"``: the number is chosen by a probe, a worker that steps the first environment for a moment before
    the others start; ``stats().placement`` gives number and reason. ``local_envs``: number of environments (the last
    ones) that run in this process, in an additional worker (the local worker) that ``n_workers`` does not count. It
    steps while the trainer would wait; meanwhile no other response is received. If it crashes or hangs, so does the
    trainer. ``local_envs="auto"``: the probe chooses it too, and ``n_workers`` unless that is a number.

    ``env_factory``: a callable, a Gymnasium id, ``"module:callable"``, or a list of these, one per environment; it may
    be defined anywhere, also in a script without a guard or in a notebook. ``start_method``: "forkserver" (default)
    or "spawn". ``zero_copy``: return views of shared memory, see StepInfo. ``infos``: also return the environments'
    info dicts (they are pickled). ``check_values``: also check observations for NaN and for their bounds.
    ``worker_env``: environment variables of the workers, instead of the trainer's. ``log_dir``: folder for one file per
    worker with its output; errors quote the end of it.

    The constructor returns when all workers are ready, at most after ``timeouts.start_s``. It raises UsageError for
    options or a factory that cannot work, and the WorkerError of the first worker that could not start, after all
    others were stopped.
    """

    @takes(ProcessOptions)
    def __init__(self, env_factory: EnvFactory, options: ProcessOptions) -> None:
        _require_linux()
        from envmanager.processes.process_host import ProcessHost

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
        self.start(ProcessHost(env_factory, options))


def _require_linux() -> None:
    if sys.platform != "linux":
        raise UsageError("SubprocessEnvManager needs Linux (memfd and pidfd); use SimpleEnvManager here.")
