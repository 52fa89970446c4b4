"""Each kind of environments beside each kind of fault: whether every environment's rows are those without faults.

``python -m benchmarks.kept ledger [--only processes portable]`` prints a line for each pair: ``wait="any"``, 8
environments. A fault happens in a step of an environment, by the number of the steps of all, and never twice in the
same step of an episode. A Ctrl-C is a SIGINT to this process while it waits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import hashlib
import os
import pickle
import random
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import gymnasium
import numpy as np

from envmanager import (
    ActionInfo,
    AsyncioEnvManager,
    EnvManager,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Task,
    Timeouts,
)
from envmanager.observe import events

N_ENVS, N_WORKERS, EVERY = 8, 4, 700
FAULTS = ("kill", "hang", "exception", "garbage", "Ctrl-C", "recycling")


def _garble() -> None:
    """Write garbage into each pipe and socket of this process, as a simulator that uses a descriptor of others."""
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            mode = os.fstat(number).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                os.write(number, b"garbage!" * 16)


@attrs.frozen
class Struck:
    """A factory of environments of ``make`` in which a fault happens every ``EVERY`` steps of all of them."""

    make: Callable[[], Any]
    fault: str = ""
    folder: str = ""

    def __call__(self) -> Any:
        env = self.make()
        if not self.fault:
            return env
        step, last = env.step, [b""]

        def is_due(action: Any) -> bool:
            counter = os.open(f"{self.folder}/steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(counter, b".")
                if os.lseek(counter, 0, os.SEEK_CUR) % EVERY:
                    return False
            finally:
                os.close(counter)
            with contextlib.suppress(FileExistsError):
                Path(self.folder, hashlib.sha256(last[0] + pickle.dumps(action)).hexdigest()).touch(exist_ok=False)
                return True
            return False

        def strike() -> None:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.fault == "hang":
                time.sleep(1000)
            elif self.fault == "exception":
                raise ValueError("a fault of the ledger")
            else:
                _garble()

        def stepped(action: Any) -> Any:
            if is_due(action):
                strike()
            result = step(action)
            last[0] = pickle.dumps(result)
            return result

        async def awaited(action: Any) -> Any:
            if is_due(action):
                if self.fault == "hang":
                    await asyncio.sleep(1000)
                strike()
            result = await step(action)
            last[0] = pickle.dumps(result)
            return result

        env.step = awaited if asyncio.iscoroutinefunction(step) else stepped
        return env


class OfCoroutines(gymnasium.Env):  # type: ignore[misc]
    """A CartPole whose calls are coroutines."""

    def __init__(self) -> None:
        self._env = gymnasium.make("CartPole-v1")
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space

    async def reset(self, **arguments: Any) -> Any:
        await asyncio.sleep(0)
        return self._env.reset(**arguments)

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0)
        return self._env.step(action)


def cartpole() -> Any:
    return gymnasium.make("CartPole-v1")


class Streams:
    """A digest of the first rows of each stream, and a policy by their numbers alone.

    A stream is an environment, or a task if there are tasks: which environment plays it depends on the time.
    """

    def __init__(self, actions: np.ndarray, n_rows: int) -> None:
        self._hashes: dict[int, Any] = {}
        self._actions, self._most = actions, n_rows
        self.n_rows, self.n_lost = dict[int, int](), 0

    def _add(self, key: int, *parts: Any) -> None:
        number = self.n_rows[key] = self.n_rows.get(key, 0) + 1
        if number <= self._most:
            digest = self._hashes.setdefault(key, hashlib.sha256())
            for part in parts:
                digest.update(part.tobytes())

    def add(self, rows: Any, env_ids: np.ndarray) -> None:
        """Add the rows of AgentSteps, or of a Batch without tasks."""
        columns = [*(rows.obs.values() if isinstance(rows.obs, dict) else [rows.obs]), rows.reward]
        for row, env_id in enumerate(env_ids.tolist()):
            self._add(env_id, *(column[row] for column in [*columns, rows.terminated, rows.truncated]))

    def add_tasks(self, batch: Any) -> None:
        """Add the rows of a Batch to the tasks that they belong to."""
        ended, final = batch.terminated | batch.truncated, iter(range(len(batch.env_ids)))
        for row, task in enumerate(batch.task.tolist()):
            if ended[row]:
                at = next(final)
                task = int(batch.final_task[at])
                self._add(task, batch.final_obs[at], batch.reward[row], batch.terminated[row])
            elif task >= 0:
                self._add(task, batch.obs[row], batch.reward[row])

    def actions(self, keys: np.ndarray) -> np.ndarray:
        at = [31 * key + self.n_rows.get(key, 0) for key in keys.tolist()]
        actions: np.ndarray = self._actions[np.array(at) % len(self._actions)]
        return actions

    def get_action(self, steps: Any) -> ActionInfo:
        return ActionInfo(self.actions(steps.env_id))

    @property
    def is_full(self) -> bool:
        return len(self.n_rows) >= N_ENVS and min(self.n_rows.values()) >= self._most

    @property
    def digests(self) -> dict[int, str]:
        return {key: each.hexdigest()[:16] for key, each in sorted(self._hashes.items())}


class Interrupts:
    """Sends a SIGINT to this process in some of the waits."""

    def __init__(self, is_on: bool) -> None:
        self._is_on, self._random, self.n = is_on, random.Random(1), 0

    def waiting(self, wait: Callable[[], Any]) -> Any:
        """Return ``wait()``, which is called again after each KeyboardInterrupt."""
        while True:
            if self._is_on and self._random.random() < 0.02:
                signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-5, 5e-4))
            try:
                result = wait()
                signal.setitimer(signal.ITIMER_REAL, 0)
                return result
            except KeyboardInterrupt:
                self.n += 1


@contextlib.contextmanager
def alarms_are_interrupts() -> Iterator[None]:
    """Raise a SIGINT at an alarm, but not when a call of the manager has returned and its result is not yet held."""

    def interrupt(_: int, frame: Any) -> None:
        while frame is not None and frame.f_code not in calls:
            frame = frame.f_back
        if frame is not None:
            signal.raise_signal(signal.SIGINT)

    calls = (EnvManager.recv.__code__, EnvManager.step.__code__)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


@attrs.frozen
class Kind:
    """Environments in a manager, how they are played, and which faults they can have."""

    make: Callable[[], Any]
    manager: Callable[..., EnvManager]
    faults: tuple[str, ...] = FAULTS
    tasks: dict[str, Any] | None = None
    by_step: bool = False
    begins: bool = False
    draw: Callable[[np.random.Generator, int], np.ndarray] = lambda rng, size: rng.integers(0, 2, size)


def kinds() -> dict[str, Kind]:
    from benchmarks.kept import Crowd, cartpole_of_dm

    processes = functools.partial(SubprocessEnvManager, n_workers=N_WORKERS)
    here, dm = ("exception", "Ctrl-C", "recycling"), lambda rng, size: rng.uniform(-1, 1, (size, 1))
    return {
        "processes, two each": Kind(cartpole, processes),
        "one each": Kind(cartpole, functools.partial(SubprocessEnvManager, n_workers=N_ENVS)),
        "spawn": Kind(cartpole, functools.partial(processes, start_method="spawn")),
        "portable": Kind(cartpole, functools.partial(processes, transport="portable")),
        "zero_copy": Kind(cartpole, functools.partial(processes, zero_copy=True)),
        "by step()": Kind(cartpole, processes, by_step=True),
        "tasks": Kind(cartpole, processes, tasks={"prefetch": False}),
        "tasks laid ready": Kind(cartpole, processes, tasks={"prefetch": True}),
        "begin": Kind(cartpole, functools.partial(processes, episodes="on_demand"), begins=True),
        "PettingZoo": Kind(Crowd, processes, by_step=True, draw=lambda rng, size: rng.integers(0, 3, size)),
        "dm_env": Kind(cartpole_of_dm, processes, draw=dm),
        "in process": Kind(cartpole, SimpleEnvManager, here),
        "in process, zero_copy": Kind(cartpole, functools.partial(SimpleEnvManager, zero_copy=True), here),
        "coroutines": Kind(OfCoroutines, AsyncioEnvManager, ("hang", *here)),
    }


def play(kind: Kind, fault: str, n_rows: int) -> tuple[dict[int, str], int, Any, int]:
    """Return the digest of each stream, the number of rows lost, the stats, and the number of faults."""
    streams = Streams(kind.draw(np.random.default_rng(0), 10007), n_rows)
    interrupts = Interrupts(fault == "Ctrl-C")
    policy = RestartPolicy(
        max_restarts=1_000_000,
        backoff_s=0,
        keep_episodes=True,
        on_exception="restart",
        recycle_after_steps=300 if fault == "recycling" else None,
    )
    with tempfile.TemporaryDirectory() as folder, alarms_are_interrupts():
        make = Struck(kind.make, fault if fault not in ("", "Ctrl-C", "recycling") else "", folder)
        options: Any = {"seed": 5, "restarts": policy, "timeouts": Timeouts(step_s=1.0, restore_s=60.0)}
        with kind.manager(make, N_ENVS, **options) as manager:
            if kind.by_step:
                _by_step(manager, streams, interrupts)
            else:
                _by_recv(manager, kind, streams, interrupts, n_rows)
            failures = (events.Failed, events.Recycled)
            n_faults = interrupts.n + sum(isinstance(event, failures) for event in manager.events)
            return streams.digests, streams.n_lost, manager.stats(), n_faults


def _by_step(manager: EnvManager, streams: Streams, interrupts: Interrupts) -> None:
    infos = manager.reset()
    for name in manager.behavior_specs:
        manager.set_policy(name, streams)
    while not streams.is_full:
        for info in infos:
            streams.n_lost += info.lost is not None
            for _, steps in sorted(info.current.items()):
                streams.add(steps, steps.env_id)
        infos = interrupts.waiting(manager.step)


def _by_recv(manager: EnvManager, kind: Kind, streams: Streams, interrupts: Interrupts, n_rows: int) -> None:
    n_begun = np.zeros(N_ENVS, np.int64)

    def begin(env_ids: np.ndarray) -> None:
        n_begun[env_ids] += 1
        manager.begin(env_ids.tolist(), [Task(seed=1000 * int(each) + int(n_begun[each])) for each in env_ids])

    if kind.tasks:
        manager.reset(tasks=[Task(seed=k) for k in range(n_rows // 3)], **kind.tasks)
    else:
        manager.reset()
    if kind.begins:
        begin(np.arange(N_ENVS))
    while not (manager.tasks.done if kind.tasks else streams.is_full):
        batch = interrupts.waiting(functools.partial(manager.recv, "any"))
        streams.n_lost += int(batch.lost.sum())
        keys, plays = batch.env_ids, np.ones(len(batch.env_ids), bool)
        if kind.tasks:
            streams.add_tasks(batch)
            keys = batch.task
        else:
            streams.add(batch, batch.env_ids)
        if kind.begins:
            plays = ~(batch.terminated | batch.truncated)
            if not plays.all():
                begin(batch.env_ids[~plays])
        if plays.any() and not (kind.tasks and manager.tasks.done):
            manager.send(streams.actions(keys[plays]), batch.env_ids[plays])


def ledger(arguments: argparse.Namespace) -> None:
    """Print whether each stream is as without faults, by kind and fault. 700 times fewer rows than ``rows`` has."""
    n_equal, n_cells, n_rows = 0, 0, arguments.rows // 700
    print(f"{'kind':22} {'fault':10} {'faults':>6} {'kept':>5} {'repeated':>9} {'diverged':>8} {'lost':>4}  streams")
    for name, kind in kinds().items():
        if arguments.only and name not in arguments.only:
            continue
        expected = play(kind, "", n_rows)[0]
        for fault in kind.faults:
            digests, n_lost, stats, n_faults = play(kind, fault, n_rows)
            n_same = sum(digests.get(key) == own for key, own in expected.items())
            n_cells, n_equal = n_cells + 1, n_equal + (n_same == len(expected) == len(digests))
            print(
                f"{name:22} {fault:10} {n_faults:6} {stats.episodes_kept:5} {stats.steps_repeated:9,} "
                f"{stats.episodes_diverged:8} {n_lost:4}  {n_same:,} of {len(expected):,} equal",
                flush=True,
            )
    print(f"{n_equal} of {n_cells} cells equal")
