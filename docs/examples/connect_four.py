"""Connect four, played in turns by two behaviors that learn against each other (PPO with masks of legal moves).

    pip install 'envmanager[pettingzoo,torch]' pygame-ce
    python docs/examples/connect_four.py

While they learn, in two of three games one of the two makes random legal moves instead of its own. Otherwise both would
learn to beat nobody but each other. Afterwards each plays 500 games against random legal moves, greedily.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from pettingzoo.classic.connect_four.connect_four import env
from pettingzoo.utils import BaseWrapper

from envmanager import RandomPolicy, Task, make_manager
from envmanager.adapters.pettingzoo import ParallelEnvironment
from envmanager.training.algorithms.ppo import PPO, PPOOptions
from envmanager.training.controller import TrainerController
from envmanager.training.evaluation import evaluate

OPTIONS = PPOOptions(
    rollout=2048, epochs=8, minibatch=256, learning_rate=1e-3, hidden=(256, 256), gamma=0.97, entropy_coefficient=0.01
)
PLAYERS = {"player_0": "first", "player_1": "second"}
"""Behaviors. Without names, both players would be of one behavior, because their spaces are equal."""


class Guests(BaseWrapper):  # type: ignore[type-arg]
    """Connect four in which, in a ``share`` of the games, one of the players makes random moves."""

    share = 2 / 3

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._random = np.random.default_rng()
        self._guest = ""

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        super().reset(seed, options)
        self._guest = self._random.choice(self.agents) if self._random.random() < self.share else ""

    def step(self, action: Any) -> None:
        if action is not None and self.agent_selection == self._guest:
            action = self._random.choice(np.flatnonzero(self.observe(self.agent_selection)["action_mask"]))
        super().step(action)


def game() -> Any:
    return ParallelEnvironment(Guests(env()), behavior_of=PLAYERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=240_000, help="moves of both players")
    parser.add_argument("--games", type=int, default=500, help="games of each player against random moves")
    parser.add_argument("--manager", default="subprocess", choices=["simple", "subprocess"])
    parser.add_argument("--workers", type=int, default=3, help="processes of --manager subprocess")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    workers = {"n_workers": arguments.workers} if arguments.manager == "subprocess" else {}
    options = {"kind": arguments.manager, "n_envs": 64, "wait": "all", "seed": arguments.seed, **workers}
    with make_manager(options, game) as manager:
        specs = manager.behavior_specs
        trainers = {name: PPO(name, spec, OPTIONS, device="cpu") for name, spec in specs.items()}
        began = time.perf_counter()
        TrainerController(manager, trainers).train(arguments.steps)
        print(f"{arguments.steps:,} moves in {time.perf_counter() - began:.0f} s")
        manager.set_attr("share", 0.0)
        for name, trainer in trainers.items():
            players = {other: RandomPolicy(spec, seed=1) for other, spec in specs.items()}
            tasks = [Task(seed=number) for number in range(arguments.games)]
            played = evaluate(manager, {**players, name: trainer.greedy_policy()}, tasks=tasks)
            won = [total == 1 for total in played.returns_of[name]]
            print(f"{name}: wins {sum(won) / len(won):.1%} of {len(won)} games against random moves")


if __name__ == "__main__":
    main()
