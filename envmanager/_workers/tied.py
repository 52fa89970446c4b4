"""A process that cannot outlive this one: the kernel kills it when this one ends, whatever it is doing.

::

    TiedProcess(name, function, arguments) ── spawn ──▶ own group ── lifeline ──▶ imports ──▶ function(*arguments)

The rule: the child is tied before it imports what ``function`` and ``arguments`` need, which may take seconds; and the
write end of its life pipe is closed only after it has ended, because closing it kills.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from envmanager._workers import descriptors, lifeline
from envmanager._workers.processes import ChildProcess
from envmanager.system.process_tree import state_of

_STATES = {"R": "running", "S": "asleep", "D": "waiting for a device", "T": "stopped (SIGSTOP)", "t": "traced"}


class TiedProcess(ChildProcess):
    """A spawned process, the leader of its own group, tied to this process by a life pipe."""

    def __init__(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Start it. In the child, ``function(*arguments)`` runs with SIGINT blocked. OSError when it cannot start."""
        life_fd, self._life_write_fd = map(descriptors.register, os.pipe())
        try:
            super().__init__("spawn", name, _begin, (descriptors.Fd(life_fd), _Packed((function, arguments))))
        except BaseException:
            descriptors.close(self._life_write_fd)
            raise
        finally:
            descriptors.close(life_fd)  # the child has its own

    def state_name(self) -> str:
        """Return the state of its main thread: running, asleep, stopped; "unknown" where /proc does not tell."""
        return _STATES.get(state_of(self.pid), "unknown")

    def release(self) -> None:
        """Release its descriptors and reap it; kill it if it is still there."""
        super().release()
        descriptors.close(self._life_write_fd)


class _Packed:
    """A value that reaches a new process as bytes, which it unpickles when it is ready for the imports."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (bytes(ForkingPickler.dumps(self._value)),)


def _begin(life: descriptors.Fd, packed: bytes) -> None:
    """Run the child."""
    os.setpgid(0, 0)  # signals that a terminal sends to the group do not reach it
    lifeline.arm(life.fd)
    function, arguments = pickle.loads(packed)
    function(*arguments)
