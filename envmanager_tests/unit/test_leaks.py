"""The leak guard blames this program for what it left behind, and for nothing of another's."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from envmanager.testing.leaks import Traces, nothing_left_behind, settle

SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def semaphores_that_come_and_go() -> Iterator[None]:
    """There is one at any moment, and none lasts: as other programs' multiprocessing makes them."""
    first_is_there, enough = threading.Event(), threading.Event()

    def come_and_go() -> None:
        previous: Path | None = None
        number = 0
        while not enough.is_set():
            present = SHARED_MEMORY / f"sem.mp-of-a-test-{os.getpid()}-{number}"
            present.touch()
            first_is_there.set()
            if previous is not None:
                previous.unlink()
            previous, number = present, number + 1
        if previous is not None:
            previous.unlink()

    before = threading.Thread(target=come_and_go)
    before.start()
    assert first_is_there.wait(60)
    try:
        yield
    finally:
        enough.set()
        before.join()


@pytest.fixture
def leak() -> Iterator[Callable[[], str]]:
    """A function that leaves shared memory with a name behind, and returns the name."""
    names = []

    def leave() -> str:
        memory = shared_memory.SharedMemory(create=True, size=8)
        memory.close()
        names.append(memory)
        return memory.name

    yield leave
    for memory in names:
        memory.unlink()


def test_semaphores_that_come_and_go_are_left_by_nobody() -> None:
    with semaphores_that_come_and_go():
        before = Traces.now()
        assert settle(before) == {}


def test_shared_memory_that_stays_is_left_behind_whatever_comes_and_goes(leak: Callable[[], str]) -> None:
    before = Traces.now()
    name = leak()
    with semaphores_that_come_and_go():
        assert settle(before, within_s=1.0)["shared memory"] == [name]


def test_shared_memory_of_another_user_is_no_leak_of_ours(
    leak: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_left_behind():
        leak()
        somebody_else = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: somebody_else)
