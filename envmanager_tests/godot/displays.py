"""A virtual display for engines with a window."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType

import pytest

from envmanager_tests.godot.driver import MISSING, find_engine


class VirtualDisplay:
    """An X server that draws into memory; as a context its name, such as ``":1"``. Skips the test without Xvfb."""

    def __enter__(self) -> str:
        if shutil.which("Xvfb") is None:
            pytest.skip("no virtual display: `apt-get install xvfb libgl1-mesa-dri` brings one")
        read_fd, write_fd = os.pipe()
        command = ["Xvfb", "-displayfd", str(write_fd), "-screen", "0", "640x480x24", "-nolisten", "tcp"]
        self._server = subprocess.Popen(command, pass_fds=[write_fd], stderr=subprocess.DEVNULL)
        os.close(write_fd)
        with os.fdopen(read_fd) as pipe:
            number = pipe.readline().strip()  # it comes when clients may connect
        assert number, "Xvfb did not start"
        return f":{number}"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.terminate()
        self._server.wait(10.0)


def environ_of(display: str) -> dict[str, str]:
    """The environment variables of an engine that opens its window on a display; "": that has none."""
    environ = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    return environ | {"LIBGL_ALWAYS_SOFTWARE": "1"} | ({"DISPLAY": display} if display else {})


def with_window(major: int) -> str:
    """The path of an engine that can open a window. Skips the test without one."""
    found = find_engine(4) if major == 4 else os.environ.get("ENVMANAGER_GODOT3_WINDOW") or shutil.which("godot3")
    if found is None:
        pytest.skip(MISSING[4] if major == 4 else "no Godot 3 with a window: `apt-get install godot3` brings one")
    return found
