"""The trainer's side of the guardian, which keeps lifelines for workers that lose their own (see ``lifeline``).

The rule: it is a process with nothing of the trainer's but a socket and the life pipe's read end, in a session of its
own. It is killed, not asked, at the end: there is nothing that it could leave undone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from multiprocessing import spawn

from envmanager._workers import descriptors, guard, lifeline
from envmanager.system.interrupts import blocked_in_children


class Guardian:
    """A guardian process; workers get ``fd`` to leave their lifelines with it."""

    def __init__(self, life_fd: int) -> None:
        """Start it, and do not wait for it: what it is sent stays in the socket, and counts as held, till it reads."""
        ours, theirs = socket.socketpair()
        program = [os.fsdecode(spawn.get_executable()), "-S", guard.__file__]
        try:
            with theirs, blocked_in_children():
                self._process = subprocess.Popen(
                    [*program, str(theirs.fileno()), str(life_fd), str(lifeline.NAME.size)],
                    pass_fds=(theirs.fileno(), life_fd),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        with contextlib.suppress(OSError):  # where the kernel refuses, it waits for the end of the life pipe
            line = lifeline.line_for(life_fd, self._process.pid)
            socket.send_fds(ours, [lifeline.GUARDIAN], [line])
            os.close(line)
        self.fd = descriptors.register(ours.detach())

    def let_go(self, name: bytes) -> None:
        """The worker has ended and its group is gone. A guardian that cannot read it will go at the end anyway."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fd)) as guardian:
            guardian.send(name, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def end(self) -> None:
        """Kill it and give back what it took."""
        self._process.kill()
        self._process.wait()
        descriptors.close(self.fd)
