"""The measurement of groups of rollouts, of which the trainer is killed."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.rollouts import measure


def test_each_group_comes_once_though_the_trainer_is_killed(tmp_path: Path) -> None:
    figures = measure(argparse.Namespace(prompts=12, envs=30, kills=1, folder=tmp_path))
    assert (figures["groups that came once"], figures["of"]) == (12, 12)
    assert figures["answers of another task"] == 0
    assert figures["rollouts played in vain, %"] < 100
