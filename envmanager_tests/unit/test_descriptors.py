"""How many descriptors there is room for."""

from __future__ import annotations

import os

import pytest

from envmanager.errors import UsageError
from envmanager.hosts import descriptors


def test_room_is_required_up_to_the_limit_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource", reason="Windows has no such limit")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, resource.RLIM_INFINITY))
    monkeypatch.setattr(os, "listdir", lambda _: [str(fd) for fd in range(40)])

    descriptors.require_room(60)
    with pytest.raises(UsageError, match="would need 101: raise the limit"):
        descriptors.require_room(61)
