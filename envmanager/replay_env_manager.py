"""Replay of a recording: the manager's own code runs again, over a host that tells it what the recorded one told.

::

    trainer ── step, send, recv ──▶ ReplayEnvManager ── send, recv, take, now ──▶ ReplayHost ◀── Tape ◀── run.emrec
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envmanager.data.steps import CommandName, EnvironmentResponse, StartReport
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.kernel.host import EnvWorker, ResponseSource, WorkerHost
from envmanager.options import ResetConfig, Wait
from envmanager.recording.codec import thawed_response, unpickled
from envmanager.recording.tape import Tape, same


class ReplayWorker:
    """A worker of the recorded run."""

    def __init__(self, worker_id: int, tape: Tape) -> None:
        self.worker_id, self._tape = worker_id, tape

    def send(self, name: str, payload: Any = None) -> None:
        """Compare a command with the recorded one."""
        self._tape.compare(self.worker_id, CommandName(name).value, payload)

    def recv(self) -> EnvironmentResponse:
        """Return the recorded answer."""
        return thawed_response(self._tape.next("recv", self.worker_id))


class ReplaySource(ResponseSource):
    """The source of the recorded responses, which returns them call by call."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def take(self) -> Sequence[EnvironmentResponse]:
        return [thawed_response(form) for form in self._tape.arrived("take")]

    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        return [thawed_response(form) for form in self._tape.arrived("get")]


class ReplayHost(WorkerHost):
    """The host of a recorded run."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self.rewrites_arrays = False  # each response has arrays of its own
        self.step_queue = ReplaySource(tape)

    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        recorded, error = self._tape.next("launch", worker_id)
        if recorded != generation:
            raise self._tape.diverged(f"generation {generation}", worker_id, found=generation)
        if error is not None:
            raise unpickled(error)
        return ReplayWorker(worker_id, self._tape)

    def await_start(self) -> dict[int, StartReport]:
        reports, told = unpickled(self._tape.next("started"))
        self.accepts_device_arrays, self.steps_some_rows, self.moves_all = told
        return reports  # type: ignore[no-any-return]

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        recorded, response = self._tape.next("begin_again", worker_id)
        if not same(unpickled(recorded), config):
            raise self._tape.diverged(f"a reset with {config}", worker_id, found=config)
        return None if response is None else thawed_response(response)

    def is_gone(self, worker_id: int) -> bool:
        return self._tape.next("is_gone", worker_id)  # type: ignore[no-any-return]

    def check_can_travel(self, payload: Any) -> None:
        self._tape.raise_refused()

    def now(self) -> float:
        return self._tape.next("now")  # type: ignore[no-any-return]

    def close(self) -> None:
        self._tape.close()


class ReplayEnvManager(EnvManager):
    """A manager that delivers the steps of a recorded run again, in the same order, without environments.

    A trainer that repeats what it did (with the same seeds) gets the same, and learns the same weights. If one of its
    actions differs from the recorded one, ReplayDiverged is raised; with ``strict=False`` it is counted in
    ``n_diverged``, and the recorded steps go on. Nothing waits: time is that of the recording.
    """

    def __init__(
        self,
        env_factory: Any = None,
        n_envs: int | None = None,
        *,
        recording: str | None = None,
        strict: bool = True,
        wait: Wait | str | int | None = None,
        seed: int | None = None,
        trace: str | None = None,
    ) -> None:
        """``recording``: path of the file. ``env_factory``, ``n_envs`` and ``seed`` are accepted, so that one can
        switch to a replay by changing ``kind`` alone; those of the recorded run are used. Raises UsageError if there is
        no file or it has no observations, and BadRecording if it is damaged.
        """
        if recording is None:
            raise UsageError("a replay needs a recording=…, the path of a file that was made with record=….")
        self.tape = tape = Tape(recording, strict=strict)
        about = tape.about
        if not about["observations"]:
            raise UsageError(f"{recording} was recorded without observations, so it can be read, but not replayed.")
        options = {name: about[name] for name in ("seed", "restarts", "check_values", "episodes")}
        super().__init__(about["env_ids"], wait=about["wait"] if wait is None else wait, trace=trace, **options)
        self.start(ReplayHost(tape))

    @property
    def n_diverged(self) -> int:
        """Number of steps whose actions differed from the recorded ones, if ``strict`` is False."""
        return self.tape.n_diverged
