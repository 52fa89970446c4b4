"""Both contracts over the kind over TCP that docs/writing-a-manager.md shows, and the limit of its length."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from envmanager import EnvManager, Timeouts, Wait
from envmanager.hosts import descriptors
from envmanager.testing import FakeEnvironment, FaultContract, ManagerContract
from envmanager_tests.contract.kernel_contract import KernelContract
from envmanager_tests.faults.kernel_faults import KernelFaults
from envmanager_tests.faults.process_faults import ProcessFaults
from envmanager_tests.start_methods import SAMPLE_OF_DEATHS, SAMPLE_OF_STEPS

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "tcp_manager.py"
MOST_LINES = 250
SAMPLE_OF_VALUES = (
    "test_spaces_that_are_empty|test_values_that_do_not_survive|test_actions_that_survive|test_an_info_that_is_no_dict|"
    "test_multi_agent|test_an_observation_that_breaks"
)
"""Names of the tests about values that travel, which this connection packs in a way of its own."""


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
@pytest.mark.sample(SAMPLE_OF_STEPS + "|" + SAMPLE_OF_VALUES)
class TestTcpManager(OverTcp, ManagerContract, KernelContract):
    pass


@pytest.mark.start_methods
@pytest.mark.sample(SAMPLE_OF_DEATHS + "|test_case_06.*step|test_case_3[24]_")
class TestTcpManagerUnderFaults(OverTcp, KernelFaults, ProcessFaults, FaultContract):
    pass


def test_a_kind_over_a_network_takes_at_most_250_lines() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_connections_that_send_nothing_or_too_little_hold_up_neither_the_poller_nor_the_worker() -> None:
    channel = example().TcpChannel()
    host, _, port = channel.address.rpartition(":")
    address, opened = (host, int(port)), contextlib.ExitStack()
    try:
        with opened:
            for _ in range(20):
                opened.enter_context(socket.create_connection(address, timeout=10.0))
            for n_bytes in (1, example().TOKEN_BYTES - 1):
                stranger = opened.enter_context(socket.create_connection(address, timeout=10.0))
                stranger.sendall(b"0" * n_bytes)
                assert descriptors.wait_for([channel.fd], 10.0)
                assert not channel.accept()
                assert stranger.recv(1) == b"", "it was closed"
            assert not descriptors.wait_for([channel.fd], 0.0), "the poller is not woken by those that send nothing"
            worker = opened.enter_context(socket.create_connection(address, timeout=10.0))
            worker.sendall(channel.token.encode())
            assert descriptors.wait_for([channel.fd], 10.0)
            assert channel.accept()
            channel.push(b"hello", float("inf"))
            assert worker.recv(5) == b"hello"
    finally:
        channel.close()


def test_a_manager_starts_and_steps_while_strangers_are_connected_to_its_ports(monkeypatch: Any) -> None:
    strangers = contextlib.ExitStack()
    begin = example().TcpChannel.__init__

    def with_strangers(channel: Any) -> None:
        begin(channel)
        host, _, port = channel.address.rpartition(":")
        for _ in range(3):
            strangers.enter_context(socket.create_connection((host, int(port))))

    monkeypatch.setattr(example().TcpChannel, "__init__", with_strangers)
    timeouts = Timeouts(start_s=20.0)  # less than the time that six waits for a token would take
    with strangers, example().TcpEnvManager(FakeEnvironment, 2, timeouts=timeouts) as manager:
        manager.reset()
        assert manager.recv(Wait.all()).env_ids.tolist() == [0, 1]


def test_a_connection_without_the_token_is_refused_and_the_worker_is_awaited_further() -> None:
    channel = example().TcpChannel()
    host, _, port = channel.address.rpartition(":")
    try:
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"0" * example().TOKEN_BYTES)
            assert descriptors.wait_for([channel.fd], 10.0)
            assert not channel.accept()
        with socket.create_connection((host, int(port))) as worker:
            worker.sendall(channel.token.encode())
            assert channel.accept()
            channel.push(b"hello", float("inf"))
            assert worker.recv(5) == b"hello"
    finally:
        channel.close()
