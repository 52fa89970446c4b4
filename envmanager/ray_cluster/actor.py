"""The actor: hosts the environments of one worker, wherever Ray has put it, and obeys commands.

The rule: it is a plain class that knows nothing of Ray, so it can be run in a test, and it never raises: whatever an
environment does is in the answer. What Ray reports as an error is the end of the actor.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from typing import Any

from envmanager._workers.hosting import (
    COMMANDS,
    GroupFactory,
    Reporter,
    describe_failure,
    env_ids_of_failure,
    phase_of,
)
from envmanager._workers.wire import CODES, FAILED_CODE, dumps_failure
from envmanager.data.steps import CommandName, RowBuffer, Steps, only_agents
from envmanager.environment import EnvGroup
from envmanager.errors import EnvManagerError
from envmanager.ray_cluster.wire import STEPPING, Answer, name_of, pack_answer, pack_steps, payload_of

_STEPS = (*STEPPING, CommandName.RESET)


class EnvActor:
    """The environments of one worker."""

    def __init__(self, worker_id: int, env_ids: tuple[int, ...], pickled_factory: bytes) -> None:
        self._worker_id = worker_id
        self._env_ids = env_ids
        self._pickled_factory = pickled_factory
        self._group: EnvGroup | None = None
        self._reporter = Reporter()

    def hello(self) -> tuple[int, str]:
        """Its process and its host: it has been placed, and its code is there."""
        return os.getpid(), socket.gethostname()

    def ping(self) -> None:
        """It lives."""

    def obey(self, command: bytes) -> Any:
        """Carry out a command; the answer."""
        began_ns = time.monotonic_ns()
        name = name_of(command)
        try:
            return self._carried_out(name, payload_of(command), began_ns)
        except BaseException as error:  # SystemExit, KeyboardInterrupt and MemoryError too: they are the environment's
            failure = self._failure(error, name)
            return pack_answer(Answer(FAILED_CODE, time.monotonic_ns() - began_ns, dumps_failure(failure), None))

    def _carried_out(self, name: CommandName, payload: Any, began_ns: int) -> Any:
        if name is CommandName.CLOSE:
            self._close()
            return pack_answer(Answer(CODES[name], 0, None, None))
        if name is CommandName.START:
            self._start()
        group = self._group
        if group is None:
            raise RuntimeError("its environments could not be made")
        result = COMMANDS[name](group, payload)
        news = None if name is CommandName.START else self._reporter.news(group)
        busy_ns = time.monotonic_ns() - began_ns
        steps: Steps | None = result if name in _STEPS else None
        payload = result if steps is None else pack_steps(steps)
        packed = pack_answer(Answer(CODES[name], busy_ns, payload, news), steps)
        if news is not None:
            self._reporter.reported(group, news)
        return packed

    def _start(self) -> None:
        factory: GroupFactory = pickle.loads(self._pickled_factory)
        self._group = group = factory()
        self._reporter.n_reported = len(group.behavior_specs)  # by the answer to "start"
        if len(group.behavior_specs) == 1:
            ((behavior, spec),) = group.behavior_specs.items()
            if len(group.env_ids) == group.max_agents[behavior]:
                group.offer_rows(RowBuffer.empty(spec.observation, only_agents(group.env_ids)))

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _failure(self, error: BaseException, name: CommandName) -> EnvManagerError:
        group = self._group
        env_ids = self._env_ids if group is None else env_ids_of_failure(group, self._worker_id)
        if group is not None:
            group.current_env_id = None
        return describe_failure(error, worker_id=self._worker_id, env_ids=env_ids, phase=phase_of(name))
