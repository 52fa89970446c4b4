"""Which of the two ways of stepping a manager is in: policies inside, or actions from outside."""

from __future__ import annotations

import enum

from envmanager.errors import UsageError


class Use(enum.Enum):
    """Which of the two ways of stepping is in use between two resets, if any can be."""

    RESETTING = enum.auto()
    """A reset has begun and not ended: only another one may follow."""
    UNDECIDED = enum.auto()
    STEP = enum.auto()
    SEND_RECV = enum.auto()

    def require(self, wanted: Use) -> None:
        """UsageError unless ``wanted`` can be used now."""
        if self is Use.RESETTING:
            raise UsageError("the last reset() did not end: call reset() again.")
        if self not in (wanted, Use.UNDECIDED):
            raise UsageError("use either step() or send()/recv() between two resets, not both.")


RESETTING, UNDECIDED, STEP, SEND_RECV = Use  # in Python 3.11 looking one up takes as long as a call
