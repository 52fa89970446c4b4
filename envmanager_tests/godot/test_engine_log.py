"""What an engine prints, and the errors of scripts in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from envmanager.godot import engine_log
from envmanager.godot.engine_log import EngineLog

GODOT_4 = """SCRIPT ERROR: Invalid call. Nonexistent function 'jump' in base 'Nil'.
          at: observe (res://hero.gd:12)
"""
GODOT_3 = """SCRIPT ERROR: observe: Invalid call. Nonexistent function 'jump' in base 'Nil'.
   At: res://hero.gd:12.
"""


class Printing:
    """A log, and the end that an engine prints into."""

    def __init__(self, log_dir: Path | None) -> None:
        self.log = EngineLog(None if log_dir is None else str(log_dir), 0, 0)
        self._fd = os.dup(self.log.write_fd)
        self.log.started()

    def print(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> None:
        os.close(self._fd)
        self.log.close()


@pytest.fixture(params=["memory", "file"])
def printing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Printing]:
    made = Printing(tmp_path if request.param == "file" else None)
    yield made
    made.close()


@pytest.mark.parametrize("text", [GODOT_4, GODOT_3], ids=["Godot 4", "Godot 3"])
def test_an_error_of_a_script_is_found_with_its_place(printing: Printing, text: str) -> None:
    printing.print("hello\n")
    assert printing.log.new_errors() == []
    printing.print(text)
    (error,) = printing.log.new_errors()
    assert (error.script, error.line, error.function) == ("res://hero.gd", 12, "observe")
    assert "Nonexistent function 'jump'" in error.message


def test_errors_are_reported_once_and_in_their_order(printing: Printing) -> None:
    printing.print(GODOT_4.replace("jump", "first") + GODOT_4)
    first, second = printing.log.new_errors()
    assert "first" in first.message
    assert "jump" in second.message
    assert printing.log.new_errors() == []


@pytest.mark.parametrize("text", [GODOT_4, GODOT_3], ids=["Godot 4", "Godot 3"])
def test_an_error_is_there_once_its_place_is(printing: Printing, text: str) -> None:
    first, second = text.splitlines(keepends=True)
    printing.print(f"hello\n{first}")
    assert not printing.log.has_error()
    printing.print(second)
    assert printing.log.has_error()
    assert len(printing.log.new_errors()) == 1
    assert not printing.log.has_error()


@pytest.mark.parametrize("text", [GODOT_4, GODOT_3], ids=["Godot 4", "Godot 3"])
def test_a_line_number_that_is_none_does_not_hide_the_error(printing: Printing, text: str) -> None:
    printing.print(text.replace(":12", f":{'9' * 5000}"))
    (error,) = printing.log.new_errors()
    assert "Nonexistent function 'jump'" in str(error)


def test_an_error_without_a_place_is_told_as_it_is(printing: Printing) -> None:
    printing.print("SCRIPT ERROR: something new in Godot 5\n")
    (error,) = printing.log.new_errors()
    assert str(error) == "something new in Godot 5"


def test_the_end_is_kept_for_errors_and_nothing_is_left_when_closed(printing: Printing) -> None:
    printing.print("x" * 5000 + "the end\n")
    assert printing.log.tail().endswith("the end")
    assert len(printing.log.tail()) <= 2000
    printing.log.close()
    assert printing.log.tail() == ""
    assert printing.log.new_errors() == []


def test_output_in_memory_is_cut_when_it_gets_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_log, "_MOST_BYTES", 1000)
    printing = Printing(None)
    printing.print("x" * 2000)
    assert printing.log.new_errors() == []
    printing.print("new")
    assert printing.log.tail() == "new"
    printing.print(GODOT_4)
    assert printing.log.new_errors()
    printing.close()
