"""``envmanager serve-env``: serve the environments of a manager by OpenEnv's protocol, until a signal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from envmanager.cli.output import PlainOutput
from envmanager.cli.plan import SERVE_TOKEN, address_of
from envmanager.cli.run import Notices, StopSignals
from envmanager.errors import ConfigError
from envmanager.interop.openenv import serve_env


def serve_until_stopped(manager: Mapping[str, Any], port: str, names: Sequence[str], *, verbose: bool) -> int:
    """Serve the manager of a table of a config at ``port``, and return the exit code when the server has ended."""
    output = PlainOutput()
    if manager.get("env") is None:
        raise ConfigError("There is no environment: name one, or a config whose manager table has `env`.")
    number, host = address_of(port, "--port") or (0, "")
    with Notices(output.show_notice, verbose=verbose), StopSignals() as signals:
        server = serve_env(manager, port=number, host=host, token=os.environ.get(SERVE_TOKEN), names=names)
        try:
            output.line(f"{manager['env']}: {server.max_sessions} sessions at {server.url}")
            server.wait()
        finally:
            signals.hold()
            server.close()
    return 1  # the server ended, and nobody has asked it to
