"""Saved training runs: policies that act without the environment, and the options of the training's manager.

::

    runs/x, or one checkpoint ── find ──▶ SavedTraining ── specs, trainers, weights ──▶ SavedPolicy
                                               └────── options of the manager ────────▶ the same environments

Only logs are written into the training's folder. A checkpoint holds only data, so loading it runs no code except that
of installed packages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from envmanager.adapters.kinds import count_kinds
from envmanager.data.casting import cast_without_loss
from envmanager.data.specs import ArraySpec, BehaviorSpec, SpecMismatch, as_array, check_structure, describe_value
from envmanager.data.steps import ActionInfo, AgentSteps
from envmanager.data.trees import Tree, build, leaves, leaves_like, map_tree, paths
from envmanager.errors import UsageError
from envmanager.observe.files import logged
from envmanager.policy import Policy
from envmanager.registry import ManagerOptions, structure
from envmanager.training.algorithms.trainers import make_trainer
from envmanager.training.curriculum import Curriculum
from envmanager.training.learners import unknown_behavior
from envmanager.training.runs import checkpoints
from envmanager.training.runs.checkpoints import BEST, STATE, Checkpoint, pointed_at, restoring
from envmanager.training.runs.plan import CHECKPOINTS, CONTROL, LATEST, LOGS, SavedPlan, table_for

if TYPE_CHECKING:
    from torch import nn

    from envmanager.training.trainer import Trainer

_TRIES = 5
"""Number of retries when a checkpoint cannot be read, because its training run may remove it after it was found."""


def load_policy(
    path: str | os.PathLike[str],
    *,
    behavior: str | None = None,
    checkpoint: str | int = LATEST,
    device: str = "cpu",
) -> SavedPolicy:
    """Return the greedy policy of a saved training. The environment is not made, and need not be installed.

    ``path``: folder of a training run (``runs/x``), or of one checkpoint. ``checkpoint``: ``"latest"``, ``"best"``, a
    checkpoint's name, or the number of agent steps after which it was written. ``behavior`` may be left out if the
    training has only one. ``device``: ``"cpu"``, ``"cuda"``, or ``"auto"``. Raises UsageError if there is no such
    checkpoint or behavior, or if the policy cannot be built from the checkpoint.
    """
    return SavedTraining.open(path, checkpoint).policy(behavior, device=device)


class SavedPolicy:
    """The greedy policy of one behavior, from a checkpoint.

    ``policy(obs)`` takes plain arrays, ``policy.get_action(steps)`` takes the steps of a manager. ``spec``: specs of
    the observations and actions. ``n_steps``: number of agent steps before the checkpoint was written. ``source``: id
    of its training, and name of its checkpoint. The policies of this library's trainers keep no memory between calls.
    """

    def __init__(self, behavior: str, spec: BehaviorSpec, trainer: Trainer, n_steps: int, source: str = "") -> None:
        self.behavior = behavior
        self.spec = spec
        self.n_steps, self.source = n_steps, source
        self._trainer = trainer
        self._policy: Policy = trainer.greedy_policy()

    def __repr__(self) -> str:
        return f"<SavedPolicy of {self.behavior!r} after {self.n_steps:,} steps: {self.spec}>"

    def __call__(self, obs: Tree) -> Tree:
        """Return the action for one observation, or a batch of actions for a batch of observations.

        An observation must fit ``spec.observation``, and an action fits ``spec.action``. In a batch of n, each leaf is
        ``[n, …]``. Raises UsageError if ``obs`` does not fit.
        """
        rows, is_one = _as_batch(self.spec.observation, obs)
        steps = AgentSteps.first(agent_id=np.arange(len(leaves(rows)[0])), obs=rows)
        action = self.get_action(steps).action
        # The only row is a scalar for Gymnasium's Discrete, an array for Box.
        return map_tree(lambda leaf: leaf[0, ...] if leaf.dtype.kind == "f" else leaf[0], action) if is_one else action

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        """Return an ActionInfo with one action per row of ``steps``."""
        return self._policy.get_action(steps)

    def module(self) -> nn.Module:
        """Return the policy as a PyTorch module. ``Trainer.greedy_module`` describes the inputs and outputs."""
        return self._trainer.greedy_module().eval()


@attrs.frozen
class SavedTraining:
    """A checkpoint of a training run, with its policies and options. ``path``: folder of the checkpoint."""

    path: Path
    checkpoint: Checkpoint = attrs.field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str], checkpoint: str | int = LATEST) -> SavedTraining:
        """Read a checkpoint and return it as a SavedTraining. The arguments mean the same as in ``load_policy``.

        Raises UsageError if there is no such checkpoint, or if it cannot be read.
        """
        found = find(Path(path), checkpoint)
        for _ in range(_TRIES):
            try:
                return cls(found, checkpoints.load(found))
            except UsageError:
                before, found = found, find(Path(path), checkpoint)
                if found == before:
                    raise
        return cls(found, checkpoints.load(found))

    @property
    def folder(self) -> Path | None:
        """Folder of the training; None for a checkpoint outside such a folder."""
        folder = self.path.resolve().parent
        return folder.parent if folder.name == CHECKPOINTS else None

    @property
    def name(self) -> str:
        """Name of the training's folder; for a checkpoint outside such a folder, the name of the checkpoint."""
        return (self.folder or self.path).name

    def logged(self, options: ManagerOptions, name: str) -> AbstractContextManager[ManagerOptions]:
        """Return a context with ``options`` whose workers print into files in the folder ``name`` of the run's logs."""
        return logged(options, None if self.folder is None else self.folder / LOGS / name)

    @property
    def n_steps(self) -> int:
        """Number of agent steps in the training before the checkpoint was written."""
        return self.checkpoint.training.n_steps

    @property
    def behaviors(self) -> list[str]:
        """Names of the behaviors that have a policy in the checkpoint."""
        return list(self.checkpoint.trainers)

    @property
    def plan(self) -> SavedPlan:
        """Options of the training's manager and trainers. Raises UsageError if the checkpoint lacks them."""
        plan = self.checkpoint.training.plan
        if plan is None:
            raise UsageError(
                f"the checkpoint in {self.path} does not say what it plays: options of its trainers were given as "
                "objects. Train from a config."
            )
        return plan

    def curriculum(self, *, seed: int) -> Curriculum | None:
        """Return the environment parameters of the training, drawn from ``seed``, or None if it had none."""
        parameters = self.plan.parameters
        return Curriculum(parameters, seed=seed, progress=lambda: 1.0) if parameters else None

    def reset_options(self, *, seed: int = 0, given: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
        """Return a draw of the environment parameters in their last lessons, with those ``given`` in their place.

        None if there are neither parameters nor ``given``.
        """
        curriculum = self.curriculum(seed=seed)
        return given if curriculum is None else {**(curriculum.final_tasks(1)[0].options or {}), **(given or {})}

    def policy(self, behavior: str | None = None, *, device: str = "cpu") -> SavedPolicy:
        """Return the policy of ``behavior`` (None: the only behavior). Raises UsageError if it cannot be built."""
        chosen = self._chosen(behavior)
        return self._policy(chosen, self.checkpoint.training.specs[chosen], device)

    def policies_for(self, specs: Mapping[str, BehaviorSpec], *, device: str = "cpu") -> dict[str, SavedPolicy]:
        """Return the greedy policy of each behavior in ``specs``, an environment's specs by behavior.

        Raises UsageError for a behavior that was not trained, or whose saved weights do not fit the specs.
        """
        return {behavior: self._policy(behavior, spec, device) for behavior, spec in specs.items()}

    def manager_options(self, *, env: str | None = None, kind: str | None = None) -> ManagerOptions:
        """Return the manager options of the training, overridden by the arguments that are not None.

        Raises UsageError if the checkpoint has no plan, or if neither the plan nor ``env`` names an environment.
        """
        saved = self.plan.manager
        if saved is None and env is None:
            raise UsageError(
                f"the checkpoint in {self.path} does not say what it plays: its environment was given as an object or "
                "a function, not as text."
            )
        chosen = {name: value for name, value in (("env", env), ("kind", kind)) if value is not None}
        where = f"{self.path / STATE}: parts.controller.plan.manager"
        options = structure(ManagerOptions, {**(saved or {}), **chosen}, where=where)
        if env is None and isinstance(options.env, str):
            options = attrs.evolve(options, env=self._from_here(options.env))
        if options.engine is not None and isinstance(options.engine.get("binary"), str):
            binary = self._from_here(options.engine["binary"])
            options = attrs.evolve(options, engine={**options.engine, "binary": binary})
        return options

    def _from_here(self, name: str) -> str:
        """Return ``name`` joined to the training's working directory if that path exists, else unchanged."""
        there = os.path.join(self.plan.directory, name)
        return there if os.path.exists(there) else name

    def _chosen(self, behavior: str | None) -> str:
        known = self.behaviors
        if behavior is None and len(known) == 1:
            return known[0]
        if behavior is None and known:
            names = ", ".join(map(repr, known))
            raise UsageError(
                f"the training in {self.path} has several behaviors: say which one (--behavior NAME, behavior=…) of "
                f"{names}."
            )
        if behavior not in known:
            raise UsageError(f"the training in {self.path} has no policy of {unknown_behavior(behavior, known)}")
        return behavior

    def _policy(self, behavior: str, spec: BehaviorSpec, device: str) -> SavedPolicy:
        tables = self.plan.trainers
        with restoring(f"the policy of {behavior!r} cannot be made from the checkpoint in {self.path}"):
            table = table_for(behavior, tables)
            alone = {name: value for name, value in table.items() if name != "apart"}
            trainer = make_trainer(behavior, spec, alone, seed=0, device=device)
        try:
            advice = "Have the observations or actions of the environment changed since then?"
            checkpoints.restore(trainer, spec, self.checkpoint, self.path, advice, to_act=True)
            source = f"{self.checkpoint.run}/{self.path.name}"
            return SavedPolicy(behavior, spec, trainer, self.n_steps, source)
        finally:
            trainer.close()


def find(path: Path, checkpoint: str | int = LATEST) -> Path:
    """Return the folder of a checkpoint, specified as in ``load_policy``. Raises UsageError if there is none."""
    try:
        return _found(path, checkpoint)
    except OSError as error:  # a folder without permission, a name that is too long
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error


def _found(path: Path, checkpoint: str | int) -> Path:
    if path.is_symlink():
        path = path.resolve()
    if path in checkpoints.written(path.parent):
        if checkpoint != LATEST:
            raise UsageError(f"{path} is one checkpoint: leave out {checkpoint!r}, or name the training's folder.")
        return path
    directory = _directory_in(path)
    if checkpoint in (LATEST, BEST) and os.path.lexists(directory / str(checkpoint)):
        return pointed_at(directory / str(checkpoint))
    there = checkpoints.written(directory)
    found = _named(str(checkpoint), there)
    if found is None:
        known = ", ".join(each.name for each in there) or "none"
        why = ": no evaluation has been made" if checkpoint == BEST else ""
        raise UsageError(f"there is no checkpoint {checkpoint!r} in {directory}{why}. There is: {known}.")
    return found


def _directory_in(path: Path) -> Path:
    for directory in (path / CHECKPOINTS, path):
        if (directory / LATEST).is_file():
            return directory
    raise UsageError(
        f"there is no checkpoint in {path}: name the folder that `envmanager train` writes to, such as runs/NAME. A "
        f"training writes one at its end, every training.checkpoint_every steps, and when {CONTROL} says so."
    )


def _named(name: str, there: Iterable[Path]) -> Path | None:
    """Return the path in ``there`` with that name, else the newest with that number of agent steps, else None."""
    of_that_step = []
    for path in there:
        if path.name == name:
            return path
        steps, _, number = path.name.partition("-")
        if steps.isdecimal() and name.isdecimal() and steps.lstrip("0") == name.lstrip("0"):
            of_that_step.append((int(number) if number.isdecimal() else 1, path))
    return max(of_that_step)[1] if of_that_step else None


def with_n_envs(options: ManagerOptions, n_envs: int) -> ManagerOptions:
    """Return ``options`` with ``n_envs`` environments, and with fewer workers and local environments if necessary.

    Several kinds of environments stay as many as they are.
    """
    if count_kinds(options.env) is not None:
        return options
    n_workers, local_envs = options.n_workers, options.local_envs
    if isinstance(local_envs, int):
        local_envs = min(local_envs, n_envs - 1)
    if isinstance(n_workers, int):
        n_workers = min(n_workers, n_envs - (local_envs if isinstance(local_envs, int) else 0))
    return attrs.evolve(options, n_envs=n_envs, n_workers=n_workers, local_envs=local_envs)


def _as_batch(spec: Tree, obs: Tree) -> tuple[Tree, bool]:
    """Return ``obs`` as a batch in the spec's dtypes, and whether it was unbatched. Raises UsageError on a mismatch."""
    try:
        check_structure(spec, obs, "obs")
        parts = list(zip(leaves(spec), leaves_like(spec, obs), paths(spec, "obs"), strict=True))
        arrays = [_fitting(*part) for part in parts]
    except SpecMismatch as error:
        raise UsageError(f"the observation does not fit the policy: {error}.") from error
    sizes = {
        len(array) if array.ndim > len(leaf.shape) else None for array, (leaf, *_) in zip(arrays, parts, strict=True)
    }
    if len(sizes) > 1:
        told = ", ".join(f"{path} {describe_value(array)}" for array, (*_, path) in zip(arrays, parts, strict=True))
        raise UsageError(f"this is neither one observation nor a batch with as many rows in each part: {told}.")
    is_one = sizes == {None}
    return build(spec, [array[None] for array in arrays] if is_one else arrays), is_one


def _fitting(spec: ArraySpec, value: Any, path: str) -> np.ndarray:
    """Convert one value or a batch to the spec's dtype, rounding floats. Raises SpecMismatch if it does not fit."""
    shape = ", ".join(map(str, spec.shape))
    expected = f"{spec.dtype}[{shape}] or {spec.dtype}[n{', ' if shape else ''}{shape}]"
    try:
        array = as_array(value)
    except ValueError as error:
        raise SpecMismatch(path, expected, str(error)) from error
    got = describe_value(value if array.dtype.kind == "O" else array)
    if spec.shape not in (array.shape, array.shape[1:] if array.ndim else None):
        raise SpecMismatch(path, expected, got)
    cast = array if array.dtype == spec.dtype else cast_without_loss(array, spec.dtype)
    if cast is None:
        raise SpecMismatch(path, expected, f"{got} with values that are not of that dtype")
    return cast
