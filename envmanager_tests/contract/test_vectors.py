"""The manager contract over hosted vectors: each worker's environments are those of one Gymnasium VectorEnv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envmanager import EnvContext, EnvManager, EnvRaised, SimpleEnvManager, SubprocessEnvManager, Wait
from envmanager.adapters.factories import call_factory, factories_for
from envmanager.data.trees import map_tree
from envmanager.environment import Environment
from envmanager.interop.spaces import to_space
from envmanager.testing import ManagerContract
from envmanager.testing.fakes import FakeEnvironment, Raise, Step
from envmanager.testing.fault_contract_restarts import TasksUnderFaults
from envmanager_tests.contract.kernel_contract import KernelContract

SUITE = "vectors portable faults"


class AsGymnasium(gymnasium.Env):  # type: ignore[type-arg, misc]
    """An Environment of one agent as a gymnasium.Env, for vectors of the contract's environments."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        (spec,) = environment.behavior_specs.values()
        self.observation_space, self.action_space = to_space(spec.observation), to_space(spec.action)
        self._next: Any = None
        """First observation of the next episode, which the environment has already begun, without seed and options."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, self._next = self._next, None
        if obs is None or options or seed is not None:
            (steps,) = self.environment.reset(seeds=[seed], options=options).values()
            obs = self._row_of(steps.obs)
        return obs, {}

    def step(self, action: Any) -> Any:
        batch = map_tree(lambda leaf: np.asarray(leaf)[None], action)
        (steps,) = self.environment.step(dict.fromkeys(self.environment.behavior_specs, batch)).values()
        obs = self._row_of(steps.obs)
        if steps.ended[0]:
            self._next, obs = obs, self._row_of(steps.final_obs)
        info = {} if steps.info is None else steps.info[0]
        return obs, float(steps.reward[0]), bool(steps.terminated[0]), bool(steps.truncated[0]), info

    def render(self) -> Any:
        return self.environment.render()  # type: ignore[attr-defined]

    def close(self) -> None:
        self.environment.close()

    def __getattr__(self, name: str) -> Any:
        if name == "environment":
            raise AttributeError(name)
        return getattr(self.environment, name)

    def _row_of(self, obs: Any) -> Any:
        return map_tree(lambda leaf: np.array(leaf[0], leaf.dtype), obs)


def vectors_of(env_factory: Any, n_envs: int, mode: AutoresetMode) -> Callable[[EnvContext], Any]:
    """Return a factory of vectors whose environments are those of ``env_factory``."""
    factories = factories_for(env_factory, n_envs)

    def make(context: EnvContext) -> Any:
        env_ids = range(context.env_id, context.env_id + context.n_envs)
        made = [call_factory(factories[env_id], attrs.evolve(context, env_id=env_id, n_envs=1)) for env_id in env_ids]
        if not all(isinstance(each, Environment) for each in made):
            return made[0]
        return SyncVectorEnv([lambda each=each: AsGymnasium(each) for each in made], autoreset_mode=mode)

    return make


_SYNC = "SyncVectorEnv itself refuses or casts it when it joins the observations and infos of its environments"
NOT_FOR_VECTORS = {
    "test_send_takes_some_environments_and_leaves": "the environments of a vector move together",
    "test_multi_agent_environments_step": "an environment of a vector has one agent",
    "test_spaces_that_are_empty_work": "SyncVectorEnv steps no environment whose action space is empty",
    "test_an_observation_that_breaks_its_spec": _SYNC,
    "test_values_that_do_not_survive_a_cast": _SYNC,
    "test_an_info_that_is_no_dict_is_refused": _SYNC,
}
"""Tests of the contract that cannot apply, by the beginning of their names."""


class _OfVectors(ManagerContract, KernelContract):
    takes_actions = False

    @pytest.fixture(autouse=True)
    def _applies(self, request: pytest.FixtureRequest) -> None:
        for beginning, reason in NOT_FOR_VECTORS.items():
            if request.node.originalname.startswith(beginning):
                pytest.skip(reason)

    def test_an_exception_in_step_is_raised_once_and_reset_revives(self) -> None:
        def make(context: EnvContext) -> FakeEnvironment:
            return FakeEnvironment([Step(), Raise(ValueError("gear 7 broke"))] if context.env_id == 0 else [Step()])

        with self.stepping(make, 4) as manager:
            own = manager.stats().workers[0].env_ids
            manager.step(Wait.all())
            with pytest.raises(EnvRaised, match="gear 7 broke") as raised:
                manager.step(Wait.all())
            assert raised.value.env_ids == own  # a vector does not say which of its environments raised
            assert isinstance(raised.value.__cause__, ValueError)
            if len(manager.env_workers) > 1:
                assert [info.worker_id for info in manager.step(Wait.all())] == [1]
            manager.reset()
            assert manager.step(Wait.all())


class TestVectorInThisProcess(_OfVectors):
    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return SimpleEnvManager(vectors_of(env_factory, n_envs, AutoresetMode.NEXT_STEP), n_envs, **options)


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=[mode.value for mode in AutoresetMode], scope="class")
class _InEachMode:
    @pytest.fixture(autouse=True)
    def _mode(self, mode: AutoresetMode) -> None:
        self.mode = mode


class TestVectorsInWorkers(_InEachMode, _OfVectors):
    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        make, n_workers = vectors_of(env_factory, n_envs, self.mode), max(1, n_envs // 2)
        return SubprocessEnvManager(make, n_envs, n_workers=n_workers, **options)


class TestTasksOfAVectorUnderFaults(_InEachMode, TasksUnderFaults):
    has_processes = False

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return SimpleEnvManager(vectors_of(env_factory, n_envs, getattr(self, "mode", "NextStep")), n_envs, **options)


class _TasksInWorkers(TasksUnderFaults):
    mode = AutoresetMode.NEXT_STEP

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return SubprocessEnvManager(
            vectors_of(env_factory, n_envs, self.mode), n_envs, n_workers=(n_envs + 1) // 2, **options
        )


class TestTasksOfVectorsUnderFaults(_TasksInWorkers):
    pass


@pytest.mark.thorough
class TestTasksOfVectorsInEachMode(_InEachMode, _TasksInWorkers):
    """What a mode has of its own is shown in this process, above."""
