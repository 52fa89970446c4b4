"""The comparison of games of turns with PettingZoo's own loop."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import turns
from envmanager_tests.games import Brawl


def made(name: str) -> Any:
    return Brawl(dies=name) if name != "missing" else turns.importlib.import_module("no_such_library")


@pytest.fixture
def brawl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "make", made)
    monkeypatch.setattr(turns, "GAMES", {"first": ("", {}), "missing": ("", {})})


@pytest.mark.parametrize("kind", ["simple", "subprocess"])
def test_all_moves_of_a_game_are_equal_and_all_rewards_are_told(brawl: None, kind: str) -> None:
    name, n_episodes, _, _, n_ends, n_unequal, ledger, _ = turns.compare("first", kind, 3).strip("| ").split(" | ")
    assert (name, n_episodes, n_ends, n_unequal, ledger) == ("first", "3", "12", "0", "0")


def test_moves_that_differ_are_counted(brawl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of = turns.rows_of

    def with_a_wrong_reward(*args: Any) -> Any:
        rows = rows_of(*args)
        return {agent: (row[0], row[1] + 1, *row[2:]) for agent, row in rows.items()}

    monkeypatch.setattr(turns, "rows_of", with_a_wrong_reward)
    moves, unequal = (turns.compare("first", "simple", 1).strip("| ").split(" | ")[column] for column in (2, 5))
    assert int(unequal) == int(moves) + 1


def test_a_game_whose_libraries_are_missing_is_named(
    brawl: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["turns", "--only", "missing", "--episodes", "1"])
    turns.main()
    assert "| missing | skipped: No module named 'no_such_library' |" in capsys.readouterr().out
