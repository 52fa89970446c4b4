"""Frames per second of DQN on Pong with each speed-up added, in the order of "Speeding up DQN on PyTorch".

    python docs/examples/dqn_speedups.py

(a) several steps per update, with a batch grown alike; (b) playing and learning in separate processes; (c) asynchronous
copies to the GPU, which do nothing on the CPU; (d) Atari preprocessing straight from the emulator. A step of the agent
is four frames of the game; the article counts steps, and calls them frames.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from envmanager.training.algorithms.networks import pick_device
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun

STARTS = 500
FRAMES_PER_STEP = 4


def wrapped_pong() -> gymnasium.Env:
    """Pong by Gymnasium's own wrappers."""
    import ale_py  # registers the games

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    made = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    return FrameStackObservation(AtariPreprocessing(made), 4)


def config(steps: int, *, n_envs: int, env: Any, **trainer: Any) -> dict[str, Any]:
    """32 rows of the replay are learned from per step of an agent, however many environments there are."""
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


class Clock(Report):
    """Times a training run from its first update to its last."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.steps: list[int] = []

    def updated(self, run: TrainingRun, update: Any) -> None:
        self.times.append(time.perf_counter())
        self.steps.append(update.n_steps)


def steps_per_s(tables: dict[str, Any]) -> float:
    """Steps of the agents per second while they learn."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        TrainingRun(TrainingPlan.parse(tables, Path(directory)), clock).go()
    return (clock.steps[-1] - clock.steps[0]) / (clock.times[-1] - clock.times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1500, help="of the agents, for each line")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--convolutions", default="nature", choices=["nature", "small"])
    arguments = parser.parse_args()
    network = {"convolutions": arguments.convolutions}
    four: dict[str, Any] = {"n_envs": 4, "env": wrapped_pong, "pinned_copies": False, **network}
    apart = {"apart": 200}
    lines: dict[str, dict[str, Any]] = {
        "one environment, an update per step": {**four, "n_envs": 1},
        "(a) four environments, a batch grown alike": four,
        "(b) learning in a process of its own": {**four, **apart},
        "(c) asynchronous copies to the GPU": {**four, **apart, "pinned_copies": True},
        "(d) fast preprocessing": {**four, **apart, "pinned_copies": True, "env": "envmanager.adapters.atari:Pong"},
    }
    rates: dict[str, list[float]] = {name: [] for name in lines}
    for _ in range(arguments.rounds):
        for name, options in lines.items():
            rates[name].append(steps_per_s(config(arguments.steps, **options)))
    print(f"{'':<43} steps/s  frames/s  ratio  (medians, on {pick_device('auto').type})")
    first = rates["one environment, an update per step"]
    for name, of in rates.items():
        median = statistics.median(of)
        ratio = statistics.median(rate / base for rate, base in zip(of, first, strict=True))  # of the same round
        print(f"{name:<43} {median:7.1f} {FRAMES_PER_STEP * median:9.0f} {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
