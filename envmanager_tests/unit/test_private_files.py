"""Files of our own: who can read them, and what is refused in their place."""

from __future__ import annotations

import os
import socket
import stat

import pytest

from envmanager.system.private_files import open_privately


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


@pytest.mark.parametrize("mode", ["w", "a"])
def test_a_second_name_of_a_file_is_refused(tmp_path, mode):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "victim").chmod(0o644)
    os.link(tmp_path / "victim", tmp_path / "file")

    with pytest.raises(OSError, match="second name"):
        write(tmp_path / "file", "new", mode)
    assert ((tmp_path / "victim").read_text(), mode_of(tmp_path / "victim")) == ("precious", 0o644)


@pytest.mark.parametrize("is_read", [False, True], ids=["", "read by somebody"])
def test_a_pipe_is_refused_at_once(tmp_path, is_read):
    os.mkfifo(tmp_path / "file")
    reader = os.open(tmp_path / "file", os.O_RDONLY | os.O_NONBLOCK) if is_read else None

    with pytest.raises(OSError, match="no regular file"):
        write(tmp_path / "file", "new")
    if reader is not None:
        assert os.read(reader, 10) == b""
        os.close(reader)


def test_a_socket_a_device_and_a_folder_are_refused(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "socket", "/dev/null"):
            with pytest.raises(OSError, match="no regular file"):
                write(path, "new")
    with pytest.raises(IsADirectoryError):
        write(tmp_path, "new")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's file")
def test_another_users_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("theirs")
    (tmp_path / "file").chmod(0o666)
    os.chown(tmp_path / "file", 65534, 65534)

    with pytest.raises(OSError, match="another user"):
        write(tmp_path / "file", "new")
    assert ((tmp_path / "file").read_text(), mode_of(tmp_path / "file")) == ("theirs", 0o666)


def test_nothing_stays_open_after_a_refusal(tmp_path):
    before = os.listdir("/proc/self/fd")
    (tmp_path / "victim").touch()
    os.link(tmp_path / "victim", tmp_path / "file")

    with pytest.raises(OSError, match="second name"):
        write(tmp_path / "file", "new")
    assert os.listdir("/proc/self/fd") == before
