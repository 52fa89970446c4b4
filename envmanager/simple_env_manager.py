"""Environments in the trainer's own process: no process, no pipe, the same contract.

The rule: one worker hosts all environments, and its step is taken when it is asked for, so exceptions come out where
they would with processes.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Mapping
from typing import Any

import attrs

from envmanager.env_manager import EnvManager, EnvWorker
from envmanager.environment import EnvGroup
from envmanager.errors import EnvManagerError
from envmanager.events import Started
from envmanager.factories import EnvFactory, factories_for
from envmanager.hosting import (
    COMMANDS,
    GroupFactory,
    StartReport,
    describe_failure,
    env_ids_of_failure,
    make_contexts,
    phase_of,
)
from envmanager.interrupts import let_through
from envmanager.options import ManagerOptions, ResetConfig, RestartPolicy, StartMethod, Timeouts, Wait, WorkerCount
from envmanager.stats import ManagerStats
from envmanager.steps import CommandName, EnvironmentResponse, RowBuffer, StepInfo, only_agents
from envmanager.timing import WorkerTimes

_logger = logging.getLogger("envmanager")


class SimpleEnvManager(EnvManager):
    """Runs ``n_envs`` environments one after the other in this process, as one worker.

    The choice for cheap environments, and for debugging: a breakpoint in the environment works. The parameters are
    those of SubprocessEnvManager; ``n_workers``, ``start_method``, ``timeouts``, ``worker_env`` and ``log_dir`` (but
    for the factory's EnvContext) mean nothing here, and only exceptions can be faults for ``restarts``. Nobody can stop
    an environment that hangs or crashes this process.
    """

    def __init__(
        self,
        env_factory: EnvFactory,
        n_envs: int = 1,
        *,
        n_workers: WorkerCount = None,
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
            trace=options.trace,
        )
        self._options = options
        self._n_specs = 0
        self._factories = factories_for(env_factory, n_envs)
        worker = self._new_worker()
        report = worker.start()
        self._tell_of_start(worker)
        self.env_workers.append(worker)
        self.step_queue = LocalStepQueue(self.env_workers)
        self._partial_actions = report.partial_actions
        self._learn_specs(report.specs, 0)

    def _new_worker(self) -> LocalWorker:
        options, generation = self._options, self._recovery.generations[0]
        contexts = make_contexts(
            range(options.n_envs),
            worker_id=0,
            generation=generation,
            first_slot=generation * options.n_envs,
            seed=options.seed,
            log_dir=options.log_dir,
        )
        factory = GroupFactory(self._factories, contexts, options.infos, options.check_values)
        return LocalWorker(factory, self._times[0], rotates=options.zero_copy)

    def _replace(self, worker_id: int) -> EnvWorker:
        self.env_workers[worker_id].close_quietly()
        return self._new_worker()

    def _begin_again(self, worker: EnvWorker, config: ResetConfig) -> None:
        local: LocalWorker = self.env_workers[0]
        local.send(CommandName.RESET, config)
        try:
            response = local.recv()
        except KeyboardInterrupt as error:
            local.was_interrupted(error, CommandName.RESET)
            raise
        if local.group is not None:
            self._tell_of_start(local)
        self._gathering.arrive(response)

    def _tell_of_start(self, worker: LocalWorker) -> None:
        generation = self._recovery.generations[0]
        self.events.add(Started(worker_id=0, generation=generation, pid=None, start_s=worker.times.start_s))

    def _collect(self, wait: Wait) -> list[EnvironmentResponse]:
        responses = self._collect_from(self.step_queue, wait)
        group = self.env_workers[0].group
        if group is not None and len(group.behavior_specs) != self._n_specs:
            self._n_specs = len(group.behavior_specs)
            self._learn_specs(group.behavior_specs, 0)
        return responses

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


class LocalWorker:
    """A worker that is an object in this process."""

    def __init__(self, factory: GroupFactory, times: WorkerTimes, *, rotates: bool) -> None:
        """``rotates``: let the environments write into three sets of arrays in turn, so that a StepInfo stays valid for
        a while.
        """
        self.worker_id = 0
        self.waiting = False
        self.previous_step: StepInfo | None = None
        self.times = times
        self.group: Any = None  # an EnvGroup, once started
        self._factory = factory
        self._rotates = rotates
        self._asked: tuple[CommandName, Any] | None = None
        self._step: tuple[CommandName, Any] | None = None
        self._stepped: EnvironmentResponse | None = None
        self._buffers: list[RowBuffer] = []
        self._ended_ns = time.monotonic_ns()

    def start(self) -> StartReport:
        """Make the environments; raises as a worker process's start does."""
        asked_ns = time.monotonic_ns()
        try:
            self.group = self._factory()
        except (Exception, SystemExit) as error:
            env_ids = [context.env_id for context in self._factory.contexts]
            raise describe_failure(error, worker_id=0, env_ids=env_ids, phase="start") from error
        self._ended_ns = time.monotonic_ns()
        self.times.started(asked_ns, self._ended_ns, generation=self._factory.contexts[0].generation)
        if self._rotates:
            self._make_buffers(self.group)
        report: StartReport = COMMANDS[CommandName.START](self.group, None)
        return report

    def close_quietly(self) -> None:
        """Close the environments, whatever they say to that."""
        if self.group is not None:
            try:
                self.group.close()
            except (Exception, SystemExit):
                _logger.exception("an environment failed to close")

    def _make_buffers(self, group: EnvGroup) -> None:
        if len(group.behavior_specs) == 1:
            ((behavior, spec),) = group.behavior_specs.items()
            if len(group.env_ids) == group.max_agents[behavior]:
                ids = only_agents(group.env_ids)
                self._buffers = [RowBuffer.empty(spec.observation, ids) for _ in range(3)]

    def send(self, name: str, payload: Any = None) -> None:
        """Remember a command; it is carried out when its answer is asked for, and never before a step in flight."""
        command = CommandName(name)
        if command in (CommandName.STEP, CommandName.STEP_ROWS):
            self._step = (command, payload)
            return
        if self._step is not None:
            self._stepped = self._take_step()
        if command is CommandName.RESET:
            self._stepped = None
        self._asked = (command, payload)

    def recv(self) -> EnvironmentResponse:
        """Carry out the command that was sent."""
        if self._asked is None:
            raise RuntimeError("recv() without send()")
        (name, payload), self._asked = self._asked, None
        if self.group is None:  # it takes another's place
            try:
                self.start()
            except EnvManagerError as error:
                return EnvironmentResponse(CommandName.FAILED, 0, error)
        started_ns = time.monotonic_ns()
        response = self._obey(name, payload)
        self._ended_ns = time.monotonic_ns()
        self.times.answered(name, self._ended_ns - started_ns, self._ended_ns)
        return response

    @property
    def has_step(self) -> bool:
        """Whether a step was sent whose answer has not been taken."""
        return self._step is not None or self._stepped is not None

    def take_step(self) -> EnvironmentResponse | None:
        """The answer to the step that was sent, taking it now; None when there is none."""
        if self._stepped is not None:
            stepped, self._stepped = self._stepped, None
            return stepped
        return None if self._step is None else self._take_step()

    def _take_step(self) -> EnvironmentResponse:
        assert self._step is not None
        (name, actions), self._step = self._step, None
        if self._buffers:
            self._buffers.append(self._buffers.pop(0))
            self.group.offer_rows(self._buffers[0])
        started_ns = time.monotonic_ns()
        try:
            response = self._obey(name, actions)
        except KeyboardInterrupt as error:
            self.was_interrupted(error, name)
            raise
        idle_ns, self._ended_ns = started_ns - self._ended_ns, time.monotonic_ns()
        self.times.stepped(self._ended_ns - started_ns, idle_ns, self._ended_ns)
        return response

    def was_interrupted(self, error: KeyboardInterrupt, name: CommandName) -> None:
        """The environments were stopped half-way: whoever goes on after this must reset first."""
        self._stepped = self._failed(error, name)

    def _obey(self, name: CommandName, payload: Any) -> EnvironmentResponse:
        try:
            with let_through():
                result = COMMANDS[name](self.group, payload)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return self._failed(error, name)
        return EnvironmentResponse(CommandName.STEP if name is CommandName.STEP_ROWS else name, 0, result)

    def _failed(self, error: BaseException, name: CommandName) -> EnvironmentResponse:
        env_ids = env_ids_of_failure(self.group, 0)
        if self.group is not None:
            self.group.current_env_id = None
        failure = describe_failure(error, worker_id=0, env_ids=env_ids, phase=phase_of(name))
        return EnvironmentResponse(CommandName.FAILED, 0, failure)


class LocalStepQueue:
    """A step queue whose one step is taken when somebody asks for it."""

    def __init__(self, workers: list[Any]) -> None:
        self._workers = workers

    def empty(self) -> bool:
        """Whether no step was sent."""
        return not self._workers[0].has_step

    def get_nowait(self) -> EnvironmentResponse:
        """The answer to the step that was sent."""
        response: EnvironmentResponse | None = self._workers[0].take_step()
        if response is None:
            raise queue.Empty
        return response

    def get(self, *, timeout: float | None = None) -> EnvironmentResponse:
        """As ``get_nowait``; when nothing was sent, a replacement may be what the ``timeout`` is for."""
        if timeout and self.empty():
            with let_through():
                time.sleep(timeout)
        return self.get_nowait()
