"""Stepping of all environments of a manager together, as the vectorised interfaces of other libraries require.

::

    VectorEnv, VecEnv ── send(actions) ──▶ Lockstep ── send ─────────────▶ manager
                      ◀── receive() ──────          ◀── recv(Wait.all()) ──

The rule: ``receive`` returns a row for every environment that acted, even if its worker was replaced. It raises
UsageError if a row is missing, as when a worker was dropped. Later steps do not overwrite the returned arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from envmanager.data.specs import ArraySpec, SpecMismatch, as_array, check_structure, describe_value
from envmanager.data.steps import Batch
from envmanager.data.trees import Tree, is_foreign, leaves, map_tree, snapshot
from envmanager.env_manager import EnvManager
from envmanager.errors import BadAction, EnvRaised, UsageError
from envmanager.interop.spaces import batch_of, final_reader, spaces_of
from envmanager.options import EpisodeStart, Wait
from envmanager.tasks import Task

LOST = "lost"
"""Key set to True in an info if the worker was replaced: no step was taken, and the episode is truncated."""

Info = dict[str, Any]


class Lockstep:
    """A wrapper around a manager of single-agent environments that steps all or some environments together."""

    def __init__(self, manager: EnvManager, episodes: EpisodeStart = "automatic") -> None:
        manager.set_episodes(episodes)
        self.manager = manager
        self.n_envs = manager.n_envs
        if len(manager.behavior_specs) != 1:
            raise UsageError(
                "a bridge needs environments with one agent each; these have the behaviors "
                f"{sorted(manager.behavior_specs)}. Use step() of the manager."
            )
        (self._spec,) = manager.behavior_specs.values()
        self.observation_space, self.action_space = spaces_of(manager, self._spec)
        self.batch_obs = partial(batch_of, self.observation_space)
        self._read_final = final_reader(self.observation_space)
        self._acting: np.ndarray | None = None
        """The env_ids of the pending step; None if no step is pending."""

    def reset(self, seeds: Sequence[int | None] | None, options: Mapping[str, Any] | None) -> Batch:
        """Reset all environments and return their first steps in the order of env_ids. Discards a pending step."""
        self._acting = None
        self.manager.reset({"seed": seeds, "options": options})
        return self._complete(self.manager.recv(Wait.all()), np.arange(self.n_envs))

    def state(self, mode: str, **own: Any) -> dict[str, Any]:
        """Return the manager's state and a bridge's ``own``, for ``mode``. Raises UsageError amid a step."""
        self._require_no_pending_step()
        return {"mode": mode, "manager": self.manager.state(), **snapshot(own)}

    def restore(self, state: Mapping[str, Any], mode: str) -> dict[str, Any]:
        """Let the manager go on from what ``state`` has returned. Return a copy of it. Discards a pending step.

        Raises UsageError if it is of another mode, or of the manager alone.
        """
        if not isinstance(state, Mapping) or state.get("mode") != mode:
            raise UsageError(
                f"reset(state=…) in mode {mode} takes what state() of such a bridge has returned, not of the manager "
                "alone or of a bridge in another mode."
            )
        infos = self.manager.reset(state=state["manager"])
        self._acting = None
        if any(len(steps) for info in infos for steps in info.current.values()):
            self.manager.recv(Wait.all())  # the rows, which the bridge has
        return snapshot(dict(state))  # type: ignore[no-any-return]

    def begin(self, tasks: Mapping[int, Task]) -> list[Batch]:
        """Begin an episode in each environment in ``tasks``, by env_id. Return all batches up to their first rows.

        Raises UsageError if a step is pending, and WorkerError if a worker failed and was not replaced.
        """
        self._require_no_pending_step()
        self.manager.begin(list(tasks), list(tasks.values()))
        self._acting = np.array(list(tasks))
        batches, left = [], set(tasks)
        while left:
            batches.append(self._own(self.manager.recv(Wait.all())))
            left.difference_update(batches[-1].env_ids[batches[-1].first].tolist())
            if not left <= set(self.manager.tasks.running.values()):
                raise _dropped(sorted(left))
        self._acting = None
        return batches

    def send(self, actions: Tree, env_ids: np.ndarray | None = None) -> None:
        """Send actions to ``env_ids`` (default: all). ``actions`` must have a row for every environment of the manager.

        Raises BadAction if the actions do not fit the action spec, and UsageError if a step is pending.
        """
        self._require_no_pending_step()
        acting = np.arange(self.n_envs) if env_ids is None else env_ids
        self.manager.send(actions if env_ids is None else self._actions_of(actions, env_ids), acting)
        self._acting = acting

    def receive(self) -> Batch:
        """Wait for the pending step. Return its Batch. Raises UsageError if no step is pending or a row is missing."""
        if self._acting is None:
            raise UsageError("no step is pending: send actions first.")
        batch = self._complete(self.manager.recv(Wait.all()), self._acting)
        self._acting = None
        return batch

    def final_obs(self, batch: Batch) -> dict[int, Any]:
        """Return the last observation of each episode that ended, by env_id, as an element of the observation space."""
        ended = batch.env_ids[batch.terminated | batch.truncated].tolist()
        return {env_id: self._read_final(batch.final_obs, row) for row, env_id in enumerate(ended)}

    def get_attr(self, name: str, env_ids: Any = None) -> list[Any]:
        """Return ``env.name`` for ``env_ids`` (default: all). Raises AttributeError if an environment lacks it."""
        try:
            return self.manager.get_attr(name, env_ids)
        except EnvRaised as error:
            if error.type_name != "AttributeError":
                raise
            raise AttributeError(str(error)) from error

    def first_attr(self, name: str, default: Any) -> Any:
        """Return ``env.name`` of environment 0, or ``default`` if the environment has no such attribute."""
        try:
            return self.get_attr(name, [0])[0]
        except AttributeError:
            return default

    def _require_no_pending_step(self) -> None:
        if self._acting is not None:
            raise UsageError("a step is pending: receive its result first; if that raised, call reset().")

    def _complete(self, batch: Batch, env_ids: np.ndarray) -> Batch:
        """Return ``batch`` with arrays that later steps do not change. Raises UsageError if any env_id has no row."""
        is_there = np.zeros(self.n_envs, np.bool_)
        is_there[batch.env_ids] = True
        if not is_there[env_ids].all():
            if not any(worker.dropped for worker in self.manager.stats().workers):
                raise UsageError(
                    "a worker returns some of its environments first, as an asynchronous pool does, but a vector "
                    "environment steps all: leave out the pool's batch_size, or use the manager's send() and recv()."
                )
            raise _dropped(env_ids[~is_there[env_ids]].tolist())
        return self._own(batch)

    def _own(self, batch: Batch) -> Batch:
        if any(map(is_foreign, leaves(batch.obs))):
            batch.obs, batch.final_obs = map_tree(as_array, batch.obs), map_tree(as_array, batch.final_obs)
        return batch.copy() if batch.is_view else batch

    def _actions_of(self, actions: Tree, env_ids: np.ndarray) -> Tree:
        try:
            check_structure(self._spec.action, actions, "action")
            return map_tree(lambda leaf, column: self._rows(leaf, column, env_ids), self._spec.action, actions)
        except (SpecMismatch, ValueError) as error:
            raise BadAction(f"step: {error}. Nothing was sent.") from error

    def _rows(self, spec: ArraySpec, column: Any, env_ids: np.ndarray) -> Any:
        if not hasattr(column, "__len__") or len(column) != self.n_envs:
            raise SpecMismatch("action", f"{self.n_envs} rows of {spec}", describe_value(column))
        return [column[env_id] for env_id in env_ids] if spec.is_object else as_array(column)[env_ids]


class Elsewhere:
    """A descriptor for unsupported attributes. Reading one on an instance raises AttributeError with ``advice``."""

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._names: list[str] = []

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._names.append(name)

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return self
        raise AttributeError(f"{owner.__name__} has no {', '.join(self._names)}: {self._advice}.")


def step_infos(batch: Batch) -> dict[int, Info]:
    """Return copies of step infos by env_id, each {} without ``infos=True``. Set LOST in those of replaced workers."""
    infos = [{} for _ in batch.env_ids] if batch.info is None else [dict(info) for info in batch.info]
    for row in np.flatnonzero(batch.lost):
        infos[row][LOST] = True
    return dict(zip(batch.env_ids.tolist(), infos, strict=True))


def reset_infos(batch: Batch) -> dict[int, Info]:
    """Return the reset infos of environments whose episode ended, by env_id. Each is {} without ``infos=True``."""
    ended = batch.env_ids[batch.terminated | batch.truncated].tolist()
    infos = batch.reset_info if batch.reset_info is not None else [{} for _ in ended]
    return dict(zip(ended, infos, strict=True))


def _dropped(env_ids: list[int]) -> UsageError:
    return UsageError(
        f"the environments {env_ids} were dropped with their worker, but a vector environment must keep all of its "
        'environments: use RestartPolicy(then="raise").'
    )
