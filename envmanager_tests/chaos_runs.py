"""A trainer under chaos that keeps books: what was asked for, what came, what was lost, and what it cost."""

from __future__ import annotations

import os
import statistics
import time
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from envmanager import (
    ActionInfo,
    AgentSteps,
    Batch,
    EnvContext,
    RestartPolicy,
    StepInfo,
    SubprocessEnvManager,
    Timeouts,
    Wait,
)
from envmanager.observe import events as happened
from envmanager.testing import ChaosReport, EchoEnvironment, chaos

N_WORKERS = 8
ENVS_PER_WORKER = 2
N_ENVS = N_WORKERS * ENVS_PER_WORKER
RATE = 0.5
SAMPLE_EVERY_S = 1.0
SETTLE_S = 120.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@attrs.frozen
class Sample:
    """What this process has at one moment."""

    at_s: float
    descriptors: int
    threads: int
    rss_mb: float

    @classmethod
    def now(cls) -> Sample:
        rss_pages = int(Path("/proc/self/statm").read_text().split()[1])
        threads = len(os.listdir("/proc/self/task"))
        return cls(time.monotonic(), len(os.listdir("/proc/self/fd")), threads, rss_pages * _PAGE_BYTES / 1e6)


class Ledger:
    """What was asked of each environment and what came back, with everything counted that should not be."""

    def __init__(self) -> None:
        self.next_action = 1
        self.last_action = np.zeros(N_ENVS, np.int64)
        self.n_steps = np.zeros(N_ENVS, np.int64)  # handed out since its generation began
        self.wrong: Counter[str] = Counter()
        self.first_wrong: dict[str, str] = {}
        self.asked: Counter[int] = Counter()  # worker steps
        self.delivered: Counter[int] = Counter()
        self.lost: Counter[int] = Counter()
        self.generation: Counter[int] = Counter()

    def actions_for(self, env_ids: np.ndarray) -> np.ndarray:
        """Actions that were never given before."""
        actions = np.arange(self.next_action, self.next_action + len(env_ids))
        self.next_action += len(env_ids)
        self.last_action[env_ids] = actions
        return actions

    def expect(self, holds: Any, what: str, about: Any) -> None:
        if not holds:
            self.wrong[what] += 1
            self.first_wrong.setdefault(what, str(about))

    def check_step(self, env_ids: np.ndarray, shown: np.ndarray, reward: np.ndarray) -> None:
        """``shown`` is what each environment's step showed: env_id, agent, steps, action, episode."""
        given = self.last_action[env_ids]
        self.expect((shown[:, 0] == env_ids).all(), "mispaired", (env_ids, shown))
        self.expect((shown[:, 3] == given).all() and (reward == given % 1000).all(), "mispaired", (given, shown))
        expected = self.n_steps[env_ids] + 1
        self.expect((shown[:, 2] >= expected).all(), "duplicated", (expected, shown))
        self.expect((shown[:, 2] <= expected).all(), "skipped", (expected, shown))
        self.n_steps[env_ids] = shown[:, 2]

    def check_loss(self, env_ids: np.ndarray, obs: np.ndarray, final_obs: np.ndarray, last: np.ndarray) -> None:
        """All environments of a worker begin anew, after what was handed out last."""
        self.expect((obs[:, 0] == env_ids).all() and not obs[:, 1:].any(), "stitched", obs)
        self.expect((final_obs == last).all(), "stitched", (final_obs, last))
        self.n_steps[env_ids] = 0


class Trainer(ABC):
    """Steps a manager as one of the two ways of using it does."""

    def __init__(self, manager: SubprocessEnvManager) -> None:
        self.manager = manager
        self.ledger = Ledger()

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def go_on(self, wait: Wait) -> None: ...

    @property
    @abstractmethod
    def in_flight(self) -> Counter[int]:
        """Steps asked for and not handed out, by worker."""


class Stepping(Trainer):
    """``step()`` with a policy."""

    def begin(self) -> None:
        self.manager.set_policy("default", self)
        self._last = {info.worker_id: info for info in self.manager.reset()}

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        self.ledger.asked.update(np.unique(steps.env_id // ENVS_PER_WORKER).tolist())
        return ActionInfo(self.ledger.actions_for(steps.env_id))

    def go_on(self, wait: Wait) -> None:
        infos = self.manager.step(wait)
        twice = len({info.worker_id for info in infos}) < len(infos)
        self.ledger.expect(not twice, "duplicated", [info.worker_id for info in infos])
        for info in infos:
            self._check(info)
            self._last[info.worker_id] = info

    @property
    def in_flight(self) -> Counter[int]:
        return Counter(worker.worker_id for worker in self.manager.stats().workers if worker.waiting)

    def _check(self, info: StepInfo) -> None:
        ledger, now, made = self.ledger, info.current["default"], info.transitions("default")
        last = self._last[info.worker_id].current
        ledger.expect(info.previous is last, "mispaired", info)
        if info.lost is None:
            assert info.actions is not None
            ledger.delivered[info.worker_id] += 1
            ledger.check_step(now.env_id, made.next_obs, now.reward)
            ledger.expect((made.action == ledger.last_action[now.env_id]).all(), "mispaired", made)
            ledger.expect((made.next_obs[:, 2] == made.obs[:, 2] + 1).all(), "stitched", made)
            ledger.expect((made.next_obs[:, 4] == made.obs[:, 4]).all(), "stitched", made)
            return
        ledger.lost[info.worker_id] += 1
        ledger.generation[info.worker_id] += 1
        ledger.expect(info.lost.generation == ledger.generation[info.worker_id], "told twice or never", info.lost)
        ledger.expect(not len(made.reward) and info.actions is None and not now.reward.any(), "stitched", info)
        ledger.expect(now.truncated.all() and not now.terminated.any(), "stitched", info)
        ledger.check_loss(now.env_id, now.obs, now.final_obs, last["default"].obs)


class SendingAndReceiving(Trainer):
    """``send()`` to some environments of each worker that is ready, and ``recv()``."""

    def begin(self) -> None:
        self._dice = np.random.default_rng(0)
        self._in_flight: set[int] = set()
        self.manager.reset()
        first = self.manager.recv(Wait.all())
        self._obs = first.obs.copy()

    def go_on(self, wait: Wait) -> None:
        env_ids = np.concatenate([self._some_of(worker_id) for worker_id in range(N_WORKERS)])
        if len(env_ids):
            self.ledger.asked.update(np.unique(env_ids // ENVS_PER_WORKER).tolist())
            self.manager.send(self.ledger.actions_for(env_ids), env_ids)
            self._in_flight.update((env_ids // ENVS_PER_WORKER).tolist())
        batch = self.manager.recv(wait)
        self._check(batch)
        self._in_flight.difference_update((batch.env_ids // ENVS_PER_WORKER).tolist())
        self._obs[batch.env_ids] = batch.obs

    @property
    def in_flight(self) -> Counter[int]:
        return Counter(self._in_flight)

    def _some_of(self, worker_id: int) -> np.ndarray:
        if worker_id in self._in_flight:
            return np.arange(0)
        own = np.arange(ENVS_PER_WORKER) + worker_id * ENVS_PER_WORKER
        return own[: self._dice.integers(1, ENVS_PER_WORKER + 1)]

    def _check(self, batch: Batch) -> None:
        ledger = self.ledger
        twice = len(np.unique(batch.env_ids)) < len(batch.env_ids)
        ledger.expect(not twice, "duplicated", batch.env_ids)
        ended = batch.terminated | batch.truncated
        shown = batch.obs.copy()
        if ended.any():
            shown[ended] = batch.final_obs
        came = ~batch.lost
        ledger.delivered.update(np.unique(batch.env_ids[came] // ENVS_PER_WORKER).tolist())
        ledger.check_step(batch.env_ids[came], shown[came], batch.reward[came])
        ledger.expect((batch.obs[came, 4] == shown[came, 4] + ended[came]).all(), "stitched", batch)
        before = self._obs[batch.env_ids[came]]
        ledger.expect((shown[came, 4] == before[:, 4]).all(), "stitched", (shown[came], before))
        ids = batch.env_ids[batch.lost]
        for worker_id in np.unique(ids // ENVS_PER_WORKER).tolist():
            ledger.lost[worker_id] += 1
            ledger.generation[worker_id] += 1
            n_rows = int((ids // ENVS_PER_WORKER == worker_id).sum())
            ledger.expect(n_rows == ENVS_PER_WORKER, "told twice or never", ids)
        ledger.expect(batch.truncated[batch.lost].all() and not batch.terminated[batch.lost].any(), "stitched", batch)
        ledger.expect(not batch.reward[batch.lost].any(), "stitched", batch)
        ledger.check_loss(ids, batch.obs[batch.lost], shown[batch.lost], self._obs[ids])


@attrs.define
class Outcome:
    """What a run came to."""

    seconds: float
    report: ChaosReport
    ledger: Ledger
    restarts: int
    steps_lost: int
    env_steps: int
    late_replies: int
    n_failed: int
    of_its_own: list[str]
    generations: list[int]
    in_flight: Counter[int]
    samples: list[Sample]

    @property
    def unaccounted(self) -> dict[int, int]:
        """Steps by worker that were asked for and are neither delivered, nor in flight, nor lost: must be none.

        How many were lost is told for all workers together; each is lost with a worker.
        """
        ledger = self.ledger
        return {
            worker_id: ledger.asked[worker_id] - ledger.delivered[worker_id] - self.in_flight[worker_id]
            for worker_id in range(N_WORKERS)
        }

    def medians(self, from_s: float, to_s: float) -> Sample:
        """Of what was sampled in this part of the run."""
        began = self.samples[0].at_s
        part = [each for each in self.samples if from_s <= each.at_s - began < to_s]
        return Sample(
            from_s,
            *(statistics.median(getattr(each, name) for each in part) for name in ("descriptors", "threads", "rss_mb")),
        )

    def table(self, early: Sample, late: Sample) -> str:
        """Everything, for people."""
        ledger, report = self.ledger, self.report
        rows: list[tuple[str, Any]] = [
            ("seconds", f"{self.seconds:.0f}"),
            ("worker steps delivered", ledger.delivered.total()),
            ("environment steps delivered", self.env_steps),
            ("injected: kills, freezes, pauses", f"{report.kills}, {report.freezes}, {report.pauses}"),
            ("faults injected", report.faults),
            ("failures the manager saw", self.n_failed),
            ("restarts", self.restarts),
            ("generations by worker", self.generations),
            ("lost told", ledger.lost.total()),
            ("worker steps lost", f"{self.steps_lost} (books: {sum(self.unaccounted.values())})"),
            ("mispaired", ledger.wrong["mispaired"]),
            ("duplicated", ledger.wrong["duplicated"]),
            ("skipped", ledger.wrong["skipped"]),
            ("stitched", ledger.wrong["stitched"]),
            ("late replies discarded", self.late_replies),
            ("descriptors, early → late", f"{early.descriptors:.0f} → {late.descriptors:.0f}"),
            ("threads, early → late", f"{early.threads:.0f} → {late.threads:.0f}"),
            ("RSS in MB, early → late", f"{early.rss_mb:.1f} → {late.rss_mb:.1f}"),
        ]
        return "\n".join(f"{name:<36}{value}" for name, value in rows)

    def check_books(self) -> None:
        """Nothing wrong, nothing missing, one replacement and one loss for every fault."""
        ledger, faults = self.ledger, self.report.faults
        assert not ledger.wrong, ledger.first_wrong
        assert self.of_its_own == [], "workers failed to which nothing had been done: is the machine too busy?"
        assert (self.restarts, self.n_failed, ledger.lost.total()) == (faults, faults, faults)
        assert Counter(each.worker_id for each in self.report.injected if each.kind != "pause") == ledger.lost
        assert self.generations == [ledger.lost[worker_id] for worker_id in range(N_WORKERS)]
        unaccounted = self.unaccounted
        assert sum(unaccounted.values()) == self.steps_lost
        assert all(0 <= n <= ledger.lost[worker_id] for worker_id, n in unaccounted.items()), unaccounted


def _not_injected(manager: SubprocessEnvManager, report: ChaosReport) -> list[happened.Event]:
    """Failures of workers, among the events still kept, to which nothing had been done."""
    hit = {(each.worker_id, each.generation) for each in report.injected if each.kind != "pause"}
    failures = [event for event in manager.events if isinstance(event, happened.Failed)]
    return [event for event in failures if (event.worker_id, event.generation) not in hit]


def run_under_chaos(
    kind: type[Trainer],
    seconds: float,
    *,
    rate: float = RATE,
    seed: int = 0,
    sleep_s: float = 0.005,
    step_s: float = 2.0,
) -> Outcome:
    """Train for so long under chaos, then until all that was injected has been told.

    With ``sleep_s``, what one environment's step takes, faults strike mostly in steps; without, also between them.
    ``step_s`` is the manager's patience: on a busy machine a healthy worker may have to wait for the processor.
    """

    def make_env(context: EnvContext) -> EchoEnvironment:
        return EchoEnvironment(context, sleep_s=sleep_s)

    with SubprocessEnvManager(
        make_env,
        N_ENVS,
        n_workers=N_WORKERS,
        restarts=RestartPolicy(max_restarts=10**6, backoff_s=0.05),
        timeouts=Timeouts(step_s=step_s),
    ) as manager:
        trainer = kind(manager)
        trainer.begin()
        samples = [Sample.now()]
        with chaos(manager, rate, seed) as report:
            while samples[-1].at_s - samples[0].at_s < seconds:
                trainer.go_on(Wait.any())
                if time.monotonic() - samples[-1].at_s >= SAMPLE_EVERY_S:
                    samples.append(Sample.now())
        deadline = time.monotonic() + SETTLE_S
        while trainer.ledger.lost.total() < report.faults and time.monotonic() < deadline:
            trainer.go_on(Wait.any(timeout_s=1.0))
        stats = manager.stats()
        return Outcome(
            time.monotonic() - samples[0].at_s,
            report,
            trainer.ledger,
            stats.restarts,
            stats.steps_lost,
            stats.env_steps,
            stats.late_replies,
            manager.events.count(happened.Failed),
            [str(event) for event in _not_injected(manager, report)],
            [worker.generation for worker in stats.workers],
            trainer.in_flight,
            samples,
        )
