"""A trainer that learns in a process of its own, while this one goes on stepping.

::

    this process                                     the learner
    policy ◀── weights in shared memory ◀─────────── trainer: replay, optimizer
    add ────── StepInfos, through a pipe ──────────▶ add, update
        └───── how many steps, how many updates ────▶ neither may run ahead of the other too far

The rule: the ratio of updates to steps is kept from both sides. The learner waits until there are steps enough for its
next update; who plays waits while more than ``max_ahead`` steps have not been learned from. The learner obeys this
process alone: a Ctrl-C or SIGTERM for both is this one's to obey, which may need the learner's weights to save them.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import attrs
import cloudpickle
import numpy as np

from envmanager._workers.descriptors import wait_for
from envmanager.data.steps import StepInfo
from envmanager.errors import EnvManagerError, UsageError
from envmanager.extras import needed_by
from envmanager.policy import Policy
from envmanager.training.trainer import Arrays, Trainer, require_can_learn_apart

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import nn

_CLOSE_S = 10.0


class LearnerFailed(EnvManagerError):
    """The learner's process raised, or ended. The text holds its traceback."""


class Apart(Trainer):
    """Lets the trainer that ``make()`` makes learn in a process of its own. Its policy acts here.

    For trainers that may learn from what any policy did, such as DQN: the weights change under the one that acts.
    ``make`` is called in both processes and must make the same model, as attribute ``model``. ``max_ahead``: how many
    steps may be under way to the learner or in it before ``add`` waits. Close it, or use it as a context manager.
    Raises UsageError when the trainer cannot learn so, later LearnerFailed when the learner does.
    """

    learns_while_playing = True

    def __init__(self, make: Callable[[], Trainer], *, max_ahead: int = 1000) -> None:
        if max_ahead < 1:
            raise UsageError(f"max_ahead must be at least 1, not {max_ahead}.")
        self._here = make()
        if not isinstance(getattr(self._here, "model", None), nn.Module):
            raise UsageError(f"{type(self._here).__name__} has no `model`, so its weights cannot be shared.")
        require_can_learn_apart(self._here)
        self.behavior, self.policy = self._here.behavior, self._here.policy
        self.options = getattr(self._here, "options", None)
        self.max_policy_lag = math.inf
        self._model: nn.Module = self._here.model  # type: ignore[attr-defined]
        self._model.share_memory()
        self._max_ahead = max_ahead
        self._is_closed = False
        self._owner_pid = os.getpid()
        self._n_before = 0
        """How many steps the trainer that this one goes on with had collected."""
        self._n_sent = 0
        self._n_learned = 0
        self._learned_version = 0
        self._figures: dict[str, float] = {}
        self._connection, theirs = multiprocessing.Pipe()
        weights = dict(self._model.state_dict())
        arguments = (theirs, cloudpickle.dumps(make), weights, torch.get_num_threads())
        from envmanager._workers.processes import ChildProcess

        with theirs:
            self._process = ChildProcess("spawn", "envmanager-learner", _learn, arguments)

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the learner, by force after 10 s. Any number of times; in a process that was forked it does nothing."""
        if self._is_closed or self._owner_pid != os.getpid():
            return
        self._is_closed = True
        deadline = time.monotonic() + _CLOSE_S
        try:
            # One that is stopped reads nothing, and would keep us waiting for room.
            if wait_for([], _CLOSE_S, writable=[self._connection.fileno()]):
                with contextlib.suppress(OSError):
                    self._connection.send(("close", None))
            wait_for([self._process.pidfd], deadline - time.monotonic())
        finally:
            self._process.signal(signal.SIGKILL)  # in vain, when it has ended
            self._process.release()
            self._connection.close()
        for tensor in [*self._model.parameters(), *self._model.buffers()]:
            if tensor.is_shared():
                tensor.data = tensor.data.clone()  # else its memory stays with the descriptor behind it

    def add(self, info: StepInfo) -> int:
        own = _only(info, self.behavior)
        before = None if own.previous is None or own.lost is not None else own.previous.get(self.behavior)
        n = 0 if before is None or not own.actions else len(before.acting_rows)
        self._n_sent += n
        self._here.collected(self._n_before + self._n_sent)
        self._send("add", own)
        while self._n_sent - self._n_learned > self._max_ahead:
            self._hear(wait=True)
        return n

    def is_ready(self) -> bool:
        self._hear(wait=False)
        return self._learned_version > self.version

    def update(self, progress: float) -> dict[str, float]:
        """Take over what the learner has done meanwhile: its weights are here already."""
        self.version = self._here.policy.version = self._learned_version  # type: ignore[attr-defined]
        self._send("progress", progress)
        return self._figures

    def pause(self) -> None:
        """Wait until the learner has learned from all that it was sent."""
        self._send("pause", None)
        self._hear_answer()
        self.version = self._here.policy.version = self._learned_version  # type: ignore[attr-defined]

    def greedy_policy(self) -> Policy:
        return self._here.greedy_policy()

    def greedy_module(self) -> nn.Module:
        return self._here.greedy_module()

    def environments_were_reset(self) -> None:
        self._send("reset", None)

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self._send("state", None)
        return self._hear_answer()  # type: ignore[no-any-return]

    def restore(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        self._send("restore", (dict(arrays), dict(facts)))
        self.version = self._learned_version = int(self._hear_answer())
        self._here.policy.version = self.version  # type: ignore[attr-defined]
        self._n_before = int(facts.get("n_steps", 0)) - self._n_sent
        self._here.collected(self._n_before + self._n_sent)

    def _send(self, what: str, payload: Any) -> None:
        try:
            self._connection.send((what, payload))
        except OSError:
            self._hear(wait=True)  # its last words, if there are any
            raise LearnerFailed(self._end()) from None

    def _hear(self, *, wait: bool) -> Any:
        """Take what the learner says; an answer to a question ends it."""
        while wait or self._connection.poll():
            try:
                what, payload = self._connection.recv()
            except (EOFError, OSError):
                raise LearnerFailed(self._end()) from None
            if what == "failed":
                raise LearnerFailed(f"the learner of {self.behavior!r} raised:\n{payload}")
            if what == "answer":
                return payload
            if what == "learned":
                self._n_learned = payload
            else:
                self._learned_version, self._figures = payload
            wait = False
        return None

    def _hear_answer(self) -> Any:
        answer = None
        while answer is None:
            answer = self._hear(wait=True)
        return answer

    def _end(self) -> str:
        return f"the learner of {self.behavior!r} has ended ({self._process.exit_name()})."


def _only(info: StepInfo, behavior: str) -> StepInfo:
    """What the learner needs: this behavior, and of the steps before no more than who acted."""

    def part(of: Any) -> Any:
        return {behavior: of[behavior]} if of is not None and behavior in of else {}

    previous = None if info.previous is None else part(info.previous)
    if previous:
        before = previous[behavior]
        previous = {behavior: attrs.evolve(before, obs=None, final_obs=None, info=None, reset_info=None)}
    current = {name: attrs.evolve(steps, info=None, reset_info=None) for name, steps in part(info.current).items()}
    actions = None if info.actions is None or behavior not in info.actions else part(info.actions)
    return StepInfo(previous, current, actions, info.worker_id, info.lost)


def _learn(connection: Connection, pickled: bytes, weights: dict[str, torch.Tensor], n_threads: int) -> None:
    """The learner's process."""
    os.setpgid(0, 0)  # out of reach of what a terminal sends to the group
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        torch.set_num_threads(n_threads)
        trainer: Any = cloudpickle.loads(pickled)()
        with torch.no_grad():
            trainer.model.load_state_dict(weights)
        _Learner(connection, trainer, weights).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # who plays has gone
    except BaseException:
        connection.send(("failed", traceback.format_exc()))


class _Learner:
    """Takes steps only while its trainer has not enough for an update, so that who plays feels it when it is behind."""

    def __init__(self, connection: Connection, trainer: Any, weights: dict[str, torch.Tensor]) -> None:
        self._connection = connection
        self._trainer = trainer
        self._weights = weights
        self._progress = 0.0
        self._n_learned = 0

    def run(self) -> None:
        goes_on = True
        while goes_on:
            if self._trainer.is_ready():
                figures = self._trainer.update(self._progress)
                self._publish()
                self._connection.send(("updated", (self._trainer.version, figures)))
            else:
                goes_on = self._obey(*self._connection.recv())

    def _obey(self, what: str, payload: Any) -> bool:
        if what == "add":
            self._n_learned += self._trainer.add(payload)
            self._connection.send(("learned", self._n_learned))
        elif what == "progress":
            self._progress = payload
        elif what == "reset":
            self._trainer.environments_were_reset()
        elif what == "pause":  # it is obeyed only when no update is due, and what brings the next one comes after it
            self._connection.send(("answer", True))
        elif what == "state":
            self._connection.send(("answer", self._trainer.state()))
        elif what == "restore":
            self._trainer.restore(*payload)
            self._publish()
            self._connection.send(("answer", self._trainer.version))
        return what != "close"

    def _publish(self) -> None:
        with torch.no_grad():
            for name, tensor in self._trainer.model.state_dict().items():
                self._weights[name].copy_(tensor)
