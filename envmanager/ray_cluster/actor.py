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

from envmanager.data.specs import BehaviorSpecs
from envmanager.data.steps import STEPPING, CommandName, StartReport
from envmanager.environment import EnvGroup
from envmanager.hosts.failures import dumps_failure
from envmanager.hosts.hosting import COMMANDS, GroupFactory, failed
from envmanager.hosts.wire import CODES, FAILED_CODE, IN_MEMORY, STEP_CODE, dumps, response_message, step_message
from envmanager.ray_cluster.wire import Answer, SentRows, pack_answer, unpack_command


class EnvActor:
    """A Ray actor that hosts the environments of one worker."""

    def __init__(self, worker_id: int, env_ids: tuple[int, ...], pickled_factory: bytes) -> None:
        self._worker_id = worker_id
        self._env_ids = env_ids
        self._pickled_factory = pickled_factory
        self._group: EnvGroup | None = None
        self._rows: SentRows | None = None
        self._n_reported = 0
        """Number of behaviors whose specs were sent with an answer; those sent by "start" do not count."""

    def hello(self) -> tuple[int, str]:
        """Return the process id and the host name: the actor has been placed, and its code is there."""
        return os.getpid(), socket.gethostname()

    def ping(self) -> None:
        """Return nothing: an answer shows that the actor lives."""

    def obey(self, command: bytes) -> Any:
        """Carry out a command, and return the packed answer; never raises."""
        began_ns = time.monotonic_ns()
        name, flags, data = unpack_command(command)
        try:
            return self._carried_out(name, flags, data, began_ns)
        except BaseException as error:  # SystemExit, KeyboardInterrupt and MemoryError too: they are the environment's
            response = failed(error, name, worker_id=self._worker_id, env_ids=self._env_ids, group=self._group)
            pickled = dumps_failure(response.payload)
            return pack_answer(Answer(FAILED_CODE, 0, 0, b"", time.monotonic_ns() - began_ns, pickled))

    def _carried_out(self, name: CommandName, flags: int, data: memoryview, began_ns: int) -> Any:
        if name is CommandName.CLOSE:
            self._close()
            return pack_answer(Answer(CODES[name], 0, 0, b"", 0, dumps(None)))
        if name is CommandName.START:
            self._start()
        group, rows = self._group, self._rows
        if group is None:
            raise RuntimeError("its environments could not be made")
        payload = rows.step_payload(name, flags, data) if rows and flags & IN_MEMORY else pickle.loads(data)
        result = COMMANDS[name](group, payload)
        busy_ns = time.monotonic_ns() - began_ns
        specs = None
        if name is CommandName.START:
            self._lay_out_rows(group, result)
        elif len(group.behavior_specs) != self._n_reported:
            specs = dict(group.behavior_specs)
        packed = pack_answer(self._answer(name, result, busy_ns, specs))
        if specs is not None:
            self._n_reported = len(specs)
        return packed

    def _answer(self, name: CommandName, result: Any, busy_ns: int, specs: BehaviorSpecs | None) -> Answer:
        if name not in STEPPING or self._rows is None:
            flags, data = response_message(result, specs)
            return Answer(CODES[name], flags, 0, b"", busy_ns, data)
        flags, n_ended, steps = self._rows.put_steps(result)
        return Answer(STEP_CODE, flags, n_ended, steps, busy_ns, step_message(result, flags, specs) or b"")

    def _start(self) -> None:
        factory: GroupFactory = pickle.loads(self._pickled_factory)
        self._group = factory()

    def _lay_out_rows(self, group: EnvGroup, report: StartReport) -> None:
        self._rows = SentRows(report, group.env_ids)
        buffer = self._rows.rows.buffer(0)
        if buffer is not None:
            group.offer_rows(buffer)

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
