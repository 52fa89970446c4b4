"""Replay of a recording: the manager's own code runs again, over a host that tells it what the recorded one told.

::

    trainer ── step, send, recv ──▶ ReplayEnvManager ── send, recv, take, now ──▶ ReplayHost ◀── Tape ◀── run.emrec

The rule: what the trainer does must be what it did. Its actions are compared with the recorded ones, and so is the
order of what the manager asks.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envmanager.data.steps import STEPPING, CommandName, EnvironmentResponse, StartReport
from envmanager.env_manager import EnvManager
from envmanager.errors import EnvManagerError, UsageError
from envmanager.kernel.host import EnvWorker, HostContext, ResponseSource, WorkerHost
from envmanager.options import ResetConfig, Wait
from envmanager.recording.codec import thawed, thawed_response
from envmanager.recording.file import FORMAT, BadRecording, Record, read_records

_ASKED = {
    "send": "a command",
    "step": "a step",
    "recv": "the wait for an answer",
    "launch": "a worker's start",
    "begin_again": "a worker's reset",
    "take": "a look at what has arrived",
    "get": "a wait for steps",
    "now": "a look at the time",
    "is_gone": "a look at a worker",
    "started": "the start",
}


class ReplayDiverged(EnvManagerError):
    """Error raised when the trainer does something other than in the recorded run.

    ``step``: number of the worker's step since the start, from 0; ``worker_id``; ``row``: the first row of its actions
    that differs, or -1; ``recorded`` and ``found``: what was done there, such as the two actions.
    """

    def __init__(self, text: str, *, step: int, worker_id: int, row: int, recorded: Any, found: Any) -> None:
        super().__init__(text)
        self.step, self.worker_id, self.row = step, worker_id, row
        self.recorded, self.found = recorded, found


class RecordingEnded(EnvManagerError):
    """Error raised when the trainer goes on after the end of the recording."""


class Tape:
    """The facts of a recording, one after the other."""

    def __init__(self, path: str, *, strict: bool = True) -> None:
        """Open a recording. Raises UsageError if there is none, and BadRecording if it is damaged."""
        self.path, self.strict = path, strict
        self.n_diverged = 0
        """Number of actions that differed from the recorded ones, if that is no error."""
        self.n_steps: dict[int, int] = {}
        """Number of steps that each worker was asked for, by worker_id."""
        self._records = read_records(path)
        first = next(self._records, None)
        if first is None or first.kind != "about" or first.content.get("format") != FORMAT:
            raise BadRecording(f"{path} does not begin as a recording of this version of envmanager does.")
        self.about: Mapping[str, Any] = first.content
        self._facts: deque[tuple[str, int, Any]] = deque()

    def peek(self) -> tuple[str, int, Any]:
        """Return the next fact, and leave it there. Raises RecordingEnded if there is none."""
        while not self._facts:
            record: Record | None = next(self._records, None)
            if record is None:
                raise RecordingEnded(
                    f"the recording {self.path} ends here, after {sum(self.n_steps.values()):,} steps of workers, but "
                    "the trainer goes on."
                )
            if record.kind == "facts":
                self._facts.extend(record.content)
        return self._facts[0]

    def next(self, what: str, worker_id: int = -1) -> Any:
        """Return the content of the next fact. Raises ReplayDiverged if it is of another kind or worker."""
        recorded, of_worker, content = self.peek()
        if (recorded, of_worker) != (what, worker_id):
            raise self.diverged(f"{_ASKED[what]} was asked for", worker_id, found=what)
        self._facts.popleft()
        return content

    def arrived(self, call: str) -> Sequence[EnvironmentResponse]:
        """Return what a call of the source has returned, perhaps nothing."""
        what, _, content = self.peek()
        if what == f"no {call}":
            if content == 1:
                self._facts.popleft()
            else:
                self._facts[0] = (what, -1, content - 1)
            return ()
        _, forms = self.next(call)
        return [thawed_response(form) for form in forms]

    def diverged(self, text: str, worker_id: int, *, found: Any) -> ReplayDiverged:
        """Return the error for something that was done in place of what is recorded next."""
        what, of_worker, content = self.peek()
        who = "" if of_worker < 0 else f" of worker {of_worker}"
        step = self.n_steps.get(worker_id, 0)
        return ReplayDiverged(
            f"the replay of {self.path} has left the recorded run: {text}"
            + ("" if worker_id < 0 else f" of worker {worker_id} (step {step})")
            + f", but {_ASKED.get(what.removeprefix('no '), what)}{who} came next in the recording.",
            step=step,
            worker_id=worker_id,
            row=-1,
            recorded=(what, of_worker, content),
            found=found,
        )

    def compare(self, worker_id: int, name: str, payload: Any) -> None:
        """Compare a command with the next fact. Raises ReplayDiverged, or counts, if actions differ."""
        step = self.n_steps.get(worker_id, 0)
        if name in STEPPING:
            rows, actions, _ = self.next("step", worker_id)
            recorded: Any = {behavior: thawed(form) for behavior, form in actions.items()}
            recorded_name = CommandName.STEP if rows is None else CommandName.STEP_ROWS
            recorded = recorded if rows is None else (thawed(rows), recorded)
            self.n_steps[worker_id] = step + 1
        else:
            recorded_name, recorded = self.next("send", worker_id)
            recorded = pickle.loads(recorded)
        if recorded_name == name and _same(recorded, payload):
            return
        if not self.strict and recorded_name in STEPPING and name in STEPPING:
            self.n_diverged += 1
            return
        row, before, now = _first_difference(recorded, payload)
        raise ReplayDiverged(
            f"the replay of {self.path} has left the recorded run: in step {step} of worker {worker_id} "
            f"the trainer sent {name}"
            + (f", row {row}: {now!r}" if row >= 0 else f" {now!r}")
            + f"; the recording has {recorded_name} {before!r}.",
            step=step,
            worker_id=worker_id,
            row=row,
            recorded=before,
            found=now,
        )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        one, other = np.asarray(one), np.asarray(other)
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.dtype.hasobject:
            return all(map(_same, one.reshape(-1).tolist(), other.reshape(-1).tolist()))
        return bool(one.tobytes() == other.tobytes())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(type(one) is type(other) and (one is other or one == other or one != one))


def _first_difference(recorded: Any, found: Any) -> tuple[int, Any, Any]:
    """Return the first row of two payloads that differs, and what it is in each; row -1 if they have no rows."""
    if isinstance(recorded, tuple) and isinstance(found, tuple) and len(recorded) == len(found) == 2:
        recorded, found = (recorded, found) if not _same(recorded[0], found[0]) else (recorded[1], found[1])
    if isinstance(recorded, Mapping) and isinstance(found, Mapping):
        for key in recorded:
            if key in found and not _same(recorded[key], found[key]):
                return _first_difference(recorded[key], found[key])
        return -1, sorted(map(str, recorded)), sorted(map(str, found))
    if isinstance(recorded, np.ndarray) and isinstance(found, np.ndarray) and len(recorded) == len(found):
        for row, (before, now) in enumerate(zip(recorded, found, strict=True)):
            if not _same(before, now):
                return row, _plain(before), _plain(now)
    return -1, recorded, found


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


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
        return self._tape.arrived("take")

    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        return self._tape.arrived("get")


class ReplayHost(WorkerHost):
    """The host of a recorded run."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self.rewrites_arrays = False  # each response has arrays of its own
        self.step_queue = ReplaySource(tape)

    def open(self, context: HostContext) -> None:
        super().open(context)

    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        recorded, error = self._tape.next("launch", worker_id)
        if recorded != generation:
            raise self._tape.diverged(f"generation {generation}", worker_id, found=generation)
        if error is not None:
            raise pickle.loads(error)
        return ReplayWorker(worker_id, self._tape)

    def await_start(self) -> dict[int, StartReport]:
        reports, (self.accepts_device_arrays, self.steps_some_rows) = pickle.loads(self._tape.next("started"))
        return reports  # type: ignore[no-any-return]

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        recorded, response = self._tape.next("begin_again", worker_id)
        if not _same(pickle.loads(recorded), config):
            raise self._tape.diverged(f"a reset with {config}", worker_id, found=config)
        return None if response is None else thawed_response(response)

    def is_gone(self, worker_id: int) -> bool:
        return self._tape.next("is_gone", worker_id)  # type: ignore[no-any-return]

    def now(self) -> float:
        return self._tape.next("now")  # type: ignore[no-any-return]

    def close(self) -> None:
        pass


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
        recording: str,
        strict: bool = True,
        wait: Wait | str | int | None = None,
        seed: int | None = None,
        trace: str | None = None,
    ) -> None:
        """``recording``: path of the file. ``env_factory``, ``n_envs`` and ``seed`` are accepted, so that one can
        switch to a replay by changing ``kind`` alone; those of the recorded run are used. Raises UsageError if there is
        no file or it has no observations, and BadRecording if it is damaged.
        """
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


__all__ = ["RecordingEnded", "ReplayDiverged", "ReplayEnvManager"]
