"""The facts of a recording, one after the other, as the answers of a host to a trainer that does the same again.

The rule: what the trainer does must be what it did. Its actions are compared with the recorded ones, and so is the
order of what the manager asks.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import STEPPING, CommandName, EnvironmentResponse
from envmanager.errors import EnvManagerError
from envmanager.recording.codec import Apart, kind_of, packed, unpacked
from envmanager.recording.file import Fact, read_facts
from envmanager.recording.tap import Tap

_ASKED = {
    "send": "a command",
    "step": "a step",
    "again": "a step that is sent again, as its worker was replaced",
    "recv": "the wait for an answer",
    "launch": "a worker's start",
    "begin_again": "a worker's reset",
    "take": "a look at what has arrived",
    "get": "a wait for steps",
    "now": "a look at the time",
    "why_due": "a look whether a worker is due",
    "is_gone": "a look at a worker",
    "await_start": "the start",
    "check_can_travel": "a value that cannot be sent",
}
"""What a fact is about. Those of other kinds tell what a manager knows by itself, and are left out here."""

_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_VALUES = (str, bytes, int, float, complex, type(None), np.generic)
"""Types whose ``repr`` tells all of a value, also which zero it is."""


class ReplayDiverged(EnvManagerError):
    """Error raised when the trainer does something other than in the recorded run.

    ``step``: number of the worker's step since the start, from 0; ``worker_id``; ``row``: the first row of its actions
    that differs, or -1; ``recorded`` and ``found``: what was done there, such as the two actions.
    """

    def __init__(self, text: str, *, step: int, worker_id: int, recorded: Any, found: Any, row: int = -1) -> None:
        super().__init__(text)
        self.step, self.worker_id, self.row = step, worker_id, row
        self.recorded, self.found = recorded, found


class RecordingEnded(EnvManagerError):
    """Error raised when the trainer goes on after the end of the recording."""


class Tape(Tap):
    """The tap that replays: it asks no host, and answers what is recorded, as long as the trainer asks the same."""

    def __init__(self, path: str, *, strict: bool = True, trust: bool = False) -> None:
        """Open a recording. Raises UsageError if there is none, and BadRecording if it is damaged.

        Without ``strict``, actions may differ. ``trust``: whether to unpickle the objects of classes that it holds.
        Without it, an answer with such an object raises UsageError, and in commands any of its class is as recorded.
        """
        self.path, self.strict = path, strict
        self._answer = Apart.load if trust else Apart.refuse
        self._command = Apart.load if trust else Apart.leave
        self.n_diverged = 0
        """Number of actions that differed from the recorded ones, if that is no error."""
        self.n_steps: dict[int, int] = {}
        """Number of steps that each worker was asked for, by worker_id."""
        self._facts = read_facts(path)
        self.about: Mapping[str, Any] = next(self._facts)
        self._next: Fact | None = None
        self._n_empty = 0
        """Number of calls of the source that have found nothing, of those of the next fact."""

    def close(self) -> None:
        self._facts.close()

    def send(self, worker_id: int, name: str, payload: Any, do: Callable[[str, Any], None]) -> None:
        """Compare a command with the recorded one. Raises ReplayDiverged, or counts, if actions differ."""
        name, step = CommandName(name).value, self.n_steps.get(worker_id, 0)
        if name in STEPPING:
            if again := self.peek().what == "again":
                step -= 1
            rows, recorded, *_ = self.next("again" if again else "step", worker_id).content(self._command)
            recorded_name = CommandName.STEP if rows is None else CommandName.STEP_ROWS
            recorded = recorded if rows is None else (rows, recorded)
            self.n_steps[worker_id] = step + 1
        else:
            recorded_name, recorded = self.next("send", worker_id).content(self._command)
        if recorded_name == name and self._is_same(recorded, payload):
            return
        if not self.strict and recorded_name in STEPPING and name in STEPPING:
            self.n_diverged += 1
            return
        row, before, now = _first_difference(recorded, payload)
        where = f"step {step} of worker {worker_id}" + (f", row {row}," if row >= 0 else "")
        sent, was_sent = ("the action" if each in STEPPING else each for each in (name, recorded_name))
        text = f"in {where} the trainer sent {sent} {now!r}; the recording has {was_sent} {before!r}"
        raise self._diverged(text, worker_id, before, now, step=step, row=row)

    def call(self, what: str, worker_id: int, asked: Any, do: Callable[[], Any]) -> Any:
        if what == "check_can_travel":
            self.raise_refused()
            return None
        fact = self.next(what, worker_id)
        # An error of begin_again would count as a failure of the worker.
        recorded, answer, error = fact.content(self._command if what == "begin_again" else self._answer)
        if not self._is_same(recorded, asked):
            self._next = fact
            raise self._another(f"{_ASKED[what]} with {asked}", worker_id, asked)
        if error is not None:
            raise error
        return answer

    def take(self) -> Sequence[EnvironmentResponse]:
        return self.arrived("take")

    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        return self.arrived("get")

    def peek(self) -> Fact:
        """Return the next fact, and leave it there. Raises RecordingEnded if there is none."""
        while self._next is None:
            fact = next(self._facts, None)
            if fact is None:
                raise RecordingEnded(
                    f"the recording {self.path} ends here, after {sum(self.n_steps.values()):,} steps of workers, but "
                    "the trainer goes on."
                )
            if fact.what.removeprefix("no ") in _ASKED:
                self._next = fact
        return self._next

    def next(self, what: str, worker_id: int = -1) -> Fact:
        """Return the next fact. Raises ReplayDiverged if it is of another kind or worker."""
        fact = self.peek()
        if (fact.what, fact.worker_id) != (what, worker_id):
            raise self._another(_ASKED[what], worker_id, what)
        self._next = None
        return fact

    def raise_refused(self) -> None:
        """Raise the error with which a payload was refused, if that is the next fact."""
        with contextlib.suppress(RecordingEnded):  # nothing was refused, and nothing was sent
            fact = self.peek()
            if fact.what == "check_can_travel":
                self._next = None
                raise fact.content(self._answer)[2]

    def arrived(self, call: str) -> Sequence[EnvironmentResponse]:
        """Return the recorded responses that a call of the source has returned, perhaps none."""
        fact = self.peek()
        if fact.what == f"no {call}":
            self._n_empty += 1
            if self._n_empty == fact.content():
                self._next, self._n_empty = None, 0
            return []
        _, responses = self.next(call).content(self._answer)
        return responses  # type: ignore[no-any-return]

    def _another(self, asked: str, worker_id: int, found: Any) -> ReplayDiverged:
        """Return the error for something that was asked for in place of what is recorded next."""
        fact, step = self.peek(), self.n_steps.get(worker_id, 0)
        of_next = "" if fact.worker_id < 0 else f" of worker {fact.worker_id}"
        of_this = "" if worker_id < 0 else f" of worker {worker_id} (step {step})"
        came = f"{_ASKED[fact.what.removeprefix('no ')]}{of_next} came next in the recording"
        text = f"{asked} was asked for{of_this}, but {came}"
        return self._diverged(text, worker_id, (fact.what, fact.worker_id, fact.content()), found, step=step)

    def _diverged(
        self, text: str, worker_id: int, recorded: Any, found: Any, *, step: int, row: int = -1
    ) -> ReplayDiverged:
        text = f"the replay of {self.path} has left the recorded run: {text}."
        return ReplayDiverged(text, step=step, worker_id=worker_id, recorded=recorded, found=found, row=row)

    def _is_same(self, recorded: Any, found: Any) -> bool:
        """Return whether a value is as recorded, once it has been recorded too."""
        return same(recorded, unpacked(packed(found), self._command))


def same(one: Any, other: Any, within: tuple[tuple[Any, Any], ...] = ()) -> bool:
    """Return whether two payloads are equal to the bit. ``within``: the pairs of objects of which they are parts."""
    if isinstance(one, Apart):
        return one.data is None or one.kind == (other.kind if isinstance(other, Apart) else kind_of(other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        one, other = np.asarray(one), np.asarray(other)
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.dtype.hasobject:
            return all(same(*pair, within) for pair in zip(one.reshape(-1), other.reshape(-1), strict=True))
        return bool(one.tobytes() == other.tobytes())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key], within) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(*pair, within) for pair in zip(one, other, strict=True))
    if type(one) is not type(other):
        return False
    if isinstance(one, _CODE):
        return bool(one.__qualname__ == other.__qualname__)
    if isinstance(one, _VALUES):
        return repr(one) == repr(other)
    return _have_same_parts(one, other, within)


def _have_same_parts(one: Any, other: Any, within: tuple[tuple[Any, Any], ...]) -> bool:
    """Return whether two objects of one type are equal, or are pickled as the same parts."""
    if any(one is before and other is then for before, then in within):
        return True
    with contextlib.suppress(Exception):  # of any kind: it is the object's own code
        if one is other or (not attrs.has(type(one)) and (one == other) is True):
            return True
    with contextlib.suppress(Exception):
        return same(one.__reduce_ex__(4), other.__reduce_ex__(4), (*within, (one, other)))
    return False


def _first_difference(recorded: Any, found: Any) -> tuple[int, Any, Any]:
    """Return the first row of two payloads that differs, and what it is in each; row -1 if they have no rows."""
    if isinstance(recorded, tuple) and isinstance(found, tuple) and len(recorded) == len(found) == 2:
        recorded, found = (recorded, found) if not same(recorded[0], found[0]) else (recorded[1], found[1])
    if isinstance(recorded, Mapping) and isinstance(found, Mapping):
        for key in recorded:
            if key in found and not same(recorded[key], found[key]):
                return _first_difference(recorded[key], found[key])
        return -1, sorted(map(str, recorded)), sorted(map(str, found))
    if isinstance(recorded, np.ndarray) and isinstance(found, np.ndarray) and len(recorded) == len(found):
        for row, (before, now) in enumerate(zip(recorded, found, strict=True)):
            if not same(before, now):
                return row, _plain(before), _plain(now)
    return -1, recorded, found


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
