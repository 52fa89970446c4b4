"""What worker processes need of the trainer's process."""

from __future__ import annotations

import pytest
from pytest_mock import MockerFixture

from envmanager.errors import ManagerClosed
from envmanager.hosts.link import Link
from envmanager.hosts.link_host import Resources
from envmanager.hosts.poller import Poller


def test_a_worker_that_was_started_while_everything_was_given_back_is_given_back_too(mocker: MockerFixture) -> None:
    resources: Resources[Link] = Resources(1.0, Poller())
    resources.close()
    handle = mocker.Mock()
    with pytest.raises(ManagerClosed):
        resources.watch(handle)
    handle.release.assert_called_once_with()
