"""Trainings that are killed at random moments beside the same trainings that are not: whether all weights are equal.

    python -m benchmarks.killed matrix [--only ppo "rounds, 4 workers"] [--kills 200]
    python -m benchmarks.killed moments [--kills 1000]
    python -m benchmarks.killed apart | disk | twice | signals | evaluation | godot | cost

``matrix``: trainings of 4 environments with 0, 1 and 4 workers and ``wait: all``, killed and begun again by the same
command (``--resume auto``) until they end. Then the same with kill -9 of a random worker, or of the helper, about once
a second. ``moments``: a fast training in one process, killed by time, by CPU time and by the number of system calls.
``apart``: trainings whose learner is a process of its own. ``disk``: file systems that are too small (mounted as tmpfs,
by root). ``twice``: two that resume the same training at once. ``signals``: SIGTERMs, with the time until the command
is gone. ``evaluation``: 1,000 tasks. ``godot``: a demo game in one engine. ``cost``: the time share of checkpoints.

Each command runs in a fork of this process, which has imported PyTorch already. SHA-256 of the arrays (weights,
optimizers, replay, generators, running episodes) in the latest checkpoint is compared after each kill with that of the
undisturbed training at the same step, and at the end that of the table of episodes too, without its wall times.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import ctypes
import functools
import hashlib
import importlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import gymnasium
import numpy as np
import psutil
from pettingzoo.utils.env import ParallelEnv


class Slope(gymnasium.Env):  # type: ignore[misc]
    """A walk whose steps are as long as the option ``slope`` says."""

    observation_space = gymnasium.spaces.Box(-100.0, 100.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._slope, self._n = float((options or {}).get("slope", 1.0)), 0
        self._at = float(self.np_random.random())
        return np.array([self._at, 0], np.float32), {}

    def step(self, action: Any) -> Any:
        self._n += 1
        self._at += self._slope * (2 * int(action) - 1) + float(self.np_random.normal())
        obs = np.array([self._at, self._n], np.float32)
        return obs, float(action) * self._slope, self._n >= 30 or abs(self._at) > 15, False, {}


class Busy(Slope):
    """The same walk, of which a step takes about 50 µs."""

    def step(self, action: Any) -> Any:
        until = time.perf_counter_ns() + 45_000
        while time.perf_counter_ns() < until:
            pass
        return super().step(action)


class Meeting(ParallelEnv):  # type: ignore[misc]
    """Agents of two behaviors that come and go in the middle of an episode."""

    metadata = {"name": "meeting"}  # noqa: RUF012
    possible_agents = ["hero_0", "target_0", "target_1"]  # noqa: RUF012

    def observation_space(self, agent: str) -> Any:
        return gymnasium.spaces.Box(-np.inf, np.inf, (2,) if agent == "hero_0" else (3,), np.float32)

    def action_space(self, agent: str) -> Any:
        return gymnasium.spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._n, self._x = 0, dict.fromkeys(self.possible_agents, float(self._random.random()))
        self.agents = self.possible_agents[: 1 + int(self._random.integers(2))]
        return self._seen(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self._n += 1
        for agent, action in actions.items():
            self._x[agent] = (self._x[agent] * 1.7 + int(action) + float(self._random.random())) % 3.0
        acted, is_over = self.agents, self._n >= 20
        ends = {agent: is_over or (agent != "hero_0" and bool(self._random.random() < 0.1)) for agent in acted}
        joins = [each for each in self.possible_agents if each not in acted][: self._random.random() < 0.2]
        self.agents = [] if is_over else sorted([*(agent for agent in acted if not ends[agent]), *joins])
        both = list(dict.fromkeys([*acted, *self.agents]))
        no = dict.fromkeys(both, False)
        return self._seen(both), {each: self._x[each] for each in both}, {**no, **ends}, no, {each: {} for each in both}

    def _seen(self, agents: list[str]) -> dict[str, Any]:
        return {each: np.array([self._x[each], self._n, 1.0], np.float32)[: 2 + (each != "hero_0")] for each in agents}


PPO = {"kind": "ppo", "rollout": 256, "minibatch": 64, "epochs": 2, "hidden": [16]}
DQN = {"kind": "dqn", "learning_starts": 100, "hidden": [16], "n_step": 3, "prioritized": True, "capacity": 2000}
SAC = {"kind": "sac", "learning_starts": 100, "hidden": [16], "batch": 32, "capacity": 2000}
LESSONS = [
    {"value": 0.5, "until": {"measure": "reward", "threshold": 1.0, "episodes": 10}},
    {"value": 1.0, "until": {"measure": "progress", "threshold": 0.5}},
    {"value": {"sampler": "uniform", "min": 0.5, "max": 1.5}},
]
HERE = "benchmarks.killed"
CELLS: dict[str, dict[str, Any]] = {
    "ppo": {"env": "CartPole-v1", "trainers": {"*": PPO}, "steps": 4000},
    "dqn": {"env": "CartPole-v1", "trainers": {"*": DQN}, "steps": 1600},
    "sac": {"env": "Pendulum-v1", "trainers": {"*": SAC}, "steps": 640},
    "lessons": {
        "env": f"{HERE}:Slope",
        "trainers": {"*": PPO},
        "steps": 4000,
        "parameters": {"slope": {"lessons": LESSONS}},
    },
    "two": {"env": f"{HERE}:Meeting", "trainers": {"hero": PPO, "target": DQN}, "steps": 1600},
    "rounds": {
        "env": f"{HERE}:Meeting",
        "trainers": {"hero": PPO, "target": PPO},
        "rounds": {"steps": 50, "train": [["hero"], ["target"]]},
        "steps": 4000,
    },
    "fast": {
        "env": f"{HERE}:Busy",
        "trainers": {"*": {**PPO, "hidden": [8], "epochs": 1}},
        "steps": 2000,
        "every": 100,
    },
    "apart": {"env": "CartPole-v1", "trainers": {"*": {**DQN, "apart": 50}}, "steps": 1600},
    "sac apart": {"env": "Pendulum-v1", "trainers": {"*": {**SAC, "apart": 50}}, "steps": 640},
}


def write_config(cell: str, n_workers: int, path: Path, *, keep: int = 3) -> None:
    """Write the config of a training of ``CELLS`` with so many workers; 0 for the trainer's process."""
    own = CELLS[cell]
    manager: dict[str, Any] = {"env": own["env"], "n_envs": 4, "wait": "all", "kind": "simple"}
    if n_workers:
        restarts = {"max_restarts": 1_000_000, "backoff_s": 0}  # keep_episodes is if_possible
        manager |= {"kind": "subprocess", "n_workers": n_workers, "restarts": restarts}
    training = {"steps": own["steps"], "checkpoint_every": own.get("every", own["steps"] // 16), "seed": 7}
    training |= {"keep": keep, "evaluation_episodes": 0, "device": "cpu", "threads": 1, "metrics": ["csv"]}
    training |= {key: own[key] for key in ("parameters", "rounds") if key in own}
    path.write_text(json.dumps({"manager": manager, "training": training, "trainers": own["trainers"]}))


def train_command(config: Path, folder: Path) -> list[str]:
    return ["train", str(config), "--dir", str(folder), "--plain", "--resume", "auto"]


def forked(command: list[str], log: str, *, cpu_s: float = 0.0, is_traced: bool = False) -> int:
    """Start ``envmanager`` with the arguments ``command`` in a fork of this process, and return its pid.

    ``log``: file that its output is appended to. ``cpu_s``: CPU time after which the kernel kills it. ``is_traced``:
    whether it waits to be traced.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if is_traced:
            ctypes.CDLL(None).ptrace(0, 0, 0, 0)  # PTRACE_TRACEME
            os.kill(os.getpid(), signal.SIGSTOP)
        if cpu_s:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # whose signal ends the process at once
        from envmanager.cli.app import run_command_line

        code = run_command_line(command)
        sys.stdout.flush()
        os._exit(code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(99)


def traced(pid: int, n_calls: float) -> tuple[int, int]:
    """Let a process run for ``n_calls`` starts and ends of system calls, and kill it. Return its status and number."""
    ptrace, n = ctypes.CDLL(None).ptrace, 0
    ptrace.argtypes = [ctypes.c_long] * 4
    while True:
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            return status, n
        number = os.WSTOPSIG(status)
        n += number == signal.SIGTRAP
        if n > n_calls:
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            ptrace(24, pid, 0, 0 if number in (signal.SIGTRAP, signal.SIGSTOP) else number)  # PTRACE_SYSCALL


class Deaths:
    """Kills of random processes below a trainer, about once a second, while its process runs."""

    def __init__(self, rng: random.Random) -> None:
        self.n, self._rng, self._due = 0, rng, 0.0

    def look(self, pid: int) -> None:
        """Kill a worker or the helper of the trainer with this pid, if one is due."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._rng.uniform(0.5, 1.5)
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            self._rng.choice(psutil.Process(pid).children(recursive=True)).kill()
            self.n += 1


def hashes(folder: Path) -> dict[str, dict[str, str]]:
    """Return SHA-256 of each file of arrays, by name, of each finished checkpoint."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(folder.glob("checkpoints/*/*.safetensors")):
        if not file.parent.name.endswith(".unfinished"):
            found.setdefault(file.parent.name, {})[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def table(folder: Path) -> list[list[str]]:
    """Return the rows of the table of episodes without the wall times."""
    return [[row[0], *row[2:]] for row in csv.reader((folder / "episodes.csv").read_text().splitlines())]


@attrs.define
class Killings:
    """One cell: a training without kills, and then trainings that are killed ``n_kills`` times in all."""

    cell: str
    n_workers: int
    place: Path
    rng: random.Random
    deaths: Deaths | None = None
    expected: dict[str, dict[str, str]] = attrs.field(init=False, factory=dict)
    episodes: list[list[str]] = attrs.field(init=False, factory=list)
    most: dict[str, float] = attrs.field(init=False, factory=dict)
    """What the undisturbed training took, by way of killing: seconds, seconds of CPU time, system calls."""
    n_kills: int = attrs.field(init=False, default=0)
    n_trainings: int = attrs.field(init=False, default=0)
    n_compared: int = attrs.field(init=False, default=0)
    errors: list[str] = attrs.field(init=False, factory=list)
    differences: list[str] = attrs.field(init=False, factory=list)

    def undisturbed(self, ways: tuple[str, ...]) -> None:
        """Train without kills, once for each way of killing, and keep what it makes and takes."""
        config = self.place / "undisturbed.json"
        write_config(self.cell, self.n_workers, config, keep=1000)
        for way in ways:
            folder = self.place / f"undisturbed by {way}"
            began = time.monotonic()
            pid = forked(train_command(config, folder), f"{folder}.log", is_traced=way == "calls")
            if way == "calls":
                status, n_calls = traced(pid, math.inf)
                self.most[way] = n_calls
            else:
                _, status, used = os.wait4(pid, 0)
                self.most[way] = time.monotonic() - began if way == "time" else used.ru_utime + used.ru_stime
            assert status == 0, Path(f"{folder}.log").read_text()[-2000:]
            found = hashes(folder), table(folder)
            assert not self.expected or found == (self.expected, self.episodes), "two undisturbed trainings differ"
            self.expected, self.episodes = found

    def go(self, n_kills: int, ways: tuple[str, ...]) -> None:
        """Kill trainings ``n_kills`` times, in all these ways in turn, and let each reach its end."""
        self.undisturbed(ways)
        write_config(self.cell, self.n_workers, self.place / "config.json")
        while self.n_kills < n_kills and not self.differences and len(self.errors) < 5:
            self.n_trainings += 1
            folder, is_over = self.place / f"training {self.n_trainings}", False
            while not is_over and len(self.errors) < 5:
                is_over = self._attempt(folder, ways[self.n_kills % len(ways)] if self.n_kills < n_kills else "")
                self._compare(folder, is_over=is_over)
            shutil.rmtree(folder)

    def _attempt(self, folder: Path, way: str) -> bool:
        """Train on until a kill, or without a ``way`` until the end. Return whether the training is over."""
        most, config = self.most.get(way, 0.0) / 2 * self.rng.random(), self.place / "config.json"
        command, cpu_s = train_command(config, folder), most if way == "CPU" else 0.0
        pid = forked(command, f"{folder}.log", cpu_s=cpu_s, is_traced=way == "calls")
        if way == "calls":
            status, _ = traced(pid, most)
        else:
            due, done, status = time.monotonic() + (most if way == "time" else math.inf), 0, 0
            while not done:
                if time.monotonic() >= due:
                    os.kill(pid, signal.SIGKILL)
                if self.deaths is not None:
                    self.deaths.look(pid)
                time.sleep(0.001)
                done, status = os.waitpid(pid, os.WNOHANG)
        if os.WIFSIGNALED(status):
            self.n_kills += 1
        elif os.WEXITSTATUS(status):
            told = Path(f"{folder}.log").read_text()[-1500:]
            if self.deaths is None or "the learner of 'default' has ended (SIGKILL)" not in told:
                self.errors.append(told)
        return status == 0

    def _compare(self, folder: Path, *, is_over: bool) -> None:
        """Read the whole latest checkpoint, and compare it with that of the undisturbed training."""
        from envmanager.training.runs import checkpoints

        if not (folder / "checkpoints" / "latest").exists():
            return
        path = checkpoints.latest(folder / "checkpoints")
        loaded = checkpoints.load(path)  # which raises CheckpointDamaged, as reading an array does
        for arrays in (loaded.generators, *(arrays for arrays, _ in loaded.trainers.values())):
            for name in arrays:
                arrays[name]
        self.n_compared += 1
        name, last = path.name.partition("-")[0], max(self.expected)
        found, expected = hashes(folder)[path.name], self.expected.get(name, {})
        if found != expected:
            files = ", ".join(file for file in found if found[file] != expected.get(file))
            self.differences.append(f"{path.name} of {folder.name}: {files}")
        if is_over and (name != last or table(folder) != self.episodes):
            self.differences.append(f"the last step, or the table of episodes, of {folder.name}")

    def has_ended_in(self, folder: Path) -> bool:
        """Return whether the last checkpoint and the table of episodes are those of the undisturbed training."""
        return (max(hashes(folder).items()), table(folder)) == (max(self.expected.items()), self.episodes)

    def line(self) -> str:
        """Return what was found, in one line, and what was wrong after it."""
        name = f"{self.cell}, {self.n_workers} worker{'s' * (self.n_workers != 1)}"
        deaths = "" if self.deaths is None else f"{self.deaths.n:4} of workers and helpers, "
        result = "DIFFERS" if self.differences else "equal"
        errors = f"; {len(self.errors)} ERRORS" if self.errors else ""
        told = f"{name:20} {self.n_kills:5} kills, {deaths}{self.n_trainings:3} trainings, {self.n_compared:5} times"
        return "\n".join([f"{told} {result}{errors}", *self.differences, *self.errors])


def warm() -> None:
    """Import what a training needs, so that forks of this process begin at once."""
    import torch
    import torch._dynamo  # which optimizers import

    for module in (HERE, "gymnasium.envs.classic_control", "envmanager.cli.app", "envmanager.cli.train"):
        importlib.import_module(module)
    for module in ("adapters.gymnasium", "adapters.pettingzoo", "simple_env_manager", "subprocess_env_manager"):
        importlib.import_module(f"envmanager.{module}")
    records: Any = importlib.import_module("envmanager.training.runs.records")
    records.versions = functools.cache(records.versions)  # it reads the metadata of all packages, 0.2 s each time
    records.versions()
    torch.set_num_threads(1)


def tried(cells: list[tuple[str, int]], n_kills: int, ways: tuple[str, ...], *, kills_workers: bool = False) -> None:
    """Print a line for each cell, a pair of a training's name and the number of its workers, and one for all."""
    total, n_wrong, began = [0, 0, 0], 0, time.monotonic()
    for number, (cell, n_workers) in enumerate(cells):
        rng = random.Random(number)
        with tempfile.TemporaryDirectory() as place:
            own = Killings(cell, n_workers, Path(place), rng, Deaths(rng) if kills_workers else None)
            own.go(n_kills // len(cells) + (number < n_kills % len(cells)), ways)
        print(own.line(), flush=True)
        found = own.n_kills, 0 if own.deaths is None else own.deaths.n, own.n_compared
        total = [before + more for before, more in zip(total, found, strict=True)]
        n_wrong += bool(own.differences or own.errors)
    print(
        f"in all: {total[0]:,} kills of trainers, {total[1]:,} of workers and helpers, {total[2]:,} checkpoints read "
        f"and compared, {time.monotonic() - began:.0f} s; {len(cells) - n_wrong} of {len(cells)} cells right"
    )


def matrix(arguments: argparse.Namespace) -> None:
    """Kill trainers of all kinds, then trainers and workers."""
    kinds = [name for name in CELLS if name not in ("fast", "apart", "sac apart")]
    cells = [(name, n_workers) for n_workers in (0, 1, 4) for name in kinds]
    cells = [each for each in cells if not arguments.only or {each[0], ", ".join(map(str, each))} & {*arguments.only}]
    if not arguments.workers:
        tried(cells, arguments.kills or 200, ("time", "CPU"))
    tried([each for each in cells if each[1]], arguments.kills or 200, ("time", "CPU"), kills_workers=True)


def moments(arguments: argparse.Namespace) -> None:
    """Kill one fast training in all ways."""
    tried([("fast", 0)], arguments.kills or 1000, ("time", "CPU", "calls"))


def apart(arguments: argparse.Namespace) -> None:
    """Kill trainers whose learner is a process of its own, which dies with them. Then kill learners and workers too."""
    cells = [(name, n_workers) for name in ("apart", "sac apart") for n_workers in (0, 1, 4)]
    for kills_workers in (False, True):
        tried(cells, arguments.kills or 30, ("time", "CPU"), kills_workers=kills_workers)


def disk(_: argparse.Namespace) -> None:
    """Train in file systems of all sizes that are too small, give each more room, and train on."""
    for cell in ("ppo", "dqn"):
        with tempfile.TemporaryDirectory() as name:
            place, found = Path(name), collections.Counter[str]()
            own = Killings(cell, 0, place, random.Random(0))
            own.undisturbed(("time",))
            write_config(cell, 0, place / "config.json")
            small, log = place / "small", str(place / "log")
            small.mkdir()
            command = train_command(place / "config.json", small / "run")
            for size_kb in range(20, 700, 20):
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", small], check=True)
                try:
                    status = os.waitpid(forked(command, log), 0)[1]
                    code = os.waitstatus_to_exitcode(status)
                    found[f"exit code {code}"] += 1
                    if code:
                        last = Path(log).read_text().splitlines()[-1]
                        found["told why" if "No space left" in Path(log).read_text()[-3000:] else f"said {last!r}"] += 1
                    subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
                    status = os.waitpid(forked(command, log), 0)[1]
                    is_equal = not status and own.has_ended_in(small / "run")
                    found["in the end equal" if is_equal else f"DIFFERS with {size_kb} kB"] += 1
                finally:
                    subprocess.run(["umount", small], check=True)
            print(f"{cell}: " + ", ".join(f"{n} × {what}" for what, n in found.items()), flush=True)


def twice(arguments: argparse.Namespace) -> None:
    """Begin the same command twice at once, kill both at random, and so on until the end."""
    found = collections.Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        place, rng = Path(name), random.Random(0)
        own = Killings("ppo", 0, place, rng)
        own.undisturbed(("time",))
        write_config("ppo", 0, place / "config.json")
        number = 0
        while found["killed"] < (arguments.kills or 40):
            number += 1
            folder, codes = place / f"training {number}", list[int]()
            while 0 not in codes:
                codes = []
                command = train_command(place / "config.json", folder)
                pids = [forked(command, str(place / f"log {at}")) for at in range(2)]
                time.sleep(own.most["time"] * rng.random())
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                found["killed"] += codes.count(-signal.SIGKILL)
                for at, code in enumerate(codes):
                    if code == 2:
                        text = (place / f"log {at}").read_text()[-500:]
                        found["refused: in progress" if "is in progress in" in text else f"refused: {text!r}"] += 1
                    elif code not in (0, -signal.SIGKILL):
                        found[f"exit code {code}: {(place / f'log {at}').read_text()[-500:]!r}"] += 1
            found["in the end equal" if own.has_ended_in(folder) else "DIFFERS"] += 1
    print(", ".join(f"{n} × {what}" for what, n in found.items()))


def signals(arguments: argparse.Namespace) -> None:
    """Send SIGTERMs to the same command, a Python of its own each time, until there were enough; then let it end."""
    n_signals = arguments.kills or 20
    for cell, n_workers in (("ppo", 0), ("ppo", 4), ("dqn", 4)):
        with tempfile.TemporaryDirectory() as name:
            place, rng = Path(name), random.Random(0)
            own = Killings(cell, n_workers, place, rng)
            own.undisturbed(("time",))
            write_config(cell, n_workers, place / "config.json")
            command = [sys.executable, "-W", "ignore", "-m", "envmanager"]
            command += train_command(place / "config.json", place / "run")
            gone_s, codes, n_lines = list[float](), list[int](), 0
            while len(codes) <= n_signals:
                with (place / "log").open("ab") as log:
                    process = subprocess.Popen(command, stdout=log, stderr=log)
                if len(codes) < n_signals:
                    while (place / "log").read_bytes().count(b"\n") == n_lines:
                        time.sleep(0.001)  # until it says what it trains
                    time.sleep(own.most["time"] / n_signals / 3 * rng.random())
                    sent = time.monotonic()
                    process.terminate()
                    codes.append(process.wait())
                    gone_s.append(time.monotonic() - sent)
                else:
                    codes.append(process.wait())
                n_lines = (place / "log").read_bytes().count(b"\n")
            print(
                f"{cell}, {n_workers} workers: exit codes {dict(collections.Counter(codes))}, gone after "
                f"{statistics.median(gone_s):.2f} s, at most {max(gone_s):.2f} s; in the end "
                f"{'equal' if own.has_ended_in(place / 'run') else 'DIFFERS'}",
                flush=True,
            )


def evaluation(arguments: argparse.Namespace) -> None:
    """Evaluate 1,000 tasks, and again with kills."""
    n_kills = arguments.kills or 10
    with tempfile.TemporaryDirectory() as name:
        place, rng = Path(name), random.Random(0)
        for n_workers in (0, 2):
            run = place / f"run {n_workers}"
            write_config("ppo", n_workers, place / "config.json")
            log = str(place / "log")
            assert os.waitpid(forked(train_command(place / "config.json", run), log), 0)[1] == 0
            tables, began = [place / "one.csv", place / "other.csv"], time.monotonic()
            command = ["evaluate", str(run), "--seeds", "0:1000", "--out"]
            assert os.waitpid(forked([*command, str(tables[0])], log), 0)[1] == 0, Path(log).read_text()[-1000:]
            took_s, n, status = time.monotonic() - began, 0, -1
            resumed = [*command, str(tables[1]), "--resume", str(place / f"place {n_workers}")]
            while status:
                pid = forked(resumed, log)
                if n < n_kills:
                    time.sleep(took_s / n_kills * rng.uniform(0.3, 1.3))
                    os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                n += os.WIFSIGNALED(status)
            first, other = (path.read_text() for path in tables)
            ids = [row["task"] for row in csv.DictReader(other.splitlines())]
            print(
                f"{n_workers} workers: {n} kills, {len(ids)} rows, {len(set(ids))} tasks, "
                f"{'equal' if first == other else 'DIFFERS'}",
                flush=True,
            )


def godot(arguments: argparse.Namespace) -> None:
    """Train on a demo game twice without kills, then with kills: one arena an engine, and several in one."""
    training = {"steps": 4000, "checkpoint_every": 500, "seed": 7, "evaluation_episodes": 0, "device": "cpu"}
    training |= {"threads": 1, "metrics": ["csv"], "keep": 1000}
    for n_arenas, n_engines in ((1, 1), (2, 2), (4, 1)):
        manager = {"env": "demo:rolling_ball", "kind": "godot", "n_envs": n_arenas, "n_workers": n_engines}
        config = {"manager": {**manager, "wait": "all"}, "training": training, "trainers": {"*": PPO}}
        with tempfile.TemporaryDirectory() as name:
            place, rng, found, took_s = Path(name), random.Random(0), list[Any](), 0.0
            (place / "config.json").write_text(json.dumps(config))
            for number, n_kills in enumerate((0, 0, arguments.kills or 5)):
                folder, n, status = place / str(number), 0, -1
                while status:
                    began = time.monotonic()
                    pid = forked(train_command(place / "config.json", folder), f"{folder}.log")
                    if n < n_kills:
                        time.sleep(took_s * rng.uniform(0.2, 0.6))
                        os.kill(pid, signal.SIGKILL)
                    _, status = os.waitpid(pid, 0)
                    n += os.WIFSIGNALED(status)
                    took_s = took_s if n_kills else time.monotonic() - began
                    assert os.WIFSIGNALED(status) or not status, Path(f"{folder}.log").read_text()[-2000:]
                found.append(hashes(folder))
            equal = [[step for step in found[0] if other.get(step) == found[0][step]] for other in found[1:]]
            print(
                f"{n_arenas} arenas in {n_engines} engines: of {len(found[0])} checkpoints a second training has "
                f"{len(equal[0])} equal, one with {n} kills {len(equal[1])}",
                *dict.fromkeys(line for line in (place / "2.log").read_text().splitlines() if "anew" in line),
                sep="\n  ",
                flush=True,
            )


class Frames(gymnasium.Env):  # type: ignore[misc]
    """Images of 84 × 84 that are new in each step."""

    observation_space = gymnasium.spaces.Box(0, 255, (1, 84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._n = 0
        return self.np_random.integers(0, 255, (1, 84, 84), np.uint8), {}

    def step(self, action: Any) -> Any:
        self._n += 1
        return self.np_random.integers(0, 255, (1, 84, 84), np.uint8), 1.0, self._n >= 200, False, {}


def cost(_: argparse.Namespace) -> None:
    """Print the time share of the checkpoints of two trainings. Run as a script, it tries an older checkout too."""
    from envmanager.training.runs.plan import TrainingPlan
    from envmanager.training.runs.run import Report, TrainingRun

    module = HERE if __name__ != "__main__" or __spec__ is not None else Path(__file__).stem
    frames: dict[str, Any] = {"kind": "dqn", "learning_starts": 1000, "train_every": 1000, "capacity": 100_000}
    cells: dict[str, tuple[str, dict[str, Any], int]] = {
        "PPO, CartPole 8": ("CartPole-v1", {"kind": "ppo"}, 60_000),
        "DQN, 100,000 frames": (f"{module}:Frames", frames, 120_000),
    }
    for cell, (env, trainer, n_steps) in cells.items():
        spent, save = list[tuple[float, float]](), TrainingRun._save

        def timed(run: Any, *args: Any, save: Any = save, spent: Any = spent, **more: Any) -> Any:
            began = time.perf_counter(), time.process_time()
            try:
                return save(run, *args, **more)
            finally:
                spent.append((time.perf_counter() - began[0], time.process_time() - began[1]))

        training: dict[str, Any] = {"steps": n_steps, "checkpoint_every": 10_000, "evaluation_episodes": 0, "seed": 7}
        training |= {"device": "cpu", "threads": 1, "metrics": ["csv"], "keep": 1}
        manager = {"env": env, "kind": "simple", "n_envs": 8, "wait": "all"}
        with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
            setattr(TrainingRun, "_save", timed)  # noqa: B010
            stack.callback(setattr, TrainingRun, "_save", save)
            plan = TrainingPlan.parse(
                {"manager": manager, "training": training, "trainers": {"*": trainer}}, Path(place)
            )
            began = time.perf_counter(), time.process_time()
            TrainingRun(plan, Report()).go()
            wall_s, cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
        print(
            f"{cell}: {len(spent)} checkpoints, {100 * sum(wall for wall, _ in spent) / wall_s:.2f} % of {wall_s:.1f} "
            f"s, {100 * sum(cpu for _, cpu in spent) / cpu_s:.2f} % of {cpu_s:.1f} s of CPU; one takes "
            f"{1e3 * statistics.median(wall for wall, _ in spent):.1f} ms",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whats = {what.__name__: what for what in (matrix, moments, apart, disk, twice, signals, evaluation, godot, cost)}
    parser.add_argument("what", choices=whats)
    parser.add_argument("--only", nargs="*", help='cells of the matrix, such as ppo or "rounds, 4"')
    parser.add_argument("--kills", type=int, help="number of kills in all (default: 200, or 1000 of moments)")
    parser.add_argument("--workers", action="store_true", help="only the part of the matrix with kills of workers")
    arguments = parser.parse_args()
    if arguments.what != "cost":
        warm()
    whats[arguments.what](arguments)


if __name__ == "__main__":
    main()
