"""Which engines are told that they may keep a core busy while they wait."""

from __future__ import annotations

from typing import Any

import pytest

from envmanager.godot import launch, worker
from envmanager.testing import EchoEnvironment
from envmanager.testing.fake_engine_manager import FakeEngineManager


@pytest.mark.parametrize(("n_cores", "may_spin"), [(2, False), (3, True)])
def test_engines_may_spin_where_there_is_a_core_for_each_and_one_for_the_trainer(
    mocker: Any, n_cores: int, may_spin: bool
) -> None:
    mocker.patch.object(launch, "count_cores", return_value=n_cores)
    configured = mocker.spy(worker, "configure_body")
    with FakeEngineManager(EchoEnvironment, 2):
        assert [call.kwargs["may_spin"] for call in configured.call_args_list] == [may_spin] * 2
