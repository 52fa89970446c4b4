"""All that a training needs to go on, in a directory, there wholly or not at all.

::

    run/checkpoints/latest                   the name of the newest one
    run/checkpoints/000102400/state.json     what JSON can hold: counts, options, the state of generators
                             /agent.safetensors       the arrays of one behavior's trainer

The rule: a checkpoint is written under another name and flushed to the disk before ``latest`` names it; the one before
it is removed only after that. Removed are files that a checkpoint's own ``state.json`` names, and nothing else: it is
written first, so that this holds for one that was never finished too.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs
import numpy as np

from envmanager.errors import UsageError
from envmanager.extras import needed_by
from envmanager.system.new_files import write_anew
from envmanager.training.array_files import ArrayFile

with needed_by("envmanager.training", extra="torch"):
    from safetensors import SafetensorError
    from safetensors.numpy import load_file, save_file

LATEST, _STATE = "latest", "state.json"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, SafetensorError)


@attrs.frozen
class Checkpoint:
    """``facts`` for JSON; ``arrays`` by file and name. ``facts["run"]`` tells the checkpoints of one training."""

    facts: dict[str, Any]
    arrays: Mapping[str, Mapping[str, np.ndarray]]


def save(directory: Path, name: str, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint and make it the latest; where it is. Raises OSError, and then the one before still stands.

    The checkpoints that the same run wrote before are removed. Whatever else is in the directory stays.
    """
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f"{name}.{secrets.token_hex(4)}.unfinished"
    unfinished.mkdir()  # anew, so nobody has put links into it
    try:
        _write(unfinished, checkpoint)
        finished = _free(directory, name)
        unfinished.rename(finished)
    except BaseException:
        remove(unfinished, checkpoint.facts)
        raise
    write_anew(directory / LATEST, finished.name)
    for old, facts in written(directory).items():
        if old != finished and facts.get("run") == checkpoint.facts.get("run"):
            remove(old, facts)
    return finished


def load_latest(directory: Path) -> Checkpoint:
    """The newest checkpoint. Raises UsageError when there is none, or it cannot be read."""
    try:
        return _read(latest(directory))
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no checkpoint in {directory} to resume from ({error.filename} is missing)."
        ) from error
    except _UNREADABLE as error:
        raise UsageError(f"the checkpoint in {directory} cannot be read: {error}.") from error


def latest(directory: Path) -> Path:
    """Where the newest checkpoint is. Raises OSError when there is none."""
    return directory / Path((directory / LATEST).read_text().strip()).name


def load(path: Path) -> Checkpoint:
    """The checkpoint in this folder, whose arrays are read when asked for. Raises UsageError when it cannot be read."""
    try:
        return _read(path, ArrayFile)
    except _UNREADABLE as error:
        raise UsageError(f"the checkpoint {path} cannot be read: {error}.") from error


def _read(path: Path, read: Callable[[Path], Mapping[str, np.ndarray]] = load_file) -> Checkpoint:
    facts = json.loads((path / _STATE).read_text())
    return Checkpoint(facts, {file: read(_arrays_in(path, file)) for file in facts["files"]})


def written(directory: Path) -> dict[Path, dict[str, Any]]:
    """The checkpoints in a directory, finished or not, of whichever run, with their facts."""
    found = {}
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        facts = _facts_of(path)
        if facts is not None:
            found[path] = facts
    return found


def remove(path: Path, facts: Mapping[str, Any]) -> None:
    """Remove the files of a checkpoint, and its folder if nothing else is in it. What cannot be removed stays."""
    for own in [*(_arrays_in(path, file) for file in facts["files"]), path / _STATE]:
        with contextlib.suppress(OSError):
            own.unlink()
    with contextlib.suppress(OSError):
        path.rmdir()


def facts_and_arrays(
    states: Mapping[str, tuple[dict[str, np.ndarray], dict[str, Any]]], *, run: str | None
) -> Checkpoint:
    """One checkpoint from the states of several parts, by name; ``run`` tells those of one training from others."""
    facts = {"run": run, "files": list(states), "parts": {name: own for name, (_, own) in states.items()}}
    return Checkpoint(facts, {name: arrays for name, (arrays, _) in states.items()})


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    (folder / _STATE).write_text(json.dumps(checkpoint.facts, indent=1))
    _flush(folder / _STATE)
    for file, arrays in checkpoint.arrays.items():
        save_file({key: np.ascontiguousarray(array) for key, array in arrays.items()}, _arrays_in(folder, file))
        _arrays_in(folder, file).chmod((folder / _STATE).stat().st_mode)  # as the umask has it; safetensors' is 0600
        _flush(_arrays_in(folder, file))


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _free(directory: Path, name: str) -> Path:
    """``name``, or if that is taken (a training that stopped at the step at which it was resumed), ``name-2``, …"""
    return next(path for path in _candidates(directory / name) if not os.path.lexists(path))


def _candidates(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1


def _arrays_in(folder: Path, file: str) -> Path:
    return folder / f"{quote(file, safe='')}.safetensors"


def _facts_of(path: Path) -> dict[str, Any] | None:
    """What the ``state.json`` in a folder says; None when this is no checkpoint, or only a link to one."""
    if path.is_symlink() or not path.is_dir() or (path / _STATE).is_symlink() or not (path / _STATE).is_file():
        return None
    try:
        facts = json.loads((path / _STATE).read_text())
        is_ours = all(isinstance(file, str) for file in facts["files"]) and isinstance(facts["parts"], dict)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return facts if is_ours else None
