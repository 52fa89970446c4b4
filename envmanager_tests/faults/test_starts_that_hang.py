"""Starts that do not go on: a helper that is stopped or hangs, workers that are stopped or end before they could look.

No wait of a start is without a deadline or deaf to a Ctrl-C, and none leaves anything behind. Nor does a helper that
stops keep a manager from closing.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from envmanager.options import StartMethod
from envmanager.processes import starting
from envmanager.processes.helper import FORK, Request
from envmanager.system import machine
from envmanager.testing.fault_checks import until
from envmanager.testing.leaks import SLACK_S
from envmanager_tests.faults import scripts
from envmanager_tests.faults.scripts import program
from envmanager_tests.in_a_thread import lines_of, while_held_at
from envmanager_tests.start_methods import MARKED_START_METHODS, native_only

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@native_only
def test_a_helper_that_is_stopped_is_replaced_and_the_workers_of_other_managers_live_on() -> None:
    with program(scripts.train_across_a_stopped_helper) as trainer:
        assert trainer.announced("stepped", 2) == [["2"], ["2"]]
        assert trainer.announced("closed") == [["True"]]
        assert trainer.ended() == 0
        trainer.until_all_gone()


@pytest.mark.parametrize(("n_helpers", "max_restarts"), [(1, 0), (3, 1)])
def test_helpers_that_stop_when_they_were_asked_are_replaced_within_the_limit_of_restarts(
    n_helpers: int, max_restarts: int
) -> None:
    with program(scripts.train_across_helpers_that_stop_when_asked, n_helpers, max_restarts) as trainer:
        assert trainer.announced("stepped") == [["2"]]
        assert trainer.ended() == 0
        trainer.until_all_gone()


@native_only
def test_a_helper_that_is_about_to_stop_does_not_keep_close_waiting() -> None:
    with program(scripts.close_while_the_helper_is_about_to_stop) as trainer:
        assert trainer.announced("closed") == [[]]
        assert trainer.ended() == 0
        trainer.until_all_gone()


@native_only
def test_a_helper_reaps_on_after_a_process_whose_end_and_release_it_finds_at_once() -> None:
    first, second = (starting.start("spawn", "sleeper", f"{scripts.__name__}:sleep", ()) for _ in range(2))
    helper = starting.find_helper()
    try:
        os.kill(helper.pid, signal.SIGSTOP)
        until(lambda: not helper.responds())
        first.signal(signal.SIGKILL)
        first.release()
        os.kill(helper.pid, signal.SIGCONT)
        second.signal(signal.SIGKILL)
        assert second.exit_name() == "SIGKILL"
    finally:
        second.release()


@native_only
def test_when_the_next_helper_stops_too_that_is_said() -> None:
    with program(scripts.train_across_helpers_that_stop_when_asked, 2) as trainer:
        ((phase, *cause),) = trainer.announced("error")
        assert phase == "start"
        assert " ".join(cause) == "HelperGone: [Errno 104] the helper process has ended or is stopped"
        assert trainer.ended() == 0
        trainer.until_all_gone()


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_an_interrupt_before_the_trainer_has_read_of_a_worker_leaves_none_behind(
    start_method: StartMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper, wait_for = starting.find_helper(), starting.Helper.wait_for
    before = machine.children_of(helper.pid)

    def interrupted(helper: starting.Helper, fd: int, deadline: float) -> None:
        wait_for(helper, fd, deadline)
        raise KeyboardInterrupt

    monkeypatch.setattr(starting.Helper, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        starting.start(start_method, "sleeper", f"{scripts.__name__}:sleep", ())
    until(lambda: machine.children_of(helper.pid) == before)


@pytest.fixture
def hanging_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a ``cv2`` that can be imported in the trainer only. The helper says where it begins to hang."""
    monkeypatch.setenv("HANGING", str(tmp_path / "hanging"))
    tmp_path.joinpath("cv2.py").write_text(
        "import os, pathlib, time\n"
        "if os.environ.get('TRAINER') != str(os.getpid()):\n"
        "    hanging = pathlib.Path(os.environ['HANGING'])\n"
        "    hanging.touch()\n"
        "    while hanging.exists():\n"
        "        time.sleep(0.01)\n"
    )
    return os.pathsep.join([str(tmp_path), str(scripts.ROOT)])


@native_only
def test_a_helper_that_hangs_is_given_up_at_the_deadline(hanging_import: str) -> None:
    with program(scripts.train_with_a_helper_that_hangs, 2.0, PYTHONPATH=hanging_import) as trainer:
        ((kind, phase, took_s),) = trainer.announced("error")
        assert (kind, phase) == ("WorkerTimedOut", "start")
        assert 2.0 <= float(took_s) <= 2.0 + SLACK_S
        assert trainer.ended() == 0
        trainer.until_all_gone()


@native_only
def test_a_start_that_times_out_fails_no_start_of_another_manager() -> None:
    with program(scripts.start_beside_starts_that_time_out) as trainer:
        assert trainer.announced("started") == [["10"]]
        assert trainer.ended() == 0
        trainer.until_all_gone()


@native_only
def test_a_start_that_times_out_takes_no_exit_code_from_another_manager(hanging_import: str) -> None:
    with program(scripts.die_beside_a_start_that_timed_out, PYTHONPATH=hanging_import) as trainer:
        assert trainer.announced("late") == [["WorkerTimedOut"]]
        assert trainer.announced("exit") == [["SIGKILL"]]
        assert trainer.announced("helpers") == [["1"]]
        assert trainer.ended() == 0
        trainer.until_all_gone()


@native_only
def test_a_helper_that_hangs_delays_a_close_no_longer_than_one_worker_would(hanging_import: str) -> None:
    with program(scripts.close_beside_a_helper_that_hangs, PYTHONPATH=hanging_import) as trainer:
        ((took_s,),) = trainer.announced("closed")
        assert float(took_s) <= 2.0 + SLACK_S
        assert trainer.ended() == 0
        trainer.until_all_gone()


@native_only
def test_a_helper_that_hangs_delays_a_call_to_many_dead_workers_no_longer_than_to_one(hanging_import: str) -> None:
    with program(scripts.reset_dead_workers_beside_a_helper_that_hangs, PYTHONPATH=hanging_import) as trainer:
        ((took_s, exit_name),) = trainer.announced("failed")
        assert float(took_s) <= SLACK_S
        assert exit_name == "EXIT(?)"
        assert trainer.ended() == 0
        trainer.until_all_gone()


@native_only
@pytest.mark.parametrize("line", lines_of(starting.Helper.ask))
def test_a_request_to_a_helper_that_another_thread_stops_goes_to_no_socket_of_the_program(line: int) -> None:
    with ExitStack() as stack:
        life_fds = os.pipe()
        for fd in life_fds:
            stack.callback(os.close, fd)
        helper = starting.Helper(life_fds[0])

        def ask() -> None:
            with suppress(starting.HelperGone):
                helper.ask(Request(FORK, ["json"]))

        with while_held_at(line, starting.Helper.ask, ask, helper.stop):
            ends = [stack.enter_context(end) for _ in range(20) for end in socket.socketpair()]
        for end in ends:
            end.setblocking(False)
            with pytest.raises(BlockingIOError):
                end.recv(100)


@native_only
@pytest.mark.parametrize("line", lines_of(starting.Process.signal))
def test_a_signal_to_a_process_that_another_thread_releases_goes_to_no_other_process(line: int) -> None:
    process, received = starting.start("spawn", "sleeper", f"{scripts.__name__}:sleep", ()), []
    os.kill(process.pid, signal.SIGKILL)
    assert process.exit_name() == "SIGKILL"
    before = signal.signal(signal.SIGUSR1, lambda *_: received.append(True))
    pidfds: list[int] = []
    try:
        with while_held_at(line, starting.Process.signal, lambda: process.signal(signal.SIGUSR1), process.release):
            pidfds += [os.pidfd_open(os.getpid()) for _ in range(20)]
        assert received == []
    finally:
        signal.signal(signal.SIGUSR1, before)
        for fd in pidfds:
            os.close(fd)


@native_only
def test_a_ctrl_c_ends_the_wait_for_a_helper_that_hangs(hanging_import: str) -> None:
    with program(scripts.train_with_a_helper_that_hangs, 60.0, PYTHONPATH=hanging_import) as trainer:
        trainer.announced("starting")
        helper = scripts.until(
            lambda: [pid for pid, command in trainer.family().items() if "envmanager.processes.helper" in command],
            "the helper",
        )
        assert helper

        os.kill(trainer.pid, signal.SIGINT)

        ((kind, _, _),) = trainer.announced("error")
        assert kind == "KeyboardInterrupt"
        assert trainer.ended() == 0
        trainer.until_all_gone()


def test_a_helper_whose_trainer_died_while_it_began_obeys_no_request(hanging_import: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    life_fd, trainers_end = os.pipe()
    with ours, theirs:
        Request(FORK, ["cv2"]).send(ours)  # which would hang
        os.close(trainers_end)
        command = f"from envmanager.processes.helper import main; main({theirs.fileno()}, {life_fd})"
        helper = subprocess.Popen(
            [sys.executable, "-c", command],
            pass_fds=(theirs.fileno(), life_fd),
            env={**os.environ, "PYTHONPATH": hanging_import},
        )
        os.close(life_fd)
        assert helper.wait(10 * SLACK_S) == 0


@native_only
@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_a_worker_that_is_stopped_before_it_has_read_its_factory_is_given_up_at_the_deadline(start_method: str) -> None:
    with program(scripts.train_with_workers_that_are_stopped_early, start_method) as trainer:
        ((kind, phase, took_s),) = trainer.announced("error")
        assert (kind, phase) == ("WorkerTimedOut", "start")
        assert float(took_s) <= 2.0 + SLACK_S
        assert trainer.ended() == 0
        trainer.until_all_gone()


def test_workers_that_end_before_they_have_read_anything_leave_no_zombies() -> None:
    with program(scripts.train_with_interpreters_that_end_at_once) as trainer:
        assert trainer.announced("error", 3) == [["WorkerDied"]] * 3
        assert trainer.announced("zombies") == [[]]
        trainer.until_all_gone()


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_the_folder_for_temporary_files_may_have_a_long_name_and_nothing_is_left_in_it(
    start_method: str, tmp_path: Path
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    with program(scripts.train_and_hang_in, start_method, TMPDIR=str(folder)) as trainer:
        assert trainer.announced("folder") == [[str(folder)]]

        trainer.kill()

        trainer.until_all_gone()
        assert list(folder.iterdir()) == []
