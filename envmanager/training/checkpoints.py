"""All that a training needs to go on, in a directory, there wholly or not at all.

::

    run/checkpoints/latest                   the name of the newest one
    run/checkpoints/best                     the name of the best one by evaluation, and its mean return
    run/checkpoints/000102400/state.json     what JSON can hold: counts, options, the state of generators
                             /agent.safetensors       the arrays of one behavior's trainer

The rule: a checkpoint is written under another name and flushed to the disk before ``latest`` or ``best`` names it;
those before it are removed only after that. A checkpoint is removed only under a name that ``save`` gives, and of it
only the files that its own ``state.json`` names: that is written first, so that this holds for an unfinished one too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs
import numpy as np

from envmanager.errors import NotWritten, UsageError
from envmanager.extras import needed_by
from envmanager.system.new_files import write_anew
from envmanager.training.array_files import ArrayFile

with needed_by("envmanager.training", extra="torch"):
    from safetensors import SafetensorError
    from safetensors.numpy import load_file, save_file

LATEST, BEST, _STATE = "latest", "best", "state.json"
_UNFINISHED = ".unfinished"
_NAME = re.compile(r"[0-9]{12,}(-[0-9]+)?")
_OWN_NAME = re.compile(rf"{_NAME.pattern}(\.[0-9a-f]{{8}}{re.escape(_UNFINISHED)})?")
_LONGEST_NAME = 100
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, SafetensorError)


@attrs.frozen
class Checkpoint:
    """``facts`` for JSON; ``arrays`` by file and name. ``facts["run"]`` tells the checkpoints of one training."""

    facts: dict[str, Any]
    arrays: Mapping[str, Mapping[str, np.ndarray]]


def save(directory: Path, n_steps: int, checkpoint: Checkpoint, *, keep: int = 1) -> Path:
    """Write the checkpoint after ``n_steps``, make it the latest, and return its folder.

    Raises NotWritten; the checkpoint before is then unchanged. Of the checkpoints that the same run wrote, the last
    ``keep`` and the best stay. Everything else in the directory stays too.
    """
    run = checkpoint.facts.get("run")
    number = 1 + max((_number(facts) for facts in _of_run(directory, run).values()), default=0)
    try:
        finished = _write(directory, n_steps, Checkpoint({**checkpoint.facts, "number": number}, checkpoint.arrays))
        write_anew(directory / LATEST, finished.name)
    except (OSError, SafetensorError) as error:
        last = named(directory / LATEST)
        is_there = last is not None and last.is_dir()
        advice = (
            f"The last one is whole, {last}: go on from it with --resume." if is_there else "There is none before it."
        )
        reason = getattr(error, "strerror", None) or error
        raise NotWritten(
            f"the checkpoint after {n_steps:,} steps cannot be written to {directory}: {reason}. {advice}"
        ) from error
    prune(directory, run, keep=keep)
    return finished


def _write(directory: Path, n_steps: int, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint under a name that says that it is not finished, then rename it."""
    name = f"{n_steps:012d}"
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f"{name}.{secrets.token_hex(4)}{_UNFINISHED}"
    unfinished.mkdir()  # a new folder, so nobody has put links into it
    try:
        _write_files(unfinished, checkpoint)
        finished = _free(directory, name)
        unfinished.rename(finished)
    except BaseException:
        remove(unfinished, checkpoint.facts)
        raise
    return finished


def prune(directory: Path, run: str | None, *, keep: int) -> None:
    """Remove the checkpoints of a run before its last ``keep``, except the latest and the best."""
    own = _of_run(directory, run)
    finished = [path for path in sorted(own, key=lambda path: _number(own[path])) if path.suffix != _UNFINISHED]
    kept = {*finished[-keep:], named(directory / LATEST), named(directory / BEST)}
    for path, facts in own.items():
        if path not in kept:
            remove(path, facts)


def mark_best(path: Path, mean: float) -> None:
    """Make this checkpoint the best of its directory, where an evaluation brought ``mean``. Raises NotWritten."""
    write_anew(path.parent / BEST, f"{path.name}\n{mean!r}\n")


def best_mean(directory: Path, run: str | None) -> float | None:
    """What the best checkpoint of this run brought; None when there is none."""
    path = named(directory / BEST)
    if path is None or path not in _of_run(directory, run):
        return None
    try:
        return float((directory / BEST).read_text().splitlines()[1])
    except (OSError, ValueError, IndexError):
        return None


def named(file: Path) -> Path | None:
    """The checkpoint that ``latest`` or ``best`` names, there or not; None when no training has written such a file."""
    try:
        with file.open("rb") as opened:
            name = opened.readline(_LONGEST_NAME).decode().strip()
    except (OSError, ValueError):
        return None
    return file.parent / name if _NAME.fullmatch(name) else None


def _of_run(directory: Path, run: str | None) -> dict[Path, dict[str, Any]]:
    return {path: facts for path, facts in own(directory).items() if facts.get("run") == run}


def _number(facts: Mapping[str, Any]) -> int:
    """The how-many-th of its run a checkpoint is."""
    number = facts.get("number")
    return number if isinstance(number, int) else 0


def load_latest(directory: Path, *, lazily: bool = False) -> Checkpoint:
    """Return the newest checkpoint; ``lazily`` reads arrays when they are asked for.

    Raises UsageError when there is none, or it cannot be read.
    """
    try:
        return _read(latest(directory), ArrayFile if lazily else load_file)
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


def own(directory: Path) -> dict[Path, dict[str, Any]]:
    """Return the checkpoints under names that ``save`` gives. One under another name is a copy that the user keeps."""
    return {path: facts for path, facts in written(directory).items() if _OWN_NAME.fullmatch(path.name)}


def written(directory: Path) -> dict[Path, dict[str, Any]]:
    """Return all checkpoints in a directory with their facts: finished or not, of any run, under any name."""
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


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
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
