"""The demos are learned as well and as fast as the docs say, by three seeds, and by each engine.

What they reach, and the seconds that they take on two cores, are printed: ``pytest -m load -rP`` shows them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import make_manager
from envmanager.cli.config_files import TRAINING_TABLES, load_config
from envmanager.testing.leaks import SLACK_S
from envmanager.training.learners import LearnersChanged
from envmanager.training.policies.saved import SavedTraining
from envmanager.training.runs import checkpoints
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun

pytestmark = [pytest.mark.load, pytest.mark.timeout(1500)]

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SEEDS = pytest.mark.parametrize("seed", range(3))
HERO_STEPS = 200_000
TARGET_STEPS = 300_000
BUSY = max(1.0, SLACK_S / 2)
"""How many times as long it may take: 1 on a machine with nothing else to do (`make soak`), elsewhere ten."""


@attrs.frozen
class Played:
    """How many of so many episodes ended by themselves: the ball is at its goal, the hero has caught the target."""

    ended: int
    of: int

    @property
    def share(self) -> float:
        return self.ended / self.of

    def __str__(self) -> str:
        return f"{self.ended} of {self.of}"


def played(directory: Path, checkpoint: Path, manager: Mapping[str, Any], *, episodes_per_env: int = 2) -> Played:
    """Greedily by the policies of a checkpoint, as many episodes in each arena, with seeds of their own."""
    with make_manager({**manager, "seed": 1_000_000}) as environments:
        policies = SavedTraining(directory, checkpoints.load(checkpoint)).policies_for(environments.behavior_specs)
        for behavior, policy in policies.items():
            environments.set_policy(behavior, policy)
        environments.reset()
        first = next(iter(policies))
        n = np.zeros((2, environments.n_envs), int)
        while n.sum(axis=0).min() < episodes_per_env:
            for info in environments.step():
                steps = info.current[first]
                for ended, row in ((steps.truncated, 0), (steps.terminated, 1)):
                    counts = ended & (n[:, steps.env_id].sum(axis=0) < episodes_per_env)
                    n[row, steps.env_id[counts]] += 1
    return Played(int(n[1].sum()), int(n.sum()))


def plan_of(example: str, program: str, directory: Path, *, seed: int, steps: int | None = None) -> TrainingPlan:
    """The training of an example as it is, only with this engine and seed."""
    tables = load_config(EXAMPLES / example, TRAINING_TABLES)
    tables["training"] |= {"seed": seed, "evaluation_episodes": 0}
    if steps is not None:
        tables["training"]["steps"] = steps
    tables["manager"]["engine"] |= {"binary": program}
    return TrainingPlan.parse(tables, directory)


def manager_of(plan: TrainingPlan) -> dict[str, Any]:
    return {"kind": "godot", "env": plan.manager.env, "n_envs": plan.manager.n_envs, "engine": plan.manager.engine}


class Quiet(Report):
    """Nobody is told."""


@SEEDS
def test_the_ball_finds_its_goal_after_a_minute(seed: int, program: str, tmp_path: Path) -> None:
    plan = plan_of("godot_rolling_ball.yaml", program, tmp_path, seed=seed)
    result = TrainingRun(plan, Quiet()).go()

    reached = played(tmp_path, checkpoints.latest(plan.checkpoints), manager_of(plan))
    print(f"rolling_ball, seed {seed}: {result.wall_s:.0f} s, {reached} episodes reach the goal")
    assert reached.share >= 0.95
    assert result.wall_s <= 60 * BUSY


class TakesTurns(Report):
    """Has the hero learn alone, then the target alone, by the file that a person would write meanwhile."""

    def __init__(self, control: Path, kept: Path) -> None:
        self.hero_s = 0.0
        self._control = control
        self._kept = kept
        self._asked = False
        control.write_text('frozen = ["target"]\n')

    def updated(self, run: Any, update: Any) -> None:
        if not self._asked and update.n_steps >= HERO_STEPS:
            self._asked = True
            self._control.write_text('frozen = ["hero"]\ncheckpoint = true\n')

    def changed(self, run: Any, change: LearnersChanged) -> None:
        if "hero" in change.frozen:
            self.hero_s = time.monotonic() - run.began

    def saved(self, path: Path) -> None:
        if not self._kept.exists():
            shutil.copytree(path, self._kept)


@SEEDS
def test_the_hero_learns_to_catch_and_then_the_target_to_run_away(seed: int, program: str, tmp_path: Path) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    run.mkdir()
    plan = plan_of("godot_coin_chase.yaml", program, run, seed=seed, steps=HERO_STEPS + TARGET_STEPS)
    turns = TakesTurns(plan.control, kept)
    result = TrainingRun(plan, turns).go()

    before = played(run, kept, manager_of(plan))
    after = played(run, checkpoints.latest(plan.checkpoints), manager_of(plan))
    target_s = result.wall_s - turns.hero_s
    print(
        f"coin_chase, seed {seed}: the hero catches {before} after {turns.hero_s:.0f} s, then, frozen, {after} "
        f"after the target's {target_s:.0f} s"
    )
    assert before.share >= 0.9
    assert turns.hero_s <= 60 * BUSY
    assert after.share < 0.6
    assert target_s <= 90 * BUSY
