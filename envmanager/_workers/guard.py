"""The guardian's program: hold what workers bring, let go what the trainer names, until the trainer closes or dies.

The rule: it imports what is written in C alone. Each manager starts a guardian, and the modules in Python above these
(``os``, ``signal``, ``socket``) would take more than half of its start.
"""

import _signal  # type: ignore[import-not-found]
import _socket
import posix
import resource
import select
import sys

_FD_BYTES = 4


def guard(trainer_fd: int, life_fd: int, name_bytes: int) -> None:
    """Hold the lifelines of each worker, two of them, by the name of so many bytes that comes with them."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    posix.chdir("/")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    lines_of: dict[bytes, list[int]] = {}
    trainer = _socket.socket(fileno=trainer_fd)
    while True:
        name, ancillary, _, _ = trainer.recvmsg(name_bytes, _socket.CMSG_SPACE(2 * _FD_BYTES))
        if not name:  # the trainer is dying, and has not closed the life pipe yet
            _wait_for(life_fd)
            return
        for line in lines_of.pop(name, ()):
            posix.close(line)
        for _, _, data in ancillary:
            lines_of[name] = memoryview(data).cast("i").tolist()


def _wait_for(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()


if __name__ == "__main__":
    guard(*map(int, sys.argv[1:]))
