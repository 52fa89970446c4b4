"""AsyncioEnvManager, a manager whose environments wait: coroutines on an event loop, or calls in threads."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import attrs

from envmanager.adapters.factories import EnvFactory, count_envs, factories_for
from envmanager.adapters.kinds import Kinds, count_kinds
from envmanager.coroutines.environment import SessionFactory
from envmanager.coroutines.session import Session, SessionQueue
from envmanager.data.steps import EnvironmentResponse, StartReport
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.hosts.life import State, WorkerPlan
from envmanager.kernel.host import EnvWorker, HostContext, WorkerHost, start_report
from envmanager.options import EnvCount, KindOptions, ResetConfig, at_least, count_or_auto, plain_numbers, takes
from envmanager.system.interrupts import defer_interrupts
from envmanager.system.machine import advice

_COUNT_AFTER = 127
"""Bit mask for the number of steps after which the times of a session are counted: seldom takes more memory."""


@attrs.frozen(field_transformer=plain_numbers)
class SessionOptions(KindOptions):
    """The options of AsyncioEnvManager."""

    n_envs: EnvCount = attrs.field(default=1, converter=count_or_auto, validator=at_least(1, or_auto=True))

    def __attrs_post_init__(self) -> None:
        if isinstance(self.n_envs, int):
            super().__attrs_post_init__()


class AsyncioEnvManager(EnvManager):
    """A manager of ``n_envs`` environments that wait, such as for a server, each of which is a worker of its own.

    An environment has ``async def reset(*, seed, options)``, which returns ``(obs, info)``, and ``async def
    step(action)``, which returns ``(obs, reward, terminated, truncated, info)``. It may have ``async def close()``. All
    run on one event loop, in a thread of this process. If it declares Gymnasium spaces, observations and actions are
    arrays; else they are objects, in arrays of the dtype ``object``. Other environments are called in a thread each.

    A step that takes longer than ``timeouts.step_s`` is cancelled, and its environment is replaced. Code that does not
    await blocks all environments. A thread that is late is abandoned. ``worker_env`` has no effect, and ``log_dir`` is
    only passed on to the environments. ``n_envs="auto"`` is for ``{openenv: …}``: as many as its servers have sessions.
    """

    @takes(SessionOptions, count_kinds)
    def __init__(self, env_factory: EnvFactory, options: SessionOptions) -> None:
        if not isinstance(options.n_envs, int):
            options = attrs.evolve(options, n_envs=count_envs(env_factory))
        several, kinds = Kinds.of(env_factory, options), list[str]()
        if options.n_workers not in (None, "auto", options.n_envs):
            raise UsageError(
                f"n_workers={options.n_workers} does not exist with kind asyncio: each of the n_envs={options.n_envs} "
                "environments is a worker, and all are in this process. Leave n_workers out."
            )
        if several is not None:
            env_factory, (_, kinds) = several.factories, several.blocks(options.n_envs)
        super().__init__([[env_id] for env_id in range(options.n_envs)], kinds=kinds, **options.of_the_manager)
        self.start(SessionHost(factories_for(env_factory, options.n_envs), options))


class SessionHost(WorkerHost):
    """The host of an AsyncioEnvManager."""

    rewrites_arrays = False
    step_queue: SessionQueue

    def __init__(self, factories: Sequence[Any], options: KindOptions) -> None:
        super().__init__()
        self.factories = factories
        self._options = options

    def open(self, context: HostContext) -> None:
        super().open(context)
        with defer_interrupts():
            try:
                self.step_queue = SessionQueue(self._options.timeouts, context.entries, context.events)
            except (OSError, RuntimeError) as error:  # no descriptor or no thread left
                hint = advice(error) if isinstance(error, OSError) else ""
                raise UsageError(f"an event loop cannot be started: {error}. {hint}".strip()) from error
            self._finalizer = weakref.finalize(self, self.step_queue.close)

    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        if generation > 0:
            self.workers[worker_id].retire()
        entry, options, queue = self.context.entries[worker_id], self._options, self.step_queue
        loop = queue.loop
        factory = SessionFactory.of(self.factories, entry, options, known=loop.shared)
        plan = WorkerPlan(worker_id=worker_id, env_ids=entry.env_ids, generation=generation, timeouts=options.timeouts)
        entry.times.count_after = _COUNT_AFTER
        session = Session(plan, loop, queue, self.context.events, entry.times)
        queue.start(session, factory)
        return session

    def await_start(self) -> dict[int, StartReport]:
        return {worker.worker_id: start_report(worker.recv()) for worker in self.workers}

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        self.workers[worker_id].begin_again(config, self.context.entries[worker_id].attributes.values())
        return None

    def is_gone(self, worker_id: int) -> bool:
        return self.workers[worker_id].state is not State.RUNNING

    def wake(self) -> None:
        self.step_queue.wake()

    def stop(self) -> None:
        self.step_queue.close()

    def close(self) -> None:
        self.step_queue.close()
        self._finalizer.detach()
