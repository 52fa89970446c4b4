"""Ten minutes in which workers are killed, stopped, die, hang and raise, in steps, resets, calls and starts.

The trainer sends to some environments, in any order, and compares each row that it gets with the one before it.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import random
import signal
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from envmanager import (
    EnvContext,
    EnvRaised,
    RestartPolicy,
    SubprocessEnvManager,
    Timeouts,
    Wait,
    WorkerDied,
    WorkerError,
    WorkerTimedOut,
)
from envmanager.observe.events import Failed
from envmanager.testing import chaos
from envmanager_tests.random_use import N_ASKS, Ask, Books, Layout, Tells, rows_of

pytestmark = pytest.mark.load

MINUTES = 10
N_WORKERS, ENVS_PER_WORKER = 16, 2
N_ENVS = N_WORKERS * ENVS_PER_WORKER
WORKERS = tuple(tuple(range(first, first + ENVS_PER_WORKER)) for first in range(0, N_ENVS, ENVS_PER_WORKER))
RESTARTS = RestartPolicy(max_restarts=10**6, backoff_s=0.05, on_exception="restart")
ODDS = {"start": 0.05, "reset": 0.03, "step": 1 / 2000, "call": 0.02}
"""How likely each of these goes wrong, each time."""


class Unreliable(Tells):
    """Goes wrong at random."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__(context)
        self._dice = random.Random(f"{context.env_id} {context.generation}")
        self._has_ended = False
        if context.generation:  # else the manager could not be made
            self._go_wrong_perhaps("start")

    def _go_wrong_perhaps(self, where: str) -> None:
        if self._dice.random() < ODDS[where]:
            what = self._dice.choice(["raise", "die", "kill", "stop"])
            if what == "raise":
                raise ValueError(f"as it happens, in {where}")
            if what == "die":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if not self._has_ended:  # else it is a part of the step
            self._go_wrong_perhaps("reset")
        self._has_ended = False
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self._go_wrong_perhaps("step")
        time.sleep(0.002)
        result = super().step(action)
        self._has_ended = result[2] or result[3]
        return result

    def who(self) -> int:
        """Its env_id."""
        self._go_wrong_perhaps("call")
        return self._env_id


class Trainer:
    """Sends to some environments, in any order; its books compare each row that comes with the one before it."""

    def __init__(self, manager: SubprocessEnvManager) -> None:
        self.manager = manager
        self.dice = random.Random(0)
        self.counts: Counter[str] = Counter()
        self._books = Books(Layout(WORKERS, False, SubprocessEnvManager), RESTARTS)
        self._number = 0
        self._owing: set[int] = set()
        """Workers that will hand something out, though nothing was asked of them."""

    def reset(self) -> None:
        """All anew; again as long as somebody fails in it."""
        while True:
            try:
                self.manager.reset()
            except WorkerError:
                self.counts["resets that failed"] += 1
                continue
            break
        self.counts["resets"] += 1
        self._owing.clear()
        batch = self.manager.recv(Wait.all())
        assert batch.env_ids.tolist() == list(range(N_ENVS))
        self._books.begin(rows_of(batch, batch.env_ids, batch.lost))

    @property
    def _idle(self) -> list[int]:
        return sorted(set(range(N_WORKERS)) - self._books.busy - self._owing)

    def send(self) -> None:
        """To some environments of each idle worker, in any order."""
        env_ids = []
        for worker_id in self._idle:
            env_ids += self.dice.sample(WORKERS[worker_id], self.dice.randint(1, ENVS_PER_WORKER))
        self.dice.shuffle(env_ids)
        if env_ids:
            asks = self.dice.choices([Ask.NOTHING, Ask.TERMINATE, Ask.TRUNCATE], [9, 1, 1], k=len(env_ids))
            numbers = range(self._number, self._number + len(env_ids))
            self._number += len(env_ids)
            actions = [number * N_ASKS + ask for number, ask in zip(numbers, asks, strict=True)]
            self.manager.send(np.array(actions), env_ids)
            self._books.asked.update(zip(env_ids, actions, strict=True))

    def call(self) -> None:
        """A question to one idle worker's environments, in any order."""
        if not self._idle:
            return
        worker_id = self.dice.choice(self._idle)
        env_ids = self.dice.sample(WORKERS[worker_id], ENVS_PER_WORKER)
        try:
            said = self.manager.call("who", env_ids=env_ids)
        except (WorkerDied, WorkerTimedOut):
            self.counts["calls that failed"] += 1
            self._owing.add(worker_id)
        except EnvRaised:  # after an exception it lives on
            self.counts["calls that failed"] += 1
        else:
            self.counts["calls"] += 1
            assert said == env_ids

    def receive(self) -> None:
        """Whatever is ready."""
        if len(self._idle) == N_WORKERS:
            return
        batch = self.manager.recv(Wait.any(timeout_s=1.0))
        rows = rows_of(batch, batch.env_ids, batch.lost)
        self._books.check(rows)
        lost = {self._books.worker_of[env_id] for env_id, row in rows.items() if row.lost}
        self.counts["steps"] += sum(not row.lost for row in rows.values())
        self.counts["lost"] += len(lost)
        self._owing -= lost


@pytest.mark.timeout(MINUTES * 60 + 300)
def test_ten_minutes_of_faults_anywhere_mix_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="envmanager")  # each fault is a warning or two
    faulthandler.cancel_dump_traceback_later()  # it is meant to take that long

    with SubprocessEnvManager(
        Unreliable,
        N_ENVS,
        n_workers=N_WORKERS,
        restarts=RESTARTS,
        timeouts=Timeouts(start_s=20.0, reset_s=2.0, step_s=2.0, call_s=2.0),
    ) as manager:
        trainer = Trainer(manager)
        trainer.reset()
        ends_at = time.monotonic() + MINUTES * 60
        resets_at = time.monotonic() + 20
        with chaos(manager, rate=0.5, seed=0, pause_s=0.1) as report:
            while time.monotonic() < ends_at:
                if trainer.dice.random() < 0.02:
                    trainer.call()
                trainer.send()
                trainer.receive()
                if time.monotonic() >= resets_at:
                    trainer.reset()
                    resets_at = time.monotonic() + 20
        phases = Counter(getattr(each.error, "phase", "?") for each in manager.events if isinstance(each, Failed))
        print(dict(trainer.counts), report.kills, report.freezes, report.pauses, phases, manager.stats(), sep="\n")
        assert trainer.counts["lost"] > MINUTES * 20
        assert {"start", "reset", "step", "call"} <= set(phases)
