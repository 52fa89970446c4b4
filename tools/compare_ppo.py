"""Trains a config of PPO here, with Stable-Baselines3's PPO and with CleanRL's, and prints one table.

    python tools/compare_ppo.py docs/examples/ppo_lunarlander.yaml [--seeds 0 1 2] [--steps N] [--at-once 2]
        [--sb3 .venv-bench-sb3/bin/python] [--cleanrl PYTHON SCRIPT [--cleanrl-env LunarLander-v2]]

All libraries get the hyperparameters of the config, one thread and one core; all environments are in the trainer's
process; each training run is a process of its own. SCRIPT is CleanRL's ``ppo.py``, or for continuous actions its
``ppo_continuous_action.py``. PYTHON has Gymnasium 0.29, as SCRIPT needs; its environments may differ in version:

    pip install torch gymnasium==0.29.1 'numpy<2' tyro tensorboard box2d pygame mujoco imageio

Returns are of the last 100 episodes of the training (10 with a single environment), in which actions are sampled. Times
are the wall time and the CPU time of the whole process, imports included.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from comparing import config_of, parser_of

FIXED = ("hidden", "target_kl", "reward_scale", "policy_gain", "anneal")
"""Options that must have their defaults, because the other libraries have these values fixed."""
SAME = (
    *("learning_rate", "epochs", "minibatch", "gamma", "gae_lambda", "clip"),
    *("entropy_coefficient", "value_coefficient", "max_grad_norm"),
)
"""Options that all libraries have."""


def main() -> None:
    arguments = parse()
    if arguments.train is not None:
        train_sb3(json.loads(arguments.config))
        return
    plan = read(Path(arguments.config), arguments.steps)
    libraries: list[Library] = [Ours(), StableBaselines(arguments.sb3)]
    if arguments.cleanrl:
        python, script = arguments.cleanrl
        libraries.append(CleanRL(python, script, arguments.cleanrl_env))
    cores: SimpleQueue[int] = SimpleQueue()
    for core in sorted(os.sched_getaffinity(0))[: arguments.at_once]:
        cores.put(core)

    def train(library: Library, seed: int) -> dict[str, float]:
        core = cores.get()
        try:
            return run(library, {**plan, "seed": seed}, core)
        finally:
            cores.put(core)

    with ThreadPoolExecutor(arguments.at_once) as pool:
        jobs = [(library, seed) for seed in arguments.seeds for library in libraries]
        found = list(pool.map(train, *zip(*jobs, strict=True)))
    about = f"{plan['steps']:,} steps; the last {plan['n_last']} episodes; {arguments.at_once} at once"
    print(f"\n{plan['env']}, {about}\n")
    for line in table([library.name for library in libraries], arguments.seeds, found):
        print(line)


def table(names: Sequence[str], seeds: Sequence[int], found: Sequence[dict[str, float]]) -> Iterator[str]:
    """Yield the lines of a table with the returns by seed and the medians of the times."""
    yield f"| | {' | '.join(f'seed {seed}' for seed in seeds)} | median time | processor |"
    yield "|---" * (len(seeds) + 3) + "|"
    for number, name in enumerate(names):
        own = found[number :: len(names)]
        returns = " | ".join(f"{each['mean']:,.0f} ± {each['spread']:,.0f}" for each in own)
        times = [statistics.median(each[key] for each in own) for key in ("seconds", "processor")]
        yield f"| {name} | {returns} | {times[0]:.0f} s | {times[1]:.0f} s |"


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "ppo", ["sb3"])
    parser.add_argument("--at-once", type=int, default=1, help="how many training runs, each on a core of its own")
    parser.add_argument("--cleanrl", nargs=2, metavar=("PYTHON", "SCRIPT"), help="one of CleanRL's scripts")
    parser.add_argument("--cleanrl-env", help="what the environment is called there")
    return parser.parse_args()


def read(path: Path, steps: int | None) -> dict[str, Any]:
    """Return the training that a config describes; exit if the other libraries lack one of its options."""
    from envmanager.training.algorithms.ppo import PPOOptions

    tables, own = config_of(path, "ppo")
    options = PPOOptions(**own)
    n_envs = tables["manager"]["n_envs"]
    differ = [name for name in FIXED if getattr(options, name) != getattr(PPOOptions(), name)]
    if differ or options.rollout % n_envs:
        sys.exit(f"{path}: the other libraries cannot train this: {', '.join(differ) or 'rollout'}.")
    if options.normalize_observations != options.normalize_rewards:
        sys.exit(f"{path}: CleanRL normalizes observations and rewards, or neither.")
    return {
        "config": absolute(str(path)),
        "env": tables["manager"]["env"],
        "n_envs": n_envs,
        "steps": tables["training"]["steps"] if steps is None else steps,
        "n_last": 100 if n_envs > 1 else 10,
        "n_steps": options.rollout // n_envs,
        "normalizes": options.normalize_rewards,
        **{name: getattr(options, name) for name in SAME},
    }


class Library(Protocol):
    """The command of a library's training, and the returns that it leaves."""

    name: str

    def command(self, plan: dict[str, Any], folder: Path) -> list[str]:
        """Return the command of one training run, which may write into ``folder``."""

    def returns(self, output: str, folder: Path) -> list[float]:
        """Return the returns of all episodes, or of the last ones."""


class Ours:
    name = "envmanager"

    def command(self, plan: dict[str, Any], folder: Path) -> list[str]:
        program = str(Path(sys.executable).with_name("envmanager"))
        settings = {
            "manager.kind": "simple",
            "training.steps": plan["steps"],
            "training.seed": plan["seed"],
            "training.evaluation_episodes": 0,
            "training.device": "cpu",
        }
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        return [program, "train", plan["config"], "--dir", str(folder / "run"), *words]

    def returns(self, output: str, folder: Path) -> list[float]:
        with open(folder / "run" / "episodes.csv", newline="", encoding="utf-8") as file:
            return [float(row["return"]) for row in csv.DictReader(file)]


class StableBaselines:
    name = "Stable-Baselines3"

    def __init__(self, python: str) -> None:
        self._python = absolute(python)

    def command(self, plan: dict[str, Any], folder: Path) -> list[str]:
        return [self._python, absolute(__file__), json.dumps(plan), "--train", "sb3"]

    def returns(self, output: str, folder: Path) -> list[float]:
        returns: list[float] = json.loads(output.splitlines()[-1])
        return returns


class CleanRL:
    name = "CleanRL"

    def __init__(self, python: str, script: str, env: str | None) -> None:
        self._program = [absolute(python), absolute(script)]
        self._env = env

    def command(self, plan: dict[str, Any], folder: Path) -> list[str]:
        options = {
            "env-id": self._env or plan["env"],
            "seed": plan["seed"],
            "total-timesteps": plan["steps"],
            "num-envs": plan["n_envs"],
            "num-steps": plan["n_steps"],
            "learning-rate": plan["learning_rate"],
            "update-epochs": plan["epochs"],
            "num-minibatches": plan["n_envs"] * plan["n_steps"] // plan["minibatch"],
            "gamma": plan["gamma"],
            "gae-lambda": plan["gae_lambda"],
            "clip-coef": plan["clip"],
            "ent-coef": plan["entropy_coefficient"],
            "vf-coef": plan["value_coefficient"],
            "max-grad-norm": plan["max_grad_norm"],
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [*self._program, *words, "--no-clip-vloss", "--no-cuda"]

    def returns(self, output: str, folder: Path) -> list[float]:
        return [float(found) for found in re.findall(r"episodic_return=\[? *([-+.\de]+)", output)]


def absolute(path: str) -> str:
    """Make a path absolute without resolving links: the Python of a virtual environment must stay a link."""
    return os.path.abspath(path)


def run(library: Library, plan: dict[str, Any], core: int) -> dict[str, float]:
    """Train in a process of its own, on one core."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as name, open(Path(name) / "output", "w+", encoding="utf-8") as output:
        folder = Path(name)
        command = ["taskset", "--cpu-list", str(core), *library.command(plan, folder)]
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
        if process.returncode:
            sys.exit(f"{library.name} failed:\n{text[-4000:]}")
        returns = library.returns(text, folder)[-plan["n_last"] :]
    found = {
        "mean": statistics.fmean(returns),
        "spread": statistics.pstdev(returns),
        "seconds": seconds,
        "processor": usage.ru_utime + usage.ru_stime,
    }
    told = ", ".join(f"{key} {value:.1f}" for key, value in found.items())
    print(f"{library.name}, seed {plan['seed']}: {told}", flush=True)
    return found


def train_sb3(plan: dict[str, Any]) -> None:
    """Train with Stable-Baselines3, and print the returns of the last episodes."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize

    torch.set_num_threads(1)
    envs: VecEnv = make_vec_env(plan["env"], plan["n_envs"], seed=plan["seed"])
    if plan["normalizes"]:
        envs = VecNormalize(envs, gamma=plan["gamma"])
    model = PPO(
        "MlpPolicy",
        envs,
        learning_rate=lambda left: plan["learning_rate"] * left,
        n_steps=plan["n_steps"],
        batch_size=plan["minibatch"],
        n_epochs=plan["epochs"],
        gamma=plan["gamma"],
        gae_lambda=plan["gae_lambda"],
        clip_range=plan["clip"],
        ent_coef=plan["entropy_coefficient"],
        vf_coef=plan["value_coefficient"] / 2,  # Stable-Baselines3 does not halve the value loss
        max_grad_norm=plan["max_grad_norm"],
        stats_window_size=plan["n_last"],
        policy_kwargs={"net_arch": [64, 64]},
        seed=plan["seed"],
        device="cpu",
    )
    model.learn(plan["steps"])
    assert model.ep_info_buffer is not None
    print(json.dumps([float(each["r"]) for each in model.ep_info_buffer]))


if __name__ == "__main__":
    main()
