"""What worker processes need of the trainer's process."""

from __future__ import annotations

import pytest
from pytest_mock import MockerFixture

from envmanager.errors import ManagerClosed
from envmanager.observe.events import EventLog
from envmanager.processes.process_host import ProcessResources


def test_a_worker_that_was_started_while_everything_was_given_back_is_given_back_too(mocker: MockerFixture) -> None:
    resources = ProcessResources(EventLog(), 1.0, spin_ns=0)
    resources.close()
    handle = mocker.Mock()
    with pytest.raises(ManagerClosed):
        resources.watch(handle)
    handle.release.assert_called_once_with()
