"""Managers end cleanly however they end, and what workers get and leave behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager import ActionInfo, AgentSteps, EnvContext, SubprocessEnvManager, UsageError, Wait
from envmanager._workers.memory import available_bytes
from envmanager.testing import EchoEnvironment, FakeEnvironment, nothing_left_behind
from envmanager.testing.leaks import descendants

START_METHODS = ["forkserver", "spawn", "fork"]


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


def pids(manager: SubprocessEnvManager) -> list[int]:
    return [worker.pid or 0 for worker in manager.stats().workers]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(gone: list[int], within_s: float = 3.0) -> None:
    deadline = time.monotonic() + within_s
    while any(alive(pid) for pid in gone):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in gone if alive(pid)]}"
        threading.Event().wait(0.02)


@pytest.mark.parametrize("start_method", START_METHODS)
def test_seventeen_environments_over_six_workers(start_method: Any) -> None:
    with SubprocessEnvManager(EchoEnvironment, 17, n_workers=6, start_method=start_method) as manager:
        blocks = [worker.env_ids for worker in manager.stats().workers]
        manager.reset()
        batch = manager.recv(Wait.all())

    assert [len(block) for block in blocks] == [3, 3, 3, 3, 3, 2]
    assert batch.env_ids.tolist() == list(range(17))


@pytest.mark.parametrize("start_method", START_METHODS)
def test_each_environment_is_made_once_and_never_in_the_trainer(start_method: Any, tmp_path: Path) -> None:
    def make(context: EnvContext) -> FakeEnvironment:
        (tmp_path / f"{context.env_id}-{os.getpid()}").touch(exist_ok=False)
        return FakeEnvironment()

    with SubprocessEnvManager(make, 5, n_workers=2, start_method=start_method) as manager:
        made = sorted(path.name.split("-") for path in tmp_path.iterdir())
        workers = manager.stats().workers

    assert [(int(env_id), int(pid)) for env_id, pid in made] == [(i, w.pid) for w in workers for i in w.env_ids]
    assert os.getpid() not in {int(pid) for _, pid in made}


def test_a_factory_learns_its_context(tmp_path: Path) -> None:
    class Keeps(FakeEnvironment):
        def __init__(self, context: EnvContext) -> None:
            super().__init__()
            self.context = context

    with SubprocessEnvManager(Keeps, 3, n_workers=2, seed=4, log_dir=str(tmp_path)) as manager:
        contexts = manager.get_attr("context")

    assert [(c.env_id, c.worker_id, c.generation) for c in contexts] == [(0, 0, 0), (1, 0, 0), (2, 1, 0)]
    assert len({c.slot for c in contexts}) == 3
    assert len({c.seed for c in contexts}) == 3
    assert {c.log_dir for c in contexts} == {str(tmp_path)}


@pytest.mark.parametrize("start_method", START_METHODS)
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
    assert all(name.endswith("_NUM_THREADS") for name in limited)


@pytest.mark.parametrize("start_method", START_METHODS)
def test_workers_draw_different_random_numbers(start_method: Any) -> None:
    class Draws(FakeEnvironment):
        def draw(self) -> tuple[float, float]:
            import random

            return float(np.random.random()), random.random()

    np.random.seed(0)
    with SubprocessEnvManager(Draws, 3, start_method=start_method) as manager:
        drawn = manager.call("draw")

    assert len(set(drawn)) == 3


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_worker_holds_no_descriptor_of_its_siblings(start_method: Any) -> None:
    class Lists(FakeEnvironment):
        def channels(self) -> set[str]:
            links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            ends = {os.readlink(link) for link in links if os.path.exists(link)}
            return {end for end in ends if end.startswith(("pipe:", "socket:"))}

    with SubprocessEnvManager(Lists, 3, start_method=start_method) as manager:
        channels = manager.call("channels")

    own = [mine - set.union(*(other for other in channels if other is not mine)) for mine in channels]
    assert all(any(end.startswith("socket:") for end in ends) for ends in own), "its connection is its own"
    shared = set.intersection(*channels)
    assert all(mine - own_ <= shared for mine, own_ in zip(channels, own, strict=True)), (
        "two share what a third has not"
    )


def test_a_worker_may_start_children_and_they_end_with_it() -> None:
    class Simulator(FakeEnvironment):
        def start(self) -> int:
            return subprocess.Popen(["sleep", "600"]).pid

    with SubprocessEnvManager(Simulator, 2) as manager:
        simulators = manager.call("start")
        assert all(alive(pid) for pid in simulators)
    wait_until_gone(simulators)


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_forgotten_manager_ends_when_it_is_garbage(start_method: Any) -> None:
    manager = SubprocessEnvManager(FakeEnvironment, 2, start_method=start_method)
    manager.reset()
    workers = pids(manager)
    del manager
    gc.collect()
    wait_until_gone(workers)


def test_an_exception_in_a_with_block_ends_the_workers() -> None:
    workers = []

    def fail() -> None:
        with SubprocessEnvManager(FakeEnvironment, 2) as manager:
            workers.extend(pids(manager))
            raise ZeroDivisionError

    with nothing_left_behind(), pytest.raises(ZeroDivisionError):
        fail()
    wait_until_gone(workers)


EXITS = {
    "end of the script": "",
    "sys.exit": "import sys; sys.exit(0)",
    "os._exit": "import os; os._exit(0)",
    "an exception": "raise RuntimeError('oh')",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
}

TRAINER = """
import time
from envmanager import SubprocessEnvManager, Wait, ActionInfo
from envmanager.testing import FakeEnvironment, Sleep, Step
import numpy as np
class Zeros:
    def get_action(self, steps):
        return ActionInfo(np.zeros(len(steps), np.int64))
manager = SubprocessEnvManager(lambda: FakeEnvironment([Step(), Sleep({sleep})]), 2, start_method={start_method!r})
manager.set_policy("default", Zeros())
manager.reset()
manager.step(Wait.all())
manager.step(Wait(timeout_s=0.0))
print(*[worker.pid for worker in manager.stats().workers], flush=True)
{end}
"""


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize("end", EXITS.values(), ids=EXITS.keys())
@pytest.mark.parametrize("sleep", [0, 600], ids=["idle", "in a long step"])
def test_when_the_trainer_ends_its_workers_end(start_method: str, end: str, sleep: int) -> None:
    code = TRAINER.format(start_method=start_method, end=end, sleep=sleep)
    trainer = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, check=False
    )
    workers = [int(pid) for pid in trainer.stdout.split()]
    assert len(workers) == 2
    wait_until_gone(workers)


def test_a_process_that_the_trainer_forks_neither_stops_the_workers_nor_keeps_them() -> None:
    manager = SubprocessEnvManager(FakeEnvironment, 2, start_method="spawn")
    manager.set_policy("default", Zeros())
    manager.reset()
    loader = os.fork()
    if loader == 0:
        try:
            manager.close()
            del manager
            gc.collect()
        finally:
            os._exit(0)
    os.waitpid(loader, 0)
    assert len(manager.step(Wait.all())) == 2
    workers = pids(manager)
    waiting = os.fork()
    if waiting == 0:
        signal.pause()
    manager.close()
    try:
        wait_until_gone(workers)
    finally:
        os.kill(waiting, signal.SIGKILL)
        os.waitpid(waiting, 0)


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


def test_no_worker_outlives_a_constructor_that_fails() -> None:
    def make(context: EnvContext) -> FakeEnvironment:
        if context.env_id == 2:
            raise RuntimeError("no")
        return FakeEnvironment()

    before = set(descendants())
    with pytest.raises(Exception, match="no"):
        SubprocessEnvManager(make, 3)
    wait_until_gone([pid for pid in descendants() if pid not in before])


def test_the_trainer_holds_few_descriptors_per_worker() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    with SubprocessEnvManager(FakeEnvironment, 1) as manager:
        manager.reset()
        one = count()
    with SubprocessEnvManager(FakeEnvironment, 11) as manager:
        manager.reset()
        eleven = count()
    assert (eleven - one) / 10 <= 4


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


def test_free_memory_is_a_sensible_number() -> None:
    assert 2**20 < available_bytes() < 2**50


def test_another_system_is_told_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UsageError, match="use SimpleEnvManager"):
        SubprocessEnvManager(FakeEnvironment, 1)
