"""All that a training needs to go on, in a directory, there wholly or not at all.

::

    run/checkpoints/latest                   the name of the newest one
    run/checkpoints/000102400/state.json     what JSON can hold: counts, options, the state of generators
                             /agent.safetensors       the arrays of one behavior's trainer

The rule: a checkpoint is written under another name and flushed to the disk before ``latest`` names it; the one before
it is removed only after that.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs
import numpy as np

from envmanager.errors import UsageError
from envmanager.extras import needed_by

with needed_by("envmanager.training", extra="torch"):
    from safetensors import SafetensorError
    from safetensors.numpy import load_file, save_file

_LATEST, _STATE = "latest", "state.json"


@attrs.frozen
class Checkpoint:
    """``facts`` for JSON; ``arrays`` by file and name."""

    facts: dict[str, Any]
    arrays: dict[str, dict[str, np.ndarray]]


def save(directory: Path, name: str, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint and make it the latest; where it is. Raises OSError, and then the one before still stands."""
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f"{name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    for file, arrays in checkpoint.arrays.items():
        whole = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
        save_file(whole, unfinished / f"{quote(file, safe='')}.safetensors")
        _flush(unfinished / f"{quote(file, safe='')}.safetensors")
    (unfinished / _STATE).write_text(json.dumps(checkpoint.facts, indent=1))
    _flush(unfinished / _STATE)
    finished = directory / name
    shutil.rmtree(finished, ignore_errors=True)
    unfinished.rename(finished)
    temporary = directory / f"{_LATEST}.unfinished"
    temporary.write_text(name)
    _flush(temporary)
    temporary.replace(directory / _LATEST)
    for old in directory.iterdir():
        if old.is_dir() and old.name != name:
            shutil.rmtree(old, ignore_errors=True)
    return finished


def load_latest(directory: Path) -> Checkpoint:
    """The newest checkpoint. Raises UsageError when there is none, or it cannot be read."""
    try:
        path = directory / (directory / _LATEST).read_text().strip()
        facts = json.loads((path / _STATE).read_text())
        arrays = {file: load_file(path / f"{quote(file, safe='')}.safetensors") for file in facts["files"]}
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no checkpoint in {directory} to resume from ({error.filename} is missing)."
        ) from error
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UsageError(f"the checkpoint in {directory} cannot be read: {error}.") from error
    return Checkpoint(facts, arrays)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def facts_and_arrays(states: Mapping[str, tuple[dict[str, np.ndarray], dict[str, Any]]]) -> Checkpoint:
    """One checkpoint from the states of several parts, by name."""
    facts = {"files": list(states), "parts": {name: own for name, (_, own) in states.items()}}
    return Checkpoint(facts, {name: arrays for name, (arrays, _) in states.items()})
