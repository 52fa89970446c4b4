"""One training run at a time writes into a folder; the lock is gone with its process and no child process holds it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from envmanager import NotWritten, UsageError
from envmanager.training.runs import folder
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun

CONFIG: dict[str, Any] = {
    "manager": {"kind": "simple", "env": "CartPole-v1", "n_envs": 2, "wait": "all"},
    "training": {"steps": 300, "evaluation_episodes": 0, "device": "cpu", "checkpoint_every": 100},
    "trainers": {"default": {"kind": "ppo", "rollout": 32, "epochs": 1, "hidden": [4]}},
}


def held(directory: Path) -> AbstractContextManager[None]:
    return folder.held(directory, resume=True, force=False)


class OthersBegin(Report):
    """Tries to train in the same folder once there is a checkpoint."""

    def __init__(self, *hows: dict[str, bool]) -> None:
        self._hows = list(hows)
        self.refusals: list[str] = []

    def saved(self, path: Path) -> None:
        hows, self._hows = self._hows, []
        for how in hows:
            with pytest.raises(UsageError) as caught:
                TrainingRun(TrainingPlan.parse(CONFIG, path.parent.parent, **how), OthersBegin()).go()
            self.refusals.append(str(caught.value))


@pytest.mark.parametrize("how", [{"force": True}, {"resume": True}], ids=["force", "resume"])
def test_a_training_that_runs_is_left_alone_and_the_other_one_names_the_folder(
    tmp_path: Path, how: dict[str, bool]
) -> None:
    report = OthersBegin(how)
    run = TrainingRun(TrainingPlan.parse(CONFIG, tmp_path), report)
    run.go()

    (refusal,) = report.refusals
    assert f"a training run is in progress in {tmp_path}. " in refusal
    assert not tmp_path.with_name(f"{tmp_path.name}.1").exists()
    assert run.controller is not None
    assert len((tmp_path / "episodes.csv").read_text().splitlines()) == 1 + run.controller.episodes.count
    again = {**CONFIG, "training": {**CONFIG["training"], "steps": 400}}
    assert TrainingRun(TrainingPlan.parse(again, tmp_path, resume=True), OthersBegin()).go().n_steps == 400


def test_two_that_begin_in_an_empty_folder_do_not_both_train(tmp_path: Path) -> None:
    with held(tmp_path / "run"), pytest.raises(UsageError, match="is in progress in"):
        TrainingRun(TrainingPlan.parse(CONFIG, tmp_path / "run"), OthersBegin()).go()


@pytest.mark.parametrize("how", [{"force": True}, {"resume": True}, {}], ids=["force", "resume", "plain"])
def test_a_training_that_has_renamed_its_folder_is_left_alone_too(tmp_path: Path, how: dict[str, bool]) -> None:
    run, report = tmp_path / "run", OthersBegin(how)
    TrainingRun(TrainingPlan.parse(CONFIG, run), OthersBegin()).go()
    TrainingRun(TrainingPlan.parse(CONFIG, run, force=True), report).go()

    (refusal,) = report.refusals
    assert ("is in progress" if how else "holds a training run already") in refusal
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.1"}


def test_the_old_folder_is_locked_too_as_long_as_the_new_training_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    TrainingRun(TrainingPlan.parse(CONFIG, run), OthersBegin()).go()
    with (
        folder.held(run, resume=False, force=True),
        pytest.raises(UsageError, match="is in progress in"),
        held(tmp_path / "run.1"),
    ):
        pass
    with held(tmp_path / "run.1"), held(run):
        pass


def test_the_lock_file_stays_in_a_folder_in_which_nothing_was_written(tmp_path: Path) -> None:
    with held(tmp_path / "run"):
        pass
    assert {path.name for path in (tmp_path / "run").iterdir()} == {folder.LOCK}


HOLDS = """
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from envmanager.training.runs import folder
with folder.held(Path(sys.argv[1]), resume=True, force=False):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_lock_is_gone_with_a_process_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="is in progress in"), held(tmp_path):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        with held(tmp_path):
            pass


ORPHANS = """
import os, sys
from pathlib import Path
from envmanager.training.runs import folder
with folder.held(Path(sys.argv[1]), resume=True, force=False):
    if os.fork() == 0:
        print("forked", flush=True)
        sys.stdin.read()
        os._exit(0)
    os.waitid(os.P_ALL, 0, os.WEXITED)
"""


def test_a_forked_child_that_outlives_the_training_does_not_hold_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHANS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "forked\n"
        other.send_signal(signal.SIGKILL)
        other.wait()
        with held(tmp_path):
            pass
        other.stdin.close()
        assert other.stdout.read() == "", "the child lived until now, and has ended"


def test_a_forked_child_that_leaves_the_context_does_not_release_the_lock(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(held(tmp_path))
        before = (tmp_path / folder.LOCK).read_bytes()
        pid = os.fork()
        if pid == 0:
            stack.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert (tmp_path / folder.LOCK).read_bytes() == before
        with pytest.raises(UsageError, match="is in progress in"), held(tmp_path):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_where_there_are_no_locks_a_training_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path / "run"):
        pass
    (warning,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert os.strerror(number) in warning


def test_a_folder_that_cannot_be_written_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (Path("/proc/run"), tmp_path / "file" / "run"):
        with pytest.raises(NotWritten, match=r"run/\.training\.lock cannot be written: "):
            TrainingRun(TrainingPlan.parse(CONFIG, directory), OthersBegin()).go()


@pytest.mark.parametrize("what", ["link", "folder"])
def test_something_of_others_under_the_name_of_the_lock_is_refused_and_stays(tmp_path: Path, what: str) -> None:
    path, target = tmp_path / folder.LOCK, tmp_path / "target"
    if what == "link":
        path.symlink_to(target)
    else:
        path.mkdir()
    before = os.lstat(path)
    with pytest.raises(NotWritten, match=folder.LOCK), held(tmp_path):
        pass
    assert os.lstat(path).st_ino == before.st_ino
    assert not target.exists()
