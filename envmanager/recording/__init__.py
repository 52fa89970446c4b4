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
    from envmanager.recording.codec import Apart
    from envmanager.recording.data import RecordedEpisode, about, episodes, table
    from envmanager.recording.file import BadRecording
    from envmanager.recording.place import position
    from envmanager.recording.tape import RecordingEnded, ReplayDiverged

__all__ = [
    "Apart", "BadRecording", "RecordedEpisode", "RecordingEnded", "ReplayDiverged", "about", "episodes", "position",
    "table",
]  # fmt: skip
_ELSEWHERE = {
    "Apart": "codec", "BadRecording": "file", "RecordingEnded": "tape", "ReplayDiverged": "tape", "position": "place",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'envmanager.recording' has no attribute {name!r}")
    return pkgutil.resolve_name(f"envmanager.recording.{_ELSEWHERE.get(name, 'data')}:{name}")
