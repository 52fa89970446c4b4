"""Compares two checkouts of this library: what a round of a manager costs the trainer's process.

For each cell one process of each checkout lives beside the other, and they take turns of 50 ms in random order. After
a fifth of the turns both are started anew, because where a process has its memory is worth some percent. Medians of
the ratios are printed: above 1, the second checkout is faster.

    python tools/compare_checkouts.py ../before . --cells noop step pong
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

N_STARTS, TURN_S = 5, 0.05
CELLS = ("noop", "step", "tasks", "laid", "two", "each", "local", "cartpole", "cartpole-two", "pong", "asyncio")


def compare(before: str, after: str, cell: str, n_turns: int) -> None:
    """Print the ratios of one cell."""
    ratios: list[list[float]] = [[], []]
    for _ in range(N_STARTS):
        sides = [_start(folder, cell) for folder in (before, after)]
        for _ in range(n_turns // N_STARTS):
            costs = [[0.0, 0.0], [0.0, 0.0]]
            for side in random.sample((0, 1), 2):
                sides[side].stdin.write("go\n")
                sides[side].stdin.flush()
                costs[side] = [float(number) for number in sides[side].stdout.readline().split()]
            for at in (0, 1):
                ratios[at].append(costs[0][at] / costs[1][at])
        for process in sides:
            process.stdin.close()
            process.wait()
    texts = []
    for what, own in zip(("CPU", "wall"), ratios, strict=True):
        low, middle, high = statistics.quantiles(own, n=4)
        texts.append(f"{what} {middle:.3f} ({low:.2f} to {high:.2f})")
    print(f"{cell:14} {'  '.join(texts)}", flush=True)


def _start(folder: str, cell: str) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", os.path.abspath(__file__), "--play", cell],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.path.abspath(folder)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", f"{folder} cannot play {cell!r}"
    return process


def play(cell: str) -> None:
    """Play a cell: after each line of the input a turn, then a line with µs of CPU and of time a round."""
    import gymnasium
    import numpy as np

    from benchmarks.envs import make_env
    from envmanager import ActionInfo, AsyncioEnvManager, SimpleEnvManager, SubprocessEnvManager, Task

    class Waits(gymnasium.Env):  # type: ignore[misc]
        observation_space = gymnasium.spaces.Box(0, 1, (4,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.n = 0
            return np.zeros(4, np.float32), {}

        async def step(self, action: Any) -> Any:
            await asyncio.sleep(0)
            self.n += 1
            return np.zeros(4, np.float32), 1.0, self.n >= 200, False, {}

    class Zeros:
        def get_action(self, steps: Any) -> ActionInfo:
            return ActionInfo(np.zeros(len(steps), np.int64))

    def upright(batch: Any) -> Any:
        return (batch.obs[:, 2] + 0.5 * batch.obs[:, 3] > 0).astype(np.int64)

    noop, pong = functools.partial(make_env, "noop", 0), functools.partial(make_env, "pong", 0)
    how: dict[str, Any] = {"seed": 1, "wait": "all"}
    managers: dict[str, Callable[[], Any]] = {
        "two": lambda: SubprocessEnvManager(noop, 8, n_workers=2, **how),
        "each": lambda: SubprocessEnvManager(noop, 8, n_workers=8, **how),
        "local": lambda: SubprocessEnvManager(noop, 8, n_workers=1, local_envs=4, **how),
        "cartpole": lambda: SimpleEnvManager("CartPole-v1", 32, **how),
        "cartpole-two": lambda: SubprocessEnvManager("CartPole-v1", 32, n_workers=2, **how),
        "pong": lambda: SubprocessEnvManager(pong, 8, n_workers=2, **how),
        "asyncio": lambda: AsyncioEnvManager(Waits, 2000, **how),
    }
    with managers.get(cell, lambda: SimpleEnvManager(noop, 8, **how))() as manager:
        tasks = (Task(seed=number) for number in itertools.count())
        manager.reset(**({"tasks": tasks, "prefetch": cell == "laid"} if cell in ("tasks", "laid") else {}))
        if cell == "step":
            manager.set_policy("default", Zeros())
            next_round = manager.step
        else:
            zeros, batch = np.zeros(manager.n_envs, np.int64), manager.recv()

            def next_round() -> Any:
                nonlocal batch
                n = len(batch.env_ids)
                manager.send(upright(batch) if cell.startswith("cartpole") else zeros[:n], batch.env_ids)
                batch = manager.recv()

        for _ in range(3 if cell == "asyncio" else 300):
            next_round()
        print("ready", flush=True)
        for _ in sys.stdin:
            warm = time.perf_counter() + TURN_S / 5
            while time.perf_counter() < warm:
                next_round()
            n, cpu, began = 0, time.process_time(), time.perf_counter()
            while time.perf_counter() - began < TURN_S or n < 2:
                next_round()
                n += 1
            cost = time.process_time() - cpu, time.perf_counter() - began
            print(*(1e6 * each / n for each in cost), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", metavar="CHECKOUT", help="before, after")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS)
    parser.add_argument("--turns", type=int, default=250)
    parser.add_argument("--play", choices=CELLS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.play:
        play(arguments.play)
    elif len(arguments.checkouts) != 2:
        parser.error("name two checkouts")
    else:
        for cell in arguments.cells:
            compare(*arguments.checkouts, cell, arguments.turns)


if __name__ == "__main__":
    main()
