"""Trains one task with this library, Stable-Baselines3 or CleanRL, evaluates greedily, and prints one line of JSON.

    python tools/compare_learning.py dqn-tuned envmanager --seed 0
    python tools/compare_learning.py dqn-tuned sb3 --seed 0
    PYTHON tools/compare_learning.py sac-pendulum cleanrl --seed 0 --cleanrl FOLDER

All libraries get the same hyperparameters, one thread, the CPU, and all environments in the trainer's process. FOLDER
is CleanRL's repository, whose scripts run unchanged; PYTHON has Gymnasium 0.29, as these scripts need. The greedy
policy of each library plays the same episodes, with the seeds 10,000 and on. With ``every`` in a task it also plays ten
others on the way; their means are the ``curve``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import runpy
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

np.bool8 = np.bool_  # Gymnasium 0.29 asks for it, and NumPy 2 has it no more

import gymnasium  # noqa: E402
import torch  # noqa: E402

Act = Callable[[Any], Any]
"""A greedy policy: it maps one observation to one action of the environment."""

DQN = {
    "algorithm": "dqn", "env": "CartPole-v1", "steps": 50_000, "n_envs": 1, "batch": 64, "starts": 1000,
    "explores": 8000, "final_epsilon": 0.04, "target_every": 128,
}  # fmt: skip
PPO = {
    "algorithm": "ppo", "n_envs": 1, "n_steps": 2048, "rate": 3e-4, "epochs": 10, "minibatch": 64, "entropy": 0.0,
    "normalize": True,
}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    # The tuned settings of Stable-Baselines3's zoo. CleanRL's script cannot learn from several batches at a time.
    "dqn-tuned": {**DQN, "rate": 2.3e-3, "train_every": 256, "updates": 128, "hidden": [256, 256], "every": 5000},
    "dqn-cartpole": {**DQN, "rate": 1e-3, "train_every": 2, "updates": 1, "hidden": [120, 84]},
    "ppo-cartpole": {
        "algorithm": "ppo", "env": "CartPole-v1", "steps": 51_200, "n_envs": 4, "n_steps": 128, "rate": 2.5e-4,
        "epochs": 4, "minibatch": 128, "entropy": 0.01, "normalize": False,
    },
    "ppo-hopper": {**PPO, "env": "Hopper-v4", "steps": 65_536},
    "ppo-inverted-pendulum": {**PPO, "env": "InvertedPendulum-v4", "steps": 30_720},
    "sac-pendulum": {
        "algorithm": "sac", "env": "Pendulum-v1", "steps": 5000, "n_envs": 1, "rate": 1e-3, "batch": 64, "starts": 500,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="other than the task has")
    parser.add_argument("--cleanrl", type=Path, help="CleanRL's repository")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = {**TASKS[arguments.task], "seed": arguments.seed, "cleanrl": arguments.cleanrl, "curve": []}
    task["steps"] = arguments.steps or task["steps"]
    act, sampled = LIBRARIES[arguments.library](task)
    returns = play(task["env"], act, 20, first_seed=10_000)
    found = {
        "task": arguments.task, "library": arguments.library, "seed": arguments.seed, "mean": statistics.fmean(returns),
        "spread": statistics.pstdev(returns), "last": statistics.fmean(sampled[-100:] or [0.0]), "curve": task["curve"],
    }  # fmt: skip
    print(json.dumps(found))


def play(env_id: str, act: Act, n_episodes: int, *, first_seed: int) -> list[float]:
    """Return the returns of ``n_episodes`` episodes."""
    env = gymnasium.make(env_id)
    returns = []
    for episode in range(n_episodes):
        obs, _ = env.reset(seed=first_seed + episode)
        total, ended = 0.0, False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            total += float(reward)
            ended = terminated or truncated
        returns.append(total)
    env.close()
    return returns


def add_to_curve(task: dict[str, Any], n_steps: int, act: Act) -> None:
    """Evaluate once more if the training has reached the next multiple of ``every``."""
    every = task.get("every")
    if every and n_steps >= every * (len(task["curve"]) + 1):
        state = torch.get_rng_state(), np.random.get_state()
        task["curve"].append([n_steps, statistics.fmean(play(task["env"], act, 10, first_seed=20_000))])
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])


# Each returns the greedy policy, and the returns of the training's episodes.


def with_ours(task: dict[str, Any]) -> tuple[Act, list[float]]:
    from envmanager import SimpleEnvManager
    from envmanager.training.algorithms.trainers import make_trainer
    from envmanager.training.controller import TrainerController

    table: dict[str, Any] = {"kind": task["algorithm"], "learning_rate": task["rate"]}
    if task["algorithm"] == "ppo":
        table |= {
            "rollout": task["n_envs"] * task["n_steps"], "epochs": task["epochs"], "minibatch": task["minibatch"],
            "entropy_coefficient": task["entropy"], "normalize_observations": task["normalize"],
            "normalize_rewards": task["normalize"],
        }  # fmt: skip
    else:
        table |= {"learning_starts": task["starts"], "batch": task["batch"]}
    if task["algorithm"] == "dqn":
        table |= {
            "train_every": task["train_every"], "updates": task["updates"], "target_every": task["target_every"],
            "exploration_steps": task["explores"], "final_epsilon": task["final_epsilon"], "hidden": task["hidden"],
            "double": False, "duelling": False,
        }  # fmt: skip
    torch.manual_seed(task["seed"])
    returns: list[float] = []
    space = gymnasium.make(task["env"]).action_space
    if task["algorithm"] == "ppo" and isinstance(space, gymnasium.spaces.Box):
        table["log_std_init"] = -math.log(space.high[0])  # 1 in the environment's units, as the others begin
    with SimpleEnvManager(task["env"], task["n_envs"], seed=task["seed"]) as manager:
        ((behavior, spec),) = manager.behavior_specs.items()
        trainer = make_trainer(behavior, spec, table, seed=task["seed"], device="cpu")
        module = trainer.greedy_module()

        @torch.inference_mode()
        def act(obs: Any) -> Any:
            action = module(torch.from_numpy(np.asarray(obs))[None])[0][0].numpy()
            return int(action) if action.dtype.kind == "i" else np.clip(action, space.low, space.high)

        def until() -> bool:
            add_to_curve(task, controller.n_steps, act)
            return False

        controller = TrainerController(manager, {behavior: trainer})
        controller.episodes.on_end = lambda episode: returns.append(episode.total)
        controller.train(task["steps"], until=until)
        until()
    return act, returns


def with_sb3(task: dict[str, Any]) -> tuple[Act, list[float]]:
    from stable_baselines3 import DQN, PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize

    envs: VecEnv = make_vec_env(task["env"], task["n_envs"], seed=task["seed"])
    options: dict[str, Any] = {"seed": task["seed"], "device": "cpu"}
    normalizer = None
    if task["algorithm"] == "ppo":
        if task["normalize"]:
            envs = normalizer = VecNormalize(envs, gamma=0.99)
        model: Any = PPO(
            "MlpPolicy", envs, learning_rate=lambda left: task["rate"] * left, n_steps=task["n_steps"],
            batch_size=task["minibatch"], n_epochs=task["epochs"], ent_coef=task["entropy"],
            vf_coef=0.25,  # Stable-Baselines3 does not halve the value loss
            policy_kwargs={"net_arch": [64, 64]}, **options,
        )  # fmt: skip
    else:
        options |= {"learning_rate": task["rate"], "batch_size": task["batch"], "learning_starts": task["starts"]}
    if task["algorithm"] == "sac":
        model = SAC("MlpPolicy", envs, train_freq=1, gradient_steps=1, **options)
    elif task["algorithm"] == "dqn":
        model = DQN(
            "MlpPolicy", envs, buffer_size=100_000, train_freq=task["train_every"], gradient_steps=task["updates"],
            # In steps here. Between two updates of 128 batches the target network follows once, as with us.
            target_update_interval=10 if task["updates"] > 1 else task["target_every"] * task["train_every"],
            exploration_fraction=task["explores"] / task["steps"], exploration_final_eps=task["final_epsilon"],
            policy_kwargs={"net_arch": task["hidden"]}, **options,
        )  # fmt: skip
    returns: list[float] = []

    def act(obs: Any) -> Any:
        return model.predict(obs if normalizer is None else normalizer.normalize_obs(obs), deterministic=True)[0]

    class Watch(BaseCallback):
        """A callback that keeps the returns of episodes."""

        def _on_step(self) -> bool:
            returns.extend(float(info["episode"]["r"]) for info in self.locals["infos"] if "episode" in info)
            add_to_curve(task, self.num_timesteps, act)
            return True

    model.learn(task["steps"], callback=Watch())
    return act, returns


def with_cleanrl(task: dict[str, Any]) -> tuple[Act, list[float]]:
    """Run a script of CleanRL as a program, and take the networks from its variables."""
    algorithm, normalizes = task["algorithm"], task.get("normalize", False)
    options = {
        "env-id": task["env"], "seed": task["seed"], "total-timesteps": task["steps"], "num-envs": task["n_envs"],
        "gamma": 0.99,
    }  # fmt: skip
    if algorithm == "ppo":
        script = "ppo_continuous_action" if normalizes else "ppo"
        options |= {
            "learning-rate": task["rate"], "num-steps": task["n_steps"], "update-epochs": task["epochs"],
            "num-minibatches": task["n_envs"] * task["n_steps"] // task["minibatch"], "ent-coef": task["entropy"],
        }  # fmt: skip
    else:
        script = {"dqn": "dqn", "sac": "sac_continuous_action"}[algorithm]
        options |= {"buffer-size": 100_000, "batch-size": task["batch"], "learning-starts": task["starts"]}
    if algorithm == "sac":
        options |= {"policy-lr": task["rate"], "q-lr": task["rate"], "policy-frequency": 1}
    elif algorithm == "dqn":
        options |= {
            "learning-rate": task["rate"], "train-frequency": task["train_every"], "end-e": task["final_epsilon"],
            "exploration-fraction": task["explores"] / task["steps"],
            "target-network-frequency": task["target_every"] * task["train_every"],
        }  # fmt: skip
    words = [f"--{name}={value}" for name, value in options.items()]
    folder = task["cleanrl"].absolute()
    sys.path.insert(0, str(folder))
    home = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        sys.argv = [script, *words, "--no-cuda", *(["--no-clip-vloss"] if algorithm == "ppo" else [])]
        log = Path(directory) / "log"
        with log.open("w", encoding="utf-8") as output, redirect_stdout(output):
            made = runpy.run_path(str(folder / "cleanrl" / f"{script}.py"), run_name="__main__")
        os.chdir(home)
        returns = [float(found) for found in re.findall(r"episodic_return=\[? *([-+.\de]+)", log.read_text("utf-8"))]

    @torch.no_grad()
    def act(obs: Any) -> Any:
        if normalizes:
            obs = np.clip((obs - scale.obs_rms.mean) / np.sqrt(scale.obs_rms.var + scale.epsilon), -10, 10)
        row = torch.from_numpy(np.asarray(obs, np.float32))[None]
        if algorithm == "dqn":
            return int(made["q_network"](row).argmax(1))
        if algorithm == "sac":
            return made["actor"].get_action(row)[2][0].numpy()
        if not normalizes:
            return int(made["agent"].actor(row).argmax(1))
        space = scale.action_space
        return np.clip(made["agent"].actor_mean(row)[0].numpy(), space.low, space.high)

    scale = made["envs"].envs[0]
    while normalizes and type(scale).__name__ != "NormalizeObservation":
        scale = scale.env
    return act, returns


LIBRARIES = {"envmanager": with_ours, "sb3": with_sb3, "cleanrl": with_cleanrl}

if __name__ == "__main__":
    main()
