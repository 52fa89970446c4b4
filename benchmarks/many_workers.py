"""``python -m benchmarks.many_workers``: what the manager itself costs with few workers, and with thousands.

The workers are fakes without an environment. Each row of the first table is one way to use a manager: the CPU time and
the number of Python calls per delivered row, with 16 and with 10,000 workers. The second has storms, in which half of
the workers fail one after the other. The third has the time and memory that each worker takes otherwise.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from envmanager import ActionInfo, AgentSteps, ArraySpec, BehaviorSpec, EnvManager, RestartPolicy, Wait, WorkerHost
from envmanager.data.steps import STEPPING, CommandName, EnvironmentResponse, StartReport, only_agents
from envmanager.errors import EnvManagerError, WorkerDied
from envmanager.kernel.host import ResponseSource

FEW, MANY = 16, 10_000
SPEC = BehaviorSpec(ArraySpec((4,), np.float32), ArraySpec((), np.int64))
USES = ("send-recv", "step")
PORTIONS = {"any": 1, "number": 8, "half": 0.5, "all": 1.0}
"""Number of responses that arrive together, or their share of all workers, by the name of the wait."""
POLICIES = {
    "nominal": None,
    "failed": RestartPolicy(max_restarts=0),
    "given up": RestartPolicy(max_restarts=0, then="drop"),
    "restarting": RestartPolicy(max_restarts=2),
    "backing off": RestartPolicy(max_restarts=2, within_s=3600.0, backoff_s=3600.0),
}
"""States of the last worker, and the policies with which failures bring it about. All other workers are nominal."""


class Responses(ResponseSource):
    """Responses of fake workers. They arrive ``portion`` at a time, and only while the manager waits."""

    def __init__(self) -> None:
        self.portion = 0
        self.pending: deque[EnvironmentResponse] = deque()

    def take(self) -> Sequence[EnvironmentResponse]:
        return ()

    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        pending = self.pending
        return [pending.popleft() for _ in range(min(self.portion, len(pending)))]


class Fake:
    """A worker whose only environment always returns the same step."""

    def __init__(self, worker_id: int, pending: deque[EnvironmentResponse]) -> None:
        self.worker_id = worker_id
        self.is_silent = False
        self._steps = {"default": AgentSteps.first(agent_id=only_agents([worker_id]), obs=np.zeros((1, 4), np.float32))}
        self._pending = pending

    def send(self, name: str, payload: Any = None) -> None:
        if name not in STEPPING:
            report = StartReport({"default": SPEC}, {"default": 1}, True)
            self._response = EnvironmentResponse(name, self.worker_id, report if name == "start" else self._steps)
        elif not self.is_silent:
            self._pending.append(EnvironmentResponse(CommandName.STEP, self.worker_id, self._steps))

    def recv(self) -> EnvironmentResponse:
        return self._response


class Fakes(WorkerHost):
    """The host of the fakes. Replacements respond when ``begins`` is true."""

    rewrites_arrays = False

    def __init__(self) -> None:
        super().__init__()
        self.step_queue: Responses = Responses()
        self.begins = True

    def launch(self, worker_id: int, generation: int) -> Fake:
        return Fake(worker_id, self.step_queue.pending)

    def begin_again(self, worker_id: int, config: Any) -> None:
        if self.begins:
            self.workers[worker_id].send(CommandName.RESET)
            self.step_queue.pending.append(self.workers[worker_id].recv())

    def now(self) -> float:
        return 0.0  # no replacement becomes due while the calls of a slow machine are counted

    def close(self) -> None:
        pass


class FakeManager(EnvManager):
    """A manager of ``n_workers`` fakes with one environment each, all of which have a step in flight."""

    def __init__(self, n_workers: int, use: str = "send-recv", restarts: RestartPolicy | None = None) -> None:
        super().__init__([[env_id] for env_id in range(n_workers)], restarts=restarts)
        self.use, self.host = use, Fakes()
        self.actions = np.zeros(n_workers, np.int64)
        self.start(self.host)
        self.set_policy("default", self)
        self.reset()
        if use == "send-recv":
            self.recv(Wait.all())

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(self.actions[: len(steps)])

    def send_all(self) -> None:
        """Send actions to all workers. No response arrives yet."""
        if self.use == "send-recv":
            self.send(self.actions, np.arange(self.n_workers))
        else:
            self.step(Wait(timeout_s=0.0))

    def fail(self, worker_id: int) -> None:
        """Put the failure of a worker before all responses that have not arrived."""
        error = WorkerDied(worker_id=worker_id, env_ids=[worker_id], phase="step", exit="SIGKILL")
        self.host.step_queue.pending.appendleft(EnvironmentResponse(CommandName.FAILED, worker_id, error))

    def go_on(self, wait: Wait) -> int:
        """Deliver rows and send actions for them. Return the number of rows, 0 if a worker's error was raised."""
        with suppress(EnvManagerError):
            if self.use == "step":
                return len(self.step(wait))
            batch = self.recv(wait)
            self.send(self.actions[: len(batch)], batch.env_ids)
            return len(batch)
        return 0


def wait_of(name: str, n_workers: int) -> Wait:
    """Return the Wait with this name: "any", "number", "half" or "all"."""
    least = {"any": 1, "number": PORTIONS["number"], "half": n_workers // 2, "all": Wait.ALL}[name]
    return Wait(min_ready=int(least))


@contextmanager
def rounds(use: str, state: str, n_workers: int) -> Iterator[Callable[[str], int]]:
    """Yield a function that waits by the wait with a name, sends actions, and returns the number of rows delivered."""
    with FakeManager(n_workers, use, POLICIES[state]) as manager:
        responses, host = manager.host.step_queue, manager.host
        host.begins, host.workers[-1].is_silent = False, state != "nominal"
        manager.send_all()
        responses.portion = 1
        for _ in range({"nominal": 0, "backing off": 2}.get(state, 1)):
            manager.fail(n_workers - 1)
            manager.go_on(Wait(timeout_s=0.0))
        rules = {name: wait_of(name, n_workers) for name in PORTIONS}

        def go_on(name: str) -> int:
            portion = PORTIONS[name]
            responses.portion = portion if isinstance(portion, int) else max(1, int(portion * n_workers))
            return manager.go_on(rules[name])

        for _ in range(3):
            go_on("half")  # the first step of a worker costs more
        yield go_on


def ends(state: str, wait: str) -> bool:
    """Return whether a wait with this name ends although the last worker is in this state."""
    return wait != "all" or state not in ("restarting", "backing off")


@contextmanager
def storm(use: str, then: str, n_workers: int, *, at_once: bool = False) -> Iterator[Callable[[], int]]:
    """Yield a function in which every second worker fails, and all responses of the others arrive.

    ``then``: what happens to a failed worker: "raise", "drop", "restart" (at once), or "back off" (a later restart).
    The function returns the number of workers that fail.
    """
    policies = {
        "raise": RestartPolicy(max_restarts=0),
        "drop": RestartPolicy(max_restarts=0, then="drop"),
        "restart": RestartPolicy(max_restarts=9),
        "back off": RestartPolicy(max_restarts=9, within_s=3600.0, backoff_s=3600.0),
    }
    with FakeManager(n_workers, use, policies[then]) as manager:
        responses, failing = manager.host.step_queue, range(1, n_workers, 2)
        manager.host.begins = then == "restart"
        for worker_id in failing:
            manager.host.workers[worker_id].is_silent = True
        manager.send_all()
        responses.portion = n_workers if at_once else 1
        n_calls = n_workers if not at_once else len(failing) + 1 if then == "raise" else 2
        wait = Wait(timeout_s=0.0)

        def rage() -> int:
            for _ in range(2 if then == "back off" else 1):
                for worker_id in failing:
                    manager.fail(worker_id)
                for _ in range(n_calls):
                    manager.go_on(wait)
            return len(failing)

        yield rage


def calls_per_row(go_on: Callable[[], int], n_rounds: int = 20) -> float:
    """Return the number of Python functions that are called per row, those of this module aside."""
    count = n_rows = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename != __file__

    sys.setprofile(note)
    try:
        for _ in range(n_rounds):
            n_rows += go_on()
    finally:
        sys.setprofile(None)
    return count / n_rows


def cpu_us_per_row(go_on: Callable[[], int], seconds: float) -> float:
    """Return the CPU time per row in microseconds: the least of ten measurements of ``seconds`` each."""
    best = float("inf")
    gc.disable()
    try:
        for _ in range(10):
            n_rows, began = 0, time.process_time()
            while (took := time.process_time() - began) < seconds:
                n_rows += go_on()
            best = min(best, took / max(1, n_rows))
    finally:
        gc.enable()
    return best * 1e6


def show_rounds(n_workers: int, seconds: float) -> None:
    print(f"{'':36}{'µs per row':>20}{'calls per row':>22}")
    print(f"{'':36}{FEW:>7}{n_workers:>8}{'ratio':>7}{FEW:>8}{n_workers:>8}{'ratio':>7}")
    for use, state, wait in itertools.product(USES, POLICIES, PORTIONS):
        if not ends(state, wait):
            continue
        row = f"{use}, {state}, wait for {wait}"
        with rounds(use, state, FEW) as few, rounds(use, state, n_workers) as many:
            both = partial(few, wait), partial(many, wait)
            times = [cpu_us_per_row(each, seconds) for each in both]
            calls = [calls_per_row(each) for each in both]
        print(
            f"{row:<36}{times[0]:>7.1f}{times[1]:>8.1f}{times[1] / times[0]:>7.2f}"
            f"{calls[0]:>8.1f}{calls[1]:>8.1f}{calls[1] / calls[0]:>7.2f}",
            flush=True,
        )


def show_storms(sizes: Sequence[int]) -> None:
    print("\nstorms: µs per failure while half of the workers fail" + "".join(f"{size:>8}" for size in sizes))
    for use, then, at_once in itertools.product(USES, ("raise", "drop", "restart", "back off"), (False, True)):
        times = []
        for size in sizes:
            best, until = float("inf"), time.process_time() + 1.0
            while best == float("inf") or time.process_time() < until:
                with storm(use, then, size, at_once=at_once) as rage:
                    began = time.process_time()
                    n_failures = rage()
                    best = min(best, (time.process_time() - began) / n_failures * 1e6)
            times.append(best)
        print(
            f"{f'{use}, {then}, ' + ('at once' if at_once else 'singly'):<50}"
            + "".join(f"{each:>8.1f}" for each in times),
            flush=True,
        )


def show_rest(n_workers: int) -> None:
    print("\nper worker:")
    tracemalloc.start()
    with FakeManager(0 + n_workers) as manager:
        manager.send_all()
        made = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, __file__)])
        tracemalloc.stop()
        for what, first in (("stats() before any step was timed", 0), ("stats() after 20 steps were timed", 20)):
            for entry in manager._table.entries:
                for step in range(first):
                    entry.times.stepped(10_000 + 1000 * step, 20_000 * (step + 1))
            best = float("inf")
            for _ in range(3):
                began = time.process_time()
                manager.stats()
                best = min(best, time.process_time() - began)
            print(f"  {what:<40}{best / n_workers * 1e6:8.1f} µs")
    size = sum(each.size for each in made.statistics("filename"))
    print(f"  {'memory of the manager':<40}{size / n_workers / 1e3:8.1f} kB")


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=MANY, help="number of workers to compare with 16")
    parser.add_argument("--seconds", type=float, default=0.1, help="of one of the ten measurements of a case")
    arguments = parser.parse_args()
    logging.getLogger("envmanager").setLevel(logging.CRITICAL)
    show_rounds(arguments.workers, arguments.seconds)
    show_storms([256, 1024, 4096])
    show_rest(arguments.workers)


if __name__ == "__main__":
    main()
