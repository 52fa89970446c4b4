"""Managers of Duels whose workers are fakes, and answer when a test says so."""

from __future__ import annotations

import contextlib
import gc
import queue
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pytest_mock import MockerFixture

from envmanager import EnvironmentResponse, SubprocessEnvManager
from envmanager.testing import FakeWorker
from envmanager_tests.envs import Duel
from envmanager_tests.preloading import preload


class Answers(queue.Queue[EnvironmentResponse]):
    """A step queue whose workers answer late when somebody waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.when_waiting: Callable[[], None] = lambda: None

    def get(self, *args: Any, **options: Any) -> EnvironmentResponse:
        if self.empty() and options.get("timeout"):
            self.when_waiting()
        return super().get(*args, **options)


@pytest.fixture
def duels(mocker: MockerFixture) -> Iterator[Any]:
    """Three Duels, one per worker. ``manager.env_workers[k].hold = True`` has one answer late."""
    answers = Answers()
    mocker.patch.object(
        SubprocessEnvManager,
        "create_worker",
        side_effect=lambda worker_id, _, factory: FakeWorker(worker_id, answers, factory),
    )
    with SubprocessEnvManager(Duel, n_envs=3) as manager:
        manager.step_queue = answers
        yield manager


@pytest.fixture
def speakers() -> Iterator[None]:
    """mpe2 is there. Its environments keep a font open until they are collected."""
    pytest.importorskip("mpe2")
    yield
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def loaded_once() -> None:
    """Workers find PyTorch in the helper: an environment of a test comes with its module, and that with PyTorch."""
    if sys.platform == "linux":
        preload("torch")


@pytest.fixture(scope="session", autouse=True)
def cuda() -> None:
    """CUDA keeps its descriptors open until the program ends, so it starts before the leak guard of the first test."""
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            torch.zeros(1).pin_memory().to("cuda")
