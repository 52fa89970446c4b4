"""Makes responses of what a worker process sends: messages of its connection, and steps in shared memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import attrs

from envmanager._workers.channel import Message
from envmanager._workers.hosting import describe_failure, phase_of
from envmanager._workers.wire import ENDED, FAILED_CODE, FULL, IN_MEMORY, WITH_NEWS, loads_failure
from envmanager._workers.worker_rows import WorkerRows
from envmanager.data.reports import News
from envmanager.data.specs import SpecConflict
from envmanager.data.steps import AgentSteps, CommandName, EnvironmentResponse
from envmanager.errors import EnvManagerError


def _unheard(_: News, __: int) -> None:
    """Nobody listens yet."""


class Decoder:
    """Makes responses of one worker's messages and records, and passes its news on."""

    def __init__(self, worker_id: int, env_ids: tuple[int, ...]) -> None:
        self.on_news: Callable[[News, int], None] = _unheard
        """Called with what the worker reports besides its responses."""
        self._worker_id = worker_id
        self._env_ids = env_ids
        self._worker_rows: WorkerRows | None = None
        self._in_place: list[EnvironmentResponse] = []
        """By slot, the response of a step that was written in place and in which nobody ended."""

    def attach(self, worker_rows: WorkerRows | None) -> None:
        """Find steps there from now on; None: the memory is given back."""
        self._worker_rows = worker_rows
        self._in_place = (
            []
            if worker_rows is None
            else [self._step(worker_rows.full(slot)) for slot in range(worker_rows.layout.n_slots)]
        )

    def _step(self, steps: Any) -> EnvironmentResponse:
        return EnvironmentResponse(CommandName.STEP, self._worker_id, steps)

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
        payload, news = payload if message.flags & WITH_NEWS else (payload, None)
        response = EnvironmentResponse(asked, self._worker_id, payload)
        return response if news is None else self.pass_on(news, response)

    def in_place(self, slot: int, n_ended: int) -> EnvironmentResponse:
        """The response to a step all of whose rows lie in a slot of the memory; ``n_ended`` have final rows."""
        if not n_ended:
            return self._in_place[slot]
        assert self._worker_rows is not None
        return self._step(self._worker_rows.full_with_final(slot, n_ended))

    def step(self, code: int, slot: int, flags: int, n_ended: int, data: bytes | None) -> EnvironmentResponse:
        """The response behind any record and its message; the arrays are views of shared memory."""
        if code == FAILED_CODE:
            return self.failed(loads_failure(data or b""))
        infos: Any = {}
        try:
            if flags & IN_MEMORY and self._worker_rows is not None:
                infos, news = ({}, None) if data is None else pickle.loads(data)
                steps = _read(self._worker_rows, slot, flags, n_ended)
            else:
                steps, news = pickle.loads(data or b"")
        except Exception as error:
            return self.failed(self._cannot_unpickle(error, CommandName.STEP))
        if infos:
            steps = {name: _with_infos(own, infos.get(name)) for name, own in steps.items()}
        return self._step(steps) if news is None else self.pass_on(news, self._step(steps))

    def pass_on(self, news: News, response: EnvironmentResponse) -> EnvironmentResponse:
        """The response, once its news are passed on; a "failed" one when a behavior has two specs."""
        try:
            self.on_news(news, self._worker_id)
        except SpecConflict as error:
            return self.failed(self._failure(error, response.name))
        return response

    def _failure(self, error: Exception, command: CommandName) -> EnvManagerError:
        phase = phase_of(command)
        return describe_failure(error, worker_id=self._worker_id, env_ids=self._env_ids, phase=phase)

    def _cannot_unpickle(self, error: Exception, command: CommandName) -> EnvManagerError:
        """What a worker pickled can have a constructor that pickle cannot call, or a class that only the worker has."""
        text = f"what it returned cannot be unpickled in the trainer: {type(error).__name__}: {error}"
        return self._failure(RuntimeError(text), command)


def _read(worker_rows: WorkerRows, slot: int, flags: int, n_ended: int) -> dict[str, AgentSteps]:
    if not flags & FULL:
        return worker_rows.read(slot)
    return worker_rows.full_with_final(slot, n_ended) if flags & ENDED else worker_rows.full(slot)


def _with_infos(steps: AgentSteps, infos: Any) -> AgentSteps:
    info, reset_info = (None, None) if infos is None else infos
    return attrs.evolve(steps, info=info, reset_info=reset_info)
