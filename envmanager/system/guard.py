"""Runs a command whose process is killed when the thread that started it ends, even by SIGKILL of its process.

::

    python -I -S guard.py PID command … ── prctl(PR_SET_PDEATHSIG) ── exec ──▶ command …

A script of its own, which imports little: it runs once for each process. Linux alone has this signal. Elsewhere the
command runs unguarded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9


def guarded(command: Sequence[str]) -> list[str]:
    """Return a command that runs ``command`` so that its process does not outlive the thread that starts it.

    On Linux the kernel kills the process when that thread ends, which may be by SIGKILL of the trainer. The command's
    own children are not killed. For environments that are coroutines, the thread is that of their event loop.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _run(parent_pid: str, *command: str) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() == int(parent_pid):  # else it has died before
        os.execvp(command[0], command)


if __name__ == "__main__":
    try:
        _run(*sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
