"""Cases 11 and 40, and what is hidden in them: workers that crash unseen, untie themselves, or leave their group.

Whatever a worker has done to itself, it and its simulators end with it or with the trainer, and nobody else does.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from envmanager import Wait, WorkerDied
from envmanager_tests.faults import scripts
from envmanager_tests.faults.scripts import alive, pids_of, program, started, until, until_gone
from envmanager_tests.start_methods import MARKED_START_METHODS, loses, native_only

pytestmark = pytest.mark.usefixtures("nothing_is_left")
every_start_method = pytest.mark.parametrize("start_method", MARKED_START_METHODS)


# A worker crashes, and nobody looks.


@loses
@every_start_method
@pytest.mark.sample("3")
@pytest.mark.parametrize("n_envs", [1, 3])
def test_simulators_of_crashed_workers_go_with_a_trainer_that_never_noticed(start_method: str, n_envs: int) -> None:
    with program(scripts.train_and_look_away, start_method, n_envs) as trainer:
        crashed = trainer.announced("crashing", n_envs)
        until_gone([int(worker) for worker, _ in crashed])

        trainer.kill()

        trainer.until_all_gone()


@every_start_method
def test_case_11_the_simulator_of_a_crashed_worker_ends_when_the_crash_is_noticed(start_method: str) -> None:
    with program(scripts.train_and_look_late, start_method) as trainer:
        ((worker, simulator),) = trainer.announced("crashing")
        until_gone([int(worker)])
        trainer.go_on()
        assert trainer.announced("died") == [["SIGSEGV"]]

        until_gone([int(simulator)])

        trainer.go_on()
        trainer.announced("closed")
        trainer.go_on()
        assert trainer.ended() == 0
        trainer.until_all_gone()


@every_start_method
@pytest.mark.sample
def test_case_11_it_ends_at_once(start_method: str) -> None:
    with program(scripts.train_and_look_away, start_method, 1) as trainer:
        ((worker, simulator),) = trainer.announced("crashing")

        until_gone([int(worker), int(simulator)])


@native_only
@every_start_method
def test_case_11_where_the_helper_has_gone_the_simulator_of_a_crashed_worker_ends_with_the_manager(
    start_method: str,
) -> None:
    with program(scripts.train_with_a_killed_helper_and_a_crash, start_method) as trainer:
        ((worker, simulator),) = trainer.announced("crashing")
        assert trainer.announced("died") == [["EXIT(?)"]]
        trainer.announced("closed")

        until_gone([int(worker), int(simulator)])


@loses
@every_start_method
def test_a_trainer_whose_children_are_reaped_by_others_loses_nothing(start_method: str) -> None:
    with program(scripts.train_while_children_are_reaped, start_method) as trainer:
        ((worker, simulator),) = trainer.announced("crashing")
        assert trainer.announced("died") == [["SIGSEGV"]]
        trainer.announced("closed")

        until_gone([int(worker), int(simulator)])


# An environment unties itself.


@every_start_method
@pytest.mark.sample("does it all")
@pytest.mark.parametrize("how", scripts.ESCAPES)
def test_an_environment_that_unties_itself_and_hangs_goes_with_its_trainer(start_method: str, how: str) -> None:
    with program(scripts.train_what_escapes_and_hangs, start_method, how) as trainer:
        ((worker, simulator),) = trainer.announced("escaped")
        assert alive(int(worker))
        assert alive(int(simulator))

        trainer.kill()

        trainer.until_all_gone()


@every_start_method
@pytest.mark.sample("does it all")
@pytest.mark.parametrize("how", scripts.ESCAPES)
def test_an_environment_that_has_left_its_group_is_closed_and_the_trainer_lives(start_method: str, how: str) -> None:
    with program(scripts.train_what_escapes_and_is_closed, start_method, how) as trainer:
        trainer.announced("closed", 2)
        escaped = trainer.announced("escaped", 2)

        until_gone([int(pid) for pids in escaped for pid in pids])

        trainer.go_on()
        assert trainer.ended() == 0
        trainer.until_all_gone()


# The helper.


@native_only
@every_start_method
@pytest.mark.sample("KILL")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_without_the_helper_a_manager_works_and_its_workers_go_with_the_trainer(start_method: str, name: str) -> None:
    with program(scripts.train_without_a_helper, start_method, int(signal.Signals[name])) as trainer:
        trainer.announced("closed")
        trainer.announced("waiting")
        trainer.announced("stepping", 2)

        trainer.kill()

        trainer.until_all_gone()


@native_only
@every_start_method
def test_the_helper_holds_nothing_for_workers_that_were_replaced(start_method: str) -> None:
    with program(scripts.train_and_count_lifelines, start_method) as trainer:
        trainer.announced("done")
        assert trainer.ended() == 0
        trainer.until_all_gone()


@native_only
@every_start_method
def test_two_managers_have_one_process_besides_their_workers(start_method: str) -> None:
    with program(scripts.train_two_managers, start_method) as trainer:
        ((*children,),) = trainer.announced("children")
        ((*workers,),) = trainer.announced("workers")
        assert len(children) == 1
        assert len(workers) == 4
        assert trainer.ended() == 0
        trainer.until_all_gone()


def test_the_helper_leads_a_group_in_the_trainers_session_and_ignores_signals() -> None:
    with started() as manager:
        helper = scripts.pid_of_helper()
        assert os.getpgid(helper) == helper
        assert os.getsid(helper) == os.getsid(0), "in another session it would have another share of the cores"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(helper, number)
        manager.reset()
        assert len(manager.step(Wait.all())) == 2
        assert alive(helper)


# Nobody else is hit.


NS_LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


def _with_pid(pid: int) -> subprocess.Popen[bytes] | None:
    """A stranger that leads a group of this number, if that can be had."""
    for _ in range(200):
        try:
            NS_LAST_PID.write_text(str(pid - 1))
        except OSError:
            return None
        stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
        if stranger.pid == pid:
            return stranger
        stranger.kill()
        stranger.wait()
    return None


def test_a_stranger_who_got_the_number_of_a_dead_worker_is_left_alone() -> None:
    with started() as manager:
        manager.reset()
        pid = pids_of(manager)[1]
        os.kill(pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pid}").exists(), "the helper to have reaped the worker")
        stranger = _with_pid(pid)
        if stranger is None:
            pytest.skip("only root can choose the number of a process")
        try:
            with pytest.raises(WorkerDied, match="SIGKILL"):  # noqa: PT012  (any of the calls may be the one)
                while True:
                    manager.step()
            manager.close()
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()
