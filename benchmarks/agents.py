"""What agents that use tools meet: hung steps, lost rollouts, full servers, and processes that are killed.

    python -m benchmarks.agents groups | kit | trl | slots | mcp | served

``groups``: groups of 10 siblings, of which 8 are kept, while 2 % of the steps hang for ever, with timeouts of 1 and of
20 s in turns. ``kit``: the conformance kit for lost rollouts, with a right and a wrong adapter. ``trl``: the advantages
of TRL's GRPOTrainer while sandboxes die. ``slots``: OpenEnv servers that have fewer sessions than there are
environments. ``mcp``: servers of MCP that are killed about twice a second, and what is left of them when their trainer
ends. ``served``: OpenEnv's client in 1,000 sessions of ``envmanager serve-env``, and in 128 whose workers are killed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import importlib
import logging
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil

from benchmarks.waiting import ALWAYS, Server
from envmanager import AsyncioEnvManager, Timeouts
from envmanager.testing import check_lost_rollouts

ROOT = Path(__file__).resolve().parents[1]
MCP_SERVER = [sys.executable, "-S", str(ROOT / "envmanager_tests" / "openenv" / "mcp_server.py"), "--stubborn"]


# Groups of rollouts, and their advantages.


class Tool:
    """An environment whose steps take 50 to 350 ms, or hang for ever."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.n = 0
        return "begun", {}

    async def step(self, n_turns: int) -> Any:
        self.n += 1
        await asyncio.sleep(3600 if random.random() < 0.02 else random.uniform(0.05, 0.35))
        return "done", 1.0, self.n >= n_turns, False, {}


async def play_groups(pool: Any, n_groups: int, n_turns: int) -> tuple[float, int, int]:
    """Return the seconds for so many groups, and how many were whole, and waited for a rollout that was begun again."""

    async def agent(episode: Any) -> None:
        while not episode.is_over:
            await episode.step(n_turns)

    began, n_whole, n_again = time.monotonic(), 0, 0
    async with pool.play(range(n_groups), agent, group=10, keep=8, attempts=10) as play:
        async for group in play:
            n_whole += group.is_whole and len(group.results) == 8
            n_again += any(result.attempts > 1 for result in group.results)
    return time.monotonic() - began, n_whole, n_again


def groups(arguments: argparse.Namespace) -> None:
    """Print the time for groups with each timeout, and the ratio."""
    took_s = {1.0: 0.0, 20.0: 0.0}
    n_whole, n_again = collections.Counter[float](), collections.Counter[float]()
    for _ in range(arguments.rounds):
        for step_s in took_s:
            with AsyncioEnvManager(Tool, 50, restarts=ALWAYS, timeouts=Timeouts(step_s=step_s)) as manager:
                s, whole, again = asyncio.run(play_groups(manager.pool(), arguments.groups, arguments.turns))
            took_s[step_s] += s
            n_whole[step_s] += whole
            n_again[step_s] += again
    n = arguments.rounds * arguments.groups
    for step_s, s in took_s.items():
        told = f"{n_whole[step_s]} of {n} groups whole, {n_again[step_s]} with a rollout begun again"
        print(f"step_s={step_s:g}: {told}, {s:.1f} s")
    print(f"ratio {took_s[20.0] / took_s[1.0]:.2f}")


def left_out(rewards: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Return the advantages of GRPO over the rollouts that were not lost."""
    total, n = rewards.sum(axis=2), np.maximum((~lost).sum(axis=1, keepdims=True), 1)
    change = np.where(lost, 0.0, total - np.where(lost, 0.0, total).sum(axis=1, keepdims=True) / n)
    return change / (np.sqrt((change**2).sum(axis=1, keepdims=True) / n) + 1e-4)  # type: ignore[no-any-return]


def scored_0(rewards: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Return the advantages of GRPO with a reward of 0 for lost rollouts."""
    return left_out(np.where(lost[..., None], 0.0, rewards), np.zeros_like(lost))


def kit(arguments: argparse.Namespace) -> None:
    """Print the verdicts on an adapter that leaves lost rollouts out, and on one that scores them 0."""
    for advantages in (left_out, scored_0):
        print(f"{advantages.__name__}: {check_lost_rollouts(advantages, n_groups=1000 * arguments.groups)}")


def trl(_: argparse.Namespace) -> None:
    """Train with TRL with the wrapper and without, and give its lines to the kit."""
    if find_spec("trl") is None:
        print("TRL is not installed: pip install torch==2.13.0 trl==1.16.0 datasets")
        return
    for flags in ([], ["--bare"], ["--kit"]):
        command = [sys.executable, "-W", "ignore", "docs/examples/grpo_with_lost_rollouts.py", *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        told = [line for line in done.stdout.splitlines() if not line.startswith("{")]  # those are TRL's own figures
        print(" ".join(flags) or "unless_lost", "\n".join(told) or done.stderr[-2000:], sep=": ", flush=True)


# Servers with too few sessions.


async def add_up(pool: Any, n_episodes: int) -> tuple[int, int]:
    """Play episodes of five steps, each once. Return how many ended with the right sum, and how many were lost."""

    async def agent(episode: Any) -> Any:
        while not episode.is_over:
            await episode.step({"add": 2, "sleep_s": 0.02})
        return episode.obs["total"]

    results = [each async for each in pool.play([{"goal": 10}] * n_episodes, agent, attempts=1)]
    return sum(each.error is None and each.value == 10 for each in results), sum(
        each.error is not None for each in results
    )


def slots(_: argparse.Namespace) -> None:
    """Play with more environments than a server has sessions."""
    for n_sessions, n_envs, n_episodes in ((32, 64, 1000), (1, 6, 60)):
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            server = Server(sys.executable, n_sessions)
            stack.callback(server.kill)
            url = f"ws://127.0.0.1:{server.port}"
            manager = stack.enter_context(AsyncioEnvManager({"openenv": url}, n_envs, restarts=ALWAYS))
            n_ended, n_lost = asyncio.run(add_up(manager.pool(), n_episodes))
        took_s = time.monotonic() - began
        told = f"{n_ended} of {n_episodes} ended, {n_lost} lost, {took_s:.1f} s"
        print(f"{n_sessions} sessions, {n_envs} environments: {told}", flush=True)


# Servers that are killed.


def marked(tag: str) -> list[psutil.Process]:
    """Return the processes on whose command line ``tag`` stands."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if tag in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def n_left(tag: str) -> int:
    """Return the number of processes with ``tag`` that are left when they had 5 s to go."""
    until = time.monotonic() + 5
    while (n := len(marked(tag))) and time.monotonic() < until:
        time.sleep(0.05)
    return n


async def count(pool: Any, n_episodes: int, tag: str) -> tuple[int, int]:
    """Play episodes of about a second while servers are killed. Return how many ended rightly, and the kills."""
    n_kills = 0

    async def agent(episode: Any) -> str:
        for _ in range(10):
            await asyncio.sleep(0.1)
            obs, *_ = await episode.step({"name": "add", "arguments": {}})
        return str(obs["content"][0]["text"])

    async def kill() -> None:
        nonlocal n_kills
        while True:
            await asyncio.sleep(random.uniform(0.3, 0.7))
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                random.choice(marked(tag)).kill()
                n_kills += 1

    killing = asyncio.ensure_future(kill())
    results = [each async for each in pool.play(range(n_episodes), agent, attempts=10)]
    killing.cancel()
    return sum(each.error is None and each.value == "10" for each in results), n_kills


async def play_for_ever(pool: Any) -> None:
    """Hold a session in each environment, and say so."""

    async def agent(episode: Any) -> None:
        await episode.step({"name": "add", "arguments": {}})
        print("plays", flush=True)
        await asyncio.sleep(3600)

    async with pool.play(range(pool.n_envs), agent) as play:
        async for _ in play:
            pass


def mcp(arguments: argparse.Namespace) -> None:
    """Play with servers that are killed, then end the trainer in three ways, and count what is left of the servers."""
    tag = arguments.tag or uuid.uuid4().hex
    with AsyncioEnvManager({"mcp": [*MCP_SERVER, tag]}, 16, restarts=ALWAYS) as manager:
        if arguments.tag:  # a trainer that is to be ended
            asyncio.run(play_for_ever(manager.pool()))
        n_ended, n_kills = asyncio.run(count(manager.pool(), arguments.episodes, tag))
        n = len(marked(tag))
    print(f"{n_ended} of {arguments.episodes} ended with the right count, {n_kills} kills", flush=True)
    left = {f"close() of {n}": n_left(tag)}
    for name, number in (("Ctrl-C", signal.SIGINT), ("kill -9", signal.SIGKILL)):
        tag = uuid.uuid4().hex
        command = [sys.executable, "-m", "benchmarks.agents", "mcp", "--tag", tag]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as trainer:
            assert trainer.stdout is not None
            for _ in range(16):
                assert trainer.stdout.readline() == b"plays\n"
            n = len(marked(tag)) - 1  # without the trainer
            trainer.send_signal(number)
        left[f"{name} of {n}"] = n_left(tag)
    print("processes left: " + ", ".join(f"{n} after {what}" for what, n in left.items()))


# Environments that are served.


class Slow:
    """An environment whose steps take 1 s, and which says what the action was and how many there were."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.n = 0
        return {"say": -1, "n": 0}, {}

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(1.0)
        self.n += 1
        return {"say": action["say"], "n": self.n}, float(self.n), False, False, {}


class Told(gymnasium.Env):  # type: ignore[misc]
    """An environment that says in which process it is, and what the action was."""

    observation_space = gymnasium.spaces.Dict(
        {"pid": gymnasium.spaces.Discrete(2**30), "say": gymnasium.spaces.Discrete(1000)}
    )
    action_space = gymnasium.spaces.Dict({"say": gymnasium.spaces.Discrete(1000)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"pid": os.getpid(), "say": 0}, {}

    def step(self, action: Any) -> Any:
        time.sleep(0.005)
        return {"pid": os.getpid(), "say": action["say"]}, 1.0, False, False, {}


@contextlib.contextmanager
def served(*words: str) -> Iterator[str]:
    """Run ``envmanager serve-env``, and yield its address."""
    command = [sys.executable, "-m", "envmanager", "serve-env", *words, "--port", "0"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}  # it warns of each death
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


def openenv_client(url: str) -> Any:
    """Return OpenEnv's own client, which connects when it is used."""
    return importlib.import_module("openenv.core.generic_client").GenericEnvClient(base_url=url)


async def slow_sessions(url: str, n_sessions: int) -> tuple[float, float, int]:
    """Return the seconds for a reset and for five steps in all sessions, and how many were answered rightly."""
    clients = [openenv_client(url) for _ in range(n_sessions)]

    async def five(client: Any, number: int) -> bool:
        answers = [await client.step({"say": number}) for _ in range(5)]
        said = [(each.observation["say"], each.observation["n"], each.reward) for each in answers]
        return said == [(number, n, n) for n in range(1, 6)]

    began = time.monotonic()
    await asyncio.gather(*(client.reset() for client in clients))
    begun = time.monotonic()
    n_right = sum(await asyncio.gather(*map(five, clients, range(n_sessions))))
    ended = time.monotonic()
    await asyncio.gather(*(client.close() for client in clients))
    return begun - began, ended - begun, n_right


async def killed_sessions(url: str, n_sessions: int, n_kills: int) -> collections.Counter[str]:
    """Play in all sessions while a worker is killed each second. Return what came of it."""
    found, pids, killed = collections.Counter[str](), dict[int, int](), set[int]()

    async def play(number: int) -> None:
        client, has_failed = openenv_client(url), False
        while len(killed) < n_kills or has_failed:
            pids.pop(number, None)
            try:
                pids[number] = (await client.reset()).observation["pid"]
                for _ in range(10):
                    obs = (await client.step({"say": number})).observation
                    found["right answers" if obs == {"pid": pids[number], "say": number} else "WRONG ANSWERS"] += 1
                    found["sessions that went on"] += has_failed
                    has_failed = False
            except RuntimeError as error:
                has_failed = True
                where = "ELSEWHERE"
                if number not in pids and "SIGKILL" in str(error):
                    where = "in resets in killed workers"
                elif pids.get(number) in killed:
                    where = "in killed workers"
                found[f"errors {where}" if "SESSION_ERROR" in str(error) else str(error)] += 1
        await client.close()

    playing = asyncio.gather(*map(play, range(n_sessions)))
    while len(killed) < n_kills:
        await asyncio.sleep(1.0)
        pid = random.choice(sorted(set(pids.values()) - killed))
        found["sessions in killed workers"] += sum(each == pid for each in pids.values())
        killed.add(pid)
        os.kill(pid, signal.SIGKILL)
    await playing
    return found


def serve(arguments: argparse.Namespace) -> None:
    """Play with OpenEnv's client in sessions of ``envmanager serve-env``."""
    n = arguments.sessions
    with served("benchmarks.agents:Slow", "--manager", "asyncio", "--sessions", str(n)) as url:
        reset_s, steps_s, n_right = asyncio.run(slow_sessions(url, n))
    print(
        f"{n} sessions: {n_right} answered rightly, reset in {reset_s:.1f} s, 5 steps of 1 s in {steps_s:.1f} s",
        flush=True,
    )
    with served("benchmarks.agents:Told", "--sessions", "128", "--workers", "16") as url:
        found = asyncio.run(killed_sessions(url, 128, arguments.kills))
    print(
        f"128 sessions in 16 workers, {arguments.kills} killed:", ", ".join(f"{n} {what}" for what, n in found.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"groups": groups, "kit": kit, "trl": trl, "slots": slots, "mcp": mcp, "served": serve}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--groups", type=int, default=100, help="groups with each timeout; a thousandth of the kit's")
    parser.add_argument("--rounds", type=int, default=3, help="how often the timeouts take turns")
    parser.add_argument(
        "--turns",
        type=int,
        default=1,
        help="steps of an episode in groups; with 3 steps, 2 %% of the groups have to wait for a timeout",
    )
    parser.add_argument("--episodes", type=int, default=200, help="episodes with MCP")
    parser.add_argument("--sessions", type=int, default=1000, help="sessions with steps of 1 s")
    parser.add_argument("--kills", type=int, default=10, help="workers of a server to kill")
    parser.add_argument("--tag", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.getLogger("envmanager").setLevel(logging.CRITICAL)  # which tells of each restart
    parts[arguments.part](arguments)


if __name__ == "__main__":
    main()
