"""Trains a config of PPO here, with Stable-Baselines3's PPO and with CleanRL's, and prints one table.

    python tools/compare_ppo.py docs/examples/ppo_lunarlander.yaml [--seeds 0 1 2] [--steps N] [--at-once 2]
        [--sb3 .venv-bench-sb3/bin/python] [--cleanrl PYTHON SCRIPT [--cleanrl-env LunarLander-v2]]

All get the hyperparameters of the config, all environments in the trainer's process, one thread and one core; each
training is a process of its own. SCRIPT is CleanRL's ``ppo.py``, or ``ppo_continuous_action.py`` where actions are
continuous; PYTHON has the Gymnasium that it was written for (0.29), which may know other versions of an environment.

Returns are those of the last 100 episodes of the training, 10 where one environment is all there is; actions are still
drawn. Times are those of the whole process, imports included: on the clock, and of the processor.
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
from typing import Any

NOT_SAME = {"hidden": [64, 64], "target_kl": None, "reward_scale": 1.0, "policy_gain": 0.01, "anneal": True}
"""Options that stay as they are, since the other libraries have them just so."""


def main() -> None:
    arguments = parse()
    if arguments.train is not None:
        train_sb3(json.loads(arguments.config))
        return
    plan = read(Path(arguments.config), arguments.steps)
    cores: SimpleQueue[int] = SimpleQueue()
    for core in sorted(os.sched_getaffinity(0))[: arguments.at_once]:
        cores.put(core)
    libraries = ["envmanager", "Stable-Baselines3", *(["CleanRL"] if arguments.cleanrl else [])]
    jobs = [(name, {**plan, "seed": seed}) for seed in arguments.seeds for name in libraries]

    def train(job: tuple[str, dict[str, Any]]) -> dict[str, float]:
        core = cores.get()
        try:
            return run(*job, arguments, core)
        finally:
            cores.put(core)

    with ThreadPoolExecutor(arguments.at_once) as pool:
        found = list(pool.map(train, jobs))
    print(f"\n{plan['env']}, {plan['steps']:,} steps; the last {plan['n_last']} episodes; {arguments.at_once} at once\n")
    for line in table(libraries, arguments.seeds, found):
        print(line)


def table(libraries: Sequence[str], seeds: Sequence[int], found: Sequence[dict[str, float]]) -> Iterator[str]:
    """Returns by seed, and the median of the times."""
    yield f"| | {' | '.join(f'seed {seed}' for seed in seeds)} | median time | processor |"
    yield "|---" * (len(seeds) + 3) + "|"
    for number, name in enumerate(libraries):
        own = found[number :: len(libraries)]
        returns = " | ".join(f"{each['mean']:,.0f} ± {each['spread']:,.0f}" for each in own)
        times = [statistics.median(each[key] for each in own) for key in ("seconds", "processor")]
        yield f"| {name} | {returns} | {times[0]:.0f} s | {times[1]:.0f} s |"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", help="a training config with one trainer of kind ppo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="other than the config says")
    parser.add_argument("--at-once", type=int, default=1, help="how many trainings, each on a core of its own")
    parser.add_argument("--sb3", default=sys.executable, help="a Python that has stable-baselines3")
    parser.add_argument("--cleanrl", nargs=2, metavar=("PYTHON", "SCRIPT"), help="one of CleanRL's scripts")
    parser.add_argument("--cleanrl-env", help="what the environment is called there")
    parser.add_argument("--train", choices=["sb3"], help=argparse.SUPPRESS)
    return parser.parse_args()


def read(path: Path, steps: int | None) -> dict[str, Any]:
    """What to train, from a config; what the other libraries do not know is refused."""
    from envmanager.cli.config_files import TRAINING_TABLES, load_config
    from envmanager.training.ppo import PPOOptions

    tables = load_config(path, TRAINING_TABLES)
    (trainer,) = tables["trainers"].values()
    options = PPOOptions(**{name: value for name, value in trainer.items() if name != "kind"})
    n_envs = tables["manager"]["n_envs"]
    differ = [name for name, value in NOT_SAME.items() if getattr(options, name) != value and value != [64, 64]]
    if trainer["kind"] != "ppo" or differ or list(options.hidden) != [64, 64] or options.rollout % n_envs:
        sys.exit(f"{path}: the other libraries cannot train this: {', '.join(differ) or 'kind, hidden or rollout'}.")
    if options.normalize_observations != options.normalize_rewards:
        sys.exit(f"{path}: CleanRL normalizes observations and rewards, or neither.")
    names = ("learning_rate", "epochs", "minibatch", "gamma", "gae_lambda", "clip", "entropy_coefficient")
    return {
        "config": str(path),
        "env": tables["manager"]["env"],
        "n_envs": n_envs,
        "steps": tables["training"]["steps"] if steps is None else steps,
        "n_last": 100 if n_envs > 1 else 10,
        "n_steps": options.rollout // n_envs,
        "normalizes": options.normalize_rewards,
        "value_coefficient": options.value_coefficient,
        "max_grad_norm": options.max_grad_norm,
        **{name: getattr(options, name) for name in names},
    }


def run(name: str, plan: dict[str, Any], arguments: argparse.Namespace, core: int) -> dict[str, float]:
    """Train in a process of its own, on one core."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "output", "w+") as output:
        command = COMMANDS[name](plan, arguments, folder)
        began = time.monotonic()
        process = subprocess.Popen(
            ["taskset", "--cpu-list", str(core), *command],
            cwd=None if name == "envmanager" else folder,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
        if process.returncode:
            sys.exit(f"{name} failed:\n{text[-4000:]}")
        returns = READERS[name](text, Path(folder))[-plan["n_last"] :]
    found = {
        "mean": statistics.fmean(returns),
        "spread": statistics.pstdev(returns),
        "seconds": seconds,
        "processor": usage.ru_utime + usage.ru_stime,
    }
    told = ", ".join(f"{key} {value:.1f}" for key, value in found.items())
    print(f"{name}, seed {plan['seed']}: {told}", flush=True)
    return found


def ours(plan: dict[str, Any], arguments: argparse.Namespace, folder: str) -> list[str]:
    settings = {
        "manager.kind": "simple",
        "training.steps": plan["steps"],
        "training.seed": plan["seed"],
        "training.evaluation_episodes": 0,
        "training.device": "cpu",
    }
    program = str(Path(sys.executable).with_name("envmanager"))
    command = [program, "train", plan["config"], "--dir", str(Path(folder) / "run")]
    return command + [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def sb3(plan: dict[str, Any], arguments: argparse.Namespace, folder: str) -> list[str]:
    return [str(Path(arguments.sb3).absolute()), str(Path(__file__).resolve()), json.dumps(plan), "--train", "sb3"]


def cleanrl(plan: dict[str, Any], arguments: argparse.Namespace, folder: str) -> list[str]:
    python, script = (str(Path(each).absolute()) for each in arguments.cleanrl)
    options = {
        "env-id": arguments.cleanrl_env or plan["env"],
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
    return [python, script, *words, "--no-clip-vloss", "--no-cuda"]


COMMANDS = {"envmanager": ours, "Stable-Baselines3": sb3, "CleanRL": cleanrl}


def our_returns(text: str, folder: Path) -> list[float]:
    with open(folder / "run" / "episodes.csv", newline="") as file:
        return [float(row["return"]) for row in csv.DictReader(file)]


def sb3_returns(text: str, folder: Path) -> list[float]:
    returns: list[float] = json.loads(text.splitlines()[-1])
    return returns


def cleanrl_returns(text: str, folder: Path) -> list[float]:
    return [float(found) for found in re.findall(r"episodic_return=\[? *([-+.\de]+)", text)]


READERS = {"envmanager": our_returns, "Stable-Baselines3": sb3_returns, "CleanRL": cleanrl_returns}


def train_sb3(plan: dict[str, Any]) -> None:
    """Train, and print the returns of the last episodes."""
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
        vf_coef=plan["value_coefficient"] / 2,  # its loss of the values is not halved
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
