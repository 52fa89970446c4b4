"""Trainers of coroutines under chaos that keep books: ``python -m envmanager_tests.coroutines.chaos [STEPS]``.

One sends and receives with tasks: in each round it acts in some of the environments that are ready. The other plays
from coroutines over a pool, of which some are cancelled. Environments raise, hang, exit, cancel themselves, go on when
cancelled and lose connections. Each row says of which environment, object, task, step and action it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from envmanager import AsyncioEnvManager, EnvContext, LostEpisode, RestartPolicy, Task, Timeouts, UsageError, Wait

STEP_S = 2.0
"""Deadline. On a busy machine a healthy environment may have to wait for the processor."""
SETTLE_S = 60.0
WAITS = [Wait.any(timeout_s=1.0), Wait.any(timeout_s=0), Wait.any(timeout_s=0.002), Wait(5, timeout_s=0.01)]
FAULTS = {
    "raises": 10,
    "hangs": 3,
    "cancels itself": 4,
    "goes on when cancelled": 1,
    "exits": 2,
    "loses its connection": 5,
}
"""Number of faults of each kind in 10,000 calls."""
_KINDS = [*FAULTS, ""]
_WEIGHTS = [*FAULTS.values(), 10_000 - sum(FAULTS.values())]
_EVER_S = 600.0


class Faulty:
    """An environment whose observations are ``(env_id, object, task, number of steps, action)``."""

    serials = itertools.count()
    faults: Counter[str]
    """What has gone wrong so far, in all environments."""

    def __init__(self, context: EnvContext) -> None:
        self.env_id, self.serial = context.env_id, next(self.serials)
        self.dice = random.Random(self.serial)
        self.is_cancelled = self.has_begun = False

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        assert options is not None
        self.key, self.length, self.n_steps = options["key"], options["length"], 0
        await self._happens("reset")
        self.has_begun = True
        return (self.env_id, self.serial, self.key, 0, None), {}

    async def step(self, action: Any) -> Any:
        self.n_steps += 1
        await self._happens("step")
        is_end = self.n_steps == self.length
        obs = self.env_id, self.serial, self.key, self.n_steps, action
        return obs, float(action % 1000), is_end and action % 2 == 0, is_end and action % 2 == 1, {}

    async def close(self) -> None:
        await self._happens("close")

    async def _happens(self, phase: str) -> None:
        await asyncio.sleep(self.dice.choice((0, 0, 0, 0.001, 0.002)))
        (what,) = self.dice.choices(_KINDS, _WEIGHTS)
        if self.is_cancelled:
            return
        if what == "loses its connection" and not self.has_begun:
            phase = "first reset"  # its server is awaited
        if what:
            self.faults[phase] += 1
            self.faults[what] += phase != "close"
        if what == "raises":
            raise ValueError("this level does not exist")
        if what == "exits":
            raise SystemExit("the game is over")
        if what == "loses its connection":
            raise ConnectionResetError("the server has closed the session")
        if what == "cancels itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        if what == "hangs":
            await asyncio.sleep(_EVER_S)
        if what == "goes on when cancelled":
            try:
                await asyncio.sleep(_EVER_S)
            except asyncio.CancelledError:
                self.is_cancelled = True
                await asyncio.sleep(0.01)


@attrs.frozen
class Sample:
    """What this process has at one moment."""

    rss_mb: float
    descriptors: int
    threads: int
    tasks: int

    @classmethod
    def now(cls) -> Sample:
        rss_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        rss_mb = rss_pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        tasks = sum(issubclass(type(each), asyncio.Task) and not each.done() for each in gc.get_objects())
        return cls(rss_mb, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), tasks)


class Books:
    """What environments were asked for, and what came of it."""

    def __init__(self) -> None:
        self.dice = random.Random(0)
        self.wrong: Counter[str] = Counter()
        self.first_wrong: dict[str, str] = {}
        self.next_action = 1
        self.asked = self.delivered = self.lost = self.lost_in_flight = self.cancelled = 0
        self.in_flight: dict[int, int] = {}
        """Actions by env_id."""

    def options(self, key: int) -> dict[str, Any]:
        return {"key": key, "length": self.dice.randint(1, 40)}

    def expect(self, holds: Any, what: str, about: Any) -> None:
        if not holds:
            self.wrong[what] += 1
            self.first_wrong.setdefault(what, str(about))


class Trainer(Books):
    """A trainer that sends and receives."""

    def play(self, manager: AsyncioEnvManager, n_steps: int, sample: Callable[[int], None]) -> None:
        self.manager = manager
        self.ready: set[int] = set()
        self.last: dict[int, Any] = {}
        """The last observation of each environment, None if it has no episode."""
        manager.reset(tasks=self._tasks(), attempts=3)
        while self.delivered < n_steps:
            self.go_on(self.dice.choice(WAITS))
            sample(self.delivered)
        deadline = time.monotonic() + SETTLE_S
        with contextlib.suppress(UsageError):  # nothing is in flight
            while time.monotonic() < deadline:
                self.take(manager.recv(Wait.any(timeout_s=1.0)))

    def check(self, restarts: int, steps_lost: int) -> None:
        assert self.asked == self.delivered + self.lost_in_flight + len(self.in_flight)
        n_before_begun = restarts - self.lost
        """Restarts after a reset of an environment that rested, which has no row to be lost."""
        assert n_before_begun == steps_lost - self.lost_in_flight
        assert 0 <= n_before_begun <= Faulty.faults["reset"]

    def _tasks(self) -> Any:
        for key in itertools.count():
            yield Task(options=self.options(key))

    def go_on(self, wait: Wait) -> None:
        """Act in some environments that are ready, and take what comes."""
        some = [env_id for env_id in sorted(self.ready) if self.dice.random() < 0.7]
        self.dice.shuffle(some)
        if some:
            actions = list(range(self.next_action, self.next_action + len(some)))
            self.next_action += len(some)
            acting = [env_id for env_id in some if self.last.get(env_id) is not None]
            self.asked += len(acting)
            self.in_flight.update({e: a for e, a in zip(some, actions, strict=True) if self.last.get(e) is not None})
            self.ready.difference_update(some)
            self.manager.send(actions, some)
        self.take(self.manager.recv(wait))

    def take(self, batch: Any) -> None:
        """Check each row of a batch."""
        ended = batch.terminated | batch.truncated
        finals = dict(zip(np.flatnonzero(ended).tolist(), zip_finals(batch), strict=True)) if ended.any() else {}
        self.expect(len(set(batch.env_ids.tolist())) == len(batch), "twice in a batch", batch.env_ids)
        columns = (batch.env_ids, batch.obs, batch.reward, batch.lost, batch.first, batch.task)
        for row, (env_id, obs, reward, is_lost, is_first, task) in enumerate(
            zip(*(each.tolist() if isinstance(each, np.ndarray) else each for each in columns), strict=True)
        ):
            action = self.in_flight.pop(env_id, None)
            self.ready.add(env_id)
            if is_lost:
                self.lost += 1
                self.lost_in_flight += action is not None
                self.expect(row in finals and reward == 0.0, "loss is no end", obs)
                self.last[env_id] = None
                continue
            if row in finals:
                final, final_task = finals[row]
                self.check_step(env_id, action, reward, final, final_task)
                self.last[env_id] = None
                if task < 0 or obs == final:  # it rests
                    continue
                action, is_first = None, True
            if is_first:
                self.expect(
                    obs[0] == env_id and obs[3] == 0 and obs[4] is None and obs[2] == task,
                    "mispaired first",
                    (env_id, task, obs),
                )
                self.expect(action is None, "an action to no episode", (env_id, action, obs))
            elif task >= 0:
                self.check_step(env_id, action, reward, obs, task)
            else:
                self.expect(False, "a row of nothing", (env_id, obs))
            self.last[env_id] = obs

    def check_step(self, env_id: int, action: int | None, reward: float, obs: Any, task: int) -> None:
        last = self.last.get(env_id)
        self.delivered += 1
        self.expect(action is not None and last is not None, "invented", (env_id, obs))
        if action is not None and last is not None:
            expected = (env_id, last[1], last[2], last[3] + 1, action)
            self.expect(
                obs == expected and task == last[2] and reward == action % 1000,
                "mispaired",
                (expected, obs, task, reward),
            )


def zip_finals(batch: Any) -> Any:
    """The final observations of a batch with the tasks of their episodes."""
    return zip(batch.final_obs, batch.final_task.tolist(), strict=True)


class PoolTrainer(Books):
    """Coroutines that play over a pool. Some steps, and some that wait for an environment, are cancelled."""

    def play(self, manager: AsyncioEnvManager, n_steps: int, sample: Callable[[int], None]) -> None:
        asyncio.run(self._play(manager.pool(), manager.n_envs, n_steps, sample))

    def check(self, restarts: int, steps_lost: int) -> None:
        assert self.lost <= restarts <= self.lost + self.cancelled

    async def _play(self, pool: Any, n_envs: int, n_steps: int, sample: Callable[[int], None]) -> None:
        keys, together, n_held = itertools.count(), asyncio.Event(), 0

        async def agent() -> None:
            while self.delivered < n_steps:
                try:
                    await self._episode(pool, next(keys))
                except LostEpisode:
                    self.lost += 1
                sample(self.delivered)

        async def hold() -> None:
            nonlocal n_held
            try:
                async with pool.begin(self.options(-1)):
                    n_held += 1
                    if n_held == n_envs:
                        together.set()
                    await together.wait()
            except LostEpisode:
                self.lost += 1
                await hold()

        await asyncio.gather(*(agent() for _ in range(n_envs + 8)))
        await asyncio.wait_for(asyncio.gather(*(hold() for _ in range(n_envs))), SETTLE_S)

    async def _episode(self, pool: Any, key: int) -> None:
        beginning = pool.begin(self.options(key))
        if self.dice.random() < 0.05 and not await self._in_time(beginning.__aenter__(), 0.01):
            return
        if beginning.env_id is None:
            await beginning.__aenter__()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_exit(beginning.__aexit__)
            last = beginning.obs
            self.expect(last == (beginning.env_id, last[1], key, 0, None), "mispaired first", (key, last))
            while not beginning.is_over:
                action, self.next_action = self.next_action, self.next_action + 1
                step = beginning.step(action)
                if self.dice.random() < 0.01:
                    if not await self._in_time(step, 0.002):
                        return
                else:
                    await step
                self.delivered += 1
                obs, expected = beginning.obs, (*last[:3], last[3] + 1, action)
                self.expect(obs == expected, "mispaired", (expected, obs))
                last = obs

    async def _in_time(self, coroutine: Any, longest_s: float) -> bool:
        """Await a coroutine for a time drawn by chance. Return whether it has ended by itself."""
        try:
            await asyncio.wait_for(coroutine, self.dice.random() * longest_s)
        except asyncio.TimeoutError:
            self.cancelled += 1
            return False
        return True


@attrs.define
class Outcome:
    """What a run came to."""

    seconds: float
    books: Trainer | PoolTrainer
    faults: Counter[str]
    restarts: int
    steps_lost: int
    early: Sample
    late: Sample
    complaints: list[str]

    def table(self) -> str:
        """Everything, for people."""
        books = self.books
        rows = [
            ("trainer, seconds", f"{type(books).__name__}, {self.seconds:.0f}"),
            ("steps asked for, delivered", f"{books.asked:,}, {books.delivered:,}"),
            ("lost in flight, as told", f"{books.lost_in_flight:,}, {self.steps_lost:,}"),
            ("lost, restarts, cancelled", f"{books.lost:,}, {self.restarts:,}, {books.cancelled:,}"),
            ("faults", dict(self.faults)),
            ("wrong", books.first_wrong or "nothing"),
            ("early", self.early),
            ("late", self.late),
            ("complaints", self.complaints[:3] or "none"),
        ]
        return "\n".join(f"{name:<28}{value}" for name, value in rows)

    def check(self) -> None:
        """Nothing mixed up, and all accounted for."""
        assert not self.books.wrong, self.books.first_wrong
        assert self.restarts == self.faults["step"] + self.faults["reset"]
        self.books.check(self.restarts, self.steps_lost)
        assert not self.complaints, self.complaints[:3]


def run_chaos(books: Trainer | PoolTrainer, n_steps: int, n_envs: int = 64) -> Outcome:
    """Take ``n_steps`` steps under chaos, then until all faults have been told."""
    Faulty.faults = Counter()
    complaints: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("asyncio").addHandler(handler)
    samples: list[Sample] = []

    def sample(n_taken: int) -> None:
        if n_taken >= len(samples) * n_steps / 100:
            samples.append(Sample.now())

    began = time.monotonic()
    timeouts = Timeouts(start_s=60, reset_s=STEP_S, step_s=STEP_S, close_s=0.5)
    restarts = RestartPolicy(max_restarts=10**9, on_exception="restart", backoff_s=0)
    try:
        with AsyncioEnvManager(Faulty, n_envs, timeouts=timeouts, restarts=restarts) as manager:
            books.play(manager, n_steps, sample)
            stats, faults = manager.stats(), Counter(Faulty.faults)
    finally:
        logging.getLogger("asyncio").removeHandler(handler)
    third = max(1, len(samples) // 3)
    early, late = middle(samples[third : 2 * third] or samples), middle(samples[-third:])
    return Outcome(time.monotonic() - began, books, faults, stats.restarts, stats.steps_lost, early, late, complaints)


def middle(samples: list[Sample]) -> Sample:
    """The medians of samples."""
    return Sample(*(statistics.median(each) for each in zip(*map(attrs.astuple, samples), strict=True)))


if __name__ == "__main__":
    logging.getLogger("envmanager").setLevel(logging.CRITICAL)
    for kind in (Trainer, PoolTrainer):
        outcome = run_chaos(kind(), int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
        print(outcome.table(), flush=True)
        outcome.check()
