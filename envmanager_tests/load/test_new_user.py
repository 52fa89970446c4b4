"""What a new user does, with the wheel in an environment of its own: train, resume, evaluate, film, export, load."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.load, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
EXTRAS = "gymnasium,cli,torch,video,export"
TORCH = os.environ.get("TORCH", "torch==2.13.0")
"""Named, because the newest brings gigabytes for GPUs."""
STEPS = 2048

CONFIG = """
manager: {{kind: subprocess, env: {env}, n_envs: 4, n_workers: 2, wait: all}}
training: {{steps: 100000, evaluation_episodes: 0}}
trainers:
  default: {{kind: ppo, rollout: 1024, epochs: 2, normalize_observations: true, normalize_rewards: true}}
"""

ACTS_ALIKE = """
import sys
import numpy as np
import onnxruntime
from envmanager.training import load_policy

run, file = sys.argv[1:]
policy = load_policy(run)
spec = policy.spec.observation
seen = np.random.default_rng(0).normal(size=(200, *spec.shape)).astype(spec.dtype)
session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
(acted,) = session.run(None, {"obs": seen})
wanted = policy(seen)
assert acted.dtype == wanted.dtype and acted.shape == wanted.shape
if wanted.dtype.kind == "f":
    np.testing.assert_allclose(acted, wanted, rtol=1e-4, atol=1e-5)
else:
    np.testing.assert_array_equal(acted, wanted)
assert policy(seen[0]).shape == wanted.shape[1:]
print(len(seen), "actions alike")
"""

COUNT_FRAMES = """
import sys
from moviepy.video.io.VideoFileClip import VideoFileClip
with VideoFileClip(sys.argv[1]) as clip:
    print(sum(1 for _ in clip.iter_frames()))
"""


class User:
    """Somebody with a folder, and an environment in which only the wheel is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bin = folder / "venv" / "bin"
        self.told: list[str] = []

    def install(self) -> None:
        wheels = self.folder / "wheels"
        _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)])
        (wheel,) = wheels.glob("envmanager-*.whl")
        _run([sys.executable, "-m", "venv", str(self.folder / "venv")])
        for what in (["--upgrade", "pip"], [TORCH], [f"{wheel}[{EXTRAS}]", "gymnasium[box2d,mujoco,classic-control]"]):
            self.python("-m", "pip", "install", "--quiet", *what)

    def python(self, *arguments: str) -> str:
        return self._timed([str(self._bin / "python"), *arguments])

    def envmanager(self, *arguments: str) -> str:
        return self._timed([str(self._bin / "envmanager"), *arguments])

    def _timed(self, command: list[str]) -> str:
        began = time.monotonic()
        said = _run(command, cwd=self.folder)
        words = " ".join(word if len(word) < 60 else "…" for word in command[1:])
        self.told.append(f"{time.monotonic() - began:6.1f} s  {Path(command[0]).name} {words}")
        return said


def _run(command: list[str], **options: Any) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ |= {"SDL_VIDEODRIVER": "dummy", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=900, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    faulthandler.cancel_dump_traceback_later()  # installing takes minutes
    somebody = User(tmp_path_factory.mktemp("user"))
    somebody.install()
    return somebody


@pytest.mark.parametrize(
    ("name", "env"), [("lander", "LunarLander-v3"), ("pendulum", "InvertedPendulum-v5")], ids=["box2d", "mujoco"]
)
def test_from_a_config_to_a_policy_elsewhere(user: User, name: str, env: str) -> None:
    faulthandler.cancel_dump_traceback_later()
    (user.folder / f"{name}.yaml").write_text(CONFIG.format(env=env))
    run = f"runs/{name}"

    changes = ["--set", "trainers.default.learning_rate=1e-3", "--set", f"training.steps={STEPS}"]
    user.envmanager("train", f"{name}.yaml", *changes, "--plain")
    user.envmanager("train", f"{run}/config.json", "--resume", "--steps", str(2 * STEPS), "--plain")
    config: Mapping[str, Any] = json.loads((user.folder / run / "config.json").read_text())
    assert config["trainers"]["default"]["learning_rate"] == 1e-3

    told = json.loads(user.envmanager("evaluate", run, "--episodes", "4", "--json"))
    assert told["n_steps"] >= 2 * STEPS
    assert told["behaviors"]["default"]["episodes"] == 4

    user.envmanager("play", run, "--video", f"{name}.mp4")
    n_frames = int(user.python("-c", COUNT_FRAMES, f"{name}.mp4"))
    assert n_frames > 2

    user.envmanager("export", run, "--to", "onnx", "--out", f"{name}.onnx")
    assert user.python("-c", ACTS_ALIKE, run, f"{name}.onnx").strip() == "200 actions alike"
    print("\n".join([f"{name}: {n_frames} frames", *user.told]))
    user.told.clear()
