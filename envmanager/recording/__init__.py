"""Recordings of runs: what workers sent and when the trainer got it, to be replayed or read as data.

::

    manager ── Recorder ──▶ run.emrec ──▶ ReplayEnvManager      the same run again, without environments
                                     ├──▶ order=…               the same order again, with environments
                                     └──▶ episodes(), table()   data

Its names are imported when they are used.
"""

import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envmanager.recording.data import RecordedEpisode, about, episodes, table
    from envmanager.recording.file import BadRecording
    from envmanager.recording.tape import RecordingEnded, ReplayDiverged

__all__ = [
    "BadRecording", "RecordedEpisode", "RecordingEnded", "ReplayDiverged", "about", "episodes", "table",
]  # fmt: skip
_HOMES = {
    "data": ("RecordedEpisode", "about", "episodes", "table"),
    "file": ("BadRecording",),
    "tape": ("RecordingEnded", "ReplayDiverged"),
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'envmanager.recording' has no attribute {name!r}")
    return pkgutil.resolve_name(f"envmanager.recording.{home}:{name}")
