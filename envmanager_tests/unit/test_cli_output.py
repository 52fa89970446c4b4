"""Text in a terminal is broken between words; elsewhere it stays whole."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from envmanager.cli.output import NewLines, print_pairs, print_text, show

LINE = "worker 2 died in step (SIGSEGV); restart 1 (at most 3 in 60 s)"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")


def test_a_line_is_broken_between_words_and_the_rest_is_indented(narrow):
    terminal = Terminal()

    print_text(f"{LINE}\n  File /a/long-path/that-is-not/broken.py", terminal, indent=4)

    assert terminal.getvalue().splitlines() == [
        "worker 2 died in step",
        "    (SIGSEGV); restart 1 (at",
        "    most 3 in 60 s)",
        "  File",
        "    /a/long-path/that-is-not/broken.py",
    ]


def test_outside_of_a_terminal_a_line_stays_whole(narrow, capsys):
    print_text(LINE)
    print_pairs([("restarts", LINE)])

    assert capsys.readouterr().out.splitlines() == [LINE, f"restarts    {LINE}"]


def test_a_line_for_a_closed_stdout_is_dropped(monkeypatch):
    """As print() does; Python has None there in a program that was started with ``>&-``."""
    monkeypatch.setattr("sys.stdout", None)

    print_text(LINE)


@pytest.mark.parametrize(
    ("is_terminal", "lines"),
    [(True, ["worker 2 died in step", "(SIGSEGV); restart 1 (at most", "3 in 60 s)"]), (False, [LINE])],
)
def test_a_console_does_the_same(is_terminal, lines):
    console = Console(file=io.StringIO(), width=30, force_terminal=is_terminal, color_system=None)

    show(console, LINE)

    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == lines


def test_lines_of_logs_are_taken_once_when_they_are_whole(tmp_path):
    logs = [tmp_path / "worker-0-0.log", tmp_path / "probe" / "worker-1-0.log"]
    logs[1].parent.mkdir()
    new = NewLines(tmp_path)
    logs[0].write_text("one\ntw")
    assert new.take() == ["one"]

    logs[0].write_text("one\ntwo\nthree")
    logs[1].write_text("of another\n")
    assert new.take() == ["of another", "two"]
    assert new.take() == []
    assert new.take(is_over=True) == ["three"]


def test_of_too_many_lines_the_first_are_taken_and_the_others_counted(tmp_path):
    (tmp_path / "worker-0-0.log").write_text("line\n" * 1234)

    *lines, rest = NewLines(tmp_path).take()
    assert lines == ["line"] * NewLines.MOST
    assert rest.startswith(f"({1234 - NewLines.MOST:,} more lines")
