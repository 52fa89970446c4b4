"""Case 9 and its neighbours: what workers print and read, and the files that take their output."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from envmanager import RestartPolicy, RestartsExhausted, SubprocessEnvManager, UsageError, Wait, WorkerDied
from envmanager.testing import Die, FakeEnvironment, Step, faulty, nothing_left_behind
from envmanager.testing.faults import Print
from envmanager_tests.faults import scripts_of_workers
from envmanager_tests.faults.scripts import Zeros, program, started
from envmanager_tests.start_methods import MARKED_START_METHODS

pytestmark = pytest.mark.usefixtures("nothing_is_left")
every_start_method = pytest.mark.parametrize("start_method", MARKED_START_METHODS)


# Standard streams.


@pytest.mark.sample("0, 1, 2")
@every_start_method
@pytest.mark.parametrize("closed", [[0, 1, 2], [1], [0, 2]], ids=str)
def test_what_environments_print_goes_nowhere_else_when_the_trainer_has_closed_its_output(
    start_method: str, closed: list[int]
) -> None:
    with program(scripts_of_workers.train_without_standard_streams, start_method, closed, False) as trainer:
        assert trainer.announced("stepped") == [["40"]]
        for streams in trainer.announced("streams", 2):
            assert [streams[number] for number in {0, *closed}] == ["/dev/null"] * len({0, *closed})
        trainer.ended()
        trainer.until_all_gone()


@every_start_method
def test_a_worker_is_replaced_when_the_trainer_has_closed_its_output_since(start_method: str) -> None:
    with program(scripts_of_workers.train_without_standard_streams, start_method, [0, 1, 2], True) as trainer:
        assert trainer.announced("stepped") == [["40"]]
        assert trainer.announced("streams", 2)[0] == ["/dev/null"] * 3
        trainer.ended()
        trainer.until_all_gone()


@every_start_method
def test_input_for_the_trainer_is_not_taken_by_what_environments_start(start_method: str) -> None:
    with program(scripts_of_workers.train_beside_input, start_method) as trainer:
        trainer.announced("ready")
        trainer.go_on()

        assert trainer.announced("read") == [["0"]]
        assert trainer.announced("left") == [["1"]]
        assert (trainer.ended(), trainer.errors()) == (0, "")


# Logs.


LAST_WORDS = ["these were my last words"] * 2
"""On stdout and on stderr."""


def prints_and_dies(*, only_env: int | None = None, only_generation: int | None = None) -> Any:
    faults = [Print(f"{LAST_WORDS[0]}\n"), Die(3)]
    return faulty(faults, after=1, only_env=only_env, only_generation=only_generation)


def first_death(manager: SubprocessEnvManager) -> WorkerDied:
    with pytest.raises(WorkerDied) as raised:  # noqa: PT012  (any of the steps may be the one)
        while True:
            manager.step(Wait.all())
    return raised.value


@pytest.mark.sample
@every_start_method
def test_an_earlier_runs_text_is_kept_in_the_log_and_out_of_the_error(start_method: Any, tmp_path: Path) -> None:
    log = tmp_path / "worker-0-0.log"
    log.write_text("of another run\n")
    with started(prints_and_dies(), 1, start_method=start_method, log_dir=str(tmp_path)) as manager:
        manager.reset()
        error = first_death(manager)

    assert error.output.splitlines() == LAST_WORDS
    assert log.read_text().splitlines() == ["of another run", *LAST_WORDS]


@pytest.mark.sample
@every_start_method
def test_a_log_that_others_could_read_becomes_private(start_method: Any, tmp_path: Path) -> None:
    log = tmp_path / "worker-0-0.log"
    log.touch()
    log.chmod(0o666)
    with started(FakeEnvironment, 1, start_method=start_method, log_dir=str(tmp_path)):
        assert stat.S_IMODE(log.stat().st_mode) == 0o600


def plant_a_link(log: Path, victim: Path) -> None:
    log.symlink_to(victim)


def plant_a_pipe(log: Path, _: Path) -> None:
    os.mkfifo(log)


def plant_a_folder(log: Path, _: Path) -> None:
    log.mkdir()


PLANTED = [plant_a_link, plant_a_pipe, plant_a_folder]


@pytest.mark.parametrize("plant", PLANTED)
def test_what_was_planted_in_the_place_of_a_log_is_refused_before_a_process_starts(tmp_path: Path, plant: Any) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "logs").mkdir()
    plant(tmp_path / "logs" / "worker-1-0.log", victim)

    with nothing_left_behind(), pytest.raises(UsageError, match="log_dir") as raised:
        SubprocessEnvManager(FakeEnvironment, 2, log_dir=str(tmp_path / "logs"))
    assert "worker-1-0.log" in str(raised.value)
    assert victim.read_text() == "precious"


def test_a_log_dir_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with nothing_left_behind(), pytest.raises(UsageError, match="log_dir"):
        SubprocessEnvManager(FakeEnvironment, log_dir=str(tmp_path / "file" / "logs"))


def test_a_replacement_whose_log_is_refused_counts_as_a_failed_start(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for generation in range(1, 4):
        plant_a_link(tmp_path / f"worker-0-{generation}.log", victim)
    policy = RestartPolicy(max_restarts=2, backoff_s=0.0)
    with started(prints_and_dies(), 1, log_dir=str(tmp_path), restarts=policy) as manager:
        manager.reset()
        with pytest.raises(RestartsExhausted) as raised:  # noqa: PT012
            while True:
                manager.step(Wait.all())

    assert "symbolic link" in str(raised.value.last)
    assert victim.read_text() == "precious"


def test_a_file_that_took_the_place_of_a_log_is_not_in_the_error(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    log = tmp_path / "worker-0-0.log"
    for replace in (plant_a_link, lambda path, _: path.write_text("a secret")):
        with started(lambda: FakeEnvironment([Step(), Die(3)]), 1, log_dir=str(tmp_path)) as manager:
            manager.reset()
            log.unlink()
            replace(log, secret)
            assert first_death(manager).output == ""
        log.unlink()


def test_logs_stay_where_they_began_when_the_trainer_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    policy = RestartPolicy(max_restarts=1, backoff_s=0.0)
    with SubprocessEnvManager(prints_and_dies(only_generation=0), 1, log_dir="logs", restarts=policy) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        monkeypatch.chdir(tmp_path / "elsewhere")
        infos: list[Any] = []
        while not any(info.lost for info in infos):
            infos += manager.step()

    (lost,) = (info.lost for info in infos if info.lost)
    assert lost.cause.output.splitlines() == LAST_WORDS
    names = {path.name for path in (tmp_path / "here" / "logs").iterdir()}
    assert names == {"worker-0-0.log", "worker-0-1.log"}
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_log_that_its_owner_shows_to_others_stays_so_when_the_worker_dies(tmp_path: Path) -> None:
    log = tmp_path / "worker-0-0.log"
    with started(prints_and_dies(), 1, log_dir=str(tmp_path)) as manager:
        manager.reset()
        log.chmod(0o644)
        assert first_death(manager).output.splitlines() == LAST_WORDS
    assert stat.S_IMODE(log.stat().st_mode) == 0o644


def test_a_log_that_was_cut_short_by_others_still_tells_its_end(tmp_path: Path) -> None:
    log = tmp_path / "worker-0-0.log"
    log.write_text("of another run\n" * 100)
    with started(prints_and_dies(), 1, log_dir=str(tmp_path)) as manager:
        manager.reset()
        os.truncate(log, 0)
        assert first_death(manager).output.splitlines() == LAST_WORDS
