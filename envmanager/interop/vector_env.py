"""A manager as a Gymnasium ``VectorEnv``. The table shows the results for an episode that ends at step t.

::

    step    manager                          SAME_STEP    NEXT_STEP                       DISABLED
    t       obs = first, final_obs = last    as manager   obs = last                      obs = last
    t + 1   a step of the new episode        as manager   obs = first, action ignored     refused until reset(mask)

The rule: steps return what Gymnasium's ``SyncVectorEnv`` returns, apart from the rounding of rewards, if the manager
has ``infos=True``, the last reset had no options, and no worker was replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envmanager.data.steps import Batch
from envmanager.data.trees import Tree, copy_tree, take_rows, with_rows
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.importing import needed_by
from envmanager.interop.lockstep import Elsewhere, Info, Lockstep, reset_infos, step_infos
from envmanager.interop.remote import call_or_get
from envmanager.options import ResetConfig

with needed_by("as_vector_env", extra="gymnasium"):
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space

StepResult = tuple[Any, np.ndarray, np.ndarray, np.ndarray, Info]


class ManagerVectorEnv(VectorEnv):  # type: ignore[misc]
    """The VectorEnv that ``as_vector_env`` returns. Its attribute ``manager`` is the wrapped EnvManager.

    Rewards are the manager's float32 values, converted to float64. If a worker is replaced, its running episodes are
    truncated. They end with reward 0, the previously returned observation, and ``"lost": True`` in the infos.
    """

    envs = env_fns = Elsewhere(
        "the environments live in the manager's workers: use call(name, …), get_attr(name) and set_attr(name, values), "
        "or manager.call(function, env_ids=…), which runs a function where the environments are"
    )
    step_async = step_wait = reset_async = reset_wait = call_async = call_wait = Elsewhere(
        "to do something else during a step, use send() and recv() of a manager without a bridge"
    )

    def __init__(self, manager: EnvManager, autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP) -> None:
        self.manager = manager
        self.autoreset_mode = _mode(autoreset_mode)
        self._lockstep = lockstep = Lockstep(manager)
        self.num_envs = lockstep.n_envs
        self.single_observation_space = lockstep.observation_space
        self.single_action_space = lockstep.action_space
        self.observation_space = batch_space(lockstep.observation_space, self.num_envs)
        self.action_space = batch_space(lockstep.action_space, self.num_envs)
        self.metadata = {**lockstep.first_attr("metadata", {}), "autoreset_mode": self.autoreset_mode}
        self.render_mode = lockstep.first_attr("render_mode", None)
        if self.autoreset_mode is AutoresetMode.DISABLED:
            lockstep.require_gymnasium()
        self._restarting = np.zeros(self.num_envs, np.bool_)
        """Whether each environment's episode ended and the next one has returned no observation yet, bool[n_envs]."""
        self._obs: Tree = None
        """Newest observation of each environment; the first one of the new episode if the environment is restarting."""
        self._shown: Tree = None
        """Observations returned by the last step or reset."""
        self._first_infos: dict[int, Info] = {}
        """Infos of the first observations that have not been returned yet, by env_id."""
        self._has_options = False

    def __del__(self) -> None:
        """Do not close the manager, which may still be in use. In some Gymnasium versions, VectorEnv would close it."""

    @property
    def np_random(self) -> tuple[Any, ...]:
        """The environments' random number generators, or copies if the environments are in other processes."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:
        """The ``np_random_seed`` of each environment: the seed of its random number generator."""
        return self.get_attr("np_random_seed")

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Info]:
        """Begin new episodes, by default in all environments. Return ``(observations, infos)``.

        ``seed`` is an int (environment i gets ``seed + i``) or a sequence with an int or None for each environment.
        Automatic resets reuse the ``options`` of the last reset of all environments. If ``autoreset_mode`` is DISABLED,
        the option ``reset_mask`` (``bool[n_envs]``, not all False) selects the environments to reset. In the other
        modes, it must be all True. Other masks raise UsageError.
        """
        seeds, mask = self._seeds(seed), self._mask(options)
        if mask is not None and options is not None:
            options = {key: value for key, value in options.items() if key != "reset_mask"}
        if mask is not None and not mask.all():
            return self._reset_some(np.flatnonzero(mask), seeds, options or {})
        if self._can_use_begun(seeds, options):
            return self._reset_some(np.arange(self.num_envs), None, {})
        batch = self._lockstep.reset(seeds, options)
        self._restarting = np.zeros(self.num_envs, np.bool_)
        self._first_infos = {}
        self._has_options = bool(options)
        self._obs = batch.obs
        return self._returned(batch.obs), self._join(step_infos(batch)) if batch.info else {}

    def step(self, actions: Any) -> StepResult:
        """Step all environments and return ``(obs, rewards, terminations, truncations, infos)``.

        Raises BadAction if the actions do not fit the action space, and WorkerError if a worker failed and was not
        replaced; then call ``reset()``. In mode DISABLED, raises UsageError if an environment must be reset first.
        """
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            self._lockstep.send(actions)
            return self._same_step(self._lockstep.receive())
        if self.autoreset_mode is AutoresetMode.DISABLED:
            self._require_running()
        acting = np.flatnonzero(~self._restarting)
        if not len(acting):
            return self._all_restarted()
        self._lockstep.send(actions, acting if len(acting) < self.num_envs else None)
        return self._next_step(self._lockstep.receive())

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return ``env.name(*args, **kwargs)`` of each environment, or ``env.name`` itself if it is not callable."""
        return tuple(self.manager.call(call_or_get, name, args, kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return ``env.name`` of each environment. Raises AttributeError if an environment lacks it."""
        return tuple(self._lockstep.get_attr(name))

    def set_attr(self, name: str, values: Any) -> None:
        """Set ``env.name`` in all environments. ``values``: one value for all, or a list or tuple with one for each."""
        self.manager.set_attr(name, values if isinstance(values, list | tuple) else [values] * self.num_envs)

    def render(self) -> tuple[Any, ...]:
        """Return ``env.render()`` of each environment."""
        return tuple(self.manager.render())

    def close_extras(self, **_: Any) -> None:
        """Close the wrapped manager, within ``Timeouts.close_s``. Keyword arguments are ignored."""
        self.manager.close()

    def _seeds(self, seed: Any) -> Sequence[int | None] | None:
        if seed is None or hasattr(seed, "__len__"):
            return seed  # type: ignore[no-any-return]
        return [operator.index(seed) + env_id for env_id in range(self.num_envs)]

    def _mask(self, options: Any) -> np.ndarray | None:
        if not isinstance(options, Mapping) or "reset_mask" not in options:
            return None
        mask = np.asarray(options["reset_mask"])
        is_mask = mask.dtype == np.bool_ and mask.shape == (self.num_envs,)
        if self.autoreset_mode is AutoresetMode.DISABLED:
            if not is_mask or not mask.any():
                raise UsageError(f"reset_mask must be {self.num_envs} bools, at least one of them True, not {mask}.")
        elif not is_mask or not mask.all():
            raise UsageError(
                f"reset_mask must be {self.num_envs} times True: a manager resets environments whose episode ends by "
                'itself. Only with autoreset_mode="Disabled" can some environments be reset alone.'
            )
        return mask

    def _can_use_begun(self, seeds: Any, options: Any) -> bool:
        """Return whether a reset of all environments can use the episodes that the manager has already begun."""
        if self.autoreset_mode is not AutoresetMode.DISABLED or not self._restarting.any():
            return False
        return seeds is None and not options and not self._has_options and self._lockstep.is_well

    def _reset_some(self, env_ids: np.ndarray, seeds: Any, options: dict[str, Any]) -> tuple[Any, Info]:
        """Begin new episodes in ``env_ids``. Return the observations of all environments and the infos of ``env_ids``.

        When an episode ends, the manager begins the next one by itself. That next episode is used unless a seed or
        ``options`` are given, the last reset of all environments had options, or the worker was replaced.
        """
        ResetConfig.of({"seed": seeds, "options": options}, n_envs=self.num_envs)
        if self._obs is None:
            raise UsageError("the first reset must be of all environments: call reset() without a reset_mask.")
        wanted = {env_id: None if seeds is None else seeds[env_id] for env_id in env_ids.tolist()}
        has_begun = set() if options or self._has_options else set(self._first_infos)
        to_reset = {env_id: seed for env_id, seed in wanted.items() if seed is not None or env_id not in has_begun}
        infos = {env_id: self._first_infos[env_id] for env_id in wanted.keys() - to_reset.keys()}
        if to_reset:
            infos.update(self._reset_again(to_reset, options))
        for env_id in wanted:
            self._first_infos.pop(env_id, None)
        self._restarting[env_ids] = False
        return self._returned(with_rows(self._shown, env_ids, take_rows(self._obs, env_ids))), self._join(infos)

    def _reset_again(self, seeds: Mapping[int, int | None], options: dict[str, Any]) -> dict[int, Info]:
        env_ids = list(seeds)
        self._restarting[env_ids] = True  # if the reset fails, the state of their episodes is unknown
        for env_id in env_ids:
            self._first_infos.pop(env_id, None)
        first_obs, infos = self._lockstep.reset_some(seeds, options)
        self._obs = with_rows(self._obs, env_ids, first_obs)
        return infos

    def _returned(self, obs: Tree) -> Any:
        """Record ``obs`` as the last returned observations. Return them as an element of ``observation_space``."""
        self._shown = obs
        if self.autoreset_mode is AutoresetMode.DISABLED:
            obs = copy_tree(obs)  # the user may change it, and a later partial reset returns these rows again
        return self._lockstep.batch_obs(obs)

    def _require_running(self) -> None:
        if self._restarting.any():
            raise UsageError(
                f"the episodes of the environments {np.flatnonzero(self._restarting).tolist()} have ended: call "
                'reset(options={"reset_mask": terminated | truncated}) first.'
            )

    def _same_step(self, batch: Batch) -> StepResult:
        infos: Info = {}
        if batch.info is not None or batch.final_obs is not None:
            of_steps, of_resets, final_obs = step_infos(batch), reset_infos(batch), self._lockstep.final_obs(batch)
            for env_id, info in of_steps.items():
                if env_id in final_obs:
                    infos = self._add_info(infos, {"final_obs": final_obs[env_id], "final_info": info}, env_id)
                infos = self._add_info(infos, of_resets.get(env_id, info), env_id)
        obs = self._lockstep.batch_obs(batch.obs)
        return obs, batch.reward.astype(np.float64), batch.terminated, batch.truncated, infos

    def _next_step(self, batch: Batch) -> StepResult:
        """Convert ``batch`` to the result of ``step``, with first observations for environments that did not act."""
        env_ids, restarted = batch.env_ids, self._restarting
        of_steps, of_resets = step_infos(batch), reset_infos(batch)
        reward = np.zeros(self.num_envs, np.float64)
        terminated, truncated = np.zeros((2, self.num_envs), np.bool_)
        reward[env_ids], terminated[env_ids], truncated[env_ids] = batch.reward, batch.terminated, batch.truncated
        for env_id in np.flatnonzero(restarted).tolist():
            # A restarting environment did not act. If the batch has a row of it, its worker was replaced.
            reward[env_id], terminated[env_id], truncated[env_id] = 0.0, False, False
            of_steps[env_id] = of_resets.get(env_id, of_steps.get(env_id, self._first_infos[env_id]))
        self._obs = batch.obs if len(batch) == self.num_envs else with_rows(self._obs, env_ids, batch.obs)
        self._restarting, self._first_infos = terminated | truncated, of_resets
        obs = self._obs
        if self._restarting.any():
            ended = env_ids[batch.terminated | batch.truncated]
            chosen = self._restarting[ended]
            obs = with_rows(obs, ended[chosen], take_rows(batch.final_obs, chosen))
        if self.autoreset_mode is AutoresetMode.DISABLED and batch.lost.any():
            obs = self._lose(obs, env_ids[batch.lost])
        return self._returned(obs), reward, terminated, truncated, self._join(of_steps)

    def _lose(self, obs: Tree, env_ids: np.ndarray) -> Tree:
        """Return ``obs``, but with the previously returned observations for ``env_ids``, whose worker was replaced.

        Also drop the first infos of ``env_ids``, so that the next reset calls the environments' own ``reset``. The
        manager does not record resets of single environments, so its observations may be from before such a reset.
        """
        for env_id in env_ids.tolist():
            del self._first_infos[env_id]
        return with_rows(obs, env_ids, take_rows(self._shown, env_ids))

    def _all_restarted(self) -> StepResult:
        """Return the first observations of all new episodes as the result of ``step``. No environment is stepped."""
        infos = self._join(self._first_infos)
        self._restarting = np.zeros(self.num_envs, np.bool_)
        terminated, truncated = np.zeros((2, self.num_envs), np.bool_)
        return self._returned(self._obs), np.zeros(self.num_envs, np.float64), terminated, truncated, infos

    def _join(self, infos: Mapping[int, Info]) -> Info:
        """Convert infos keyed by env_id to the dict of arrays and masks that a Gymnasium VectorEnv returns."""
        joined: Info = {}
        for env_id in sorted(infos):
            joined = self._add_info(joined, infos[env_id], env_id)
        return joined


def _mode(value: AutoresetMode | str) -> AutoresetMode:
    try:
        return AutoresetMode(value)
    except ValueError:
        known = ", ".join(f'"{mode.value}"' for mode in AutoresetMode)
        raise UsageError(f"autoreset_mode must be one of {known}, not {value!r}.") from None
