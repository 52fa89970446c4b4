"""Ten kinds of environments in one manager, with steps of 0.1 ms to 1 s, and shares: ``python -m benchmarks.mixed``.

    python -m benchmarks.mixed [--seconds 30] [--rounds 2] [--of steps time] [--crashes kind4]

In each round the manager runs twice, with all kinds in order and with one that ends its process in each step. Shown are
the steps of each kind per second, beside what its share and the slowest kind make possible, and the ratios of the two.
Machines are noisy: the ratios are of runs right after each other, and the medians of all rounds count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np

from envmanager import EnvManager, EnvRecipe, RestartPolicy, SubprocessEnvManager, Wait
from envmanager.observe.events import KindLeftOut, Restarted

STEP_S = [1e-4 * 10 ** (4 * place / 9) for place in range(10)]
N_ENVS = [1, 1, 1, 1, 1, 1, 2, 2, 3, 4]
"""Number of environments of each kind, each in a process: more where a step takes long."""
NAMES = [f"kind{place}" for place in range(10)]
WARM_UP_S = 4.0
MESSAGE_S = 20e-3
"""Time between two steps of an environment that is allowed for where time is shared."""
CRASHES = "kind4"


class Sleeps(gymnasium.Env):  # type: ignore[misc]
    """An environment whose steps take some time, with an observation of its own size. It may end its process."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seconds: float, size: int, crashes: bool) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (size,), np.float64 if size % 2 else np.float32)
        self._obs = np.zeros(size, self.observation_space.dtype)
        self._seconds, self._crashes = seconds, crashes

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._obs, {}

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        if self._crashes:
            os._exit(1)
        return self._obs, 1.0, False, False, {}


def recipes(crashing: str = "") -> list[EnvRecipe]:
    """Return the ten kinds. ``crashing``: name of the one that crashes."""
    return [
        EnvRecipe(
            Sleeps,
            env_kwargs={"seconds": seconds, "size": place + 1, "crashes": name == crashing},
            n=n,
            behavior=name,
        )
        for place, (name, seconds, n) in enumerate(zip(NAMES, STEP_S, N_ENVS, strict=True))
    ]


def shares_of(what: str) -> dict[str, float]:
    """Return a share for each kind: of steps more for the quick ones, of time less, as messages take most of theirs."""
    weights = [seconds**-0.5 for seconds in STEP_S]
    if what == "time":
        weights = [n * min(0.5, seconds / (seconds + MESSAGE_S)) for n, seconds in zip(N_ENVS, STEP_S, strict=True)]
    return {name: weight / sum(weights) for name, weight in zip(NAMES, weights, strict=True)}


def possible(what: str, share: Mapping[str, float]) -> float:
    """Return the steps (or the seconds in steps) of all kinds per second that the shares make possible."""
    most = [n / seconds if what == "steps" else n for n, seconds in zip(N_ENVS, STEP_S, strict=True)]
    return min(each / share[name] for name, each in zip(NAMES, most, strict=True))


def batches(manager: EnvManager, wait: Wait, seconds: float) -> Iterator[tuple[float, str, int]]:
    """Step all environments for some seconds. Yield the time, the kind and the number of rows of each batch."""
    manager.reset()
    until = time.perf_counter() + seconds
    while (now := time.perf_counter()) < until:
        batch = manager.recv(wait)
        manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
        yield now, batch.behavior, int(np.count_nonzero(~batch.lost))


def measure(what: str, share: Mapping[str, float], seconds: float, crashing: str) -> tuple[dict[str, float], str]:
    """Return the steps (or the seconds in steps) per second of each kind, and what was told of the one that crashes."""
    wait = Wait(shares=share, shares_of="steps" if what == "steps" else "time")
    restarts = RestartPolicy(max_restarts=10**9)
    with SubprocessEnvManager(recipes(crashing), restarts=restarts, worker_env={**os.environ}) as manager:
        had, began, ended = dict.fromkeys(NAMES, 0), 0.0, 0.0
        busy: dict[str, float] = {}
        for now, kind, n in batches(manager, wait, WARM_UP_S + seconds):
            if not began:
                began = now + WARM_UP_S
            elif now >= began:
                busy = busy or busy_s(manager)
                had[kind] += n
                ended = now
        if what == "time":
            rates = {kind: (each - busy[kind]) / (ended - began) for kind, each in busy_s(manager).items()}
        else:
            rates = {kind: each / (ended - began) for kind, each in had.items()}
        left_out = [event for event in manager.events if isinstance(event, KindLeftOut)]
        told = f"{manager.events.count(Restarted)} restarts; {left_out[0] if left_out else 'no kind left out'}"
    return rates, told


def busy_s(manager: EnvManager) -> dict[str, float]:
    """Return the seconds that the workers of each kind have stepped."""
    busy = dict.fromkeys(NAMES, 0.0)
    for worker in manager.stats().workers:
        busy[worker.kind] += worker.steps * worker.step_time_s
    return busy


def show(what: str, seconds: float, n_rounds: int, crashing: str) -> None:
    """Print the figures of some rounds."""
    share, runs, told = shares_of(what), [], ""
    for _ in range(n_rounds):
        whole, _ = measure(what, share, seconds, "")
        without, told = measure(what, share, seconds, crashing)
        runs.append((whole, without))
    others = [name for name in NAMES if name != crashing]
    of_others = sum(share[name] for name in others)
    limit, deviations, ratios, parts = possible(what, share), list[float](), list[float](), list[float]()
    print(f"\nShares of {what}, {n_rounds} rounds of {seconds:g} s (load {os.getloadavg()[0]:.1f}): {told}\n")
    print(
        f"| kind | a step | environments | share | possible, {what}/s | all in order | share had | beside {crashing} | "
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, step_s, n in zip(NAMES, STEP_S, N_ENVS, strict=True):
        rate, beside = (statistics.median(run[which][name] for run in runs) for which in (0, 1))
        had = statistics.median(run[0][name] / sum(run[0].values()) for run in runs)
        had_beside = statistics.median(run[1][name] / sum(run[1][each] for each in others) for run in runs)
        ratio = statistics.median(run[1][name] / run[0][name] for run in runs)
        if name != crashing:
            deviations += [abs(had / share[name] - 1), abs(had_beside / (share[name] / of_others) - 1)]
            ratios.append(ratio)
        print(
            f"| {name} | {1e3 * step_s:.3g} ms | {n} | {share[name]:.2%} | {limit * share[name]:.4g} | {rate:.4g} | "
            f"{had:.2%} | {beside:.4g} ({ratio:.2f} times) |"
        )
    for which, names in ((0, NAMES), (1, others)):
        whole_share = sum(share[name] for name in names)
        parts.append(statistics.median(sum(run[which][name] for name in names) for run in runs) / limit / whole_share)
    print(
        f"\nof what is possible: {parts[0]:.1%}, beside the one that crashes {parts[1]:.1%}; "
        f"farthest from a share: {max(deviations):.1%} of it; slowest beside it: {min(ratios):.3f} times"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--of", nargs="+", choices=("steps", "time"), default=["steps", "time"])
    parser.add_argument("--crashes", choices=NAMES, default=CRASHES)
    arguments = parser.parse_args()
    for what in arguments.of:
        show(what, arguments.seconds, arguments.rounds, arguments.crashes)


if __name__ == "__main__":
    main()
