"""What many environments that wait cost with the kind asyncio, beside other ways to step them.

    python -m benchmarks.waiting [--only sleepers many faults server hangs rollouts pool] [--seconds 60] [--minutes 5]

The way of TorchRL needs the interpreter of a virtual environment that has it (``--torchrl``), the server an interpreter
with OpenEnv, by default this one (``--openenv``). Each way runs in a process of its own. Run it on a machine with
nothing else to do; the load of the last minute stands above each table.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import itertools
import json
import logging
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from benchmarks.rollouts import ask
from benchmarks.sleepers import AwaitedSleeper, Record, Sleeper
from envmanager import AsyncioEnvManager, LostEpisode, RestartPolicy, Task, Timeouts
from envmanager.observe.events import Restarted, ServerBack, ServerGone

SERVER = "envmanager_tests.openenv.server"
EVER_S = 3600.0
ALWAYS = RestartPolicy(max_restarts=10**9, on_exception="restart", backoff_s=0)


def show_head(title: str, *columns: str) -> None:
    """Print the head of a table."""
    print(f"\n{title} (load {os.getloadavg()[0]:.1f})\n")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)


def show(*cells: Any) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


# Sleepers.


def show_ways(n: int, seconds: float, ways: list[str], torchrl: str = "") -> None:
    """Print the figures of sleepers stepped in some ways. ``torchrl``: interpreter for the way of this name."""
    title = f"{n:,} that sleep 0.1 to 10 s, {seconds:g} s"
    show_head(title, "way", "share of what is possible", "steps", "p99 late, ms", "CPU a step, µs", "bytes each")
    for way in ways:
        python = torchrl if way == "torchrl" else sys.executable
        if not python:
            continue
        command = [python, "-m", "benchmarks.sleepers", way, str(n), str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 300)
        if done.returncode:
            show(way, f"failed: {(done.stderr.splitlines() or ['no word'])[-1]}", "", "", "", "")
            continue
        figures = json.loads(done.stdout.splitlines()[-1])
        share, steps, p99_ms = figures["share"], figures["steps"], figures["p99_ms"]
        show(way, f"{share:.2%}", f"{steps:,}", f"{p99_ms:.1f}", f"{figures['cpu_us']:.0f}", f"{figures['bytes']:,.0f}")


def sleepers(arguments: argparse.Namespace) -> None:
    """2,000 sleepers beside other ways."""
    show_ways(arguments.sleepers, arguments.seconds, ["envmanager", "bare", "threads", "torchrl"], arguments.torchrl)


def many(arguments: argparse.Namespace) -> None:
    """10,000 sleepers."""
    show_ways(10_000, arguments.seconds, ["envmanager", "bare"])


# Hangs and errors, with tasks.

N_FAULTY = 256
HUNG_S = 12.0
EPISODE = 5


class FaultySleeper(AwaitedSleeper):
    """A sleeper whose observations name the task and the number of steps, and that hangs or raises as its task says."""

    def __init__(self) -> None:
        super().__init__()
        self.task, self.n_steps = -1, 0
        self.options: dict[str, Any] = {}

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.options = options or {}
        self.task, self.n_steps = self.options["task"], 0
        return (self.task, 0), {}

    async def step(self, action: Any) -> Any:
        self.n_steps += 1
        if self.options.get("fails") == self.n_steps:
            raise RuntimeError("the sandbox has ended")
        if self.options.get("hangs") == self.n_steps:
            await asyncio.sleep(EVER_S)
        await super().step(action)
        return (self.task, self.n_steps), 1.0, self.n_steps == EPISODE, False, {}


def faulty_tasks() -> Iterator[Task]:
    """Tasks of which 1 % hang and 2 % raise, in any of their steps."""
    dice = random.Random(1)
    for task in itertools.count():
        fault = dice.choices(["", "hangs", "fails"], [97, 1, 2])[0]
        yield Task(options={"task": task, **({fault: dice.randint(1, EPISODE)} if fault else {})})


def faults(arguments: argparse.Namespace) -> None:
    """256 with hangs and errors."""
    seconds = 60 * arguments.minutes
    Sleeper.record = record = Record(N_FAULTY, seconds)
    n_lost = n_foreign = 0
    timeouts = Timeouts(step_s=HUNG_S)
    with AsyncioEnvManager(FaultySleeper, N_FAULTY, timeouts=timeouts, restarts=ALWAYS) as manager:
        record.begin()
        manager.reset(tasks=faulty_tasks(), attempts=1)
        batch = manager.recv()
        while record(()):
            n_lost += int(batch.lost.sum())
            of_tasks = [(batch.obs, batch.task, ~batch.lost & (batch.task >= 0))]
            if batch.final_obs is not None:
                of_tasks.append((batch.final_obs, batch.final_task, ~batch.lost[batch.terminated | batch.truncated]))
            for obs, tasks, is_shown in of_tasks:
                n_foreign += sum(each[0] != task for each, task in zip(obs[is_shown], tasks[is_shown], strict=True))
            manager.send([None] * len(batch), batch.env_ids)
            batch = manager.recv()
        stats, results = manager.stats(), manager.tasks.results
    title = f"{N_FAULTY} that sleep 0.1 to 10 s, 1 % of tasks hang, 2 % raise, {arguments.minutes:g} minutes"
    show_head(title, "lost rows", "restarts", "tasks played", "tasks lost", "rows of another task", "share")
    n_failed = sum(each.error is not None for each in results)
    share = record.figures["share"]
    show(n_lost, stats.restarts, f"{len(results) - n_failed:,}", n_failed, n_foreign, f"{share:.1%}")
    show_ways(N_FAULTY, min(60.0, seconds), ["few_threads"])


# A server that is killed.

N_SESSIONS = 64


class Server:
    """An OpenEnv server in a process of its own."""

    def __init__(self, python: str, n_sessions: int) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port: int = sock.getsockname()[1]
        self._command = [python, "-m", SERVER, str(self.port), str(n_sessions)]
        self._pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._pipes["stderr"] = subprocess.DEVNULL  # it tells of each connection that it loses
        self.started_at = 0.0
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it listens."""
        self.process = subprocess.Popen(self._command, **self._pipes)
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "listens\n":
            raise SystemExit("the server of OpenEnv does not start")
        self.started_at = time.monotonic()

    def kill(self) -> None:
        """Kill the server."""
        self.process.kill()
        self.process.communicate()

    def be_gone_for_3_s(self) -> None:
        """Kill the server, and start it again."""
        self.kill()
        time.sleep(3.0)
        self.start()


def server(arguments: argparse.Namespace) -> None:
    """64 sessions on a server that is killed."""
    has_openenv = subprocess.run([arguments.openenv, "-c", "import openenv.core"], capture_output=True).returncode == 0
    if not has_openenv or importlib.util.find_spec("websockets") is None:
        print("\nOpenEnv or websockets is not installed here: the server is left out", file=sys.stderr)
        return
    title = f"{N_SESSIONS} sessions of OpenEnv, whose server is killed and back after 3 s"
    show_head(title, "slots", "first step after, s", "all step after, s", "lost", "ServerGone", "ServerBack", "charged")
    for n_slots in (2 * N_SESSIONS, N_SESSIONS):
        show(n_slots, *killed_server(arguments.openenv, n_slots))


def killed_server(python: str, n_slots: int) -> tuple[Any, ...]:
    """Return what becomes of sessions whose server is killed for 3 s after each has stepped."""
    served = Server(python, n_slots)
    url = f"ws://127.0.0.1:{served.port}"
    try:
        with AsyncioEnvManager({"openenv": url}, N_SESSIONS, restarts=RestartPolicy(max_restarts=1)) as manager:
            manager.reset(options={"goal": 10**9})
            n_steps = np.zeros(N_SESSIONS, np.int64)
            lost: list[int] = []
            first_at = 0.0
            outage: threading.Thread | None = None
            batch = manager.recv()
            while outage is None or outage.is_alive() or n_steps.min() < 1 or len(lost) < N_SESSIONS:
                manager.send([{"add": 1, "sleep_s": 0.01}] * len(batch), batch.env_ids)
                batch = manager.recv()
                lost += batch.env_ids[batch.lost].tolist()
                n_steps[batch.env_ids[~batch.lost]] += 1
                if outage is None and n_steps.min() >= 5:
                    outage = threading.Thread(target=served.be_gone_for_3_s)
                    outage.start()
                    n_steps[:] = -EVER_S  # until each was lost
                n_steps[batch.env_ids[batch.lost]] = 0
                first_at = first_at or (time.monotonic() if n_steps.max() > 0 and lost else 0.0)
            all_at = time.monotonic()
            counts = [manager.events.count(kind) for kind in (ServerGone, ServerBack, Restarted)]
    finally:
        served.kill()
    return f"{first_at - served.started_at:.2f}", f"{all_at - served.started_at:.2f}", len(lost), *counts


# Hangs at the same time, and the end.


class Hanging:
    """An environment whose steps hang."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "ready", {}

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(EVER_S)


class Stubborn(Hanging):
    """An environment whose steps hang, and go on when they are cancelled."""

    async def step(self, action: Any) -> Any:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(EVER_S)


def hangs(_: argparse.Namespace) -> None:
    """1,000 that hang in the same second; the end of 2,000 in flight."""
    complaints: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("asyncio").addHandler(handler)
    sys.unraisablehook = lambda raised: complaints.append(f"{raised.err_msg}: {raised.exc_value}")
    timeouts = Timeouts(step_s=2.0, close_s=2.0)
    seconds = f"seconds (wanted: at most {timeouts.close_s + 1:g})"
    columns = "what", seconds, "lost", "restarts", "tasks left", "complaints"
    show_head("Hangs, with close_s = 2", *columns)
    for kind, how in ((Hanging, ""), (Stubborn, ", and do not end when cancelled")):
        with AsyncioEnvManager(kind, 1000, timeouts=timeouts, restarts=ALWAYS) as manager:
            manager.reset()
            batch = manager.recv("all")
            manager.send([None] * 1000, batch.env_ids)
            late_at = time.monotonic() + timeouts.step_s
            n_lost = 0
            while n_lost < 1000:
                n_lost += int(manager.recv().lost.sum())
            took_s, restarts = time.monotonic() - late_at, manager.stats().restarts
        show(f"1,000 hang past their deadline{how}", f"{took_s:.2f}", n_lost, restarts, *left(complaints))
        with AsyncioEnvManager(kind, 2000, timeouts=timeouts) as manager:
            manager.reset()
            batch = manager.recv("all")
            manager.send([None] * 2000, batch.env_ids)
            time.sleep(0.5)
            began = time.monotonic()
            manager.close()
            took_s = time.monotonic() - began
        show(f"close() with 2,000 in flight{how}", f"{took_s:.2f}", "", "", *left(complaints))


def left(complaints: list[str]) -> tuple[int, int]:
    """Return the number of tasks that have not ended and of complaints since the last call."""
    gc.collect()
    tasks = sum(isinstance(each, asyncio.Task) and not each.done() for each in gc.get_objects())
    n_complaints = len(complaints)
    complaints.clear()
    return tasks, n_complaints


# A loop like that of TRL.

N_AT_ONCE, N_ROLLOUTS = 64, 1000


class Tool:
    """An environment of an agent that calls a tool. One session in a hundred dies."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.rollout, self.n_calls = (options or {}).get("rollout", -1), 0
        return f"rollout {self.rollout}", {}

    async def step(self, action: Any) -> Any:
        self.n_calls += 1
        await asyncio.sleep(0.05)
        if self.rollout % 100 == 37 and self.n_calls == 3:
            raise ConnectionError("the session has ended")
        return f"rollout {self.rollout}, call {self.n_calls}: {action}", 0.0, self.n_calls == 5, False, {}


def rollouts(_: argparse.Namespace) -> None:
    """1,000 rollouts, 64 at once."""
    with AsyncioEnvManager(Tool, N_AT_ONCE, restarts=ALWAYS) as manager:
        began = time.monotonic()
        n_lost, n_wrong, n_free = asyncio.run(play_rollouts(manager.pool()))
        took_s, restarts = time.monotonic() - began, manager.stats().restarts
    columns = "lost", "restarts", "answers of another rollout", f"free afterwards, of {N_AT_ONCE}", "seconds"
    show_head(f"{N_ROLLOUTS:,} rollouts of 5 calls of 50 ms, {N_AT_ONCE} at once, 1 % of sessions die", *columns)
    show(n_lost, restarts, n_wrong, n_free, f"{took_s:.1f} (sleeps: {N_ROLLOUTS * 5 * 0.05 / N_AT_ONCE:.1f})")


async def play_rollouts(pool: Any) -> tuple[int, int, int]:
    """Return the number of lost rollouts, of wrong answers, and of environments that are free afterwards."""
    n_lost = n_wrong = n_free = 0
    at_once = asyncio.Semaphore(N_AT_ONCE)

    async def play(rollout: int) -> None:
        nonlocal n_lost, n_wrong
        try:
            async with at_once, pool.begin({"rollout": rollout}) as episode:
                for call in range(1, 6):
                    obs, *_ = await episode.step("look")
                    n_wrong += obs != f"rollout {rollout}, call {call}: look"
        except LostEpisode:
            n_lost += 1

    async def hold(all_held: asyncio.Event) -> None:
        nonlocal n_free
        async with pool.begin():
            n_free += 1
            if n_free == N_AT_ONCE:
                all_held.set()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(all_held.wait(), 30.0)

    await asyncio.gather(*map(play, range(N_ROLLOUTS)))
    all_held = asyncio.Event()
    await asyncio.gather(*(hold(all_held) for _ in range(N_AT_ONCE)))
    return n_lost, n_wrong, n_free


class Waits:
    """An environment of five steps, each of which waits."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self._between, self._random = (least_s, most_s), random.Random(1)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.n_steps = 0
        return "0", {}

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(self._random.uniform(*self._between))
        self.n_steps += 1
        return str(self.n_steps), 1.0, self.n_steps == 5, False, {}


N_POOLED = 1000


def pool(_: argparse.Namespace) -> None:
    """CPU of a step in a pool of 1,000 environments, beside the environments and a semaphore, in turns."""
    head = "CPU of a step in µs, 1,000 environments that wait, 5,000 steps"
    show_head(head, "agent", "a step waits", "asyncio alone", "pool", "ratio")
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.rollouts", "--part", "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as model:
        assert model.stdout is not None
        port = int(model.stdout.readline())
        for agent, between in (("none", (0.05, 0.15)), ("none", (0.5, 2.0)), ("asks a model by HTTP", (0.05, 0.5))):
            asked = port if agent != "none" else 0
            with AsyncioEnvManager(partial(Waits, *between), N_POOLED) as manager:
                own = manager.pool()
                figures = [[asyncio.run(bare_us(asked, between)), asyncio.run(pooled_us(asked, own))] for _ in range(4)]
            bare, pooled = map(statistics.median, zip(*figures[1:], strict=True))
            show(agent, f"{between[0]} to {between[1]} s", f"{bare:.0f}", f"{pooled:.0f}", f"{pooled / bare:.2f}")
        model.kill()


async def bare_us(port: int, between: tuple[float, float]) -> float:
    at_once, n_steps = asyncio.Semaphore(N_POOLED), 0

    async def play() -> None:
        nonlocal n_steps
        async with at_once:
            env, is_over = Waits(*between), False
            obs, _ = await env.reset()
            while not is_over:
                obs, _, is_over, _, _ = await env.step(await asked_for(obs, port))
                n_steps += 1

    began = time.process_time()
    await asyncio.gather(*(play() for _ in range(N_POOLED)))
    return 1e6 * (time.process_time() - began) / n_steps


async def pooled_us(port: int, own: Any) -> float:
    n_steps = 0

    async def play() -> None:
        nonlocal n_steps
        async with own.begin() as episode:
            while not episode.is_over:
                await episode.step(await asked_for(episode.obs, port))
                n_steps += 1

    began = time.process_time()
    await asyncio.gather(*(play() for _ in range(N_POOLED)))
    return 1e6 * (time.process_time() - began) / n_steps


async def asked_for(obs: str, port: int) -> str:
    """Return what a model answers, again after an error; without a port, at once."""
    while port:
        with suppress(ConnectionError):
            return await ask(port, obs)
    return obs


ROWS: dict[str, Callable[[argparse.Namespace], None]] = {
    "sleepers": sleepers,
    "many": many,
    "faults": faults,
    "server": server,
    "hangs": hangs,
    "rollouts": rollouts,
    "pool": pool,
}


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--sleepers", type=int, default=2000, help="how many beside other ways")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each way of sleepers")
    parser.add_argument("--minutes", type=float, default=5.0, help="duration of the hangs and errors")
    parser.add_argument("--torchrl", default="", help="interpreter with TorchRL; without, it is left out")
    parser.add_argument("--openenv", default=sys.executable, help="interpreter with OpenEnv, by default this one")
    return parser.parse_args(given)


def main() -> None:
    arguments = parsed()
    logging.getLogger("envmanager").setLevel(logging.CRITICAL)
    for row in arguments.only:
        ROWS[row](arguments)


if __name__ == "__main__":
    main()
