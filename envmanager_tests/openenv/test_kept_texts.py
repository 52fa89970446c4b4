"""Episodes of texts that go on, after their server or their process has ended: the texts are those without a fault."""

from __future__ import annotations

import os
import random
import signal
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from envmanager import AsyncioEnvManager, EnvContext, RestartPolicy, SubprocessEnvManager
from envmanager.adapters.factories import call_factory, resolve
from envmanager.observe.events import Died, EpisodesKept, Raised, ServerBack
from envmanager_tests.openenv.test_sessions import serving

pytest.importorskip("openenv", reason="OpenEnv is not installed: make test-openenv")

N = 4
KEPT = RestartPolicy(max_restarts=1000, backoff_s=0, keep_episodes=True, on_exception="restart")


def rows_of(
    manager: Any, act: Callable[[Any, int], Any], meanwhile: Callable[[int], Any] = lambda _: None, n_rounds: int = 30
) -> list[list[Any]]:
    """The first rows of each environment. ``act``: from an observation and the number of its row to the action."""
    manager.reset()
    rows: list[list[Any]] = [[] for _ in range(manager.n_envs)]
    while min(map(len, rows)) < n_rounds:
        batch = manager.recv("all")
        assert not batch.lost.any()
        ended, n_ended, actions = batch.terminated | batch.truncated, 0, []
        for row, env_id in enumerate(batch.env_ids.tolist()):
            final = batch.final_obs[n_ended] if ended[row] else None
            n_ended += int(ended[row])
            rows[env_id].append((batch.obs[row], float(batch.reward[row]), bool(batch.terminated[row]), final))
            actions.append(act(batch.obs[row], len(rows[env_id])))
        manager.send(actions, batch.env_ids)
        meanwhile(min(map(len, rows)))
    return [own[:n_rounds] for own in rows]


def add(obs: Any, number: int) -> Any:
    return {"add": (obs["total"] + number) % 3}


def say(obs: Any, number: int) -> str:
    return f"[{zlib.crc32(repr((obs, number)).encode()) % 9}]"


def guess(obs: Any, number: int) -> str:
    return f"\\boxed{{{zlib.crc32(repr((obs, number)).encode()) % 60}}}"


def killer(manager: Any, every: int = 9) -> Callable[[int], None]:
    """Kill a process while its step is in flight, after each ``every`` rows."""
    dice, at = random.Random(0), [every]

    def kill(n_rows: int) -> None:
        worker = manager.stats().workers[dice.randrange(manager.n_workers)]
        if n_rows >= at[0] and not worker.replacing:
            at[0] += every
            os.kill(worker.pid, signal.SIGKILL)

    return kill


def test_sessions_of_a_server_that_is_killed_and_back_go_on_in_the_middle_of_their_episodes() -> None:
    with serving(2 * N) as server:
        config: Any = {"seed": 1, "restarts": KEPT}
        with AsyncioEnvManager({"openenv": server.url}, N, **config) as manager:
            expected = rows_of(manager, add)
        backs: list[threading.Thread] = []

        def kill(n_rows: int) -> None:
            if n_rows >= 10 * (len(backs) + 1) and len(backs) < 2:
                server.kill()
                backs.append(threading.Thread(target=server.start))
                backs[-1].start()

        with AsyncioEnvManager({"openenv": server.url}, N, **config) as manager:
            rows = rows_of(manager, add, kill)
            for each in backs:
                each.join()
            assert manager.events.count(ServerBack) == len(backs) == 2
            assert manager.stats().episodes_kept == 2 * N
    assert rows == expected


TEXTS = pytest.mark.parametrize(
    ("env", "act"),
    [("textarena:TicTacToe-v0", say), ("gem:game:GuessTheNumber-v0-easy", guess), ("reasoning_gym:chain_sum", say)],
)


@TEXTS
def test_texts_of_processes_that_are_killed_are_as_without_a_kill(env: str, act: Any) -> None:
    def texts(*, kills: bool) -> Any:
        with SubprocessEnvManager(env, 2, seed=1, restarts=KEPT) as manager:
            rows = rows_of(manager, act, killer(manager) if kills else lambda _: None)
            assert manager.events.count(Died) == manager.events.count(EpisodesKept) >= 3 * kills
            return rows

    assert texts(kills=True) == texts(kills=False)


@TEXTS
def test_texts_of_a_session_that_raises_are_as_without_an_exception(env: str, act: Any) -> None:
    def texts(failing: tuple[int, ...]) -> Any:
        due: list[int] = []

        def make(context: EnvContext) -> Any:
            made = call_factory(resolve(env), context)
            (inner,) = getattr(made, "envs", [made])
            step = inner.step

            def stepped(action: Any) -> Any:
                if due:
                    raise ValueError(f"a fault at row {due.pop()}")
                return step(action)

            inner.step = stepped
            return made

        with AsyncioEnvManager(make, 1, seed=1, restarts=KEPT) as manager:
            rows = rows_of(manager, lambda obs, number: due.extend({number} & {*failing}) or act(obs, number))
            assert manager.events.count(Raised) == len(failing)
            return rows

    assert texts((5, 13, 22)) == texts(())
