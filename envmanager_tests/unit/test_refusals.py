"""What is said about a refusal of the operating system names its reason, and no other."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import resource
import signal
from pathlib import Path

import pytest

from envmanager import SubprocessEnvManager, UsageError, WorkerError
from envmanager.hosts import descriptors, shared_rows
from envmanager.processes.output import OutputLog
from envmanager.system.machine import advice
from envmanager.testing import FakeEnvironment

with contextlib.suppress(ImportError):
    import pydantic  # noqa: F401  (typer imports it late, and Python 3.13 cannot do so in a removed directory)

LIMITS = ("ulimit -u", "ulimit -n", "ulimit -f", "fs.file-max", "out of memory", "disk", "read-only", "directory")


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EAGAIN, "ulimit -u"),
        (errno.ENOMEM, "out of memory"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.EFBIG, "ulimit -f"),
        (errno.ENOSPC, "disk"),
        (errno.EROFS, "read-only"),
    ],
)
def test_advice_names_what_the_number_stands_for_and_nothing_else(number: int, reason: str) -> None:
    said = advice(OSError(number, os.strerror(number)))
    assert [each for each in LIMITS if each in said] == [reason]


@pytest.mark.parametrize("error", [PermissionError(errno.EPERM, "no"), OSError("no number"), EOFError()])
def test_there_is_no_advice_where_the_reason_is_unknown(error: Exception) -> None:
    assert advice(error) == ""


@pytest.fixture
def removed_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()


@pytest.mark.usefixtures("removed_directory")
def test_a_worker_that_cannot_start_in_a_removed_working_directory_says_so() -> None:
    with pytest.raises(WorkerError, match="working directory of this process has been removed") as raised:
        SubprocessEnvManager(FakeEnvironment, 1, start_method="spawn")
    assert "ulimit" not in str(raised.value)


@pytest.mark.usefixtures("removed_directory")
@pytest.mark.parametrize("option", ["log_dir", "trace"])
def test_a_relative_path_in_a_removed_working_directory_is_refused_with_the_reason(option: str) -> None:
    with pytest.raises(UsageError, match=r"'out' cannot be used.*working directory of this process has been removed"):
        SubprocessEnvManager(FakeEnvironment, 1, **{option: "out"})


@pytest.mark.usefixtures("removed_directory")
def test_commands_that_need_no_directory_work_in_a_removed_one_and_others_say_what_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("typer")
    app = importlib.import_module("envmanager.cli.app")

    assert app.run_command_line(["--version"]) == 0
    assert app.run_command_line(["godot", "check", "game"]) == 2
    assert "working directory of this process has been removed" in capsys.readouterr().err


def test_a_missing_file_is_no_removed_working_directory() -> None:
    assert advice(FileNotFoundError(errno.ENOENT, "no such file")) == ""


@pytest.fixture
def no_long_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``ulimit -f 0`` has it; Python ignores the signal that the kernel sends besides."""
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.mark.usefixtures("no_long_files")
def test_shared_memory_that_the_kernel_refuses_though_there_is_enough_says_why() -> None:
    fd = descriptors.create_memory("test")
    try:
        with pytest.raises(UsageError, match=r"need 4,096 bytes of shared memory.*File too large.*ulimit -f") as raised:
            shared_rows.allocate(fd, 4096)
        assert "free" not in str(raised.value)
    finally:
        descriptors.close(fd)


@pytest.mark.parametrize("log_dir", ["file", "file/logs"])
def test_a_log_in_a_place_that_is_no_folder_is_no_matter_of_who_may_write(tmp_path: Path, log_dir: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="There is a file") as raised:
        OutputLog.open(str(tmp_path / log_dir), 0, 0)
    assert "only you" not in str(raised.value)
