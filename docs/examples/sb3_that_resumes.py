"""PPO of Stable-Baselines3. Killed at any moment, the same command goes on from its file, to the same weights.

    python docs/examples/sb3_that_resumes.py run.pt --steps 20000

Before each rollout, one file gets the model with its optimizer, the wrappers around the environments, all generators
and where the environments stand. What happened after it happens again, the same.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecMonitor, VecNormalize

from envmanager import RestartPolicy, SubprocessEnvManager
from envmanager.interop import as_sb3_vec_env


def wrappers_of(vec_env: VecEnv) -> Iterator[dict[str, Any]]:
    """The attributes of the wrappers around the environments: running statistics, returns so far."""
    while isinstance(vec_env, VecEnvWrapper):
        yield vars(vec_env)
        vec_env = vec_env.venv


def save(model: PPO, path: Path) -> None:
    vec_env, zipped = model.get_env(), io.BytesIO()
    model.save(zipped)
    wrappers = [
        {name: value for name, value in own.items() if name not in ("venv", "class_attributes", "results_writer")}
        for own in wrappers_of(vec_env)
    ]
    generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    everything = {"model": zipped.getvalue(), "wrappers": wrappers, "generators": generators}
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        torch.save({**everything, "envs": vec_env.state()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)  # the file is there whole, or the one before


def load(path: Path, vec_env: VecEnv) -> PPO:
    saved = torch.load(path, weights_only=False)
    model = PPO.load(io.BytesIO(saved["model"]), vec_env, device="cpu", force_reset=False)
    vec_env.unwrapped.reset(saved["envs"])
    for own, values in zip(wrappers_of(vec_env), saved["wrappers"], strict=True):
        own.update(values)
    of_python, of_numpy, of_torch = saved["generators"]
    random.setstate(of_python), np.random.set_state(of_numpy), torch.set_rng_state(of_torch)
    return model


class Saves(BaseCallback):
    """Saves before each rollout, where the model has nothing half done."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def _on_rollout_start(self) -> None:
        save(self.model, self.path)

    def _on_step(self) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--n-envs", type=int, default=4)
    parser.add_argument("--n-workers", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    restarts = RestartPolicy(keep_episodes=True)
    manager = SubprocessEnvManager("CartPole-v1", args.n_envs, n_workers=args.n_workers, seed=0, restarts=restarts)
    vec_env = VecNormalize(VecMonitor(as_sb3_vec_env(manager)))
    if args.file.exists():
        model = load(args.file, vec_env)
        print(f"goes on after {model.num_timesteps:,} steps")
    else:
        model = PPO("MlpPolicy", vec_env, n_steps=128, batch_size=128, n_epochs=4, seed=0, device="cpu")
    left = args.steps - model.num_timesteps
    model.learn(left, callback=Saves(args.file), reset_num_timesteps=model.num_timesteps == 0)
    weights = b"".join(each.detach().numpy().tobytes() for each in model.policy.parameters())
    print(f"{model.num_timesteps:,} steps, weights {hashlib.sha256(weights).hexdigest()}")
    vec_env.close()


if __name__ == "__main__":
    main()
