"""The measurements of agents that use tools."""

from __future__ import annotations

import argparse
import re

import pytest

from benchmarks.agents import groups, kit


def test_groups_are_whole_with_each_timeout_while_steps_hang(capsys: pytest.CaptureFixture[str]) -> None:
    groups(argparse.Namespace(groups=5, rounds=1, turns=1))

    told = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in told[:2]] == [
        "step_s=1: 5 of 5 groups whole",
        "step_s=20: 5 of 5 groups whole",
    ]
    assert re.match(r"ratio \d", told[2])


def test_the_kit_passes_the_right_adapter_alone(capsys: pytest.CaptureFixture[str]) -> None:
    kit(argparse.Namespace(groups=1))

    left_out, scored_0 = capsys.readouterr().out.splitlines()
    assert left_out.startswith("left_out: passes: ")
    assert scored_0.startswith("scored_0: FAILS: ")
