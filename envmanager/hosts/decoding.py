"""Makes responses of what a worker process sends: messages of its connection, and steps in shared memory."""

from __future__ import annotations

import pickle
from typing import Any

import attrs

from envmanager.data.specs import BehaviorSpecs
from envmanager.data.steps import AgentSteps, CommandName, EnvironmentResponse, phase_of
from envmanager.errors import EnvManagerError
from envmanager.hosts.channel import Message
from envmanager.hosts.failures import describe_failure, loads_failure
from envmanager.hosts.shared_rows import WorkerRows
from envmanager.hosts.wire import FAILED_CODE, FULL, IN_MEMORY, WITH_SPECS


class Decoder:
    """Makes responses of one worker's messages and records."""

    def __init__(self, worker_id: int, env_ids: tuple[int, ...]) -> None:
        self._worker_id = worker_id
        self._env_ids = env_ids
        self._worker_rows: WorkerRows | None = None
        self._in_place: list[EnvironmentResponse] = []
        """Responses by slot: of steps that were written in place and in which no episode ended."""

    def attach(self, worker_rows: WorkerRows | None) -> None:
        """Find steps there from now on; None: the memory is given back."""
        self._worker_rows = worker_rows
        self._in_place = (
            []
            if worker_rows is None
            else [self._step(worker_rows.full(slot)) for slot in range(worker_rows.layout.n_slots)]
        )

    def _step(self, steps: Any, specs: BehaviorSpecs | None = None) -> EnvironmentResponse:
        return EnvironmentResponse(CommandName.STEP, self._worker_id, steps, specs)

    def failed(self, error: EnvManagerError) -> EnvironmentResponse:
        """The response that reports this error."""
        return EnvironmentResponse(CommandName.FAILED, self._worker_id, error)

    def response(self, message: Message, asked: CommandName) -> EnvironmentResponse:
        """The response to what was ``asked``."""
        if message.code == FAILED_CODE:
            return self.failed(loads_failure(message.data))
        try:
            payload = pickle.loads(message.data)
        except Exception as error:
            return self.failed(self._cannot_unpickle(error, asked))
        payload, specs = payload if message.flags & WITH_SPECS else (payload, None)
        return EnvironmentResponse(asked, self._worker_id, payload, specs)

    def in_place(self, slot: int, n_ended: int) -> EnvironmentResponse:
        """The response to a step all of whose rows lie in a slot of the memory; ``n_ended`` have final rows."""
        if not n_ended:
            return self._in_place[slot]
        assert self._worker_rows is not None
        return self._step(self._worker_rows.full_with_final(slot, n_ended))

    def step(self, code: int, slot: int, flags: int, n_ended: int, data: bytes | None) -> EnvironmentResponse:
        """The response to a step that lies in a slot of the memory, in pickled ``data``, or in both."""
        if code == FAILED_CODE:
            return self.failed(loads_failure(data or b""))
        infos: Any = {}
        try:
            if flags & IN_MEMORY and self._worker_rows is not None:
                infos, specs = ({}, None) if data is None else pickle.loads(data)
                rows = self._worker_rows
                if not flags & FULL:
                    steps = rows.read(slot)
                else:
                    steps = rows.full_with_final(slot, n_ended) if n_ended else rows.full(slot)
            else:
                steps, specs = pickle.loads(data or b"")
        except Exception as error:
            return self.failed(self._cannot_unpickle(error, CommandName.STEP))
        if infos:
            steps = {name: _with_infos(own, infos.get(name)) for name, own in steps.items()}
        return self._step(steps, specs)

    def _cannot_unpickle(self, error: Exception, command: CommandName) -> EnvManagerError:
        """Return an error: an object has a constructor that pickle cannot call, or a class that only the worker has."""
        text = f"what it returned cannot be unpickled in the trainer: {type(error).__name__}: {error}"
        phase = phase_of(command)
        return describe_failure(RuntimeError(text), worker_id=self._worker_id, env_ids=self._env_ids, phase=phase)


def _with_infos(steps: AgentSteps, infos: Any) -> AgentSteps:
    info, reset_info = (None, None) if infos is None else infos
    return attrs.evolve(steps, info=info, reset_info=reset_info)
