"""Frames per second of DQN on Pong with each speed-up added, in the order of "Speeding up DQN on PyTorch".

    python docs/examples/dqn_speedups.py

(a) several steps per update, with a batch grown alike; (b) playing and learning in separate processes; (c) asynchronous
copies to the GPU, which do nothing on the CPU; (d) Atari preprocessing straight from the emulator.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from envmanager.training.run import TrainingPlan, TrainingRun

STARTS = 500
FRAMES_PER_STEP = 4


def wrapped_pong() -> gymnasium.Env:
    """Pong by Gymnasium's own wrappers."""
    import ale_py  # registers the games

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    made = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    return FrameStackObservation(AtariPreprocessing(made), 4)


def config(steps: int, *, n_envs: int, env: Any, **trainer: Any) -> dict[str, Any]:
    """One step of the agent per environment and call; 32 rows of the replay are learned from per step of an agent."""
    return {
        "manager": {"kind": "simple", "env": env, "n_envs": n_envs, "wait": "all"},
        "training": {"steps": STARTS + steps, "evaluation_episodes": 0},
        "trainers": {
            "default": {
                "kind": "dqn",
                "learning_starts": STARTS,
                "train_every": n_envs,
                "batch": 32 * n_envs,
                "hidden": [],
                "capacity": 50_000,
                **trainer,
            }
        },
    }


class Clock:
    """Times a training from its first update to its last."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.steps: list[int] = []

    def updated(self, run: TrainingRun, update: Any) -> None:
        self.times.append(time.perf_counter())
        self.steps.append(update.n_steps)

    def started(self, run: TrainingRun) -> None: ...

    def saved(self, path: Path) -> None: ...

    def evaluating(self, n_episodes: int) -> None: ...


def frames_per_s(tables: dict[str, Any]) -> float:
    """Frames played per second while learning."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        TrainingRun(TrainingPlan.parse(tables, Path(directory)), clock).go()
    return FRAMES_PER_STEP * (clock.steps[-1] - clock.steps[0]) / (clock.times[-1] - clock.times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1500, help="of the agents, for each line")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    fast = "envmanager.adapters.atari:Pong"
    lines = {
        "one environment, an update per step": {"n_envs": 1, "env": wrapped_pong},
        "(a) four environments, a batch grown alike": {"n_envs": 4, "env": wrapped_pong},
        "(b) learning in a process of its own": {"n_envs": 4, "env": wrapped_pong, "apart": 200},
        "(d) fast preprocessing": {"n_envs": 4, "env": fast, "apart": 200},
    }
    rates: dict[str, list[float]] = {name: [] for name in lines}
    for _ in range(arguments.rounds):
        for name, options in lines.items():
            rates[name].append(frames_per_s(config(arguments.steps, **options)))
    first = sorted(rates["one environment, an update per step"])[arguments.rounds // 2]
    for name, of in rates.items():
        median = sorted(of)[arguments.rounds // 2]
        print(f"{name:<45} {median:6.0f} frames/s  {median / first:.2f}", flush=True)


if __name__ == "__main__":
    main()
