"""Groups of rollouts with a language model behind HTTP, faults, and a trainer that is killed and resumed.

``python -m benchmarks.rollouts`` starts a model server (50 ms to 2 s an answer, at times 429 and 500) and a trainer,
kills the trainer with SIGKILL three times, and resumes it each time. It prints whether each group came once, how many
rollouts that had ended were played again, and how many results were those of another task.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from envmanager import AsyncioEnvManager, RestartPolicy, Task, Timeouts

N_TURNS = 3
FAULTS = "raises", "disconnects", "hangs", "reset raises", "reset hangs"


class Riddle:
    """An environment of three turns. Five of a hundred episodes have a fault, of one of five kinds."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.prompt, self.n_turns = options["prompt"], 0
        self.fault = random.choice(FAULTS) if random.random() < 0.05 else ""
        await self._fails("reset ")
        return f"{self.prompt} 0", {}

    async def step(self, action: Any) -> Any:
        self.n_turns += 1
        await self._fails("")
        is_right = action == f"answer to {self.prompt} {self.n_turns - 1}"
        return f"{self.prompt} {self.n_turns}", float(is_right), self.n_turns == N_TURNS, False, {}

    async def _fails(self, where: str) -> None:
        if self.fault == f"{where}raises":
            raise ValueError("a fault")
        if self.fault == f"{where}disconnects":
            raise ConnectionError("a fault")
        if self.fault == f"{where}hangs":
            await asyncio.sleep(3600)


# The model server, and a call of it.


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request: 2 % with 429, 1 % with 500."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        text = await reader.readexactly(int(head.rpartition(b"Content-Length: ")[2]))
        draw = random.random()
        await asyncio.sleep(0.0 if draw < 0.03 else 0.05 + 1.95 * random.random() ** 4)
        status = b"429 Busy" if draw < 0.02 else b"500 Error" if draw < 0.03 else b"200 OK"
        body = b"answer to " + text
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()
        writer.close()


async def serve() -> None:
    """Serve on a free port, and print it."""
    server = await asyncio.start_server(answer, "127.0.0.1", backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def ask(port: int, text: str) -> str:
    """Return the model's answer, after further tries while it is busy. Raises ConnectionError for another status."""
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = text.encode()
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        if b" 200 " in head:
            return body.decode()
        if b" 429 " not in head:
            raise ConnectionError(head.decode())
        await asyncio.sleep(0.1)


# What a user writes. The ledger is for the measurement.


async def train(pool: Any, arguments: argparse.Namespace, ledger: int) -> None:
    """Play the groups that are not done, and keep the place."""

    async def agent(episode: Any) -> list[str]:
        said = []
        while not episode.is_over:
            said.append(await ask(arguments.port, episode.obs))
            await episode.step(said[-1])
        os.write(ledger, b"%d\n" % episode.task.id)
        return said

    file = arguments.folder / "place"
    place = pickle.loads(file.read_bytes()) if file.exists() else {"done": [], "state": None}
    prompts = [Task(id=k, options={"prompt": k}) for k in range(arguments.prompts)]
    saved_at = time.monotonic()
    play = pool.play(prompts, agent, group=10, keep=8, attempts=5, timeout_s=60.0, state=place["state"])
    async for group in play:
        wrong = sum(
            f"answer to {group.task.id} {k}" != text for each in group.results for k, text in enumerate(each.value)
        )
        place["done"].append((group.task.id, len(group.results), len(group.lost), wrong))
        if time.monotonic() - saved_at > 0.5:
            place["state"], saved_at = play.state(), time.monotonic()
            file.with_suffix(".new").write_bytes(pickle.dumps(place))
            file.with_suffix(".new").replace(file)
    file.write_bytes(pickle.dumps({**place, "state": play.state()}))


def trainer(arguments: argparse.Namespace) -> None:
    restarts = RestartPolicy(max_restarts=10_000, on_exception="restart")
    ledger = os.open(arguments.folder / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with AsyncioEnvManager(
        Riddle, arguments.envs, restarts=restarts, timeouts=Timeouts(step_s=20, reset_s=20)
    ) as manager:
        asyncio.run(train(manager.pool(), arguments, ledger))


# The measurement.


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a server and the trainer, which is killed. Return what came of it."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.rollouts", "--prompts", str(arguments.prompts)]
    command += ["--envs", str(arguments.envs), "--folder", str(arguments.folder)]
    file, began = arguments.folder / "place", time.monotonic()
    server = subprocess.Popen([*command, "--part", "serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        command += ["--part", "train", "--port", server.stdout.readline().strip()]
        for kill in range(1, arguments.kills + 2):
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            until = arguments.prompts * kill // (arguments.kills + 1)
            while process.poll() is None and (kill > arguments.kills or n_done(file) < until):
                time.sleep(0.1)
            process.kill()
            process.wait()
    finally:
        server.kill()
        server.communicate()
    done = pickle.loads(file.read_bytes())["done"]
    n_times = Counter(group for group, *_ in done)
    n_kept = sum(n for _, n, *_ in done)
    n_played = len((arguments.folder / "ledger").read_bytes().split())
    return {
        "groups that came once": sum(n == 1 for n in n_times.values()),
        "of": arguments.prompts,
        "whole": sum(n == 8 for _, n, *_ in done),
        "rollouts lost for good": sum(n for *_, n, _ in done),
        "answers of another task": sum(wrong for *_, wrong in done),
        "rollouts played in vain, %": round(100 * (n_played - n_kept) / n_kept, 2),
        "seconds": round(time.monotonic() - began),
    }


def n_done(file: Path) -> int:
    """Return how many groups the trainer has written down."""
    return len(pickle.loads(file.read_bytes())["done"]) if file.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=1250)
    parser.add_argument("--envs", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--part", choices=["all", "serve", "train"], default="all")
    arguments = parser.parse_args()
    if arguments.part == "serve":
        asyncio.run(serve())
    elif arguments.part == "train":
        trainer(arguments)
    else:
        with tempfile.TemporaryDirectory() as folder:
            arguments.folder = Path(folder)
            for name, value in measure(arguments).items():
                print(f"{name}: {value}")


if __name__ == "__main__":
    main()
