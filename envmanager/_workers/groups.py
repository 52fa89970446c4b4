"""Signals a process and what it has started (its process group), and never a stranger.

A process number is free again once its process has been reaped and its group is empty. Whoever gets it next may lead a
group of that number too, and ``killpg`` would hit that one. While a process is unreaped, alive or not, its number is
its own.

The rule: a group is signalled by its leader's parent alone, and before the leader is reaped. Everybody else signals the
leader, through its pidfd; what is left of the group ends when the leader is buried.
"""

from __future__ import annotations

import contextlib
import os
import signal


def is_ours(pidfd: int) -> bool:
    """Whether the process is a child of this one, and unreaped."""
    try:
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def send(pid: int, pidfd: int, number: int) -> None:
    """Signal the process, and its group where that is safe. Nothing happens when they are gone."""
    _send_to_group(pid, pidfd, number)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def bury(pid: int, pidfd: int) -> int | None:
    """End the group of a child that has ended, then reap the child; its exit code, negative for a signal.

    None for a child of another process, and when the user's code has reaped it.
    """
    _send_to_group(pid, pidfd, signal.SIGKILL)
    try:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:
        return None
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _send_to_group(pid: int, pidfd: int, number: int) -> None:
    if is_ours(pidfd):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
