"""Files of our own: who can read them, and what is refused in their place."""

from __future__ import annotations

import os
import stat

import pytest

from envmanager.system.machine import open_privately


@pytest.fixture(autouse=True)
def _generous_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def write(path, text, mode="w"):
    with open(path, mode, opener=open_privately) as file:
        file.write(text)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mode", ["w", "a", "x"])
def test_a_new_file_is_for_its_owner_alone(tmp_path, mode):
    write(tmp_path / "new", "text", mode)

    assert (mode_of(tmp_path / "new"), (tmp_path / "new").read_text()) == (0o600, "text")


@pytest.mark.parametrize(("mode", "expected"), [("w", "new"), ("a", "oldnew"), ("r+", "new")])
def test_a_file_that_is_there_becomes_private(tmp_path, mode, expected):
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o666)

    write(tmp_path / "file", "new", mode)

    assert (mode_of(tmp_path / "file"), (tmp_path / "file").read_text()) == (0o600, expected)


def test_a_mode_that_is_narrower_is_kept(tmp_path):
    (tmp_path / "file").touch(0o200)

    write(tmp_path / "file", "new")

    assert mode_of(tmp_path / "file") == 0o200


def test_an_exclusive_file_that_is_there_is_refused(tmp_path):
    (tmp_path / "file").write_text("old")

    with pytest.raises(FileExistsError):
        write(tmp_path / "file", "new", "x")


@pytest.mark.parametrize("mode", ["w", "a", "x", "r+"])
@pytest.mark.parametrize("target", ["victim", "nothing"])
def test_a_symbolic_link_is_not_followed(tmp_path, mode, target):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "file").symlink_to(tmp_path / target)

    with pytest.raises(OSError, match=r"symbolic link|File exists"):
        write(tmp_path / "file", "new", mode)
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


def test_a_pipe_without_a_reader_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "file")

    with pytest.raises(OSError, match="No such device"):
        write(tmp_path / "file", "new")


def test_a_device_keeps_its_mode(tmp_path):
    before = os.stat("/dev/null").st_mode
    write("/dev/null", "new")
    assert os.stat("/dev/null").st_mode == before


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError):
        write(tmp_path, "new")


def test_a_file_that_cannot_be_made_private_is_refused_and_closed(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    (tmp_path / "theirs").touch(0o666)
    monkeypatch.setattr(os, "fchmod", refuse)  # as the kernel does with another user's file
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PermissionError):
        write(tmp_path / "theirs", "new")
    assert os.listdir("/proc/self/fd") == before
