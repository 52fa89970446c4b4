"""Trains a config of SAC here and with Stable-Baselines3's SAC, one after the other, and prints one table.

    python tools/compare_sac.py docs/examples/sac_pendulum.yaml [--seeds 0 1 2] [--sb3 .venv-bench-sb3/bin/python]

Both libraries get the hyperparameters of the config, one environment in the trainer's process, and one thread; each
training is a process of its own. The order alternates with the seed. Times are the wall time and the CPU time of set-up
and training; compare CPU times while the machine is busy. Returns are of greedy episodes after the training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from comparing import config_of, parser_of

SAME = {
    "learning_rate": 3e-4, "capacity": 1_000_000, "learning_starts": 100, "train_every": 1, "updates": 1, "batch": 256,
    "gamma": 0.99, "tau": 0.005, "hidden": [256, 256],
}  # fmt: skip
"""Options that both libraries have, with our defaults. A config may override these, and have no other options."""


def main() -> None:
    arguments = parse()
    if arguments.train is not None:
        print(json.dumps(TRAININGS[arguments.train](json.loads(arguments.config))))
        return
    plan = read(Path(arguments.config), arguments.steps)
    print(f"{plan['env']}, {plan['steps']:,} steps, mean return of {plan['episodes']} greedy episodes")
    print("| seed | envmanager | time, processor | Stable-Baselines3 | time, processor | ratio of the processor's |")
    print("|---|---|---|---|---|---|")
    ratios = []
    for seed in arguments.seeds:
        order = ["ours", "sb3"] if seed % 2 == 0 else ["sb3", "ours"]
        found = {name: run(name, {**plan, "seed": seed}, arguments) for name in order}
        ratios.append(found["ours"]["processor"] / found["sb3"]["processor"])
        cells = [told(found[name]) for name in ("ours", "sb3")]
        print(f"| {seed} | {' | '.join(cells)} | {ratios[-1]:.2f} |", flush=True)
    print(f"\nmedian of the ratios {statistics.median(ratios):.2f}")


def told(found: dict[str, float]) -> str:
    return f"{found['mean']:.0f} ± {found['spread']:.0f} | {found['seconds']:.0f} s, {found['processor']:.0f} s"


def parse() -> argparse.Namespace:
    return parser_of(__doc__, "sac", TRAININGS).parse_args()


def read(path: Path, steps: int | None) -> dict[str, Any]:
    """Return the training that a config describes; exit if the other library lacks one of its options."""
    tables, own = config_of(path, "sac")
    unknown = own.keys() - SAME.keys()
    if unknown or tables["manager"].get("n_envs", 1) != 1:
        sys.exit(f"{path}: wanted is one environment and a trainer sac with no other options than {', '.join(SAME)}.")
    return {
        "env": tables["manager"]["env"],
        "steps": tables["training"]["steps"] if steps is None else steps,
        "episodes": tables["training"]["evaluation_episodes"],
        "trainer": {**SAME, **own},
    }


def run(name: str, plan: dict[str, Any], arguments: argparse.Namespace) -> dict[str, float]:
    python = sys.executable if name == "ours" else arguments.sb3
    command = [python, str(Path(__file__)), json.dumps(plan), "--train", name]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{name} failed:\n{ended.stderr}")
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def train_ours(plan: dict[str, Any]) -> dict[str, float]:
    from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun

    processor = 0.0

    class Timed(Report):
        """A report that takes the CPU time at the end of the training."""

        def evaluating(self, n_episodes: int) -> None:
            nonlocal processor
            processor = time.process_time() - began

    tables = {
        "manager": {"kind": "simple", "env": plan["env"], "n_envs": 1},
        "training": {
            "steps": plan["steps"], "seed": plan["seed"], "evaluation_episodes": plan["episodes"], "device": "cpu",
        },
        "trainers": {"*": {"kind": "sac", **plan["trainer"]}},
    }  # fmt: skip
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        result = TrainingRun(TrainingPlan.parse(tables, Path(folder)), Timed()).go()
    assert result.evaluation is not None
    evaluation = result.evaluation
    return {
        "seconds": result.wall_s,
        "processor": processor,
        "mean": evaluation.mean,
        "spread": evaluation.spread,
    }


def train_sb3(plan: dict[str, Any]) -> dict[str, float]:
    import gymnasium
    import torch
    from stable_baselines3 import SAC
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor

    torch.set_num_threads(1)
    own = plan["trainer"]
    began, processor_began = time.monotonic(), time.process_time()
    model = SAC(
        "MlpPolicy",
        Monitor(gymnasium.make(plan["env"])),
        learning_rate=own["learning_rate"],
        buffer_size=own["capacity"],
        learning_starts=own["learning_starts"],
        batch_size=own["batch"],
        tau=own["tau"],
        gamma=own["gamma"],
        train_freq=own["train_every"],
        gradient_steps=own["updates"],
        policy_kwargs={"net_arch": list(own["hidden"])},
        seed=plan["seed"],
        device="cpu",
    )
    model.learn(plan["steps"])
    seconds, processor = time.monotonic() - began, time.process_time() - processor_began
    played = Monitor(gymnasium.make(plan["env"]))
    played.reset(seed=plan["seed"] + 1000)
    mean, spread = evaluate_policy(model, played, n_eval_episodes=plan["episodes"])
    return {"seconds": seconds, "processor": processor, "mean": float(mean), "spread": float(spread)}


TRAININGS = {"ours": train_ours, "sb3": train_sb3}

if __name__ == "__main__":
    main()
