"""What a manager adds to vector environments, measured in chunks of rounds that alternate with the vector alone.

    python -m benchmarks.vectors [--runs 3] [--only noop atari]

The vector alone is stepped with random actions drawn before; EnvPool's and Gymnasium's ended rows cost it what they cost
there. Hosted, the same vector is stepped by ``send`` and ``recv`` of a SimpleEnvManager. CPU time is that of the whole
process, threads included. The last table compares by the clock: Pong by id, in this process and in worker processes,
beside EnvPool alone. Run it on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import gymnasium
import numpy as np

from envmanager import EnvContext, SimpleEnvManager, SubprocessEnvManager

Step = Callable[[], None]


class NoopVector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A vector that does nothing, of one observation of 4 numbers per row."""

    def __init__(self, n: int) -> None:
        self.num_envs = n
        self.single_observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, n)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, n)
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        self._result = np.zeros((n, 4), np.float32), np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_), {}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return self._result[0], {}

    def step(self, actions: Any) -> Any:
        return self._result


def atari(n: int) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("pong", num_envs=n, num_threads=1)


def envpool(game: str, n: int) -> Any:
    import envpool as library

    return library.make(game, env_type="gymnasium", num_envs=n, seed=1)


@attrs.frozen
class Cell:
    """A vector of ``n`` rows, and how many rounds one chunk has."""

    name: str
    make: Callable[[int], Any]
    n: int
    rounds: int
    wanted: str
    n_actions: int = 2


CELLS = {
    "noop": [
        Cell("does nothing, 8", NoopVector, 8, 2000, "≤ 25 µs"),
        Cell("does nothing, 64", NoopVector, 64, 2000, "≤ 30 µs"),
    ],
    "atari": [Cell("AtariVectorEnv Pong 8, one thread", atari, 8, 60, "≥ 0.97", 6)],
    "envpool": [
        Cell("EnvPool Pong 8", lambda n: envpool("Pong-v5", n), 8, 60, "≥ 0.97", 6),
        Cell("EnvPool CartPole 64", lambda n: envpool("CartPole-v1", n), 64, 1000, "≥ 0.7"),
    ],
}


def actions_of(cell: Cell) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, cell.n_actions, (64, cell.n)))


def alone(cell: Cell) -> Step:
    vector, actions = cell.make(cell.n), actions_of(cell)
    vector.reset()
    turn = 0

    def step() -> None:
        nonlocal turn
        turn = (turn + 1) % 64
        vector.step(actions[turn])

    return step


def hosted(cell: Cell) -> Step:
    manager, actions = SimpleEnvManager(lambda: cell.make(cell.n), cell.n), actions_of(cell)
    manager.reset()
    return stepped(manager, actions)


def stepped(manager: Any, actions: list[np.ndarray]) -> Step:
    """Return a function that takes the rows that are ready and steps them."""
    batch = manager.recv()
    turn = 0

    def step() -> None:
        nonlocal turn, batch
        turn = (turn + 1) % 64
        manager.send(actions[turn][batch.env_ids], batch.env_ids)
        batch = manager.recv()

    return step


def compare(cell: Cell, chunks: int) -> tuple[float, float, float, float]:
    """Return the medians of CPU and wall seconds per round, hosted and alone."""
    steps = hosted(cell), alone(cell)
    found: list[list[tuple[float, float]]] = [[], []]
    for number in range(2 * chunks + 2):
        which = number % 2
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for _ in range(cell.rounds):
            steps[which]()
        if number >= 2:  # the first chunk of each warms up
            found[which].append((time.process_time() - cpu_s, time.perf_counter() - wall_s))
    (cpu, wall), (cpu_alone, wall_alone) = ([statistics.median(t) / cell.rounds for t in zip(*f)] for f in found)
    return cpu, wall, cpu_alone, wall_alone


def pong_by_id(n: int, turns: int) -> dict[str, float]:
    """Return rows per second of Pong in turns of a second: ours by id in some layouts, and EnvPool alone."""

    def make(**options: Any) -> Any:
        kind = SubprocessEnvManager if "n_workers" in options else SimpleEnvManager
        manager = kind({"vector": "ALE/Pong-v5"}, n, **options)
        manager.reset()
        return manager

    managers = {"in this process": make(), "two workers": make(n_workers=2)}
    cell = Cell("", lambda k: envpool("Pong-v5", k), n, 0, "", 6)
    steps = {name: stepped(manager, actions_of(cell)) for name, manager in managers.items()}
    n_rows = {"in this process": n, "two workers": n // 2, "EnvPool alone": n}
    steps["EnvPool alone"] = alone(cell)
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 1):
        for name, step in steps.items():
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < 1.0:
                step()
                count += 1
            if turn:
                rates[name].append(count * n_rows[name] / (time.perf_counter() - began))
    for manager in managers.values():
        manager.close()
    return {name: statistics.median(rate) for name, rate in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=[*CELLS, "pong"], default=[*CELLS, "pong"])
    arguments = parser.parse_args()
    print("| vector | run | µs of CPU more a round | share of alone, CPU | by the clock | wanted |\n|---" + "|---" * 5 + "|")
    for cell in (cell for name in CELLS if name in arguments.only for cell in CELLS[name]):
        for run in range(1, arguments.runs + 1):
            cpu, wall, cpu_alone, wall_alone = compare(cell, arguments.chunks)
            shares = f"{cpu_alone / cpu:.3f} | {wall_alone / wall:.3f}"
            print(f"| {cell.name} | {run} | {(cpu - cpu_alone) * 1e6:.1f} | {shares} | {cell.wanted} |", flush=True)
    if "pong" not in arguments.only:
        return
    print("\n| Pong, rows/s | run | in this process | two workers | EnvPool alone | best of ours beside it |\n|---" + "|---" * 5 + "|")
    for n in (8, 32):
        for run in range(1, arguments.runs + 1):
            rates = pong_by_id(n, 8)
            peer = rates.pop("EnvPool alone")
            ours = " | ".join(f"{rate:,.0f}" for rate in rates.values())
            print(f"| {n} | {run} | {ours} | {peer:,.0f} | {max(rates.values()) / peer:.2f} |", flush=True)


if __name__ == "__main__":
    main()
