"""The facts of a recording, one after the other, beside a trainer that does the same again.

The rule: what the trainer does must be what it did. Its actions are compared with the recorded ones, and so is the
order of what the manager asks.
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import STEPPING, CommandName, EnvironmentResponse
from envmanager.errors import EnvManagerError
from envmanager.recording.codec import Unrecorded, frozen_response, thawed, thawed_response, unpickled
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
    "refused": "a value that cannot be sent",
}


_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_VALUES = (str, bytes, int, float, complex, type(None), np.generic)
"""Types whose ``repr`` tells all of a value, also which zero it is."""


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

    def close(self) -> None:
        """Close the file."""
        self._records.close()

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

    def raise_refused(self) -> None:
        """Raise the error with which a payload was refused, if that is the next fact."""
        what, _, content = self.peek()
        if what == "refused":
            self._facts.popleft()
            raise unpickled(content)

    def arrived(self, call: str) -> list[Any]:
        """Return the recorded forms of the responses that a call of the source has returned, perhaps none."""
        what, _, content = self.peek()
        if what == f"no {call}":
            if content == 1:
                self._facts.popleft()
            else:
                self._facts[0] = (what, -1, content - 1)
            return []
        _, forms = self.next(call)
        return forms  # type: ignore[no-any-return]

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

    def agreed(self, response: EnvironmentResponse, form: tuple[Any, ...]) -> EnvironmentResponse:
        """Return a live response that is as recorded, or the recorded failure. Raises ReplayDiverged for others."""
        if form[0] == CommandName.FAILED:
            return thawed_response(form)
        if response.name is CommandName.FAILED:
            found: Any = response.payload
        else:
            observations = self.about["observations"]
            found = frozen_response(response, observations=observations)
            is_same = not self.strict or found[2] == form[2]
            if is_same or same(thawed_response(form).payload, thawed_response(found).payload):
                return response
        worker_id, step = response.worker_id, self.n_steps.get(response.worker_id, 1) - 1
        what = "returned something else: environments must depend on their seeds and actions alone"
        if response.name is CommandName.FAILED:
            what = f"failed, as it did not then: {found}"
        raise ReplayDiverged(
            f"the environments have left the recorded run {self.path}: after step {step}, worker {worker_id} {what}",
            step=step,
            worker_id=worker_id,
            row=-1,
            recorded=thawed_response(form).payload,
            found=response.payload,
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
            recorded = unpickled(recorded)
        if recorded_name == name and same(recorded, payload):
            return
        if not self.strict and recorded_name in STEPPING and name in STEPPING:
            self.n_diverged += 1
            return
        row, before, now = _first_difference(recorded, payload)
        sent = "the action" if name in STEPPING else name
        was_sent = "the action" if recorded_name in STEPPING else recorded_name
        raise ReplayDiverged(
            f"the replay of {self.path} has left the recorded run: in step {step} of worker {worker_id}"
            + (f", row {row}," if row >= 0 else "")
            + f" the trainer sent {sent} {now!r}; the recording has {was_sent} {before!r}.",
            step=step,
            worker_id=worker_id,
            row=row,
            recorded=before,
            found=now,
        )


def same(one: Any, other: Any, within: tuple[tuple[Any, Any], ...] = ()) -> bool:
    """Return whether two payloads are equal to the bit. ``within``: the pairs of objects of which they are parts."""
    if isinstance(one, Unrecorded):
        return True
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
