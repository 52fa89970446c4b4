"""Managers end cleanly however they end, and what workers get and leave behind."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    AsyncioEnvManager,
    EnvContext,
    SimpleEnvManager,
    SubprocessEnvManager,
    UsageError,
    Wait,
)
from envmanager.hosts import shared_rows
from envmanager.processes.boot import THREAD_CAPS
from envmanager.testing import EchoEnvironment, FakeEnvironment
from envmanager_tests.start_methods import MARKED_START_METHODS

SUITE = "core portable start-methods faults"


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


def pids(manager: SubprocessEnvManager) -> list[int]:
    return [worker.pid or 0 for worker in manager.stats().workers]


@pytest.mark.sample
@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_seventeen_environments_over_six_workers(start_method: Any) -> None:
    with SubprocessEnvManager(EchoEnvironment, 17, n_workers=6, start_method=start_method) as manager:
        blocks = [worker.env_ids for worker in manager.stats().workers]
        manager.reset()
        batch = manager.recv(Wait.all())

    assert [len(block) for block in blocks] == [3, 3, 3, 3, 3, 2]
    assert batch.env_ids.tolist() == list(range(17))


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_environments_may_use_multiprocessing_and_atexit(
    start_method: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Uses(FakeEnvironment):
        def use(self) -> tuple[bool, bytes, int, int]:
            atexit.register((tmp_path / str(os.getpid())).touch)
            memory = shared_memory.SharedMemory(create=True, size=8)
            memory.buf[0] = 7
            value = memory.buf[0]
            memory.close()
            memory.unlink()
            with multiprocessing.get_context("fork").Pool(1) as pool:
                result = pool.apply(abs, (-3,))
            process = multiprocessing.current_process()
            return process.daemon, bytes(process.authkey), value, result

    with SubprocessEnvManager(Uses, 2, start_method=start_method) as manager:
        used = manager.call("use")
        workers = {str(pid) for pid in pids(manager)}

    assert used == [(False, bytes(multiprocessing.current_process().authkey), 7, 3)] * 2
    assert {path.name for path in tmp_path.iterdir()} == workers
    assert capfd.readouterr().err == ""


class Keeps(FakeEnvironment):
    def __init__(self, context: EnvContext) -> None:
        super().__init__()
        self.context = context


def test_a_factory_learns_its_context(tmp_path: Path) -> None:
    with SubprocessEnvManager(Keeps, 3, n_workers=2, seed=4, log_dir=str(tmp_path)) as manager:
        contexts = manager.get_attr("context")

    assert [(c.env_id, c.worker_id, c.generation) for c in contexts] == [(0, 0, 0), (1, 0, 0), (2, 1, 0)]
    assert len({c.seed for c in contexts}) == 3
    assert {c.log_dir for c in contexts} == {str(tmp_path)}


def test_no_two_managers_of_a_program_share_a_slot() -> None:
    slots = []
    for kind in (SubprocessEnvManager, SimpleEnvManager, AsyncioEnvManager):
        for _ in range(2):
            with kind(Keeps, 3) as manager:
                slots += [context.slot for context in manager.get_attr("context")]

    assert len(set(slots)) == 18


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_workers_get_the_environment_variables_of_now_or_those_asked_for(
    start_method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reads(FakeEnvironment):
        def variables(self) -> dict[str, str]:
            return dict(os.environ)

    monkeypatch.setenv("ENVMANAGER_TEST", "now")
    with SubprocessEnvManager(Reads, 1, start_method=start_method) as manager:
        (inherited,) = manager.call("variables")
    with SubprocessEnvManager(Reads, 1, start_method=start_method, worker_env={"ONLY": "this"}) as manager:
        (limited,) = manager.call("variables")

    assert inherited["ENVMANAGER_TEST"] == "now"
    assert inherited["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    assert limited.pop("ONLY") == "this"
    assert set(limited) == set(THREAD_CAPS)


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_opencv_has_one_thread_in_a_worker_unless_the_variable_says_otherwise(
    start_method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cv2")  # also loaded in the helper then

    class Images(FakeEnvironment):
        def n_threads(self) -> int:
            import cv2

            return int(cv2.getNumThreads())

    with SubprocessEnvManager(Images, 1, start_method=start_method) as manager:
        assert manager.call("n_threads") == [1]
    monkeypatch.setenv("OPENCV_FOR_THREADS_NUM", "3")
    with SubprocessEnvManager(Images, 1, start_method=start_method) as manager:
        assert manager.call("n_threads") == [3]


LOGS_AND_WARNINGS = """
import logging
import sys
import warnings
from envmanager import SimpleEnvManager, SubprocessEnvManager
from envmanager.testing import FakeEnvironment

class Marked(logging.Formatter):
    def format(self, record):
        return f"<{super().format(record)}>"

class Adds(logging.Filter):
    def filter(self, record):
        record.run = "r7"
        return record.getMessage() != "filtered"

class Talks(FakeEnvironment):
    def reset(self, **arguments):
        logging.debug("below the level of the root logger")
        logging.info("an information")
        logging.info("filtered")
        logging.getLogger("mine.part").debug("below the root's level, but not that of its logger")
        logging.getLogger("loud").error("below the level of its logger")
        warnings.warn("ignored by its text")
        try:
            warnings.warn("made an error", DeprecationWarning)
        except DeprecationWarning:
            logging.info("raised")
        return super().reset(**arguments)

handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(Marked("%(name)s %(levelname)s %(run)s %(message)s"))
handler.addFilter(Adds())
logging.basicConfig(level=logging.INFO, handlers=[logging.FileHandler(sys.argv[2]), handler])
logging.getLogger("mine").setLevel(logging.DEBUG)
logging.getLogger("loud").setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", message="ignored")
warnings.filterwarnings("error", category=DeprecationWarning)
options = {} if sys.argv[1] == "simple" else {"start_method": sys.argv[1]}
with (SubprocessEnvManager if options else SimpleEnvManager)(Talks, 1, **options) as manager:
    manager.reset()
"""


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_what_an_environment_logs_and_warns_of_comes_out_of_a_worker_as_in_the_trainer(
    start_method: str, tmp_path: Any
) -> None:
    script = tmp_path / "logs.py"
    script.write_text(LOGS_AND_WARNINGS)

    def lines(kind: str) -> list[str]:
        command = [sys.executable, str(script), kind, str(tmp_path / "file.log")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        assert done.stderr == ""
        return done.stdout.splitlines()

    there = lines(start_method)
    assert there == lines("simple")
    assert there == [
        "<root INFO r7 an information>",
        "<mine.part DEBUG r7 below the root's level, but not that of its logger>",
        "<root INFO r7 raised>",
    ]


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_workers_draw_different_random_numbers(start_method: Any) -> None:
    class Draws(FakeEnvironment):
        def draw(self) -> tuple[float, float]:
            import random

            return float(np.random.random()), random.random()

    np.random.seed(0)
    with SubprocessEnvManager(Draws, 3, start_method=start_method) as manager:
        drawn = manager.call("draw")

    assert len(set(drawn)) == 3


def test_two_managers_run_beside_each_other_and_inside_a_thread() -> None:
    results: list[int] = []

    def run() -> None:
        with SubprocessEnvManager(FakeEnvironment, 2) as inner:
            inner.set_policy("default", Zeros())
            inner.reset()
            results.append(len(inner.step(Wait.all())))

    with SubprocessEnvManager(FakeEnvironment, 1) as outer:
        outer.set_policy("default", Zeros())
        outer.reset()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        results.append(len(outer.step(Wait.all())))
    assert results == [2, 1]


def test_output_goes_to_a_file_per_worker_with_log_dir(tmp_path: Path) -> None:
    class Prints(FakeEnvironment):
        def say(self) -> None:
            print("hello from", os.getpid(), flush=True)

    with SubprocessEnvManager(Prints, 2, log_dir=str(tmp_path / "logs")) as manager:
        manager.call("say")
        workers = pids(manager)
    texts = [path.read_text() for path in sorted((tmp_path / "logs").iterdir())]
    assert [text.split() for text in texts] == [["hello", "from", str(pid)] for pid in workers]


def test_more_workers_than_environments_is_refused() -> None:
    with pytest.raises(UsageError, match="n_workers=3 is more than n_envs=2"):
        SubprocessEnvManager(FakeEnvironment, 2, n_workers=3)


def test_free_memory_is_a_sensible_number_also_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**20 < shared_rows.available_bytes() < 2**50
    monkeypatch.setattr(shared_rows, "words_of", lambda _: [])
    assert 2**20 < shared_rows.available_bytes() < 2**50
