"""Files that take the place of others: wholly or not at all, and never through a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from envmanager.cli.plan import check_out
from envmanager.errors import NotWritten, UsageError
from envmanager.observe.files import append_to, logged, replacing, write_atomically
from envmanager.registry import ManagerOptions


def mode_of(path):
    return path.stat().st_mode & 0o777


@pytest.fixture
def umask():
    """The umask, set to something unusual."""
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def test_what_is_written_is_there(tmp_path):
    write_atomically(tmp_path / "a.json", "ü\n")

    assert (tmp_path / "a.json").read_text("utf-8") == "ü\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("before", [None, 0o666, 0o600])
def test_its_mode_is_what_the_umask_leaves_whatever_was_there_before(tmp_path, umask, before):
    path = tmp_path / "a.json"
    if before is not None:
        path.touch()
        path.chmod(before)

    write_atomically(path, "x")

    assert mode_of(path) == 0o666 & ~umask


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "a.json").symlink_to(victim)

    write_atomically(tmp_path / "a.json", "x")

    assert victim.read_text() == "precious"
    assert not (tmp_path / "a.json").is_symlink()


def test_a_hard_link_is_replaced_and_the_other_name_stays(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "a.json").hardlink_to(victim)

    write_atomically(tmp_path / "a.json", "x")

    assert victim.read_text() == "precious"


def test_a_link_under_the_name_of_the_temporary_file_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (tmp_path / ".a.json.guessed.part").symlink_to(victim)

    with pytest.raises(NotWritten, match="File exists"):
        write_atomically(tmp_path / "a.json", "x")

    assert victim.read_text() == "precious"
    assert not (tmp_path / "a.json").exists()


def test_when_writing_fails_the_old_file_is_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    with pytest.raises(TypeError), replacing(path) as file:
        file.write("no bytes")

    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("a.json", "old")]
    assert file.closed


def test_it_can_be_written_to_after_it_has_taken_the_place(tmp_path):
    with replacing(tmp_path / "a.csv") as file:
        file.write(b"1\n")
    with append_to(tmp_path / "a.csv") as file:
        file.write(b"2\n")

    assert (tmp_path / "a.csv").read_text() == "1\n2\n"


def test_a_link_that_has_taken_the_place_is_not_written_to(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "a.csv").symlink_to(victim)

    with pytest.raises(OSError, match="symbolic links"):
        append_to(tmp_path / "a.csv")

    assert victim.read_text() == "precious"


def test_what_is_no_regular_file_is_refused_as_out(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")

    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/null")):
        with pytest.raises(UsageError, match="no regular file"):
            check_out(path)


def test_a_file_that_cannot_be_written_is_named_and_what_was_there_stays(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text("before")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotWritten, match=r"a\.json cannot be written: No space left on device\."):
        write_atomically(tmp_path / "a.json", "after")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "before"


def test_logs_are_kept_unless_they_are_empty(tmp_path):
    folder = tmp_path / "run" / "logs" / "evaluate"
    with logged(ManagerOptions(), folder) as options:
        assert options.log_dir == str(folder)
        (folder / "probe").mkdir()
        for name in ("a.log", "probe/b.log", "c.log"):
            (folder / name).write_text("printed" if name == "c.log" else "")

    assert [path.relative_to(folder).as_posix() for path in folder.rglob("*")] == ["c.log"]


def test_each_command_has_logs_of_its_own(tmp_path):
    folder = tmp_path / "run" / "logs" / "evaluate"
    with logged(ManagerOptions(), folder) as options, logged(ManagerOptions(), folder) as others:
        Path(others.log_dir, "a.log").write_text("")
        assert (options.log_dir, others.log_dir) == (str(folder), f"{folder}.2")
    assert not folder.parent.exists()


def test_logs_are_in_a_temporary_folder_where_none_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file" / "logs"):
        with logged(ManagerOptions(), folder) as options:
            Path(options.log_dir, "a.log").write_text("printed")
        assert not Path(options.log_dir).exists()


@pytest.mark.parametrize("options", [ManagerOptions(log_dir="mine"), ManagerOptions(kind="simple")])
def test_a_folder_for_logs_that_is_named_or_not_used_stays(tmp_path, options):
    with logged(options, tmp_path) as own:
        assert own is options
