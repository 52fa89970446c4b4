"""Replay of a recording: the manager's own code runs again, over a tape that tells it what the recorded host told.

::

    trainer ── step, send, recv ──▶ ReplayEnvManager ── send, recv, take, now ──▶ Tape ◀── run.emrec
"""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.kernel.host import EnvWorker, WorkerHost
from envmanager.options import Wait
from envmanager.recording.tap import TappedHost
from envmanager.recording.tape import Tape


class NoHost(WorkerHost):
    """The host of a manager whose tap answers in its place."""

    rewrites_arrays = False  # each response has arrays of its own

    def __init__(self, n_workers: int) -> None:
        super().__init__()
        self.workers = [SimpleNamespace(send=None, recv=None)] * n_workers
        self.step_queue = queue.Queue()

    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        raise NotImplementedError("a tape asks no host")

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
        recording: str | None = None,
        strict: bool = True,
        trust: bool = False,
        wait: Wait | str | int | None = None,
        seed: int | None = None,
        trace: str | None = None,
    ) -> None:
        """``recording``: path of the file. ``env_factory``, ``n_envs`` and ``seed`` are accepted, so that one can
        switch to a replay by changing ``kind`` alone; those of the recorded run are used. ``trust``: whether to
        unpickle objects of classes in infos and observations, which can run any code; else the first step that has one
        raises UsageError. Raises UsageError if there is no file or it has no observations, and BadRecording if it is
        damaged.
        """
        if recording is None:
            raise UsageError("a replay needs a recording=…, the path of a file that was made with record=….")
        self.tape = tape = Tape(recording, strict=strict, trust=trust)
        about = tape.about
        if not about["observations"]:
            raise UsageError(f"{recording} was recorded without observations, so it can be read, but not replayed.")
        options = {
            name: about.get(name, ()) for name in ("seed", "restarts", "check_values", "episodes", "measures", "kinds")
        }
        super().__init__(about["env_ids"], wait=about["wait"] if wait is None else wait, trace=trace, **options)
        host: Any = TappedHost(NoHost(self.n_workers), tape)
        self.start(host)

    @property
    def n_diverged(self) -> int:
        """Number of steps whose actions differed from the recorded ones, if ``strict`` is False."""
        return self.tape.n_diverged
