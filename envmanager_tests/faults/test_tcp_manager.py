"""Both contracts over the kind over TCP that docs/writing-a-manager.md shows, and the limit of its length."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from envmanager import EnvManager
from envmanager.testing import FaultContract, ManagerContract
from envmanager_tests.faults.kernel_faults import KernelFaults
from envmanager_tests.faults.process_faults import ProcessFaults

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "tcp_manager.py"
MOST_LINES = 250


@cache
def example() -> Any:
    spec = importlib.util.spec_from_file_location("tcp_manager", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tcp_manager"] = module
    spec.loader.exec_module(module)
    return module


class OverTcp:
    start_s = 20.0  # each worker imports all it needs by itself

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        options.pop("zero_copy", None)  # no memory is shared
        manager: EnvManager = example().TcpEnvManager(env_factory, n_envs, **options)
        return manager


@pytest.mark.start_methods
class TestTcpManager(OverTcp, ManagerContract):
    pass


@pytest.mark.start_methods
class TestTcpManagerUnderFaults(OverTcp, KernelFaults, ProcessFaults, FaultContract):
    pass


def test_a_kind_over_a_network_takes_at_most_250_lines() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_a_connection_without_the_token_is_refused_and_the_worker_is_awaited_further() -> None:
    import socket

    channel = example().TcpChannel()
    host, _, port = channel.address.rpartition(":")
    try:
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"0" * example().TOKEN_BYTES)
            assert not channel.accept()
        with socket.create_connection((host, int(port))) as worker:
            worker.sendall(channel.token.encode())
            assert channel.accept()
            channel.push(b"hello", float("inf"))
            assert worker.recv(5) == b"hello"
    finally:
        channel.close()
