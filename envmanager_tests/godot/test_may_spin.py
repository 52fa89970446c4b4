"""Who may keep a core busy while it waits, and what a wait asleep costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envmanager.godot import channel, engine_host, messages
from envmanager.hosts import spin
from envmanager.hosts.spin import MANY, SPIN_NS
from envmanager.testing import EchoEnvironment
from envmanager_tests.godot.fake_engine_manager import FakeEngineManager


@pytest.mark.parametrize(("n_cores", "may_spin"), [(2, False), (3, True)])
def test_engines_may_spin_where_there_is_a_core_for_each_and_one_for_the_trainer(
    mocker: Any, n_cores: int, may_spin: bool
) -> None:
    mocker.patch.object(engine_host, "count_cores", return_value=n_cores)
    configured = mocker.spy(messages, "configure_body")
    with FakeEngineManager(EchoEnvironment, 2):
        assert [call.kwargs["may_spin"] for call in configured.call_args_list] == [may_spin] * 2


@pytest.mark.parametrize(
    ("n_engines", "spin_ns"), [(1, engine_host.LONG_SPIN_NS), (2, SPIN_NS), (2 * MANY, SPIN_NS), (2 * MANY + 1, 0)]
)
def test_a_trainer_with_a_core_besides_its_engines_spins_longer(mocker: Any, n_engines: int, spin_ns: int) -> None:
    mocker.patch.object(engine_host, "count_cores", return_value=2)
    mocker.patch.object(spin, "count_cores", return_value=2)
    assert engine_host.trainer_spin_ns(n_engines) == spin_ns


def test_an_engine_that_is_waited_for_asleep_is_read_once_a_step(mocker: Any) -> None:
    mocker.patch.object(engine_host, "trainer_spin_ns", return_value=0)
    with FakeEngineManager(EchoEnvironment, 1) as manager:
        manager.reset()
        manager.recv()
        reads = mocker.spy(channel.os, "readv")
        for number in range(50):
            manager.send(np.array([number]), [0])
            manager.recv()
        assert reads.call_count < 75
