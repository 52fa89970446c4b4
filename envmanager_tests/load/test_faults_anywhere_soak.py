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

import gymnasium
import numpy as np
import pytest

from envmanager import (
    Batch,
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
from envmanager.events import Failed
from envmanager.testing import chaos

pytestmark = pytest.mark.load

MINUTES = 10
N_WORKERS, ENVS_PER_WORKER = 16, 2
N_ENVS = N_WORKERS * ENVS_PER_WORKER
N_COLUMNS = 5
ODDS = {"start": 0.05, "reset": 0.03, "step": 1 / 2000, "call": 0.02}
"""How likely each of these goes wrong, each time."""


class Unreliable(gymnasium.Env):  # type: ignore[misc]
    """Shows ``[env_id, generation, episode, steps of the episode, action]``, and goes wrong at random."""

    observation_space = gymnasium.spaces.Box(-(2**62), 2**62, (N_COLUMNS,), np.int64)
    action_space = gymnasium.spaces.Box(0, 2**62, (), np.int64)

    def __init__(self, context: EnvContext) -> None:
        self._env_id, self._generation = context.env_id, context.generation
        self._dice = random.Random(f"{context.env_id} {context.generation}")
        self._episode, self._n_steps = -1, 0
        self._has_ended = False
        self._go_wrong_perhaps("start")

    def _go_wrong_perhaps(self, where: str) -> None:
        if self._dice.random() < ODDS[where] and not (where == "start" and self._generation == 0):
            what = self._dice.choice(["raise", "die", "kill", "stop"])
            if what == "raise":
                raise ValueError(f"as it happens, in {where}")
            if what == "die":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    def _show(self, action: int) -> np.ndarray:
        return np.array([self._env_id, self._generation, self._episode, self._n_steps, action])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if not self._has_ended:  # else it is a part of the step
            self._go_wrong_perhaps("reset")
        self._has_ended = False
        self._episode += 1
        self._n_steps = 0
        return self._show(-1), {}

    def step(self, action: Any) -> Any:
        self._go_wrong_perhaps("step")
        time.sleep(0.002)
        self._n_steps += 1
        self._has_ended = int(action) % 11 == 0
        return self._show(int(action)), float(action % 1000), self._has_ended, False, {}

    def who(self) -> tuple[int, int]:
        """Who it is."""
        self._go_wrong_perhaps("call")
        return self._env_id, self._generation


class Trainer:
    """Keeps of every environment what it showed last, and what it was asked for since."""

    def __init__(self, manager: SubprocessEnvManager) -> None:
        self.manager = manager
        self.dice = random.Random(0)
        self.counts: Counter[str] = Counter()
        self._number = 0
        self._shown: dict[int, tuple[int, ...]] = {}
        self._asked: dict[int, int] = {}
        self._owing: set[int] = set()
        """Workers that will hand something out, though nothing was asked of them or not any more."""

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
        self._asked.clear()
        self._owing.clear()
        batch = self.manager.recv(Wait.all())
        assert batch.env_ids.tolist() == list(range(N_ENVS))
        self._shown = {env_id: tuple(row) for env_id, row in enumerate(batch.obs.tolist())}
        for env_id, row in self._shown.items():
            assert (row[0], *row[3:]) == (env_id, 0, -1), row

    @property
    def _busy(self) -> set[int]:
        return {env_id // ENVS_PER_WORKER for env_id in self._asked} | self._owing

    def send(self) -> None:
        """To some environments of each idle worker, in any order."""
        env_ids = []
        for worker_id in set(range(N_WORKERS)) - self._busy:
            own = [worker_id * ENVS_PER_WORKER + row for row in range(ENVS_PER_WORKER)]
            env_ids += self.dice.sample(own, self.dice.randint(1, ENVS_PER_WORKER))
        self.dice.shuffle(env_ids)
        if env_ids:
            actions = np.arange(self._number, self._number + len(env_ids))
            self._number += len(env_ids)
            self.manager.send(actions, env_ids)
            self._asked.update(zip(env_ids, actions.tolist(), strict=True))

    def call(self) -> None:
        """A question to one idle worker's environments, in any order."""
        idle = sorted(set(range(N_WORKERS)) - self._busy)
        if not idle:
            return
        worker_id = self.dice.choice(idle)
        env_ids = [worker_id * ENVS_PER_WORKER + row for row in range(ENVS_PER_WORKER)]
        self.dice.shuffle(env_ids)
        try:
            said = self.manager.call("who", env_ids=env_ids)
        except (WorkerDied, WorkerTimedOut):
            self.counts["calls that failed"] += 1
            self._owing.add(worker_id)
        except EnvRaised:  # after an exception it lives on
            self.counts["calls that failed"] += 1
        else:
            self.counts["calls"] += 1
            assert [each[0] for each in said] == env_ids

    def receive(self) -> None:
        """Whatever is ready."""
        if self._busy:
            self._check(self.manager.recv(Wait.any(timeout_s=1.0)))

    def _check(self, batch: Batch) -> None:
        assert len(set(batch.env_ids.tolist())) == len(batch), "duplicated"
        ended = (batch.terminated | batch.truncated).tolist()
        finals = iter(() if batch.final_obs is None else batch.final_obs.tolist())
        rows = zip(batch.env_ids.tolist(), batch.obs.tolist(), batch.lost.tolist(), ended, strict=True)
        lost: Counter[int] = Counter()
        for place, (env_id, obs, is_lost, has_ended) in enumerate(rows):
            final = tuple(next(finals)) if has_ended else None
            if is_lost:
                lost[env_id // ENVS_PER_WORKER] += 1
                assert (batch.terminated[place], batch.truncated[place], batch.reward[place]) == (False, True, 0)
                self._check_lost(env_id, tuple(obs), final)
            else:
                assert batch.reward[place] == self._asked[env_id] % 1000, "mispaired"
                self._check_step(env_id, tuple(obs), final)
            self._shown[env_id] = tuple(obs)
            self._asked.pop(env_id, None)
        assert set(lost.values()) <= {ENVS_PER_WORKER}, "a worker is lost with all its environments"
        for worker_id in lost:
            self.counts["lost"] += 1
            self._owing.discard(worker_id)
            assert worker_id not in self._busy, "some of its environments were not handed out"

    def _check_lost(self, env_id: int, obs: tuple[int, ...], final: tuple[int, ...] | None) -> None:
        assert final == self._shown[env_id], "what was cut is not what was seen last"
        assert (obs[0], *obs[2:]) == (env_id, 0, 0, -1), obs
        assert obs[1] > self._shown[env_id][1], "not a new generation"

    def _check_step(self, env_id: int, obs: tuple[int, ...], final: tuple[int, ...] | None) -> None:
        self.counts["steps"] += 1
        _, generation, episode, n_steps, _ = self._shown[env_id]
        action = self._asked[env_id]
        stepped = (env_id, generation, episode, n_steps + 1, action)
        if action % 11 == 0:
            assert (final, obs) == (stepped, (env_id, generation, episode + 1, 0, -1)), (stepped, final, obs)
        else:
            assert (final, obs) == (None, stepped), (stepped, final, obs)


@pytest.mark.timeout(MINUTES * 60 + 300)
def test_ten_minutes_of_faults_anywhere_mix_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="envmanager")  # each fault is a warning or two
    faulthandler.cancel_dump_traceback_later()  # it is meant to take that long

    with SubprocessEnvManager(
        Unreliable,
        N_ENVS,
        n_workers=N_WORKERS,
        restarts=RestartPolicy(max_restarts=10**6, backoff_s=0.05, on_exception="restart"),
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
