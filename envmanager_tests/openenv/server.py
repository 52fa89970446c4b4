"""A real OpenEnv server: ``python -m envmanager_tests.openenv.server PORT N_SESSIONS``. It ends with its input."""

from __future__ import annotations

import os
import sys
import threading
import time

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Sum(Action):
    """Adds a number, or sleeps, or raises, before it answers."""

    add: int
    sleep_s: float = 0.0
    fails: bool = False


class Total(Observation):
    """The sum of the episode, and what the episode was begun with."""

    total: int
    begun_with: dict


class Adder(Environment):
    """An episode ends when its sum has reached its goal."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._total, self._goal, self._begun_with = 0, 10, {}

    def reset(self, seed=None, episode_id=None, **options):
        if options.get("fails"):
            raise ValueError("this level does not exist")
        self._total, self._goal, self._begun_with = (
            options.get("start", 0),
            options.get("goal", 10),
            options | {"seed": seed},
        )
        return self._observation()

    def step(self, action, timeout_s=None, **_):
        time.sleep(action.sleep_s)
        if action.fails:
            raise RuntimeError("the calculator is broken")
        self._total += action.add
        return self._observation(float(action.add))

    def _observation(self, reward=None):
        return Total(total=self._total, begun_with=self._begun_with, reward=reward, done=self._total >= self._goal)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    app = create_fastapi_app(Adder, Sum, Total, max_concurrent_envs=int(sys.argv[2]))

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            print("listens", flush=True)

    Server(uvicorn.Config(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")).run()
