"""Training runs of the example that are killed, or whose workers are, end as well as one that is left alone."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from envmanager.cli.config_files import TRAINING_TABLES, load_config
from envmanager.training.runs import checkpoints, figures
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun

pytestmark = pytest.mark.load

CONFIG = Path(__file__).parents[2] / "docs" / "examples" / "ppo_cartpole.yaml"
GOOD = 475
"""Where CartPole counts as solved (Gymnasium's reward threshold)."""
SEEDS = pytest.mark.parametrize("seed", range(3))


class KillsWorkers(Report):
    """A report that kills one worker after the other, one every ``every_s`` seconds."""

    def __init__(self, every_s: float) -> None:
        self.n_kills = 0
        self._every_s = every_s
        self._due = time.monotonic() + every_s

    def updated(self, run: Any, update: Any) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every_s
            workers = run.manager.stats().workers
            os.kill(workers[self.n_kills % len(workers)].pid, signal.SIGKILL)
            self.n_kills += 1


@SEEDS
@pytest.mark.timeout(400)
def test_a_worker_killed_every_5_s_does_not_hurt(seed: int, tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # it is meant to take that long
    tables = load_config(CONFIG, TRAINING_TABLES)
    tables["training"]["seed"] = seed
    tables["manager"]["restarts"] = {"max_restarts": 100}  # on a busy machine one worker's turn comes often
    killer = KillsWorkers(every_s=5)
    result = TrainingRun(TrainingPlan.parse(tables, tmp_path), killer).go()
    assert result.evaluation is not None
    print(
        f"seed {seed}: {killer.n_kills} workers killed, {result.stats.restarts} restarted, "
        f"{result.stats.steps_lost} steps lost in {result.wall_s:.0f} s; evaluation {result.evaluation.mean:.0f} ± "
        f"{result.evaluation.spread:.0f}"
    )
    assert result.stats.restarts == killer.n_kills > 0
    assert result.evaluation.mean >= GOOD


@SEEDS
@pytest.mark.timeout(400)
def test_a_training_killed_and_resumed_ends_as_well(seed: int, tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()
    program = "import sys; from envmanager.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "train", str(CONFIG), "--plain", "--seed", str(seed)]
    command += ["--dir", str(tmp_path), "--out", str(tmp_path / "out.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("checkpoint") and int(line.rsplit("/", 1)[1]) > 25_000)
        process.kill()
        process.stdout.read()
    killed_at = checkpoints.load_latest(tmp_path / "checkpoints").training.n_steps
    resumed = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    evaluation = next(line for line in resumed.stdout.splitlines() if line.startswith("evaluation"))
    print(f"seed {seed}: killed after {killed_at:,} steps, resumed; {evaluation}")
    assert float(evaluation.split()[1]) >= GOOD
    steps = [end.steps for end in figures.read_episodes(tmp_path / figures.EPISODES)]
    assert steps == sorted(steps)
