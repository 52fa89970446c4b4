"""Modules that the helper has before the first worker needs them."""

from __future__ import annotations

import socket


def preload(*modules: str) -> None:
    """Let the helper import modules, without waiting for that."""
    from envmanager.processes import helper, starting  # which need Linux

    ours, theirs = socket.socketpair()
    ours.close()  # so that it starts no process
    with theirs:
        starting.find_helper().ask(helper.Request(helper.FORK, modules, [theirs.fileno()]))
