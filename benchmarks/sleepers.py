"""Environments that sleep, and the ways to step thousands of them: ``python -m benchmarks.sleepers WAY N SECONDS``.

Prints one line of JSON. It runs where only the library of the way is installed. A step sleeps 0.1 to 10 s,
log-uniform, and returns the time of its end. Environments are acted on as soon as they are ready.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import sys
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

SHORTEST_S, LONGEST_S = 0.1, 10.0
WARM_UP_S = 5.0
_dice = random.Random(0)
_DURATIONS = itertools.cycle([SHORTEST_S * (LONGEST_S / SHORTEST_S) ** _dice.random() for _ in range(100_003)])


class Record:
    """What is measured in a stretch of time, which begins ``WARM_UP_S`` seconds after the first call."""

    def __init__(self, n: int, seconds: float) -> None:
        self.n, self.seconds = n, seconds
        self.start = self.end = math.inf
        self.slept_s = 0.0
        self.sleepers: list[Sleeper] = []
        self.late_s = array("d")
        """Time from the end of each step to its return to the trainer."""
        self._cpu_s = 0.0
        self._rss = 0
        self.is_over = False
        self.figures: dict[str, float] = {}

    def begin(self) -> None:
        """Note the memory in use, when all libraries are imported."""
        self._rss = rss()

    def __call__(self, ended_at: Any) -> bool:
        """Note the ends of steps that were just returned. Return whether to go on."""
        now = time.monotonic()
        if self.start == math.inf:
            self.start = now + WARM_UP_S
            self.end = self.start + self.seconds
        if now < self.start:
            self._cpu_s = time.process_time()
        elif now < self.end:
            self.late_s.extend([now - each for each in ended_at])
        else:
            self._finish()
        return now < self.end

    def slept(self, began: float, takes_s: float) -> None:
        """Note a sleep, as far as it lies in the stretch."""
        self.slept_s += max(0.0, min(began + takes_s, self.end) - max(began, self.start))

    def _finish(self) -> None:
        cpu_s, bytes_each = time.process_time() - self._cpu_s, (rss() - self._rss) / self.n
        self.is_over = True
        for each in self.sleepers:
            if each.takes_s:
                self.slept(each.began, each.takes_s)
        steps = sorted(self.late_s)
        self.figures = {
            "share": self.slept_s / (self.n * self.seconds),
            "steps": len(steps),
            "p99_ms": 1e3 * steps[int(0.99 * len(steps))] if steps else float("nan"),
            "cpu_us": 1e6 * cpu_s / max(1, len(steps)),
            "bytes": bytes_each,
        }


class Sleeper:
    """The part of an environment that all ways share."""

    record: Record
    """The measurement that runs."""

    def __init__(self) -> None:
        self.began = self.takes_s = 0.0
        """The sleep that goes on; 0 s if there is none."""
        self.record.sleepers.append(self)

    def begin(self) -> float:
        """Return how long the next step sleeps, from now."""
        takes_s: float = next(_DURATIONS)
        self.takes_s = takes_s
        self.began = time.monotonic()
        return takes_s

    def end(self) -> float:
        """Return the time, at which a step ends."""
        if not self.record.is_over:
            self.record.slept(self.began, self.takes_s)
        self.takes_s = 0.0
        return time.monotonic()


class AwaitedSleeper(Sleeper):
    """A sleeper whose methods are coroutines."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 0.0, {}

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(self.begin())
        return self.end(), 0.0, False, False, {}


class BlockingSleeper(Sleeper):
    """A sleeper that blocks its thread."""

    def step(self, action: Any) -> Any:
        time.sleep(self.begin())
        return self.end(), 0.0, False, False, {}


def manager(n: int, record: Record) -> None:
    """Step by an AsyncioEnvManager."""
    from envmanager import AsyncioEnvManager

    AsyncioEnvManager(AwaitedSleeper, 2).close()
    record.sleepers.clear()
    record.begin()
    with AsyncioEnvManager(AwaitedSleeper, n) as envs:
        envs.reset()
        batch = envs.recv("all")
        while record(batch.obs):
            envs.send([None] * len(batch), batch.env_ids)
            batch = envs.recv()


def threads(n: int, record: Record, n_threads: int | None = None) -> None:
    """Step in a pool of as many threads as environments, which put what they return on a queue."""
    record.begin()
    done: SimpleQueue[tuple[float, BlockingSleeper]] = SimpleQueue()
    ready = [(0.0, BlockingSleeper()) for _ in range(n)]

    def step(env: BlockingSleeper) -> None:
        if not record.is_over:
            done.put((env.step(None)[0], env))

    pool = ThreadPoolExecutor(n if n_threads is None else n_threads)
    while record([ended_at for ended_at, _ in ready]):
        for _, env in ready:
            pool.submit(step, env)
        ready = [done.get()]
        with suppress(Empty):
            while True:
                ready.append(done.get_nowait())


def few_threads(n: int, record: Record) -> None:
    """Step in a pool of 32 threads."""
    threads(n, record, 32)


def bare(n: int, record: Record) -> None:
    """Step by a task for each step, which puts what it returns on a queue, and nothing else."""

    async def run() -> None:
        record.begin()
        done: asyncio.Queue[tuple[float, AwaitedSleeper]] = asyncio.Queue()
        tasks = set()

        async def step(env: AwaitedSleeper) -> None:
            done.put_nowait(((await env.step(None))[0], env))

        ready = [(0.0, AwaitedSleeper()) for _ in range(n)]
        while record([ended_at for ended_at, _ in ready]):
            for _, env in ready:
                task = asyncio.ensure_future(step(env))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            ready = [await done.get()]
            while not done.empty():
                ready.append(done.get_nowait())

    asyncio.run(run())


def torchrl(n: int, record: Record) -> None:
    """Step by TorchRL's AsyncEnvPool of threads."""
    import gymnasium
    import numpy as np
    import torch
    from torchrl.envs import AsyncEnvPool, GymWrapper

    class Environment(gymnasium.Env):  # type: ignore[type-arg, misc, unused-ignore]
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self) -> None:
            self.sleeper = BlockingSleeper()

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(1), {}

        def step(self, action: Any) -> Any:
            ended_at, *rest = self.sleeper.step(None)
            return np.array([ended_at]), *rest

    record.begin()
    pool = AsyncEnvPool([lambda: GymWrapper(Environment())] * n, backend="threading", stack="lazy")
    ready = pool.reset()
    ended_at: Any = [0.0] * n
    while record(ended_at):
        ready["action"] = torch.zeros(ready.shape[0], dtype=torch.int64)
        pool.async_step_and_maybe_reset_send(ready)
        made, ready = pool.async_step_and_maybe_reset_recv(min_get=1)
        ended_at = made["next", "observation"].flatten().tolist()


WAYS: dict[str, Callable[[int, Record], None]] = {
    "envmanager": manager,
    "threads": threads,
    "few_threads": few_threads,
    "bare": bare,
    "torchrl": torchrl,
}


def rss() -> int:
    """Return the memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(way: str, n: int, seconds: float) -> None:
    Sleeper.record = record = Record(n, seconds)
    WAYS[way](n, record)
    print(json.dumps(record.figures), flush=True)
    os._exit(0)  # threads may still sleep


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
