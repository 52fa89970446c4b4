"""One training run at a time writes into a folder; the lock is gone with its process and no child process holds it."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from envmanager import UsageError
from envmanager.training.runs import lock
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun

CONFIG: dict[str, Any] = {
    "manager": {"kind": "simple", "env": "CartPole-v1", "n_envs": 2, "wait": "all"},
    "training": {"steps": 300, "evaluation_episodes": 0, "device": "cpu", "checkpoint_every": 100},
    "trainers": {"default": {"kind": "ppo", "rollout": 32, "epochs": 1, "hidden": [4]}},
}


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
def test_a_training_that_runs_is_left_alone_and_the_other_one_names_folder_and_process(
    tmp_path: Path, how: dict[str, bool]
) -> None:
    report = OthersBegin(how)
    run = TrainingRun(TrainingPlan.parse(CONFIG, tmp_path), report)
    run.go()

    (refusal,) = report.refusals
    assert str(tmp_path) in refusal
    assert f"process {os.getpid()} " in refusal
    assert run.controller is not None
    assert len((tmp_path / "episodes.csv").read_text().splitlines()) == 1 + run.controller.episodes.count
    again = {**CONFIG, "training": {**CONFIG["training"], "steps": 400}}
    assert TrainingRun(TrainingPlan.parse(again, tmp_path, resume=True), OthersBegin()).go().n_steps == 400


def test_two_that_begin_in_an_empty_folder_do_not_both_train(tmp_path: Path) -> None:
    with lock.held(tmp_path / "run"), pytest.raises(UsageError, match="is in progress in"):
        TrainingRun(TrainingPlan.parse(CONFIG, tmp_path / "run"), OthersBegin()).go()


def test_a_folder_in_which_nothing_was_written_is_removed_again(tmp_path: Path) -> None:
    with lock.held(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()
    with lock.held(tmp_path / "run"):
        (tmp_path / "run" / "notes").touch()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"notes", lock.FILE}


def test_force_and_a_training_that_has_ended_leave_the_lock_file(tmp_path: Path) -> None:
    file = tmp_path / lock.FILE
    TrainingRun(TrainingPlan.parse(CONFIG, tmp_path), OthersBegin()).go()
    inode = file.stat().st_ino
    TrainingRun(TrainingPlan.parse(CONFIG, tmp_path, force=True), OthersBegin()).go()
    assert (file.stat().st_ino, file.read_bytes()) == (inode, b"")


HOLDS = """
import sys
from contextlib import ExitStack
from pathlib import Path
from envmanager.training.runs import lock
with lock.held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_lock_is_gone_with_a_process_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"process {other.pid} "), lock.held(tmp_path):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        with lock.held(tmp_path):
            pass


ORPHANS = """
import os, sys
from pathlib import Path
from envmanager.training.runs import lock
with lock.held(Path(sys.argv[1])):
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
        with lock.held(tmp_path):
            pass
        other.stdin.close()
        assert other.stdout.read() == "", "the child lived until now, and has ended"


def test_a_forked_child_that_leaves_the_context_does_not_release_the_lock(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(lock.held(tmp_path))
        before = (tmp_path / lock.FILE).read_bytes()
        pid = os.fork()
        if pid == 0:
            stack.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert (tmp_path / lock.FILE).read_bytes() == before
        with pytest.raises(UsageError, match="is in progress in"), lock.held(tmp_path):
            pass


def test_where_there_are_no_locks_a_training_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with lock.held(tmp_path):
        pass
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


@pytest.mark.parametrize("what", ["text", "link", "folder", "fifo"])
def test_something_of_others_under_the_name_of_the_lock_is_refused_and_stays(tmp_path: Path, what: str) -> None:
    path, target = tmp_path / lock.FILE, tmp_path / "target"
    make = {
        "text": lambda: path.write_text("mine"),
        "link": lambda: path.symlink_to(target),
        "folder": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
    }
    make[what]()
    before = os.lstat(path)
    with pytest.raises(UsageError, match=lock.FILE), lock.held(tmp_path):
        pass
    assert os.lstat(path).st_ino == before.st_ino
    assert os.lstat(path).st_mtime_ns == before.st_mtime_ns
    assert not target.exists()
