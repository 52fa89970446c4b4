"""Workers that leak, take too much memory or start all at once; and clusters whose nodes come and go.

    python -m benchmarks.fleets starts | leak | limit      on this machine
    python -m benchmarks.fleets cluster | ppo [--minutes 10]   with Ray, on a cluster of three nodes of this machine

Each part prints a table. Only shares and counts are of use on a machine with other work.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import gymnasium
import numpy as np

from envmanager import EnvManager, RestartPolicy, SubprocessEnvManager, Wait, WorkerOutOfMemory
from envmanager.observe import events
from envmanager.system.machine import descendants, memory_bytes

MIB = 2**20
KEPT = RestartPolicy(max_restarts=10**6, backoff_s=0, keep_episodes=True)


def show(*cells: Any) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def show_head(title: str, *columns: str) -> None:
    """Print the head of a table."""
    print(f"\n{title} (load {os.getloadavg()[0]:.1f})\n")
    show(*columns)
    show(*["---"] * len(columns))


class Ledger(gymnasium.Env):  # type: ignore[misc]
    """An environment whose observation depends on its number, the seed and all actions since."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(5)

    def __init__(self, number: int, leak_mb: int = 0, sleep_s: float = 0.0) -> None:
        self._number, self._leak_mb, self._sleep_s = number, leak_mb, sleep_s
        self._kept: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._n, self._length, self._x = 0, int(self.np_random.integers(20, 120)), float(self.np_random.random())
        return np.array([self._number, self._n, self._x]), {}

    def step(self, action: Any) -> Any:
        self._n += 1
        self._x = (3.7 * self._x + int(action) + float(self.np_random.random())) % 10.0
        if self._leak_mb:
            self._kept.append(np.ones(self._leak_mb * MIB, np.uint8))
        if self._sleep_s:
            time.sleep(self._sleep_s)
        return np.array([self._number, self._n, self._x]), float(action), self._n >= self._length, False, {}


@attrs.frozen
class Ledgers:
    """A factory of Ledgers, of which those of ``leaking`` leak."""

    leaking: tuple[int, ...] = ()
    leak_mb: int = 1
    sleep_s: float = 0.0

    def __call__(self, context: Any) -> Ledger:
        number = context.env_id
        return Ledger(number, self.leak_mb if number in self.leaking else 0, self.sleep_s)


class Book:
    """What a trainer has received: a digest for each environment, of as many rows as each has at least."""

    def __init__(self, n_envs: int, n_rows: int) -> None:
        self.hashes = [hashlib.sha256() for _ in range(n_envs)]
        self.n_rows = np.zeros(n_envs, np.int64)
        self._limit = n_rows
        self.n_lost = self.n_foreign = 0

    def add(self, batch: Any) -> np.ndarray:
        """Add a batch and return the actions, which depend on its observations alone."""
        self.n_lost += int(batch.lost.sum())
        self.n_foreign += int(np.count_nonzero(batch.obs[:, 0] != batch.env_ids))
        for row, env_id in enumerate(batch.env_ids.tolist()):
            if self.n_rows[env_id] < self._limit:
                own = batch.obs[row], batch.reward[row], batch.terminated[row]
                self.hashes[env_id].update(b"".join(each.tobytes() for each in own))
        self.n_rows[batch.env_ids] += 1
        return np.asarray(np.abs(batch.obs[:, 2] * 7).astype(np.int64) % 5)

    @property
    def digests(self) -> list[str]:
        return [each.hexdigest() for each in self.hashes]


def play(manager: EnvManager, book: Book, until: Any) -> None:
    """Step, without waiting for all, until ``until()``."""
    manager.reset()
    batch = manager.recv()
    while not until():
        manager.send(book.add(batch), batch.env_ids)
        batch = manager.recv(Wait.any(timeout_s=5.0))


# On this machine.


@attrs.frozen
class Heavy:
    """A factory whose constructor takes a time and memory, and notes how many others are in theirs."""

    folder: str
    seconds: float
    mb: int

    def __call__(self, context: Any) -> Ledger:
        own = Path(self.folder) / f"in-{context.env_id}"
        own.touch()
        with (Path(self.folder) / "counts").open("a") as file:
            file.write(f"{len(list(Path(self.folder).glob('in-*')))}\n")
        block = np.ones(self.mb * MIB, np.uint8)
        time.sleep(self.seconds)
        del block
        own.unlink()
        return Ledger(context.env_id)


def starts(_: argparse.Namespace) -> None:
    """64 environments whose constructors take 2 s and 300 MB, at most 4 at once."""
    show_head("64 constructors of 2 s and 300 MB", "start_at_most", "most at once", "peak memory, MiB", "seconds")
    for n in (4, 16):  # all 64 at once would take 19 GiB
        with tempfile.TemporaryDirectory() as folder:
            peak, over = 0, threading.Event()

            def watch(over: threading.Event = over) -> None:
                nonlocal peak
                while not over.wait(0.05):
                    peak = max(peak, sum(_own_bytes(pid) for pid in descendants(os.getpid())))

            thread = threading.Thread(target=watch)
            thread.start()
            began = time.monotonic()
            with SubprocessEnvManager(Heavy(folder, 2.0, 300), 64, start_at_most=n) as manager:
                took_s = time.monotonic() - began
                manager.reset()
            over.set()
            thread.join()
            most = max(map(int, (Path(folder) / "counts").read_text().split()))
        show(n, most, f"{peak / MIB:,.0f}", f"{took_s:.1f}")


def _own_bytes(pid: int) -> int:
    """Memory of a process that it shares with no other, so that sums count nothing twice."""
    try:
        words = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")


def leak(arguments: argparse.Namespace) -> None:
    """1 MB a step in each of 8 workers, 100,000 steps."""
    n_rows = arguments.steps // 8
    title = (
        f"{arguments.steps:,} steps of 8 workers of which each leaks 1 MiB a step, recycle_above_mb=300, kept episodes"
    )
    show_head(title, "leak", "lost", "recycled", "restarts", "most memory of a worker, MiB", "of all, MiB", "seconds")
    digests = []
    for leaking in ((), tuple(range(8))):
        policy, book, most, most_of_all = attrs.evolve(KEPT, recycle_above_mb=300), Book(8, n_rows), 0, 0
        with SubprocessEnvManager(Ledgers(leaking), 8, seed=1, restarts=policy) as manager:
            began, looked_at = time.monotonic(), 0.0

            def is_over(book: Book = book, manager: EnvManager = manager) -> bool:
                nonlocal most, most_of_all, looked_at
                if time.monotonic() > looked_at + 0.2:
                    looked_at = time.monotonic()
                    in_use = [memory_bytes(worker.pid) for worker in manager.stats().workers if worker.pid]
                    most, most_of_all = max(most, *in_use), max(most_of_all, sum(in_use))
                return bool(book.n_rows.min() >= n_rows)

            play(manager, book, is_over)
            took_s, recycled = time.monotonic() - began, manager.events.count(events.Recycled)
            restarts = manager.stats().restarts
        digests.append(book.digests)
        what = "1 MiB a step" if leaking else "none"
        show(what, book.n_lost, recycled, restarts, f"{most / MIB:,.0f}", f"{most_of_all / MIB:,.0f}", f"{took_s:.0f}")
    print(f"\nrows equal to those of the run without a leak: {digests[0] == digests[1]}")


def limit(arguments: argparse.Namespace) -> None:
    """One of 8 takes memory without end."""
    show_head(
        "8 workers of 10 ms a step, of which one takes 16 MiB a step, memory_limit_mb=400, turns of 10 s",
        "takes memory", "died", "of these WorkerOutOfMemory of worker 3", "steps/s of the 7 others",
    )  # fmt: skip
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(arguments.turns):
        for takes in (False, True):
            policy = attrs.evolve(KEPT, keep_episodes=False)
            factory = Ledgers((3,) if takes else (), 16, 0.01)
            with SubprocessEnvManager(factory, 8, seed=1, restarts=policy, memory_limit_mb=400) as manager:
                book, end = Book(8, 0), time.monotonic() + 10.0
                play(manager, book, lambda end=end: time.monotonic() > end)
                died = [event.error for event in manager.events if isinstance(event, events.Died)]
            named = sum(isinstance(error, WorkerOutOfMemory) and error.worker_id == 3 for error in died)
            speeds[takes].append((book.n_rows.sum() - book.n_rows[3]) / 10.0)
            show("yes" if takes else "no", len(died), named, f"{speeds[takes][-1]:,.0f}")
    print(f"\nthe others have {np.median(speeds[True]) / np.median(speeds[False]):.1%} of their steps/s")


# Clusters.

CPUS_OF_A_NODE = 6
PLACE_S = 40.0  # two cores play three nodes, and start a process in up to 20 s


class Nodes:
    """A cluster of nodes that are processes of this machine, of which one is killed or added from time to time."""

    def __init__(self, every_s: float) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._node: dict[str, Any] = {"num_cpus": CPUS_OF_A_NODE, "object_store_memory": 200_000_000}
        self.cluster = Cluster(initialize_head=True, head_node_args={**self._node, "include_dashboard": False})
        for _ in range(2):
            self.cluster.add_node(**self._node)
        ray.init(address=self.cluster.address, log_to_driver=False)
        # A node sets a handler of signals, which only the main thread may, and a thread adds nodes.
        setattr(importlib.import_module("ray._private.utils"), "set_sigterm_handler", lambda *_: None)  # noqa: B010
        self.happened: list[tuple[float, str]] = []
        self._every_s, self._over, self._random = every_s, threading.Event(), random.Random(1)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to kill and add nodes."""
        self._thread.start()

    def _run(self) -> None:
        turn = 0
        while not self._over.wait(self._every_s):
            workers = list(self.cluster.worker_nodes)
            if len(workers) < 2:
                self.cluster.add_node(**self._node)
                self.happened.append((time.monotonic(), "added"))
            elif turn % 6 == 2:
                node = self._random.choice(workers)
                self._drain(node)
                self.happened.append((time.monotonic(), "notice"))
                self._over.wait(self._every_s)
                self._kill(node)
            else:
                self._kill(self._random.choice(workers))
                self.happened.append((time.monotonic(), "killed"))
            turn += 1

    def _kill(self, node: Any) -> None:
        (raylet,) = node.all_processes["raylet"]
        for pid in [raylet.process.pid, *descendants(raylet.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)

    @staticmethod
    def _drain(node: Any) -> None:
        import ray
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        client, end_ms = ray._private.worker.global_worker.gcs_client, int(1000 * (time.time() + 600))
        client.drain_node(node.node_id, DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, "spot", end_ms)

    def stop(self) -> None:
        """End all."""
        import ray

        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        ray.shutdown()
        self.cluster.shutdown()


def cluster(arguments: argparse.Namespace) -> None:
    """16 environments on three nodes, of which one is killed or added every 20 s, some with a notice."""
    from envmanager.ray_cluster.manager import RayEnvManager

    n_envs, nodes = 16, Nodes(arguments.every)
    book, end = Book(n_envs, 0), time.monotonic() + 60 * arguments.minutes
    options: Any = {"seed": 1, "restarts": KEPT, "place_s": PLACE_S}
    trace: list[tuple[float, int]] = []
    try:
        with RayEnvManager(Ledgers(sleep_s=0.01), n_envs, n_workers=n_envs, **options) as manager:
            nodes.start()

            def is_over() -> bool:
                now = time.monotonic()
                if not trace or now > trace[-1][0] + 0.5:
                    trace.append((now, int(book.n_rows.sum())))
                return bool(now > end)

            play(manager, book, is_over)
            counts = {kind.__name__: manager.events.count(kind) for kind in (events.Died, events.Restarted)}
            whys = Counter(event.why for event in manager.events if isinstance(event, events.Recycled))
            squeezed, kept = manager.events.count(events.Squeezed), manager.events.count(events.EpisodesKept)
            diverged, size = manager.stats().episodes_diverged, manager.n_envs
            outages = _outages(manager)
    finally:
        nodes.stop()
    title = f"{n_envs} environments, a node killed or added every {arguments.every:g} s, {arguments.minutes:g} minutes"
    show_head(
        title, "steps", "lost", "of another environment", "diverged", "n_envs", "died, restarted, kept", "squeezed"
    )
    show(f"{book.n_rows.sum():,}", book.n_lost, book.n_foreign, diverged, size, f"{counts}, {kept}", squeezed)
    happened = Counter(what for _, what in nodes.happened)
    print(f"\nnodes: {dict(happened)}; moves: {dict(whys)}")
    print(f"seconds from a death or move to the kept episodes: {np.median(outages):.1f}, at most {max(outages):.1f}")
    ratios = [_speed(trace, at + 15, at + 20) / max(1e-9, _speed(trace, at - 20, at - 5)) for at in _joins(nodes)]
    if ratios:
        print(f"steps/s 15 to 20 s after a join beside before the loss: {', '.join(f'{each:.2f}' for each in ratios)}")


def ppo(arguments: argparse.Namespace) -> None:
    """PPO on such a cluster, ``wait: all``, beside the same training in this process."""
    import torch

    from envmanager.training.runs.plan import TrainingPlan
    from envmanager.training.runs.run import Report, TrainingRun

    show_head("PPO, 8 environments, wait: all", "where", "agent steps", "events of the cluster", "weights (SHA-256)")
    for where in ("simple", "ray"):
        nodes = Nodes(arguments.every) if where == "ray" else None
        try:
            with tempfile.TemporaryDirectory() as folder:
                manager: Any = {"kind": where, "n_envs": 8, "wait": "all", "seed": 1}
                manager |= {"env": "benchmarks.fleets:make_ledger", "restarts": {"keep_episodes": True, "backoff_s": 0}}
                if nodes is not None:
                    manager |= {"n_workers": 8, "cluster": {"place_s": PLACE_S}}
                    manager["restarts"] |= {"max_restarts": 10**6}
                    nodes.start()
                trainer = {"kind": "ppo", "rollout": 256, "minibatch": 64, "epochs": 2, "hidden": [16]}
                training = {"steps": arguments.steps, "seed": 1, "device": "cpu", "threads": 1, "metrics": ["csv"]}
                config = {"manager": manager, "training": training, "trainers": {"*": trainer}}
                plan = TrainingPlan.parse(config, Path(folder))
                run = TrainingRun(plan, Report())
                run.go()
                state = next(iter(run.trainers.values())).model.state_dict()  # type: ignore[attr-defined]
                data = b"".join(each.numpy().tobytes() for each in state.values() if isinstance(each, torch.Tensor))
        finally:
            if nodes is not None:
                nodes.stop()
        happened = "" if nodes is None else dict(Counter(what for _, what in nodes.happened))
        show(where, f"{arguments.steps:,}", happened, hashlib.sha256(data).hexdigest()[:16])


def make_ledger(context: Any) -> Ledger:
    """Return a Ledger whose steps take 10 ms."""
    return Ledger(context.env_id, 0, 0.01)


def _joins(nodes: Nodes) -> list[float]:
    return [at for at, what in nodes.happened if what == "added"]


def _speed(trace: list[tuple[float, int]], since: float, until: float) -> float:
    own = [(at, n) for at, n in trace if since <= at <= until]
    return (own[-1][1] - own[0][1]) / (own[-1][0] - own[0][0]) if len(own) > 1 else 0.0


def _outages(manager: EnvManager) -> list[float]:
    return [event.seconds for event in manager.events if isinstance(event, events.EpisodesKept)]


PARTS = {"starts": starts, "leak": leak, "limit": limit, "cluster": cluster, "ppo": ppo}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--steps", type=int, default=100_000, help="of the leak, and of PPO")
    parser.add_argument("--turns", type=int, default=3, help="of the limit")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the cluster")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between changes of the cluster")
    arguments = parser.parse_args()
    logging.getLogger("envmanager").setLevel(logging.CRITICAL)  # each of many restarts is a line
    PARTS[arguments.part](arguments)


if __name__ == "__main__":
    main()
