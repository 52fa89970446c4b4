"""Checkpoints: folders with the data that a training run needs to resume.

::

    run/checkpoints/latest                   name of the newest checkpoint
    run/checkpoints/best                     name of the best checkpoint by evaluation, its mean return, and a checksum
    run/checkpoints/evaluated                name of the checkpoint that was evaluated at the end of the training
    run/checkpoints/000000102400/state.json  JSON data, such as counts and the training's options, and all checksums
                                /trainer-agent.safetensors    the arrays of the trainer of the behavior "agent"
                                /controller.safetensors       the states of PyTorch's random generators
                                /place.safetensors            running episodes, see ``TrainerController.place``

A checkpoint is written under a temporary name, flushed to disk and renamed before ``latest`` or ``best`` refers to it.
Then the run's other checkpoints, finished or not, are removed, except the last few, the best and renamed ones. Only
``state.json`` and the files listed in it are removed. ``load`` checks all of ``state.json`` except the trainers' parts.
An array is compared with its checksum when it is read, so a policy is loaded without reading the replay beside it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import attrs
import numpy as np

from envmanager.data.specs import BehaviorSpec
from envmanager.errors import EnvManagerError, ImportFailed, NotWritten, UsageError
from envmanager.importing import needed_by
from envmanager.keeping.state import checksum_of
from envmanager.observe.episodes import FinishedEpisode
from envmanager.observe.files import write_atomically
from envmanager.options import at_least
from envmanager.training.algorithms.states import from_plain, to_plain
from envmanager.training.curriculum import CurriculumState, LessonBegan
from envmanager.training.learner_process import LearnerFailed
from envmanager.training.learners import LearnersChanged, LearnersState
from envmanager.training.runs.plan import LATEST, SavedPlan
from envmanager.training.trainer import Arrays, Trainer

with needed_by("envmanager.training", extra="torch"):
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file

BEST, EVALUATED, STATE = "best", "evaluated", "state.json"
_CONTROLLER, _PLACE, _TRAINER = "controller", "place", "trainer-"
"""Names of the controller's parts of a checkpoint, and prefix of the name of each trainer's part."""
_UNFINISHED, _TRACEBACK = ".unfinished", "Traceback (most recent call last)"
_NAME = re.compile(r"[0-9]{12,}(-[0-9]+)?")
_AFTER_THE_STEPS = re.compile(rf"(-([2-9]|[1-9][0-9]+))?(\.[0-9a-f]{{8}}{re.escape(_UNFINISHED)})?")
"""Pattern for the part after the number of steps in a folder name that ``save`` made."""


@attrs.frozen(kw_only=True)
class TrainingState:
    """The state of a training run without its trainers' states."""

    n_steps: int = attrs.field(validator=at_least(0))
    recent_episodes: tuple[FinishedEpisode, ...] = ()
    recent_measures: tuple[dict[str, float], ...] = ()
    """Measures of each of the recent episodes."""
    learners: LearnersState = attrs.field(factory=lambda: LearnersState(frozen=()))
    """Frozen behaviors and the progress of the round."""
    frozen_in_config: tuple[str, ...] = ()
    changes: tuple[LearnersChanged, ...] = ()
    """Requested changes of the frozen behaviors, oldest first."""
    curriculum: CurriculumState = attrs.field(factory=CurriculumState)
    """Lessons, and number of tasks, of the environment parameters."""
    lessons: tuple[LessonBegan, ...] = ()
    """Lessons that have begun, oldest first, but for the first ones."""
    control: tuple[int, ...] | None = None
    """``ControlFile.state``, which identifies the version of ``control.toml`` that was read last."""
    plan: SavedPlan | None = None
    specs: dict[str, BehaviorSpec] = attrs.field(factory=dict)
    """Specs of observations and actions, by behavior."""
    evaluated_at: int | None = None
    """Agent steps of the training at the last evaluation on the way; None in checkpoints without."""
    owes_evaluation: bool = False
    """Whether all steps are taken, and the evaluation at the end is to come; the file ``evaluated`` says it came."""
    n_episodes: int | None = None
    """Number of rows in the table of episodes; None in checkpoints without."""


@attrs.frozen(kw_only=True)
class Checkpoint:
    """The content of a checkpoint: the data that a training run needs to resume.

    ``trainers``: results of ``Trainer.state``, by behavior. ``generators``: states of PyTorch's random generators.
    ``run``: id of the training run, the same in all its checkpoints. ``place``: arrays and JSON data of where the loop
    stands, which ``unpacked`` joins; None if the environments cannot go on.
    """

    training: TrainingState
    trainers: Mapping[str, tuple[Arrays, Mapping[str, Any]]] = attrs.field(factory=dict)
    generators: Arrays = attrs.field(factory=dict)
    run: str | None = None
    place: tuple[Arrays, Any] | None = None


class ArrayFile(Mapping[str, np.ndarray]):
    """The arrays in a safetensors file, by name. Each array is read from disk only when it is accessed.

    ``checksums`` has the names and checksums of all arrays. An open file stays readable after it is deleted. Raises
    CheckpointDamaged if the file cannot be opened or has other arrays, and later for an array with another checksum.
    """

    def __init__(self, path: Path, checksums: Mapping[str, int]) -> None:
        self._path, self._checksums = path, checksums
        with _reading(path):
            self._file = cast(Any, safe_open(path, framework="numpy"))
            if set(self._file.keys()) != set(checksums):
                raise ValueError("its arrays are not those that were written")

    def __getitem__(self, name: str) -> np.ndarray:
        expected = self._checksums[name]
        with _reading(self._path):
            array: np.ndarray = self._file.get_tensor(name)
            if checksum_of(array) != expected:
                raise ValueError(f"{name} is not what was written: its checksum differs")
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._checksums)

    def __len__(self) -> int:
        return len(self._checksums)


class CheckpointDamaged(UsageError):
    """Error raised when a file of a checkpoint cannot be read or is not what was written."""


def save(directory: Path, checkpoint: Checkpoint, *, keep: int = 1, best: float | None = None) -> Path:
    """Write ``checkpoint``, make it the latest, remove old checkpoints of the same run, and return the new folder.

    With ``best``, its mean return, it becomes the best one just before, so that no latest checkpoint knows of an
    evaluation whose mean is lost.

    The last ``keep`` checkpoints, including the new one, and the best one are kept. Unfinished checkpoints of the run
    are removed, if possible. If writing fails, NotWritten is raised and no older checkpoint is removed.
    """
    n_steps, run = checkpoint.training.n_steps, checkpoint.run
    try:
        number = 1 + max((_number(facts) for facts in _of_run(directory, run).values()), default=0)
        finished = _write(directory, checkpoint, number)
        if best is not None:
            mark_best(finished, best)
        write_atomically(directory / LATEST, finished.name)
    except (OSError, SafetensorError) as error:
        last = named(directory / LATEST)
        is_there = last is not None and last.is_dir()
        advice = (
            f"The last one, {last}, is complete: resume from it (--resume)." if is_there else "There is no earlier one."
        )
        reason = getattr(error, "strerror", None) or error
        raise NotWritten(
            f"the checkpoint after {n_steps:,} agent steps cannot be written to {directory}: {reason}. {advice}"
        ) from error
    prune(directory, run, keep=keep)
    return finished


def _write(directory: Path, checkpoint: Checkpoint, number: int) -> Path:
    """Write checkpoint ``number`` of a run to a folder with a temporary name, rename the folder, and return it."""
    states = {f"{_TRAINER}{behavior}": state for behavior, state in checkpoint.trainers.items()}
    states[_CONTROLLER] = checkpoint.generators, to_plain(checkpoint.training)
    if checkpoint.place is not None:
        states[_PLACE] = checkpoint.place
    parts = {part: facts for part, (_, facts) in states.items()}
    arrays = {  # as safetensors stores them
        part: {name: np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for name, array in own.items()}
        for part, (own, _) in states.items()
    }
    checksums = {part: {name: checksum_of(array) for name, array in own.items()} for part, own in arrays.items()}
    facts = {"run": checkpoint.run, "number": number, "parts": parts, "arrays": checksums}
    facts["checksum"] = checksum_of(facts)
    name = f"{checkpoint.training.n_steps:012d}"
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f"{name}.{secrets.token_hex(4)}{_UNFINISHED}"
    unfinished.mkdir()  # a new folder, so that no file in it is a symbolic link
    try:
        (unfinished / STATE).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        _flush(unfinished / STATE)
        for part, own in arrays.items():
            file = _arrays_in(unfinished, part)
            save_file(own, file)
            file.chmod((unfinished / STATE).stat().st_mode)  # the mode by the umask; safetensors uses 0600
            _flush(file)
        # The name exists already if a training run saves at the step at which it was resumed.
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        finished = next(directory / each for each in names if not os.path.lexists(directory / each))
        unfinished.rename(finished)
    except BaseException:
        remove(unfinished, facts)
        raise
    return finished


def prune(directory: Path, run: str | None, *, keep: int) -> None:
    """Remove a run's checkpoints, except the last ``keep`` finished ones and those named by ``latest`` and ``best``.

    Remove none if they cannot be listed.
    """
    try:
        own = _of_run(directory, run)
    except OSError:
        return
    finished = [path for path in sorted(own, key=lambda path: _number(own[path])) if path.suffix != _UNFINISHED]
    kept = {*finished[-keep:], named(directory / LATEST), named(directory / BEST)}
    for path, facts in own.items():
        if path not in kept:
            remove(path, facts)


def mark_best(path: Path, mean: float) -> None:
    """Record the best checkpoint with its ``mean`` return. Raises NotWritten."""
    lines = [path.name, repr(mean)]
    write_atomically(path.parent / BEST, "\n".join([*lines, f"{checksum_of(lines)}\n"]))


def best_mean(directory: Path, run: str | None) -> float | None:
    """Return the mean that ``mark_best`` recorded for this run's best checkpoint, or None if there is none.

    Raises UsageError if the file is not what was written.
    """
    if not os.path.lexists(directory / BEST) or (directory / BEST).is_symlink():
        return None
    try:
        *lines, checksum = (directory / BEST).read_text(encoding="utf-8").rstrip("\n").split("\n")
        if int(checksum) != checksum_of(lines):
            raise ValueError("its checksum differs")
        return float(lines[1]) if directory / lines[0] in _of_run(directory, run) else None
    except (OSError, ValueError, LookupError) as error:
        raise UsageError(
            f"{directory / BEST} is not what was written: {error}. Delete it, and the next evaluation is the best one."
        ) from error


def named(file: Path) -> Path | None:
    """Return the path of the checkpoint named in ``file``, such as ``latest``, or None if it has no valid name."""
    try:
        path = pointed_at(file)
    except UsageError:
        return None
    return path if _NAME.fullmatch(path.name) else None


def _of_run(directory: Path, run: str | None) -> dict[Path, dict[str, Any]]:
    """Return ``{folder: content of state.json}`` for the checkpoints of a run that were named by ``save``."""
    of_run = {path: facts for path, facts in written(directory).items() if facts.get("run") == run}
    return {path: facts for path, facts in of_run.items() if _is_own_name(path.name, facts)}


def _number(facts: Mapping[str, Any]) -> int:
    """Return a checkpoint's number within its run, counted from 1, or 0 if its ``state.json`` has none."""
    number = facts.get("number")
    return number if isinstance(number, int) else 0


def load_latest(directory: Path) -> Checkpoint:
    """Load and return the newest checkpoint in ``directory``. Raises UsageError if it is missing or damaged."""
    return load(latest(directory))


def latest(directory: Path) -> Path:
    """Return the folder named by the file ``latest`` in ``directory``. Raises UsageError if the file cannot be read."""
    if not os.path.lexists(directory / LATEST):
        raise UsageError(f"there is no checkpoint in {directory} to resume from ({directory / LATEST} is missing).")
    return pointed_at(directory / LATEST)


def pointed_at(pointer: Path) -> Path:
    """Return the folder named by the text file or link ``pointer``. Raises UsageError if ``pointer`` is unreadable."""
    try:
        is_link = pointer.is_symlink()
        name = os.readlink(pointer) if is_link else pointer.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"{pointer} cannot be read: {error}.") from error
    if not Path(name).name:
        raise UsageError(f"{pointer} is empty: write the name of a checkpoint beside it into it, such as 000000060000.")
    return pointer.parent / Path(name).name


def load(path: Path) -> Checkpoint:
    """Load and return the checkpoint in the folder ``path``. Each array is read from disk only when it is accessed.

    Raises CheckpointDamaged for a damaged checkpoint. The message names the file and says what is wrong with it.
    """
    with _reading(path / STATE):
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        if not isinstance(content, dict) or "checksum" not in content:
            raise ValueError("it has no checksum, as if another version of envmanager had written it")
        if content.pop("checksum") != checksum_of(content):
            raise ValueError("it is not what was written: its checksum differs")
        parts, checksums = content["parts"], content["arrays"]
        training = from_plain(TrainingState, parts[_CONTROLLER], where=f"parts.{_CONTROLLER}")
    arrays = {part: ArrayFile(_arrays_in(path, part), checksums[part]) for part in parts}
    own = {part: (arrays[part], parts[part]) for part in parts}
    trainers = {part.removeprefix(_TRAINER): own[part] for part in parts if part.startswith(_TRAINER)}
    generators, place = arrays[_CONTROLLER], own.get(_PLACE)
    return Checkpoint(training=training, trainers=trainers, generators=generators, run=content["run"], place=place)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        what = f"the checkpoint {file.parent} cannot be read: {file.name}: {_reason(error)}."
        raise CheckpointDamaged(f"{what} {another_than(file.parent)}") from error


def another_than(path: Path) -> str:
    """Return advice, for an error message, on how to use another checkpoint if the one at ``path`` is damaged."""
    return (
        "If it is damaged, take another one (--checkpoint NAME, checkpoint=…); to resume from that, write its name "
        f"into {path.parent / LATEST}."
    )


@contextmanager
def restoring(what: str, *, advice: str = "", why: str = "") -> Iterator[None]:
    """Convert exceptions in the block to UsageErrors, except ImportFailed, CheckpointDamaged and a learner's death.

    The message consists of ``what``, the reason and ``advice``. The reason is ``why``, or else the exception's text.
    """
    try:
        yield
    except (ImportFailed, CheckpointDamaged):
        raise
    except Exception as error:
        if isinstance(error, LearnerFailed) and _TRACEBACK not in str(error):
            raise  # its process has died, whatever the checkpoint holds
        raise UsageError(f"{what}: {why or _reason(error)}. {advice}".rstrip()) from error


def restore(
    trainer: Trainer, spec: BehaviorSpec, checkpoint: Checkpoint, where: Path, advice: str, *, to_act: bool = False
) -> None:
    """Restore a trainer from ``checkpoint``. Raises UsageError if the checkpoint does not fit the trainer.

    ``spec`` (the behavior's current spec), ``where`` (the checkpoint's path) and ``advice`` (what the user can do) are
    only used in error messages. ``to_act``: whether to restore only the greedy policy.
    """
    behavior = trainer.behavior
    if behavior not in checkpoint.trainers:
        raise UsageError(f"the checkpoint in {where} has no behavior {behavior!r}.")
    before = checkpoint.training.specs.get(behavior, spec)
    why = "" if before == spec else f"it was trained with {before}; now there is {spec}"
    take = trainer.restore_policy if to_act else trainer.restore
    with restoring(f"the checkpoint in {where} does not fit the trainer of {behavior!r}", advice=advice, why=why):
        take(*checkpoint.trainers[behavior])


def _reason(error: Exception) -> str:
    text = str(getattr(error, "strerror", None) or error).strip()
    if _TRACEBACK in text:  # from a learner in its own process
        text = text.splitlines()[-1]
    text = " ".join(text.split()).removesuffix(".")
    return text if isinstance(error, EnvManagerError | OSError | ValueError) else f"{type(error).__name__}: {text}"


def _is_own_name(name: str, facts: Mapping[str, Any]) -> bool:
    controller = facts["parts"].get(_CONTROLLER)
    n_steps = controller.get("n_steps") if isinstance(controller, dict) else None
    if not isinstance(n_steps, int):
        return False
    steps = f"{n_steps:012d}"
    return name.startswith(steps) and _AFTER_THE_STEPS.fullmatch(name, len(steps)) is not None


def written(directory: Path) -> dict[Path, dict[str, Any]]:
    """Return ``{folder: content of state.json}`` of all checkpoints in ``directory``, finished or not."""
    found = {path: _facts_of(path) for path in sorted(directory.iterdir())} if directory.is_dir() else {}
    return {path: facts for path, facts in found.items() if facts is not None}


def remove(path: Path, facts: Mapping[str, Any]) -> None:
    """Delete the files listed in ``facts``, then ``state.json``, then the folder ``path`` if empty. Ignore OSErrors."""
    for own in [*(_arrays_in(path, part) for part in facts["arrays"]), path / STATE]:
        with contextlib.suppress(OSError):
            own.unlink()
    with contextlib.suppress(OSError):
        path.rmdir()


def _flush(path: Path) -> None:
    with path.open("r+b") as file:  # Windows flushes no file that is open only for reading
        os.fsync(file.fileno())


def _arrays_in(folder: Path, file: str) -> Path:
    return folder / f"{quote(file, safe='')}.safetensors"


def _facts_of(path: Path) -> dict[str, Any] | None:
    """Return the content of a folder's ``state.json``, or None if ``path`` is a symbolic link or not a checkpoint."""
    if path.is_symlink() or not path.is_dir() or (path / STATE).is_symlink() or not (path / STATE).is_file():
        return None
    try:
        facts: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        is_ours = isinstance(facts["arrays"], dict) and isinstance(facts["parts"], dict)
        for part in facts["arrays"]:
            _arrays_in(path, part)  # raises for an invalid name
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return facts if is_ours else None
