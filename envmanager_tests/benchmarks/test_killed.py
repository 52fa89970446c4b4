"""The measurement of trainings that are killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")


def test_checkpoints_of_a_training_that_is_killed_in_all_ways_are_those_of_the_one_that_is_not() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.killed", "moments", "--kills", "6"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    line, total = done.stdout.splitlines()
    assert re.match(r"fast, 0 workers +6 kills, .* equal$", line), done.stdout
    assert total.endswith("1 of 1 cells right")
