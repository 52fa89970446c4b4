"""An adapter that lets ML-Agents' ``TrainerController`` drive a manager of this library.

::

    TrainerController ── get_steps ──▶ MlagentsEnvManager ── step ──▶ any EnvManager ──▶ BaseEnv  BaseEnv  …
                      ── process_steps ──▶ agent managers ──▶ trajectories ──▶ trainers ──▶ policies
                                                                └────── policy queues, emptied before each step

The manager of this library takes the steps, with one policy call for all workers that are ready. A recurrent policy is
called once for each worker instead. Inherited ML-Agents code passes the steps on to the trainers.

The rule: ML-Agents' agent managers receive the same steps as from ML-Agents' own env manager. When a worker is
replaced, only that worker's unfinished trajectories are dropped; no other environment is reset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from cattrs import transform_error
from cattrs.errors import BaseValidationError

from envmanager.adapters.mlagents import STATS, MlagentsEnvironment, MlagentsFactory, Parameters
from envmanager.data.steps import ActionInfo, AgentSteps, StepInfo
from envmanager.data.trees import concat_rows
from envmanager.env_manager import EnvManager
from envmanager.errors import EnvRaised, UsageError
from envmanager.importing import needed_by
from envmanager.interop.mlagents_steps import StepTranslator, share_of, to_actions

with needed_by("MlagentsEnvManager", extra=None):
    from mlagents.trainers.env_manager import EnvironmentStep
    from mlagents.trainers.env_manager import EnvManager as MlagentsManager
    from mlagents.trainers.exception import TrainerConfigError
    from mlagents.trainers.policy import Policy
    from mlagents_envs.base_env import BehaviorSpec
    from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel

__all__ = ["MlagentsEnvManager", "MlagentsEnvironment", "MlagentsFactory", "config_errors"]


class MlagentsEnvManager(MlagentsManager):  # type: ignore[misc]
    """An ML-Agents ``EnvManager`` on top of ``manager``, for ``TrainerController.start_learning``.

    The environments must be MlagentsEnvironments, which MlagentsFactory makes; otherwise UsageError is raised.
    Environment statistics reach the trainers if the manager has ``infos=True``. ``close()`` closes the manager.
    When a step raises a WorkerError, ``start_learning`` saves the models before it raises the error again.
    """

    def __init__(self, manager: EnvManager) -> None:
        super().__init__()
        self._manager = manager
        self._translator = StepTranslator()
        self._env_ids = {worker.worker_id: worker.env_ids for worker in manager.stats().workers}
        self._parameters_since_reset: Parameters = {}
        self._replaced: set[int] = set()
        self._behaviors: dict[str, BehaviorSpec] = {}
        self._seen: set[str] = set()
        self._learn_behaviors()

    @property
    def training_behaviors(self) -> dict[str, BehaviorSpec]:
        """ML-Agents' BehaviorSpec of every behavior that has appeared in any environment, by name."""
        if self._seen - self._behaviors.keys():
            self._learn_behaviors()
        return dict(self._behaviors)

    def set_policy(self, brain_name: str, policy: Policy) -> None:
        """Use ``policy`` for the agents of the behavior ``brain_name``, even if no such agent has appeared yet."""
        super().set_policy(brain_name, policy)
        self._manager.set_policy(brain_name, _DecidingPolicy(policy, self._translator, self._env_ids))

    def set_env_parameters(self, config: Mapping[str, Any] | None = None) -> None:
        """Send environment parameters to all environments. ``config`` maps names to numbers or ML-Agents samplers.

        Blocks until pending steps are done. Workers started later as replacements receive the parameters too.
        """
        parameters = _parameters_of(config)
        if parameters:
            self._parameters_since_reset = {**self._parameters_since_reset, **parameters}
            self._manager.call("set_environment_parameters", parameters)

    def close(self) -> None:
        """Close the wrapped manager."""
        self._manager.close()

    def _reset_env(self, config: Mapping[str, Any] | None = None) -> list[EnvironmentStep]:
        self._translator.forget_envs(range(self._manager.n_envs))
        self._parameters_since_reset = {}
        self._replaced = set()
        return [self._translated(info) for info in self._manager.reset({"options": _parameters_of(config)})]

    def _step(self) -> list[EnvironmentStep]:
        if self._replaced:
            # A replacement has received the parameters of the last reset, but not those sent after that reset.
            env_ids = sorted(self._replaced)
            self._manager.call("set_environment_parameters", self._parameters_since_reset, env_ids=env_ids)
            self._replaced = set()
        return [self._translated(info) for info in self._manager.step()]

    def _translated(self, info: StepInfo) -> EnvironmentStep:
        is_lost = info.lost is not None
        if is_lost:
            self._translator.forget_envs(self._env_ids[info.worker_id])
            if self._parameters_since_reset:
                self._replaced.update(self._env_ids[info.worker_id])
        self._seen |= info.current.keys()
        steps = {name: self._translator.translate(own, is_lost=is_lost) for name, own in info.current.items()}
        actions = {} if info.actions is None else {name: share_of(own) for name, own in info.actions.items()}
        return EnvironmentStep(steps, info.worker_id, actions, _stats_of(info))

    def _learn_behaviors(self) -> None:
        try:
            specs_of_envs = self._manager.get_attr("mlagents_specs")
        except EnvRaised as error:
            raise UsageError(
                "MlagentsEnvManager needs a manager of ML-Agents environments: give it MlagentsFactory(make) as its "
                f"env_factory. ({error.type_name}: {error.cause})"
            ) from error
        for specs in specs_of_envs:
            self._behaviors.update(specs)


class _DecidingPolicy:
    """An adapter from an ML-Agents policy to a policy of this library. It converts steps and actions."""

    def __init__(self, policy: Policy, translator: StepTranslator, env_ids: Mapping[int, Any]) -> None:
        self._policy = policy
        self._translator = translator
        self._worker_of = {env_id: worker_id for worker_id, own in env_ids.items() for env_id in own}

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        if not self._policy.use_recurrent:
            return self._call(steps, 0)
        # A recurrent policy keeps its memories by worker and agent, so each worker needs a call of its own.
        workers = np.array([self._worker_of[env_id] for env_id in steps.env_id.tolist()])
        bounds = np.flatnonzero(np.diff(workers)) + 1
        parts = [
            self._call(steps.take(rows), int(workers[rows[0]])) for rows in np.split(np.arange(len(steps)), bounds)
        ]
        outputs = {name: np.concatenate([part.outputs[name] for part in parts]) for name in parts[0].outputs}
        return ActionInfo(concat_rows([part.action for part in parts]), outputs)

    def _call(self, steps: AgentSteps, worker_id: int) -> ActionInfo:
        return to_actions(self._policy.get_action(self._translator.decision_steps(steps), worker_id), len(steps))


def _parameters_of(config: Mapping[str, Any] | None) -> dict[str, float | bytes]:
    """Convert the values of ``config`` to floats and bytes, so that workers need not import ML-Agents' trainers."""
    return {name: _parameter(name, value) for name, value in (config or {}).items()}


def _parameter(name: str, value: Any) -> float | bytes:
    if isinstance(value, int | float):
        return float(value)
    channel = EnvironmentParametersChannel()
    value.apply(name, channel)
    return bytes(channel.message_queue[0])


def _stats_of(info: StepInfo) -> dict[str, list[Any]]:
    """Return the statistics in a worker's step infos: for each name, a list of the values from all its environments."""
    together: dict[str, list[Any]] = {}
    for steps in info.current.values():
        for own in steps.info or ():
            for name, values in own.get(STATS, {}).items():
                together.setdefault(name, []).extend(values)
    return together


@contextmanager
def config_errors() -> Iterator[None]:
    """Return a context manager that converts cattrs' errors to a TrainerConfigError with one line per mistake.

    Use the context around calls that read a config, such as ``parse_command_line`` and ``RunOptions.from_dict``.
    ML-Agents was written for an old cattrs, which raised each error directly. The newer cattrs that this library needs
    raises exception groups, which ML-Agents does not catch and whose text does not say what is wrong.
    """
    try:
        yield
    except BaseValidationError as error:
        raise TrainerConfigError("\n".join(transform_error(error, "config", lambda mistake, _: str(mistake)))) from None
