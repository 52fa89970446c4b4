"""Runs with kills beside the same runs without: whether every row is equal, and what keeping episodes costs.

    python -m benchmarks.kept rows [--only CartPole Hopper] [--rows 1000000]
    python -m benchmarks.kept ledger [--only portable "tasks laid ready"]
    python -m benchmarks.kept clock | killer | memory | training | back | branching | cpu | check

``rows``: 8 environments in 4 worker processes, ``wait="all"``, SHA-256 of all rows, kill -9 of a random worker about
every 200 rounds. ``ledger``: each kind of environments beside each kind of fault. LunarLander and BipedalWalker need
``pip install gymnasium[box2d]``. ``back`` and ``cpu`` are to be run on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import hashlib
import json
import os
import pickle
import random
import signal
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from operator import truediv
from pathlib import Path
from typing import Any

import attrs
import gymnasium
import numpy as np
import psutil
from pettingzoo.utils.env import ParallelEnv

from benchmarks.envs import make_env
from benchmarks.kept_ledger import ledger
from envmanager import ActionInfo, EnvManager, RestartPolicy, SimpleEnvManager, SubprocessEnvManager, Task
from envmanager.check.environment import check_environment
from envmanager.data.trees import take_rows
from envmanager.observe import events

N_ENVS, N_WORKERS = 8, 4
KEPT = RestartPolicy(max_restarts=1_000_000, backoff_s=0, keep_episodes=True, on_exception="restart")


class Crowd(ParallelEnv):  # type: ignore[misc]
    """Agents that join and leave by chance, with observations of their own."""

    metadata = {"name": "crowd"}  # noqa: RUF012
    possible_agents = ["a", "b", "c", "d"]  # noqa: RUF012

    def observation_space(self, agent: str) -> Any:
        return gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def action_space(self, agent: str) -> Any:
        return gymnasium.spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._n, self._sum = 0, 0.0
        self.agents = self.possible_agents[:2]
        return self._observations(), {agent: {} for agent in self.agents}

    def _observations(self) -> dict[str, np.ndarray]:
        return {agent: np.array([self._n, self._sum, ord(agent)], np.float64) for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self._n += 1
        self._sum = self._sum * 0.9 + sum(int(action) for action in actions.values()) + self._rng.random()
        acting, ends = list(self.agents), self._n >= 60
        died = {agent: ends or self._rng.random() < 0.05 for agent in acting}
        self.agents = [agent for agent in acting if not died[agent]]
        joins = "" if ends or not self.agents else self.possible_agents[int(self._rng.integers(4))]
        if joins and joins not in acting:
            self.agents.append(joins)
        seen = dict.fromkeys([*acting, *self.agents])
        self.agents, playing = list(seen), self.agents
        obs = self._observations()
        self.agents = playing
        zeros = dict.fromkeys(seen, 0.0)
        rewards = {**zeros, **{agent: float(self._sum) for agent in acting}}
        return (
            obs,
            rewards,
            {agent: died.get(agent, False) for agent in seen},
            dict.fromkeys(seen, False),
            {a: {} for a in seen},
        )


def humanoid() -> Any:
    return gymnasium.make("Humanoid-v5")


def breakout() -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.25)
    env = gymnasium.wrappers.AtariPreprocessing(env, frame_skip=4)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


def cartpole_of_dm() -> Any:
    from dm_control import suite

    return suite.load("cartpole", "swingup", task_kwargs={"random": 1, "time_limit": 1})


@attrs.frozen
class Cell:
    """An environment, the share of the rows that are played in it, and its actions."""

    make: Any
    share: float
    actions: Callable[[np.random.Generator, int], np.ndarray]


def _discrete(n: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, size: rng.integers(0, n, size)


def _box(low: float, high: float, n: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, size: rng.uniform(low, high, (size, n)).astype(np.float32)


CELLS = {
    "CartPole": Cell("CartPole-v1", 0.25, _discrete(2)),
    "Acrobot": Cell("Acrobot-v1", 0.15, _discrete(3)),
    "LunarLander": Cell("LunarLander-v3", 0.15, _discrete(4)),
    "Hopper": Cell("Hopper-v5", 0.15, _box(-1, 1, 3)),
    "Humanoid": Cell(humanoid, 0.08, _box(-0.4, 0.4, 17)),
    "Breakout": Cell(breakout, 0.07, _discrete(4)),
    "PettingZoo": Cell(Crowd, 0.08, _discrete(3)),
    "dm_control": Cell(cartpole_of_dm, 0.07, lambda rng, size: rng.uniform(-1, 1, (size, 1))),
    "BipedalWalker": Cell("BipedalWalker-v3", 0.045, _box(-1, 1, 4)),
}


class Chance:
    """A policy that draws actions for each environment from a generator of its own."""

    def __init__(self, cell: Cell, n_agents: int) -> None:
        self._actions, self._random = cell.actions, [np.random.default_rng(agent_id) for agent_id in range(n_agents)]

    def actions(self, env_ids: np.ndarray) -> np.ndarray:
        return np.concatenate([self._actions(self._random[env_id], 1) for env_id in env_ids.tolist()])

    def get_action(self, steps: Any) -> ActionInfo:
        return ActionInfo(self.actions(steps.agent_id % len(self._random)))


def kill(manager: Any, worker_id: int) -> None:
    """Kill a worker with SIGKILL, if it runs."""
    worker = manager.stats().workers[worker_id]
    if worker.pid:
        os.kill(worker.pid, signal.SIGKILL)


def rows_of(cell: Cell, n_rows: int, every: int) -> tuple[str, Any, int, list[Any]]:
    """Play ``n_rows`` rows. Return the digest of all, the stats, the number of kills, and the events of divergence."""
    digest, rng, n_kills, n = hashlib.sha256(), np.random.default_rng(3), 0, 0
    chance = Chance(cell, 4096)
    options: Any = {"n_workers": N_WORKERS, "seed": 5, "wait": "all", "restarts": KEPT}
    with SubprocessEnvManager(cell.make, N_ENVS, **options) as manager:
        first = manager.reset(seed=5)
        by_batch = "PettingZoo" not in str(cell.make) and cell.make is not Crowd
        for name in manager.behavior_specs:
            manager.set_policy(name, chance)
        infos: Any = manager.recv() if by_batch else first
        while n < n_rows:
            if every and rng.random() < 1 / every:
                kill(manager, int(rng.integers(N_WORKERS)))
                n_kills += 1
            if by_batch:
                manager.send(chance.actions(infos.env_ids), infos.env_ids)
                infos = manager.recv()
                order = np.argsort(infos.env_ids, kind="stable")
                parts = [infos.env_ids, infos.obs, infos.reward, infos.terminated, infos.truncated, infos.lost]
                parts = [take_rows(part, order) for part in parts]
                n += len(order)
            else:
                infos = sorted(manager.step(), key=lambda info: info.worker_id)
                parts = [bool(info.lost) for info in infos]
                for info in infos:
                    for _, steps in sorted(info.current.items()):
                        parts += [steps.agent_id, steps.obs, steps.reward, steps.terminated, steps.truncated]
                        n += len(steps)
            for part in parts:
                digest.update(part.tobytes() if isinstance(part, np.ndarray) else pickle.dumps(part))
        diverged = [event for event in manager.events if isinstance(event, events.EpisodesDiverged)]
        return digest.hexdigest(), manager.stats(), n_kills, diverged


def rows(arguments: argparse.Namespace) -> None:
    """Print whether all rows are equal, by environment."""
    print(f"{'environment':14} {'rows':>9} {'kills':>5} {'kept':>5} {'repeated':>9} {'diverged':>8} {'lost':>4}  rows")
    total = 0
    for name, cell in CELLS.items():
        if arguments.only and name not in arguments.only:
            continue
        n_rows = int(arguments.rows * cell.share)
        total += n_rows
        plain, with_kills = rows_of(cell, n_rows, 0), rows_of(cell, n_rows, 200)
        stats, n_kills, diverged = with_kills[1:]
        n_lost = stats.steps_lost
        equal = "EQUAL" if plain[0] == with_kills[0] else "differ"
        print(
            f"{name:14} {n_rows:9,} {n_kills:5} {stats.episodes_kept:5} {stats.steps_repeated:9,} {len(diverged):8} "
            f"{n_lost:4}  {equal} {with_kills[0][:12]}",
            flush=True,
        )
    print(f"{'in all':14} {total:9,}")


class Walk(gymnasium.Env):  # type: ignore[misc]
    """A walk of ``length`` steps. Each step ``clock_at`` has the time of day in it; the option ``kill_at`` is fatal."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int, clock_at: int = 0) -> None:
        self._length, self._clock_at = length, clock_at

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._n, self._x = 0, float(self.np_random.random())
        self._kill_at = (options or {}).get("kill_at", 0)
        return np.array([self._x, 0.0]), {}

    def step(self, action: Any) -> Any:
        self._n += 1
        if self._n == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self._x = (self._x + int(action) + float(self.np_random.random())) % 10
        if self._clock_at and self._n % self._clock_at == 0:
            self._x += time.time() % 1
        return np.array([self._x, self._n]), 0.0, self._n >= self._length, False, {}


@attrs.frozen
class MakeWalk:
    length: int
    clock_at: int = 0

    def __call__(self) -> Walk:
        return Walk(self.length, self.clock_at)


def clock(_arguments: argparse.Namespace) -> None:
    """Kill workers amid episodes that cannot be repeated from their 1,000th step on."""
    rng, n_kills, n_lost, n_behind = np.random.default_rng(1), 0, 0, 0
    make = MakeWalk(2000, 1000)
    with SubprocessEnvManager(make, N_ENVS, n_workers=N_WORKERS, seed=1, wait="all", restarts=KEPT) as manager:
        manager.reset()
        batch = manager.recv()
        at = dict.fromkeys(batch.env_ids.tolist(), 0.0)
        for _ in range(20_000):
            n_behind_now, killed = 0, -1
            if rng.random() < 1 / 250:
                killed = int(rng.integers(N_WORKERS))
                n_behind_now = sum(at[env_id] >= 1000 for env_id in at if env_id * N_WORKERS // N_ENVS == killed)
                kill(manager, killed)
                n_kills, n_behind = n_kills + 1, n_behind + n_behind_now
            manager.send(rng.integers(0, 2, len(batch.env_ids)), batch.env_ids)
            batch = manager.recv()
            ends = batch.lost | batch.terminated
            for row, env_id in enumerate(batch.env_ids.tolist()):
                step = float(batch.obs[row, 1])
                assert step == (0.0 if ends[row] else at[env_id] + 1), (env_id, step, at[env_id])
                at[env_id] = step
            n_lost += int(batch.lost.sum())
        stats = manager.stats()
    print(f"{n_kills} kills: {n_behind} episodes behind their 1,000th step; {stats.episodes_diverged} told to differ, ")
    print(f"{n_lost} lost, {stats.episodes_kept} kept; each row follows on the one before")


def killer(_arguments: argparse.Namespace) -> None:
    """Play 200 tasks, of which ten have a step that kills its process each time. Two environments a worker."""
    tasks = [Task(seed=number, options={"kill_at": 50 if number % 20 == 7 else 0}) for number in range(200)]
    options: Any = {"n_workers": N_WORKERS, "seed": 1, "wait": "all", "restarts": KEPT}
    for way in ("recv", "step"):
        with SubprocessEnvManager(MakeWalk(200), N_ENVS, **options) as manager:
            manager.reset(tasks=tasks, attempts=1)
            manager.set_policy("default", Chance(CELLS["CartPole"], N_ENVS))
            while not manager.tasks.done:
                if way == "recv":
                    batch = manager.recv()
                    acts = batch.env_ids[~(batch.terminated | batch.truncated) | batch.first]
                    if not manager.tasks.done:
                        manager.send(np.zeros(len(acts), np.int64), acts)
                else:
                    manager.step()
            n_deaths = sum(isinstance(event, events.Died) for event in manager.events)
            lengths = {result.length for result in manager.tasks.results if result.error is None}
            print(
                f"{way}: {len(manager.tasks.results)} of 200 tasks told, {manager.tasks.n_lost} of them lost, lengths "
                f"of the others {lengths}; {n_deaths} deaths, {manager.stats().episodes_kept} episodes kept"
            )


def memory(_arguments: argparse.Namespace) -> None:
    """Print the memory that is kept for an episode, by its length."""
    for length in (10, 100, 1000, 10_000):
        sizes = []
        for policy in (KEPT, attrs.evolve(KEPT, keep_episodes=False)):
            with SimpleEnvManager(MakeWalk(1_000_000), 8, seed=1, restarts=policy) as manager:
                manager.reset()
                batch = manager.recv("all")
                gc.collect()
                tracemalloc.start()
                for _ in range(length):
                    manager.send(np.zeros(8, np.int64), batch.env_ids)
                    batch = manager.recv("all")
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
                tracemalloc.stop()
        own = (sizes[0] - sizes[1]) / 8
        print(f"{length:6} steps: {own:9,.0f} bytes an episode; 1 kB and 8 bytes a step: {1000 + 8 * length:,}")


def training(arguments: argparse.Namespace) -> None:
    """Train PPO by the command, with and without a kill of a random worker every 2 s. Compare the weights."""
    for env, n_steps in (("CartPole-v1", 100_000), ("Hopper-v5", 60_000)):
        digests, n_kills = [], 0
        for kills in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                config = {
                    "manager": {"env": env, "n_envs": 8, "n_workers": 4, "wait": "all"},
                    "training": {"steps": int(n_steps * arguments.rows / 1_000_000), "evaluation_episodes": 0},
                    "trainers": {"default": {"kind": "ppo"}},
                }
                Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
                command = [sys.executable, "-m", "envmanager", "train", "config.json", "--dir", "run", "--plain"]
                command += ["--keep-episodes", "--restarts", "1000000"]
                with Path(folder, "log").open("w") as log:
                    process = psutil.Popen(command, cwd=folder, stdout=log, stderr=log)
                rng, due, episodes = random.Random(1), time.monotonic(), Path(folder, "run", "episodes.csv")
                while process.poll() is None:
                    time.sleep(0.05)
                    if kills and time.monotonic() > due and episodes.exists() and episodes.stat().st_size > 200:
                        due = time.monotonic() + 2
                        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                            tree = process.children(recursive=True)
                            rng.choice([child for child in tree if not child.children()]).kill()
                            n_kills += 1
                assert process.returncode == 0, Path(folder, "log").read_text(encoding="utf-8")[-2000:]
                weights = sorted(Path(folder, "run", "checkpoints").rglob("*.safetensors"))
                digests.append([hashlib.sha256(each.read_bytes()).hexdigest()[:16] for each in weights])
        print(f"{env}: {n_kills} kills; weights {'EQUAL' if digests[0] == digests[1] else 'differ'}: {digests}")


def back(_arguments: argparse.Namespace) -> None:
    """Print how long a worker is away, beside a bare restart and the bare steps."""

    def pong() -> Any:
        import ale_py

        gymnasium.register_envs(ale_py)
        return gymnasium.make("ALE/Pong-v5")

    def steady() -> Any:
        return gymnasium.make("CartPole-v1", max_episode_steps=10_000)

    for name, make, n, n_steps in (("CartPole", steady, 8, 300), ("Pong", pong, 1, 2000)):
        seconds: dict[str, list[float]] = {"kept": [], "restart": [], "steps": []}
        for _ in range(5):
            for keeps in (True, False):
                policy = attrs.evolve(KEPT, keep_episodes=keeps)
                with SubprocessEnvManager(make, n, n_workers=1, seed=1, wait="all", restarts=policy) as manager:
                    manager.reset()
                    batch, balance = manager.recv(), np.zeros(n, np.int64)
                    for _ in range(n_steps if keeps else 1):
                        if name == "CartPole":
                            balance = (batch.obs[:, 2] + 0.5 * batch.obs[:, 3] > 0).astype(np.int64)
                        manager.send(balance, batch.env_ids)
                        batch = manager.recv()
                    kill(manager, 0)
                    began = time.perf_counter()
                    manager.send(balance, batch.env_ids)
                    batch = manager.recv()
                    seconds["kept" if keeps else "restart"].append(time.perf_counter() - began)
                    assert bool(batch.lost.any()) is not keeps
            envs = [make() for _ in range(n)]
            seen = [env.reset(seed=1)[0] for env in envs]
            began = time.perf_counter()
            for _ in range(n_steps):
                for place, env in enumerate(envs):
                    action = int(seen[place][2] + 0.5 * seen[place][3] > 0) if name == "CartPole" else 0
                    seen[place] = env.step(action)[0]
            seconds["steps"].append(time.perf_counter() - began)
        ms = {what: 1000 * statistics.median(own) for what, own in seconds.items()}
        ratio = ms["kept"] / (ms["restart"] + ms["steps"])
        print(
            f"{name} × {n} at step {n_steps}: back in {ms['kept']:.0f} ms; "
            f"restart {ms['restart']:.0f}, steps {ms['steps']:.0f}: {ratio:.2f}"
        )


def branching(_arguments: argparse.Namespace) -> None:
    """Begin 1,000 episodes at positions of 50 actions. Compare the first observations, and the CPU time of a step."""
    for name in ("CartPole", "LunarLander", "Hopper"):
        cell, rng, tasks, expected = CELLS[name], np.random.default_rng(0), list[Task](), dict[int, Any]()
        own, seed, bare, repeated = gymnasium.make(cell.make), 0, [], []
        while len(tasks) < 1000:
            seed, actions = seed + 1, cell.actions(rng, 50)
            own.reset(seed=seed)
            for action in actions:
                obs, _, terminated, truncated, _ = own.step(action)
                if terminated or truncated:
                    break
            else:
                expected[seed] = obs
                tasks.append(Task(seed=seed, actions=actions))
        n_equal = 0
        with SimpleEnvManager(cell.make, 8, seed=1, episodes="on_demand", restarts=KEPT) as manager:
            manager.reset()
            batch = manager.recv("all")
            for first in range(0, 1000, 8):
                taken = tasks[first : first + 8]
                began = time.process_time()
                manager.begin(list(range(8)), taken)
                batch = manager.recv("all")
                repeated.append((time.process_time() - began) / 400)
                bare_s = 0.0
                for task in taken:  # at once after the others, as the machine's speed changes
                    own.reset(seed=task.seed)
                    began = time.process_time()
                    for action in task.actions:
                        own.step(action)
                    bare_s += time.process_time() - began
                bare.append(bare_s / 400)
                for row, env_id in enumerate(batch.env_ids.tolist()):
                    n_equal += bool((batch.obs[row] == expected[tasks[first + env_id].seed]).all())
        us = [1e6 * statistics.median(own) for own in (repeated, bare)]
        print(
            f"{name}: {n_equal:,} of 1,000 first observations equal; {us[0]:.2f} µs of CPU a repeated step, "
            f"{us[1]:.2f} bare: {statistics.median(map(truediv, repeated, bare)):.2f}"
        )


def cpu(arguments: argparse.Namespace) -> None:
    """Print the trainer's CPU time of a round with the option beside without, in turns of two managers.

    By ``recv`` it is that of ``send`` and ``recv`` while all answers are there, so without waiting by spinning, whose
    length is the workers' affair. By ``step`` the waiting is part of it. Where two managers have their memory is worth
    a few percent, so eight pairs are started.
    """
    cells: list[tuple[str, str, int, int]] = [
        ("noop, 8 in process", "noop", 8, 0),
        ("noop, 8 in two", "noop", 8, 2),
        ("noop, one each of 8", "noop", 8, 8),
        ("CartPole, 32 in process", "cartpole", 32, 0),
        ("CartPole, 32 in two", "cartpole", 32, 2),
    ]
    for label, env, n_envs, n_workers in cells:
        if arguments.only and label not in arguments.only:
            continue
        make = functools.partial(make_env, env, 0)
        for way in ("recv", "step"):
            medians, us = [], []
            for pair in range(8):
                with contextlib.ExitStack() as stack:
                    rounds = {}
                    for keeps in (False, True) if pair % 2 else (True, False):
                        own: Any = {"seed": 1, "wait": "all", "restarts": attrs.evolve(KEPT, keep_episodes=keeps)}
                        manager: EnvManager = stack.enter_context(
                            SubprocessEnvManager(make, n_envs, n_workers=n_workers, **own)
                            if n_workers
                            else SimpleEnvManager(make, n_envs, **own)
                        )
                        rounds[keeps] = _rounds(manager, way, answers_s=0.001 if n_workers else 0.0)
                    ratios = []
                    for _ in range(arguments.turns // 8):
                        cost = {keeps: rounds[keeps](50) / 50 for keeps in random.sample((False, True), 2)}
                        ratios.append(cost[True] / cost[False])
                        us.append(1e6 * cost[False])
                    medians.append(statistics.median(ratios))
            print(
                f"{label:24} {way:5} {statistics.median(us):7.1f} µs of CPU a round without; with the option "
                f"{statistics.median(medians):.3f} (pairs {min(medians):.3f} to {max(medians):.3f})",
                flush=True,
            )


def _rounds(manager: EnvManager, way: str, answers_s: float) -> Callable[[int], float]:
    """Begin, and return a function that plays so many rounds and returns their CPU time.

    Its actions keep a CartPole upright. ``answers_s``: seconds after which all workers have answered.
    """
    manager.reset()
    env_ids = np.arange(manager.n_envs)
    batch: Any = manager.recv() if way == "recv" else None

    class Upright:
        def get_action(self, steps: Any) -> ActionInfo:
            return ActionInfo((steps.obs[:, 2] + 0.5 * steps.obs[:, 3] > 0).astype(np.int64))

    def by_recv(n: int) -> float:
        nonlocal batch
        cpu_s = 0.0
        for _ in range(n):
            actions = (batch.obs[:, 2] + 0.5 * batch.obs[:, 3] > 0).astype(np.int64)
            cpu_s -= time.thread_time()
            manager.send(actions, env_ids)
            cpu_s += time.thread_time()
            if answers_s:
                time.sleep(answers_s)
            cpu_s -= time.thread_time()
            batch = manager.recv()
            cpu_s += time.thread_time()
        return cpu_s

    def by_step(n: int) -> float:
        began = time.thread_time()
        for _ in range(n):
            manager.step()
        return time.thread_time() - began

    if way == "step":
        for name in manager.behavior_specs:
            manager.set_policy(name, Upright())
    play = by_recv if way == "recv" else by_step
    play(20)
    return play


class Broken(gymnasium.Env):  # type: ignore[misc]
    """A walk whose third step is not repeatable, for the reason ``why``."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, why: str) -> None:
        self._why, self._n_episodes = why, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._n, self._n_episodes = 0, self._n_episodes + 1
        return np.array([float(self.np_random.random()), 0.0]), {}

    def step(self, action: Any) -> Any:
        self._n += 1
        odd: dict[str, Callable[[], float]] = {
            "a global generator": random.random,
            "the time": time.perf_counter,
            "a set": lambda: float(list({f"wall {k}" for k in range(1000)}).index("wall 0")),
            "a used one": lambda: float(self._n_episodes),
        }
        extra = odd[self._why]() if self._n == 3 else 0.0
        return np.array([float(self.np_random.random()), extra]), 0.0, self._n >= 30, False, {}


def check(_arguments: argparse.Namespace) -> None:
    """Ask ``check_environment`` about ten environments, of which five are not repeatable."""
    whys = ("a global generator", "the time", "a set", "a used one")
    cells: dict[str, tuple[Any, bool]] = {name: (CELLS[name].make, True) for name in ("CartPole", "Acrobot", "Hopper")}
    cells |= {"Breakout": (breakout, True), "LunarLander": ("LunarLander-v3", True)}
    cells |= {"BipedalWalker": ("BipedalWalker-v3", False)}
    cells |= {why: (functools.partial(Broken, why), False) for why in whys}
    n_right = 0
    for name, (make, is_repeatable) in cells.items():
        findings = check_environment(make, n_steps=200)
        (finding,) = (each for each in findings if each.question == "repeats" and not each.text.startswith("The infos"))
        n_right += (finding.outcome == "ok") is is_repeatable
        print(f"{name}: {finding.text}", flush=True)
    print(f"right in {n_right} of {len(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = (rows, ledger, clock, killer, memory, training, back, branching, cpu, check)
    whats: dict[str, Callable[[argparse.Namespace], None]] = {what.__name__: what for what in parts}
    parser.add_argument("what", choices=whats)
    parser.add_argument("--only", nargs="*", help="names in the first column, of rows, of the ledger or of cpu")
    parser.add_argument("--turns", type=int, default=200, help="of each manager, for cpu (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="number of rows in all (default: %(default)s)")
    arguments = parser.parse_args()
    whats[arguments.what](arguments)


if __name__ == "__main__":
    main()
