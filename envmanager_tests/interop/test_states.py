"""Vector environments that go on from a state, in the middle of their episodes."""

from __future__ import annotations

import os
import pickle
import signal
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence

from envmanager import RestartPolicy, SimpleEnvManager, SubprocessEnvManager, UsageError
from envmanager.interop import as_vector_env
from envmanager_tests.interop.envs import END, GO_ON, TRUNCATE, Obedient, Talker, Tupled, cart_pole

KEEPS = RestartPolicy(keep_episodes=True, backoff_s=0)
OPTIONS: dict[str, Any] = {"restarts": KEEPS, "infos": False}
MODES = ["NextStep", "SameStep", "Disabled"]


def stepped(envs: Any, actions: Any) -> list[Any]:
    """Take a step. In mode Disabled, then begin new episodes where they have ended."""
    results = [envs.step(actions)]
    ended = results[0][2] | results[0][3]
    if envs.autoreset_mode.value == "Disabled" and ended.any():
        results.append(envs.reset(options={"reset_mask": ended}))
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factory", [cart_pole, Talker, Tupled], ids=lambda factory: factory.__name__)
def test_another_goes_on_from_each_step_with_the_same_steps(make_manager: Any, mode: str, factory: Any) -> None:
    envs = as_vector_env(make_manager(factory, **OPTIONS), autoreset_mode=mode)
    envs.action_space.seed(7)
    last: Any = envs.reset(seed=3)
    with closing(as_vector_env(SimpleEnvManager(factory, 3, **OPTIONS, seed=5), autoreset_mode=mode)) as other:
        for _ in range(40):
            obs, infos = other.reset(state=pickle.loads(pickle.dumps(envs.state())))
            assert data_equivalence((obs, infos), (last[0], {}))
            actions = envs.action_space.sample()
            results = stepped(envs, actions)
            again = stepped(other, actions)
            assert data_equivalence([each[:-1] for each in again], [each[:-1] for each in results])  # but for infos
            last = results[-1]


def test_an_ended_episode_waits_for_its_reset_in_the_other_too(make_manager: Any) -> None:
    envs, other = (as_vector_env(make_manager(Obedient, **OPTIONS), autoreset_mode="Disabled") for _ in range(2))
    envs.reset(seed=1)
    for ends in ([END, GO_ON, TRUNCATE], [END, END, END]):
        obs = envs.step(ends)[0]
        assert data_equivalence(other.reset(state=envs.state())[0], obs)
        with pytest.raises(UsageError, match="have ended"):
            other.step([GO_ON] * 3)
        mask = {"reset_mask": np.array(ends) != GO_ON}
        for each in (envs, other):
            begun, (after, *_) = each.reset(options=mask)[0], each.step([GO_ON] * 3)
            assert (begun[mask["reset_mask"]][:, 3] == 0).all()
            assert (after[:, 3] == begun[:, 3] + 1).all()


@pytest.mark.parametrize("mode", MODES)
def test_what_differs_is_lost_with_the_next_step_and_the_others_go_on(mode: str) -> None:
    with closing(as_vector_env(SimpleEnvManager(cart_pole, 3, **OPTIONS), autoreset_mode=mode)) as envs:
        envs.reset(seed=1)
        obs = envs.step([0, 1, 0])[0]
        state = envs.state()
        expected = envs.step([1, 0, 1])[0]
        state["manager"]["envs"][1]["actions"]["default"][:] = 0
        assert data_equivalence(envs.reset(state=state)[0], obs)
        next_obs, rewards, _, truncated, infos = envs.step([1, 0, 1])

        assert rewards.tolist() == [1, 0, 1]
        assert truncated.tolist() == [False, True, False]
        assert (next_obs[[0, 2]] == expected[[0, 2]]).all()
        assert (infos["final_info"] if mode == "SameStep" else infos)["lost"].tolist() == [False, True, False]


def test_workers_that_die_after_a_state_cost_no_episode() -> None:
    with closing(as_vector_env(SubprocessEnvManager(cart_pole, 2, **OPTIONS))) as envs:
        envs.reset(seed=1)
        for _ in range(5):
            envs.step([0, 1])
        state = envs.state()
        expected = [envs.step([1, 0]) for _ in range(3)]
        envs.reset(state=state)
        for results in expected:
            os.kill(envs.manager.stats().workers[1].pid, signal.SIGKILL)
            assert data_equivalence(envs.step([1, 0]), results)


def test_a_state_of_something_else_is_refused() -> None:
    with (
        closing(as_vector_env(SimpleEnvManager(cart_pole, 2, **OPTIONS))) as envs,
        closing(as_vector_env(SimpleEnvManager(cart_pole, 2, **OPTIONS), autoreset_mode="SameStep")) as other,
    ):
        with pytest.raises(UsageError, match=r"call reset\(\) first"):
            envs.state()
        envs.reset(seed=1)
        state = envs.state()
        for wrong in (envs.manager.state(), {}, 7):
            with pytest.raises(UsageError, match="of the manager alone"):
                envs.reset(state=wrong)
        with pytest.raises(UsageError, match="mode SameStep"):
            other.reset(state=state)
        for more in ({"seed": 1}, {"options": {}}, {"seed": np.array([1, 2])}):
            with pytest.raises(UsageError, match="takes no seed"):
                envs.reset(state=state, **more)
        envs.step([0, 1])


def test_a_manager_that_keeps_no_episodes_says_what_it_needs() -> None:
    with closing(as_vector_env(SimpleEnvManager(cart_pole, 2))) as envs:
        envs.reset(seed=1)
        with pytest.raises(UsageError, match="keep_episodes=True"):
            envs.state()
