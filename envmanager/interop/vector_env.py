"""A manager as a Gymnasium ``VectorEnv``. The table shows the results for an episode that ends at step t.

::

    step    manager                          SAME_STEP    NEXT_STEP                       DISABLED
    t       obs = first, final_obs = last    as manager   obs = last                      obs = last
    t + 1   a step of the new episode        as manager   obs = first, action ignored     refused until reset(mask)

In mode DISABLED, the manager's episodes begin on demand: a ``reset_mask`` becomes a call of ``begin``.

The rule: steps return what Gymnasium's ``SyncVectorEnv`` returns, apart from the rounding of rewards, if the manager
has ``infos=True``, no worker was replaced and, except in mode DISABLED, the last reset had no options.
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
from envmanager.interop.lockstep import LOST, Elsewhere, Info, Lockstep, reset_infos, step_infos
from envmanager.interop.remote import call_or_get
from envmanager.options import ResetConfig
from envmanager.tasks import ExactTask

with needed_by("as_vector_env", extra="gymnasium"):
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space

_OF_STATE = ("shown", "obs", "restarting", "cut")
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
        try:
            self.autoreset_mode = AutoresetMode(autoreset_mode)
        except ValueError:
            known = ", ".join(f'"{mode.value}"' for mode in AutoresetMode)
            raise UsageError(f"autoreset_mode must be one of {known}, not {autoreset_mode!r}.") from None
        is_disabled = self.autoreset_mode is AutoresetMode.DISABLED
        self._lockstep = lockstep = Lockstep(manager, "on_demand" if is_disabled else "automatic")
        self.num_envs = lockstep.n_envs
        self.single_observation_space = lockstep.observation_space
        self.single_action_space = lockstep.action_space
        self.observation_space = batch_space(lockstep.observation_space, self.num_envs)
        self.action_space = batch_space(lockstep.action_space, self.num_envs)
        self.metadata = {**lockstep.first_attr("metadata", {}), "autoreset_mode": self.autoreset_mode}
        self.render_mode = lockstep.first_attr("render_mode", None)
        self._restarting = np.zeros(self.num_envs, np.bool_)
        """Whether each environment's episode ended and the next one has returned no observation yet, bool[n_envs]."""
        self._cut = np.zeros(self.num_envs, np.bool_)
        """Whether each environment's episode was lost in a reset of others, which the next step says: bool[n_envs]."""
        self._obs: Tree = None
        """Newest observation of each environment; in NEXT_STEP, of the new episode if the environment is restarting."""
        self._shown: Tree = None
        """Observations that the last call has returned, before ``batch_obs``."""
        self._first_infos: dict[int, Info] = {}
        """Infos of the first observations that have not been returned yet, by env_id."""

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
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Info]:
        """Begin new episodes, by default in all environments. Return ``(observations, infos)``.

        ``seed`` is an int (environment i gets ``seed + i``) or a sequence with an int or None for each environment.
        Automatic resets reuse the ``options`` of the last reset of all environments. If ``autoreset_mode`` is DISABLED,
        the option ``reset_mask`` (``bool[n_envs]``, not all False) selects the environments to reset. In the other
        modes, it must be all True. Other masks raise UsageError. If a reset fails, reset all environments.

        ``state``, given alone, is what ``state()`` has returned, perhaps in another process: the episodes go on where
        they stood, and the observations are those that the trainer had. What differs is lost with the next step.
        """
        if state is not None:
            if seed is not None or options is not None:
                raise UsageError("reset(state=…) takes no seed and no options: the state has them.")
            return self._restored(state)
        mask = self._mask(options)
        seeds: Any = seed
        if seed is not None and not hasattr(seed, "__len__"):
            seeds = [operator.index(seed) + env_id for env_id in range(self.num_envs)]
        if mask is not None and options is not None:
            options = {key: value for key, value in options.items() if key != "reset_mask"}
        if mask is not None and not mask.all():
            return self._reset_some(np.flatnonzero(mask), seeds, options)
        batch = self._lockstep.reset(seeds, options)
        self._restarting, self._cut = np.zeros((2, self.num_envs), np.bool_)
        self._first_infos = {}
        self._obs = batch.obs
        return self._returned(batch.obs), self._join(step_infos(batch)) if batch.info else {}

    def state(self) -> dict[str, Any]:
        """Return where the environments stand as plain data, with which ``reset(state=…)`` of another one goes on.

        The manager needs ``restarts=RestartPolicy(keep_episodes=True)``. Infos are not in it. Raises UsageError before
        a reset, and after a step that was interrupted or has raised.
        """
        own = {name: getattr(self, f"_{name}") for name in _OF_STATE}
        return self._lockstep.state(self.autoreset_mode.value, **own)

    def _restored(self, state: Mapping[str, Any]) -> tuple[Any, Info]:
        state = self._lockstep.restore(state, self.autoreset_mode.value)
        for name in _OF_STATE:
            setattr(self, f"_{name}", state[name])
        self._first_infos = {env_id: {} for env_id in range(self.num_envs)}
        return self._returned(self._shown), {}

    def step(self, actions: Any) -> StepResult:
        """Step all environments and return ``(obs, rewards, terminations, truncations, infos)``.

        Raises BadAction if the actions do not fit the action space, and WorkerError if a worker failed and was not
        replaced; then call ``reset()``. In mode DISABLED, raises UsageError if an environment must be reset first.
        """
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            self._lockstep.send(actions)
            return self._same_step(self._lockstep.receive())
        is_disabled = self.autoreset_mode is AutoresetMode.DISABLED
        if is_disabled and self._restarting.any():
            raise UsageError(
                f"the episodes of the environments {np.flatnonzero(self._restarting).tolist()} have ended: call "
                'reset(options={"reset_mask": terminated | truncated}) first.'
            )
        idle = self._cut if is_disabled else self._restarting
        ids = np.flatnonzero(idle).tolist()
        infos = {env_id: {LOST: True} if is_disabled else self._first_infos[env_id] for env_id in ids}
        reward = np.zeros(self.num_envs, np.float64)
        terminated, truncated = np.zeros((2, self.num_envs), np.bool_)
        batch, of_resets = None, {}
        if len(ids) < self.num_envs:
            self._lockstep.send(actions, np.flatnonzero(~idle) if ids else None)
            batch = self._lockstep.receive()
            env_ids, of_resets = batch.env_ids, reset_infos(batch)
            reward[env_ids], terminated[env_ids], truncated[env_ids] = batch.reward, batch.terminated, batch.truncated
            self._obs = batch.obs if len(batch) == self.num_envs else with_rows(self._obs, env_ids, batch.obs)
            infos.update(step_infos(batch))
            infos.update((env_id, of_resets[env_id]) for env_id in ids if env_id in of_resets)
        # An idle environment did not act. If the batch has a row of it, its worker was replaced.
        reward[idle], terminated[idle], truncated[idle] = 0.0, False, is_disabled
        self._restarting, self._first_infos = terminated | truncated, of_resets
        self._cut = np.zeros(self.num_envs, np.bool_)
        obs = self._obs
        if batch is not None and self._restarting.any():
            ended = batch.env_ids[batch.terminated | batch.truncated]
            chosen = self._restarting[ended]
            obs = with_rows(obs, ended[chosen], take_rows(batch.final_obs, chosen)) if chosen.any() else obs
        return self._returned(obs), reward, terminated, truncated, self._join(infos)

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

    def _reset_some(self, env_ids: np.ndarray, seeds: Any, options: Any) -> tuple[Any, Info]:
        """Begin new episodes in ``env_ids``. Return the observations of all environments and the infos of ``env_ids``.

        If a worker is lost meanwhile, its environments in ``env_ids`` begin again in its replacement. The episodes of
        its other environments are cut, which no reset can say: the next step does.
        """
        ResetConfig.of({"seed": seeds, "options": options}, n_envs=self.num_envs)
        if self._obs is None:
            raise UsageError("the first reset must be of all environments: call reset() without a reset_mask.")
        tasks = {row: ExactTask(None if seeds is None else seeds[row], options) for row in env_ids.tolist()}
        infos: dict[int, Info] = {}
        for batch in self._lockstep.begin(tasks):
            self._obs = with_rows(self._obs, batch.env_ids, batch.obs)
            self._restarting[batch.env_ids], self._cut[batch.env_ids] = False, batch.lost
            first = batch.env_ids[batch.first].tolist()
            infos.update((env_id, info) for env_id, info in step_infos(batch).items() if env_id in first)
        return self._returned(self._obs), self._join(infos)

    def _returned(self, obs: Tree) -> Any:
        """Return observations as an element of ``observation_space``."""
        self._shown = obs
        if self.autoreset_mode is AutoresetMode.DISABLED:
            obs = copy_tree(obs)  # the user may change it, and a later partial reset returns these rows again
        return self._lockstep.batch_obs(obs)

    def _same_step(self, batch: Batch) -> StepResult:
        infos: Info = {}
        if batch.info is not None or batch.final_obs is not None:
            of_steps, of_resets, final_obs = step_infos(batch), reset_infos(batch), self._lockstep.final_obs(batch)
            for env_id, info in of_steps.items():
                if env_id in final_obs:
                    infos = self._add_info(infos, {"final_obs": final_obs[env_id], "final_info": info}, env_id)
                infos = self._add_info(infos, of_resets.get(env_id, info), env_id)
        rewards = batch.reward.astype(np.float64)
        return self._returned(batch.obs), rewards, batch.terminated, batch.truncated, infos

    def _join(self, infos: Mapping[int, Info]) -> Info:
        """Convert infos keyed by env_id to the dict of arrays and masks that a Gymnasium VectorEnv returns."""
        joined: Info = {}
        for env_id in sorted(infos):
            joined = self._add_info(joined, infos[env_id], env_id)
        return joined
