"""Workers that leak or take too much memory, that start a few at a time, and that are moved."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from envmanager import (
    ConfigError,
    EnvManager,
    EnvRaised,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Task,
    UsageError,
    Wait,
    WorkerDied,
    WorkerOutOfMemory,
    make_manager,
)
from envmanager.kernel.pool import PATIENCE_S
from envmanager.observe import events
from envmanager.recording.data import about
from envmanager.replay_env_manager import ReplayEnvManager
from envmanager.system import memory
from envmanager.system.memory import MIB, Group
from envmanager_tests.process.test_kept_episodes import Chain, Make
from envmanager_tests.process.test_states import KEPT, N_ENVS, ByObservation, played, processes, simple

SUITE = "core"

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the memory of processes")


class Leak(Chain):
    """A Chain of which each step keeps ``mb`` MiB."""

    kept: Any = None

    def __init__(self, mb: int) -> None:
        super().__init__()
        self.mb, self.kept = mb, []

    def step(self, action: Any) -> Any:
        self.kept.append(np.ones(self.mb * MIB, np.uint8))
        return super().step(action)


@attrs.frozen
class Leaks:
    """A factory of Chains, of which that of ``env_id`` leaks; all do if it is None."""

    env_id: int | None = None
    mb: int = 4

    def __call__(self, context: Any) -> Chain:
        return Leak(self.mb) if self.env_id in (None, context.env_id) else Chain()


# Limits.


@pytest.fixture(params=["as this machine allows", "by a thread"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by a thread":
        monkeypatch.setattr(memory, "_parents", lambda: iter(()))


@pytest.mark.usefixtures("_way")
def test_a_worker_above_its_limit_is_named_each_time_and_the_others_go_on() -> None:
    policy = RestartPolicy(max_restarts=1000, backoff_s=0)
    options: Any = {"memory_limit_mb": 200, "restarts": policy, "seed": 1}
    with SubprocessEnvManager(Leaks(1, mb=32), 3, **options) as manager:
        manager.reset()
        n_steps = np.zeros(3, np.int64)
        while manager.events.count(events.Died) < 2:
            batch = manager.recv()
            n_steps[batch.env_ids] += 1
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
        died = [event.error for event in manager.events if isinstance(event, events.Died)]

    assert all(isinstance(error, WorkerOutOfMemory) and error.worker_id == 1 for error in died)
    assert min(error.in_use_mb for error in died) >= 150  # type: ignore[union-attr]
    assert "killed by" in str(died[0])
    assert "recycle_above_mb" in str(died[0])
    assert "ran out of memory in step with" in died[0].headline  # type: ignore[attr-defined]
    assert min(n_steps[0], n_steps[2]) > 0


@pytest.mark.usefixtures("_way")
def test_a_constructor_that_takes_too_much_is_not_tried_again() -> None:
    def make() -> Chain:
        chain = Chain()
        chain.kept = [np.ones(32 * MIB, np.uint8) for _ in range(100)]  # type: ignore[attr-defined]
        return chain

    with pytest.raises(WorkerOutOfMemory, match="ran out of memory at start"):
        SubprocessEnvManager(make, 1, memory_limit_mb=200)


class Engine(Chain):
    """A Chain that starts a child with 300 MiB, and goes on when the kernel has ended that."""

    def step(self, action: Any) -> Any:
        code = f"x = bytearray({300 * MIB}); print(len(x), flush=True); input()"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with child:
            assert child.stdout is not None
            child.stdout.readline()
        signal.pause()


@pytest.mark.usefixtures("_way")
def test_a_worker_whose_child_takes_too_much_is_ended_with_it() -> None:
    policy = RestartPolicy(max_restarts=0)
    with SubprocessEnvManager(lambda context: Engine(), 1, memory_limit_mb=200, restarts=policy) as manager:
        manager.reset()
        batch = manager.recv()
        manager.send(np.zeros(1, np.int64), batch.env_ids)
        with pytest.raises(WorkerOutOfMemory):
            manager.recv()


def test_groups_of_a_trainer_that_was_killed_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_parents", lambda: iter([tmp_path]))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f"envmanager-{gone.pid}-0").mkdir()
    (tmp_path / f"envmanager-{os.getpid()}-0").mkdir()
    memory.MemoryLimits(100).close()

    assert [folder.name for folder in tmp_path.iterdir()] == [f"envmanager-{os.getpid()}-0"]


def test_no_cgroup_is_left_behind() -> None:
    with SubprocessEnvManager(Make(), 2, memory_limit_mb=1000) as manager:
        manager.reset()
        groups = list(manager._some_host._resources.limits._groups.values())  # type: ignore[attr-defined]

    assert not any(group._folder.exists() for group in groups)


@pytest.mark.parametrize(("n_killed", "kind"), [(0, WorkerDied), (1, WorkerOutOfMemory)])
def test_a_kill_by_the_kernel_is_told_from_one_by_a_person(
    monkeypatch: pytest.MonkeyPatch, n_killed: int, kind: type[Exception]
) -> None:
    with SubprocessEnvManager(Make(), 1, restarts=RestartPolicy(max_restarts=0)) as manager:
        manager.reset()
        known = memory.oom_kills()
        monkeypatch.setattr(memory, "oom_kills", lambda: known + n_killed)
        os.kill(manager.stats().workers[0].pid or 0, signal.SIGKILL)
        with pytest.raises(WorkerDied) as raised:
            manager.step() if manager.set_policy("default", ByObservation()) else [manager.step() for _ in range(99)]

    assert type(raised.value) is kind


def test_each_kill_by_the_kernel_explains_one_end(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 5
    monkeypatch.setattr(memory, "oom_kills", lambda: count)
    limits = memory.MemoryLimits(None)
    assert limits.why_killed(77) is None
    count = 6
    assert "the kernel" in limits.why_killed(77)[1]  # type: ignore[index]
    assert limits.why_killed(78) is None
    limits.close()


@pytest.mark.parametrize(("is_new", "written"), [(True, "memory.max"), (False, "memory.limit_in_bytes")])
def test_a_group_has_its_limit_before_its_process_in_both_versions(tmp_path: Path, is_new: bool, written: str) -> None:
    if is_new:
        (tmp_path / "cgroup.controllers").touch()
    group = Group(tmp_path, 4321, 3 * MIB)
    (folder,) = tmp_path.glob("envmanager-*")

    assert (folder / written).read_text() == f"{3 * MIB}\n"
    assert (folder / "cgroup.procs").read_text() == "4321\n"
    (folder / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert group.n_killed == 1


def test_the_kernels_count_is_that_of_this_cgroup_or_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text("0::/a/b\n")
    (tmp_path / "cgroup" / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(memory.machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory.machine, "OWN_CGROUP", tmp_path / "own")
    of_machine = memory.oom_kills()
    (tmp_path / "cgroup" / "a" / "b" / "memory.events").write_text("oom_kill 7\n")

    assert of_machine >= 0
    assert memory.oom_kills() == 7


# Leaks.


def test_workers_that_leak_are_recycled_in_time_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envmanager.kernel.recovery._ASK_EVERY_S", 0.0)
    one, manager = played(simple(), n_steps=30)
    manager.close()
    policy = attrs.evolve(KEPT, recycle_above_mb=120)

    several, last = played(processes(3, Leaks(), restarts=policy), n_steps=30)

    recycled = [event for event in last.events if isinstance(event, events.Recycled)]
    assert several == one
    assert {event.worker_id for event in recycled} == {0, 1, 2}
    assert all(str(event).startswith(f"worker {event.worker_id} is recycled at ") for event in recycled)
    assert max(worker.memory_bytes for worker in last.stats().workers) < 300 * MIB
    last.close()


def test_a_worker_that_is_large_from_the_start_is_not_recycled_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envmanager.kernel.recovery._ASK_EVERY_S", 0.0)
    _, last = played(processes(2, restarts=attrs.evolve(KEPT, recycle_above_mb=1)))

    assert last.events.count(events.Recycled) == 0
    last.close()


def test_memory_that_cannot_be_known_is_refused() -> None:
    policy = RestartPolicy(recycle_above_mb=100)
    for kind in ("simple", "asyncio"):
        with pytest.raises(UsageError, match="recycle_above_mb needs workers that are processes of this machine"):
            make_manager({"kind": kind, "restarts": policy, "n_envs": 1}, Make())
    with pytest.raises(UsageError, match="memory_limit_mb must be a number above 0"):
        SubprocessEnvManager(Make(), 1, memory_limit_mb=0)
    with pytest.raises(ConfigError, match="recycle_above_mb"):
        make_manager({"env": "CartPole-v1", "restarts": {"recycle_above_mb": -1}})


# Starts.


@attrs.frozen
class Crowded:
    """A factory that notes how many others make their environments at the same time, and fails where it is to."""

    folder: str
    fails: int = -1

    def __call__(self, context: Any) -> Chain:
        folder = Path(self.folder)
        own = folder / f"in-{context.env_id}"
        own.touch()
        n_others = len(list(folder.glob("in-*")))
        with (folder / "counts").open("a") as file:
            file.write(f"{n_others}\n")
        np.linalg.eigvals(np.random.default_rng(1).random((300, 300)))  # some work
        own.unlink()
        if context.env_id == self.fails:
            raise ValueError("no license")
        return Chain()


def counts(folder: Path) -> list[int]:
    return list(map(int, (folder / "counts").read_text().split()))


@pytest.mark.parametrize(("n", "transport"), [(1, "native"), (3, "native"), (2, "portable")])
def test_no_more_workers_start_at_once_than_may(tmp_path: Path, n: int, transport: Any) -> None:
    policy = RestartPolicy(max_restarts=5, backoff_s=0)
    options: Any = {"start_at_most": n, "restarts": policy, "transport": transport}
    with SubprocessEnvManager(Crowded(str(tmp_path)), n + 2, **options) as manager:
        manager.reset()
        assert max(counts(tmp_path)) <= n
        for worker in manager.stats().workers:
            os.kill(worker.pid or 0, signal.SIGKILL)
        while manager.events.count(events.Started) < 2 * (n + 2):
            batch = manager.recv(Wait.any(timeout_s=0.2))
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)

    assert max(counts(tmp_path)) <= n


def test_a_constructor_that_fails_ends_the_start_before_others_begin(tmp_path: Path) -> None:
    with pytest.raises(EnvRaised, match="no license"):
        SubprocessEnvManager(Crowded(str(tmp_path), fails=1), 8, start_at_most=2)

    assert len(counts(tmp_path)) < 8


# Moves.


@pytest.mark.parametrize("moved", [[0], [2, 0, 1]])
def test_episodes_of_workers_that_are_moved_go_on(moved: list[int]) -> None:
    one, manager = played(simple())
    manager.close()

    several, last, pids = with_moves(processes(3), {5: moved, 30: moved})

    assert several == one
    now = [worker.pid for worker in last.stats().workers]
    assert [n for n in range(3) if now[n] != pids[n]] == sorted(moved)
    assert last.events.count(events.Recycled) == 2 * len(moved)
    assert last.events.count(events.Restarted) == 0
    last.close()


def with_moves(
    make: Callable[[], EnvManager], moves: dict[int, list[int]], n_steps: int = 60
) -> tuple[dict[int, str], EnvManager, list[Any]]:
    from envmanager_tests.process.test_states import Stream

    manager, stream = make(), Stream()
    pids = [worker.pid for worker in manager.stats().workers]
    manager.set_policy("default", ByObservation())
    stream.add(manager.reset())
    for number in range(n_steps):
        if number in moves:
            manager.move(moves[number])
        stream.add(manager.step())
    return stream.digests, manager, pids


def test_a_worker_whose_step_is_in_flight_is_moved_once_that_is_delivered() -> None:
    with processes(2, n_envs=2, wait=Wait.any())() as manager:
        manager.reset()
        first = manager.recv(Wait.all())
        manager.send(np.zeros(2, np.int64), first.env_ids)
        manager.move([0, 1])
        rows = manager.recv(Wait.all())

        assert not rows.lost.any()
        assert rows.obs[:, 1].tolist() == [1.0, 1.0]
        manager.send(np.zeros(2, np.int64), rows.env_ids)
        assert manager.recv(Wait.all()).obs[:, 1].tolist() == [2.0, 2.0]
        assert manager.events.count(events.Recycled) == 2


def test_without_kept_episodes_a_worker_is_moved_when_an_episode_ends() -> None:
    with processes(2, n_envs=2, restarts=RestartPolicy())() as manager:
        manager.set_policy("default", ByObservation())
        manager.reset()
        manager.move([1])
        assert manager.events.count(events.Recycled) == 0
        n_ended = 0
        while not manager.events.count(events.Recycled):
            n_ended = sum(int(steps.ended.sum()) for info in manager.step() for steps in info.current.values())
        assert n_ended > 0


def test_a_worker_at_rest_is_moved_at_once() -> None:
    with processes(2, n_envs=2, restarts=RestartPolicy())() as manager:
        manager.set_policy("default", ByObservation())
        manager.reset(tasks=[5])
        manager.move([0, 1])
        assert [event.worker_id for event in manager.events if isinstance(event, events.Recycled)] == [1]
        while not manager.tasks.done:
            manager.step()
        (result,) = manager.tasks.results
        assert (result.error, result.attempts) == (None, 1)
        manager.reset(tasks=[5, 6])
        while not manager.tasks.done:
            manager.step()
        assert [each.error for each in manager.tasks.results] == [None, None]


def test_a_worker_of_a_pool_whose_episode_was_left_is_moved_at_once() -> None:
    async def two(manager: EnvManager) -> None:
        pool = manager.pool()
        for level in range(2):
            async with pool.begin(Task(seed=level)) as episode:
                await episode.step(0)
            manager.move([0])

    with SimpleEnvManager(Make(), 1) as manager:
        asyncio.run(asyncio.wait_for(two(manager), PATIENCE_S / 2))


@pytest.mark.parametrize("given", [[2], [-1], ["0"], [0.5]])
def test_unknown_workers_cannot_be_moved(given: Any) -> None:
    with SimpleEnvManager(Make(), 2) as manager, pytest.raises(UsageError, match="takes worker_ids from 0 to 0"):
        manager.move(given)


def test_moves_and_recycled_leaks_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envmanager.kernel.recovery._ASK_EVERY_S", 0.0)
    path = str(tmp_path / "run.emrec")
    policy = attrs.evolve(KEPT, recycle_above_mb=120)
    moves = {10: [0], 20: [1, 2]}
    live, last, _ = with_moves(processes(3, Leaks(), restarts=policy, record=path), moves, n_steps=30)
    n_recycled = last.events.count(events.Recycled)
    last.close()

    replayed, manager, _ = with_moves(lambda: ReplayEnvManager(recording=path), moves, n_steps=30)

    assert replayed == live
    assert manager.events.count(events.Recycled) == n_recycled > 3
    assert about(path)["n_envs"] == N_ENVS
    manager.close()
