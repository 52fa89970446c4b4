"""Recordings as data sets of Minari."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import Any

from envmanager.data.trees import leaves
from envmanager.errors import UsageError
from envmanager.importing import needed_by
from envmanager.interop.spaces import to_space
from envmanager.recording.data import about, episodes, specs_of
from envmanager.recording.tape import same


def to_minari(path: str | Path, dataset_id: str, *, behavior: str = "default", **described: Any) -> Any:
    """Make a data set of Minari of the finished and lost episodes of a behavior, in all parts of a recording.

    Observations, actions and rewards are equal to the recorded ones, to the bit. Infos, options and tasks are left out.
    ``described``: further arguments of Minari's ``create_dataset_from_buffers``, such as ``author``, or
    ``jpeg_encoding=True`` for smaller images that differ from the recorded ones. Raises UsageError if there is no such
    behavior, if its observations were not recorded or are Python objects, or if Minari would change the data.
    """
    with needed_by("to_minari", extra="minari"):
        import minari
        from minari.data_collector import EpisodeBuffer
    specs = specs_of(path)
    if behavior not in specs:
        raise UsageError(f"the recording {path} has no behavior {behavior!r}, but {sorted(specs)}.")
    if not about(path)["observations"]:
        raise UsageError(f"{path} was recorded without observations.")
    spec = specs[behavior]
    for what, tree in (("observations", spec.observation), ("actions", spec.action)):
        if any(leaf.is_object for leaf in leaves(tree)):
            raise UsageError(
                f"the {what} of behavior {behavior!r} are texts or other Python objects, which to_minari cannot write: "
                "read them with envmanager.recording.episodes."
            )
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
    create = minari.create_dataset_from_buffers
    if "jpeg_encoding" in inspect.signature(create).parameters:  # not in older versions
        described = {"jpeg_encoding": False, **described}
    spaces = {"observation_space": to_space(spec.observation), "action_space": to_space(spec.action)}
    dataset = create(dataset_id, buffers, **spaces, **described)
    for buffer, written in zip(buffers, dataset.iterate_episodes(), strict=True):
        given, found = ((each.observations, each.actions) for each in (buffer, written))
        if not described.get("jpeg_encoding") and not same(given, found):
            with contextlib.redirect_stdout(None):
                minari.delete_dataset(dataset_id)
            raise UsageError(
                f"Minari {minari.__version__} does not keep the data of {path} as recorded (episode {buffer.id}), as "
                "older versions with images: update it (pip install --upgrade minari). No data set was made."
            )
    return dataset
