"""A wait that is stopped loses no step, and workers that hang do not hold up the end."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from envmanager import ActionInfo, CallStopped, RestartPolicy, SubprocessEnvManager, Timeouts

LONG = Timeouts(step_s=1000, close_s=1000)


class Hangs(gymnasium.Env[Any, Any]):
    """Counts its steps, and hangs in each as long as there is a file."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._n = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if self._file.exists():
            threading.Event().wait()
        self._n += 1
        return np.full(1, self._n, np.float32), 1.0, False, False, {}


class Still:
    def get_action(self, steps: Any) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


def test_the_steps_that_were_in_flight_come_after_a_stop(tmp_path: Path) -> None:
    def made() -> SubprocessEnvManager:
        kept: Any = {"wait": "all", "restarts": RestartPolicy(keep_episodes=True), "timeouts": LONG}
        manager = SubprocessEnvManager(partial(Hangs, str(tmp_path / "file")), 4, n_workers=2, **kept)
        manager.set_policy("default", Still())
        return manager

    with made() as manager:
        manager.reset()
        manager.step()
        (tmp_path / "file").touch()
        manager.stop_waiting()
        with pytest.raises(CallStopped):
            manager.step()
        state = manager.state()
    (tmp_path / "file").unlink()
    with made() as manager:
        assert manager.reset(state=state) == []
        infos = manager.step()
        assert [info.current["default"].obs.ravel().tolist() for info in infos] == [[2.0, 2.0], [2.0, 2.0]]


def test_a_stop_from_another_thread_ends_a_wait(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with SubprocessEnvManager(partial(Hangs, str(file)), 2, timeouts=LONG) as manager:
        manager.set_policy("default", Still())
        manager.reset()
        file.touch()
        other = threading.Thread(target=manager.stop_waiting)
        other.start()
        with pytest.raises(CallStopped):
            manager.step()
        other.join()
