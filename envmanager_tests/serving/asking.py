"""Questions to the server of a manager, by HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import gymnasium
import numpy as np
import pytest

from envmanager import RandomPolicy
from envmanager.serving.server import Server
from envmanager.testing import FakeEnvironment, Step

SCRIPT = [Step(1.0), Step(2.0), Step(3.0, terminated=True)]


def brief(_: Any = None) -> FakeEnvironment:
    """An environment whose episodes take three steps and return 6."""
    return FakeEnvironment(SCRIPT)


def succeeding(_: Any = None) -> Succeeding:
    return Succeeding()


class Succeeding(gymnasium.Env):  # type: ignore[misc]
    """An environment whose episodes of two steps succeed, and fail, by turns."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    n_episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.n_steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        if self.n_steps < 2:
            return np.zeros(1, np.float32), 1.0, False, False, {"is_success": False}
        self.n_episodes += 1
        return np.zeros(1, np.float32), 1.0, True, False, {"is_success": self.n_episodes % 2 == 1, "text": "no number"}


TIMEOUT_S = 60


def get(server: Server, path: str = "/data", *, token: str | None = None, **headers: str) -> Any:
    """The answer to a request with the server's token or ``token``, which may be ""."""
    url = f"http://127.0.0.1:{server.port}{path}"
    given = server.token if token is None else token
    authorization = {"Authorization": f"Bearer {given}"} if given else {}
    request = urllib.request.Request(url, headers={**authorization, **headers})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return answer.status, answer.headers, answer.read().decode()


def data_of(server: Server, after: int = 0) -> Any:
    return json.loads(get(server, f"/data?after={after}")[2])


def refusal(server: Server, path: str = "/data", **given: Any) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(server, path, **given)
    caught.value.close()
    return caught.value.code


def start(manager: Any, **options: Any) -> Server:
    """Serve a manager that is ready for steps."""
    for behavior, spec in manager.behavior_specs.items():
        manager.set_policy(behavior, RandomPolicy(spec))
    server: Server = manager.serve(**options)
    manager.reset(seed=0)
    return server
