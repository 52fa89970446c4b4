"""Keys in a game's window that freeze or unfreeze a behavior. The engine reports each press as a ``Note`` event.

::

    numpad 2 in a window ── Note "toggle_frozen", {"behavior": "target"} ──▶ manager.events ──▶ pressed() ──▶ ["target"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envmanager.observe.events import Note

if TYPE_CHECKING:
    from envmanager.env_manager import EnvManager

NOTE = "toggle_frozen"
"""Name of the event. A game's script may send the event too, for example for a button."""


class FreezeKeys:
    """A reader of the freeze keys that were pressed in the windows of a manager's games."""

    def __init__(self, manager: EnvManager) -> None:
        self._events = manager.events
        self._n_seen = self._events.count(Note)

    def pressed(self) -> list[str]:
        """Return the behaviors whose keys were pressed since the last call, once per press. Names are not checked."""
        n_new = self._events.count(Note) - self._n_seen
        if n_new == 0:
            return []
        self._n_seen += n_new
        new = [event for event in self._events if isinstance(event, Note)][-n_new:]
        return [str(note.data.get("behavior")) for note in new if note.name == NOTE]
