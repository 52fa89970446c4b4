"""Live environments in the order of a recording: each response is delivered when it was, however fast it comes.

::

    source of the kind ──▶ held back ── in the order of run.emrec ──▶ manager

So a fault that needs a certain order comes again, with a debugger in the environment. What differs from the recording
is an error: an action, an observation, a failure that was none. A worker that had failed is failed again.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.errors import BadObservation, EnvRaised, UsageError
from envmanager.kernel.host import WorkerHost
from envmanager.recording.codec import Apart, packed, unpacked
from envmanager.recording.tap import TappedHost
from envmanager.recording.tape import Tape, same

_FAILED = CommandName.FAILED


class Ordered(Tape):
    """The tap that delivers in the order of a recording what comes from live workers, whose commands are compared."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._answer = Apart.leave  # no answer is delivered but an error
        self.held: defaultdict[int, deque[EnvironmentResponse]] = defaultdict(deque)
        """Responses that have arrived before their turn, by worker_id."""

    def send(self, worker_id: int, name: str, payload: Any, do: Callable[[str, Any], None]) -> None:
        super().send(worker_id, name, payload, do)
        do(name, payload)

    def call(self, what: str, worker_id: int, asked: Any, do: Callable[[], Any]) -> Any:
        if what == "check_can_travel":
            self.raise_refused()
            return do()
        _, recorded, error = self.next(what, worker_id).content(self._answer)
        if error is not None:
            raise error
        if what in ("now", "why_due"):
            return recorded
        if what == "launch":
            self.held.pop(worker_id, None)
        answer = do()
        if what == "recv":
            return self._agreed(answer, recorded)
        if what == "begin_again":
            if answer is not None:  # within this process at once, though perhaps not in the recorded run
                self.held[worker_id].append(answer)
            return None if recorded is None else self._response_to(recorded)
        return recorded or answer if what == "is_gone" else answer

    def arrived(self, call: str) -> Sequence[EnvironmentResponse]:
        """Return the live responses in place of those that a call of the source has returned."""
        in_turn = []
        for recorded in super().arrived(call):
            response = self._response_to(recorded)
            if response is None:
                break
            in_turn.append(response)
        return in_turn

    def _response_to(self, recorded: EnvironmentResponse) -> EnvironmentResponse | None:
        """Wait for the live response in place of a recorded one. Return None when the manager was closed."""
        held = self.held[recorded.worker_id]
        if recorded.name is _FAILED and not held and not isinstance(recorded.payload, EnvRaised | BadObservation):
            return recorded  # it may not fail this time, and is replaced
        while not held:
            arrived = self.source.take() or self.source.get(1, math.inf)
            if not arrived:
                return None
            for response in arrived:
                self.held[response.worker_id].append(response)
        return self._agreed(held.popleft(), recorded)

    def _agreed(self, response: EnvironmentResponse, recorded: EnvironmentResponse) -> EnvironmentResponse:
        """Return a live response that is as recorded, or the recorded failure. Raises ReplayDiverged for others."""
        if recorded.name is _FAILED:
            return recorded
        if response.name is _FAILED:
            what = f"failed, as it did not then: {response.payload}"
        else:
            found = unpacked(packed(response, observations=self.about["observations"]))
            if same(recorded.payload, found.payload):
                return response
            what = "returned something else: environments must depend on their seeds and actions alone"
        worker_id, step = response.worker_id, self.n_steps.get(response.worker_id, 1) - 1
        text = f"after step {step}, worker {worker_id} {what}"
        raise self._diverged(text, worker_id, recorded.payload, response.payload, step=step)


def ordered(host: WorkerHost, path: str, workers: list[list[int]]) -> TappedHost:
    """Return a host that delivers what ``host`` does in the order of a recording.

    ``workers``: the environments of each. Raises UsageError if the recording has others, and the errors of ``Tape``.
    """
    tap = Ordered(path)
    recorded = tap.about["env_ids"]
    if recorded != workers:
        tap.close()
        raise UsageError(
            f"{path} was recorded with the environments {recorded} in its workers, and this manager has {workers}: "
            "take the same n_envs and n_workers, or the kind simple, which takes those of the recording."
        )
    return TappedHost(host, tap)
