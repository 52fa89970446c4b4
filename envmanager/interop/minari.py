"""Recordings as data sets of Minari."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envmanager.errors import UsageError
from envmanager.importing import needed_by
from envmanager.interop.spaces import to_space
from envmanager.recording.data import about, episodes, specs_of


def to_minari(path: str | Path, dataset_id: str, *, behavior: str = "default", **described: Any) -> Any:
    """Make a data set of Minari of the finished episodes of a behavior, and return it.

    ``described``: further arguments of Minari's ``create_dataset_from_buffers``, such as ``author``. Raises UsageError
    if observations were not recorded or there is no such behavior.
    """
    with needed_by("to_minari", extra="minari"):
        import minari
        from minari.data_collector import EpisodeBuffer
    specs = specs_of(path)
    if behavior not in specs:
        raise UsageError(f"the recording {path} has no behavior {behavior!r}, but {sorted(specs)}.")
    if not about(path)["observations"]:
        raise UsageError(f"{path} was recorded without observations.")
    buffers = [
        EpisodeBuffer(
            id=number,
            seed=each.seed,
            observations=each.obs,
            actions=each.actions,
            rewards=each.rewards.tolist(),
            terminations=[*[False] * (each.length - 1), each.terminated],
            truncations=[*[False] * (each.length - 1), each.truncated or each.error is not None],
        )
        for number, each in enumerate(
            each for each in episodes(path) if each.behavior == behavior and each.length and not each.is_cut
        )
    ]
    return minari.create_dataset_from_buffers(
        dataset_id,
        buffers,
        observation_space=to_space(specs[behavior].observation),
        action_space=to_space(specs[behavior].action),
        **described,
    )
