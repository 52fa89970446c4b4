"""The measurement of fleets."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.fleets import leak, limit


def test_a_leak_is_measured_beside_none(capsys: pytest.CaptureFixture[str]) -> None:
    leak(argparse.Namespace(steps=4000))
    told = capsys.readouterr().out
    assert "rows equal to those of the run without a leak: True" in told
    assert [line.split(" | ")[1] for line in told.splitlines() if line.startswith(("| none", "| 1 MiB"))] == ["0", "0"]


def test_each_death_of_the_one_without_end_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    limit(argparse.Namespace(turns=1))
    *_, row = (line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| yes"))
    assert row[1] == row[2] != "0"
