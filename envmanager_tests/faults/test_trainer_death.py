"""Case 40, and the ends of case 41: however the trainer ends, all that it started is gone within ``SLACK_S``.

"Everything" is what the kernel says is below it, orphans too: workers, their simulators, the forkserver, and
multiprocessing's resource tracker. What a simulator starts in a session of its own escapes; that is documented.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from envmanager.testing.leaks import SLACK_S
from envmanager_tests.faults import scripts
from envmanager_tests.faults.scripts import program
from envmanager_tests.start_methods import MARKED_START_METHODS, loses, native_only

pytestmark = pytest.mark.parametrize("start_method", MARKED_START_METHODS)


@loses
def test_case_40_all_is_gone_when_a_trainer_is_killed_whose_workers_are_idle_busy_deaf_stopped_or_have_simulators(
    start_method: str,
) -> None:
    with program(scripts.train_one_of_each, start_method, True) as trainer:
        for what in ("waiting", "idle", "stepping", "gil"):
            trainer.announced(what)
        ((stopped,),) = trainer.announced("stopped")
        os.kill(int(stopped), signal.SIGSTOP)
        (simulators,) = trainer.announced("simulators")
        assert {int(pid) for pid in simulators} <= set(trainer.family())
        assert len(trainer.family()) >= 1 + 5 + 3

        trainer.kill()

        trainer.until_all_gone()


def test_case_40_simulators_of_idle_workers_go_with_the_trainer_every_time(start_method: str) -> None:
    for _ in range(3):
        with program(scripts.train_idle_simulators, start_method) as trainer:
            trainer.announced("waiting")
            trainer.announced("simulators", 4)

            trainer.kill()

            trainer.until_all_gone()


def test_case_40_where_the_kernel_gives_no_signal_a_thread_ends_all_that_let_it_run(start_method: str) -> None:
    with program(scripts.train_one_of_each, start_method, False, ENVMANAGER_LIFELINE="thread") as trainer:
        for what in ("waiting", "idle", "stepping", "simulators"):
            trainer.announced(what)

        trainer.kill()

        trainer.until_all_gone()


@loses
def test_case_40_a_data_loader_that_outlives_the_trainer_does_not_keep_its_workers(start_method: str) -> None:
    with program(scripts.train_beside_a_loader, start_method) as trainer:
        ((loader,),) = trainer.announced("loader")
        trainer.announced("gil", 2)

        trainer.kill()

        # multiprocessing's tracker serves every process that the trainer forked, so it stays with the loader.
        trackers = [pid for pid, command in trainer.family().items() if "multiprocessing.resource_tracker" in command]
        trainer.until_all_gone(but=[int(loader), *trackers])
        assert int(loader) in trainer.family()


@native_only
def test_case_40_workers_whose_trainer_died_before_they_could_look_make_no_environment(start_method: str) -> None:
    with program(scripts.train_with_workers_that_start_slowly, start_method) as trainer:
        trainer.announced("started", 2)

        trainer.kill()

        trainer.until_all_gone()
        with pytest.raises(AssertionError, match="announced 0 times"):
            trainer.announced("made", within_s=0)


@pytest.mark.sample("end of the script|os._exit|SIGTERM")
@pytest.mark.parametrize("ending", scripts.ENDINGS)
def test_case_41_workers_end_with_a_trainer_that_did_not_close(start_method: str, ending: str) -> None:
    with program(scripts.train_and_end, start_method, ending) as trainer:
        trainer.announced("idle")
        trainer.announced("stepping")
        assert len(trainer.family()) >= 3
        trainer.go_on()

        exit_code = trainer.ended(within_s=1.0 + SLACK_S)  # 1.0: close_s

        trainer.until_all_gone()
        errors = trainer.errors()
        assert exit_code == {"SIGTERM": -signal.SIGTERM, "an exception": 1}.get(ending, 0)
        assert errors.count("Traceback") == (ending == "an exception"), errors
        assert ending == "an exception" or errors == ""


@pytest.mark.load
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", scripts.KINDS)
def test_case_40_twenty_of_twenty_killed_trainers_leave_nothing(start_method: str, kind: str) -> None:
    took_s = []
    for _ in range(20):
        with program(scripts.train_three_of, kind, start_method) as trainer:
            trainer.announced("waiting")
            trainer.announced(kind, 3)
            before = time.monotonic()

            trainer.kill()

            trainer.until_all_gone()
            took_s.append(time.monotonic() - before)
    print(f"{start_method}, {kind}: {len(took_s)} of 20 left nothing, the slowest after {max(took_s):.2f} s")


@pytest.mark.load
@pytest.mark.timeout(600)
def test_case_40_all_is_gone_when_a_trainer_is_killed_at_any_moment_from_start_to_close(start_method: str) -> None:
    chance = random.Random(3)
    about_s = {"spawn": 1.2, "forkserver": 0.5}[start_method]  # how long it all takes
    n_before_the_end = 0
    for _ in range(40):
        with program(scripts.train_many, start_method) as trainer:
            trainer.announced("starting")
            threading.Event().wait(chance.uniform(0.0, about_s))  # any moment will do

            trainer.kill()

            trainer.until_all_gone()
            try:
                trainer.announced("closed", within_s=0.0)
            except AssertionError:
                n_before_the_end += 1
    print(f"{start_method}: {n_before_the_end} of 40 trainers were killed before they had closed")
    assert n_before_the_end > 5
