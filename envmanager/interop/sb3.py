"""A wrapper that makes an EnvManager usable as a Stable-Baselines3 ``VecEnv``.

The rule: with ``infos=True`` and no options, steps return what ``DummyVecEnv`` returns, unless a worker was replaced.
When an episode ends, ``info["terminal_observation"]`` is its last observation, and ``obs`` is the next episode's first.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from envmanager.env_manager import EnvManager
from envmanager.errors import BadAction, UsageError
from envmanager.importing import needed_by
from envmanager.interop.lockstep import Elsewhere, Info, Lockstep, reset_infos, step_infos
from envmanager.interop.remote import call_method, full_name, has_attribute, names_of_wrappers

with needed_by("as_sb3_vec_env", extra=None):
    from gymnasium import spaces
    from gymnasium.vector.utils import concatenate, create_empty_array
    from stable_baselines3.common.vec_env import VecEnv

Indices = int | Iterable[int] | None
_MODE = "VecEnv"
_OF_AN_END = ("episode", "terminal_observation")  # which a lost step must not have again


class ManagerVecEnv(VecEnv):  # type: ignore[misc]
    """The VecEnv that ``as_sb3_vec_env`` returns. Its attribute ``manager`` is the wrapped EnvManager.

    If a worker is replaced, the episodes of its environments end with reward 0. Their infos have ``"lost": True``,
    ``TimeLimit.truncated`` true, the most recently returned observation as ``terminal_observation``, and what else the
    environments' infos have: the last values of this environment, which ``VecMonitor`` may ask for.
    """

    metadata: dict[str, Any]
    envs = Elsewhere(
        "the environments live in the manager's workers: use env_method(name, …), get_attr(name) and set_attr(name, "
        "value), or manager.call(function, env_ids=…), which runs a function where the environments are"
    )

    def __init__(self, manager: EnvManager) -> None:
        self.manager = manager
        self._lockstep = Lockstep(manager)
        super().__init__(self._lockstep.n_envs, self._lockstep.observation_space, self._lockstep.action_space)
        self.metadata = self._lockstep.first_attr("metadata", self.metadata)

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Set the options for the next ``reset`` and for the automatic resets that follow it.

        Raises UsageError for a list of unequal options, because a manager gives all environments the same options.
        """
        if isinstance(options, list) and any(each != options[0] for each in options):
            raise UsageError("set_options: a manager gives the same options to all environments.")
        super().set_options(options)

    def reset(self, state: Mapping[str, Any] | None = None) -> Any:
        """Begin a new episode in all environments and return the first observations. Discards a pending step.

        ``state`` is what ``state()`` has returned, perhaps in another process: the episodes go on where they stood, and
        the observations are those that the trainer had. Wrappers pass no argument on: ``vec_env.unwrapped.reset(…)``.
        """
        if state is not None:
            own = self._lockstep.restore(state, _MODE)
            self._obs, self._seeds, self._options = own["obs"], own["seeds"], own["options"]
            infos: list[list[Info]] = [[{} for _ in own["seeds"]] for _ in range(2)]
            self.reset_infos, self._last_infos = infos
            return self._lockstep.batch_obs(self._obs)
        seeds = None if all(seed is None for seed in self._seeds) else self._seeds
        batch = self._lockstep.reset(seeds, self._options[0] or None)
        self.reset_infos = self._last_infos = list(step_infos(batch).values())
        self._reset_seeds()
        self._reset_options()
        self._obs = batch.obs
        return self._lockstep.batch_obs(batch.obs)

    def state(self) -> dict[str, Any]:
        """Return where the environments stand as plain data, with which ``reset(state)`` of another one goes on.

        The manager needs ``restarts=RestartPolicy(keep_episodes=True)``. Infos are not in it. Raises UsageError before
        a reset, between ``step_async`` and ``step_wait``, and after a step that was interrupted or has raised.
        """
        return self._lockstep.state(_MODE, obs=self._obs, seeds=self._seeds, options=self._options)

    def step_async(self, actions: Any) -> None:
        """Start a step of all environments. Raises BadAction if actions do not fit, UsageError if a step is pending."""
        if isinstance(self.action_space, spaces.Dict | spaces.Tuple):  # one action per environment, not a tree of rows
            try:
                actions = concatenate(self.action_space, actions, create_empty_array(self.action_space, self.num_envs))
            except (LookupError, TypeError, ValueError) as error:
                raise BadAction(f"the actions do not fit {self.action_space}: {error!r}. Nothing was sent.") from error
        self._lockstep.send(actions)

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[Info]]:
        """Wait for the pending step and return ``(obs, rewards, dones, infos)``.

        Raises WorkerError if a worker failed and was not replaced; then call ``reset()`` before the next step.
        """
        batch = self._lockstep.receive()
        infos = list(step_infos(batch).values())
        for row in np.flatnonzero(batch.lost).tolist():
            keys = {key for info in (*self._last_infos, *infos) for key in info if key not in _OF_AN_END}
            infos[row] = {**{key: self._last_infos[row].get(key) for key in keys}, **infos[row]}
        self._last_infos = infos
        for info, is_truncated in zip(infos, (batch.truncated & ~batch.terminated).tolist(), strict=True):
            info["TimeLimit.truncated"] = is_truncated
        for env_id, obs in self._lockstep.final_obs(batch).items():
            infos[env_id]["terminal_observation"] = obs
        for env_id, info in reset_infos(batch).items():
            self.reset_infos[env_id] = info
        self._obs = batch.obs
        return self._lockstep.batch_obs(batch.obs), batch.reward, batch.terminated | batch.truncated, infos

    def close(self) -> None:
        """Close the wrapped manager."""
        self.manager.close()

    def has_attr(self, attr_name: str) -> bool:
        """Return whether all environments have the attribute. The value is not sent, so it need not be picklable."""
        return all(self.manager.call(has_attribute, attr_name, repeat=None))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return the attribute of each env in ``indices`` (default: all). Raises AttributeError if it is missing."""
        return self._lockstep.get_attr(attr_name, self._env_ids(indices))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute to ``value`` in each environment at ``indices`` (default: all)."""
        env_ids = self._env_ids(indices)
        self.manager.set_attr(attr_name, [value] * len(env_ids), env_ids)

    def env_method(self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any) -> Any:
        """Call a method of the environments at ``indices`` (default: all), and return a list of the results."""
        env_ids = self._env_ids(indices)
        return self.manager.call(call_method, method_name, method_args, method_kwargs, env_ids=env_ids)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Indices = None) -> list[bool]:
        """Return a bool for each environment at ``indices``: whether it is wrapped in ``wrapper_class`` or a subclass.

        Classes are compared by name, so that a worker need not import ``wrapper_class``.
        """
        names = self.manager.call(names_of_wrappers, env_ids=self._env_ids(indices), repeat=None)
        return [full_name(wrapper_class) in of_env for of_env in names]

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Return an image of each environment. If the render mode is not rgb_array, warn and return None for each."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"The render mode is {self.render_mode}, but this method assumes it is `rgb_array` to obtain images.",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self.manager.render()

    def _env_ids(self, indices: Indices) -> list[int]:
        all_env_ids = range(self.num_envs)
        return [all_env_ids[index] for index in self._get_indices(indices)]
