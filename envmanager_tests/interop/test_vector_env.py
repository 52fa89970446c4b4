"""The Gymnasium bridge against Gymnasium's own SyncVectorEnv, and where it must differ."""

import gc
import os
import signal
import sys

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers

from envmanager import EnvContext, RestartPolicy, SimpleEnvManager, SubprocessEnvManager
from envmanager.errors import BadAction, EnvRaised, ManagerClosed, MissingExtra, RestartsExhausted, UsageError
from envmanager.interop import as_vector_env
from envmanager.testing import EchoEnvironment
from envmanager_tests.interop.envs import (
    DIE,
    END,
    GO_ON,
    RAISE,
    TRUNCATE,
    Arm,
    Obedient,
    Talker,
    Tupled,
    cart_pole,
    frozen_lake,
)

MODES = ["NextStep", "SameStep"]


def sync(factory, mode, n_envs=3):
    if factory is Obedient:
        return SyncVectorEnv([lambda i=i: Obedient(EnvContext(i, i)) for i in range(n_envs)], autoreset_mode=mode)
    return SyncVectorEnv([factory] * n_envs, autoreset_mode=mode)


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for our_part, their_part in zip(ours, theirs, strict=True):
        assert data_equivalence(our_part, their_part), f"\n{our_part}\ninstead of\n{their_part}"


def obedient(n_envs=3, mode="NextStep", *, n_workers=None, restarts=None, infos=True):
    restarts = RestartPolicy(backoff_s=0) if restarts is None else restarts
    return as_vector_env(
        SubprocessEnvManager(Obedient, n_envs, n_workers=n_workers, restarts=restarts, infos=infos), autoreset_mode=mode
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factory", [cart_pole, frozen_lake, Talker, Tupled, Arm], ids=lambda factory: factory.__name__)
def test_every_step_is_that_of_sync_vector_env(make_manager, factory, mode):
    ours, theirs = as_vector_env(make_manager(factory, infos=True), autoreset_mode=mode), sync(factory, mode)
    theirs.action_space.seed(5)

    assert_same(ours.reset(seed=7), theirs.reset(seed=7))
    n_ended, ended = 0, np.array([True])
    while n_ended < 12 or ended.any():  # after an end, NextStep resets our environments one step before theirs
        actions = theirs.action_space.sample()
        result = theirs.step(actions)
        assert_same(ours.step(actions), result)
        ended = result[2] | result[3]
        n_ended += np.count_nonzero(ended)
    assert_same(ours.reset(), theirs.reset())  # goes on with the randomness there is
    assert_same(ours.reset(seed=[3, None, 1]), theirs.reset(seed=[3, None, 1]))


@pytest.mark.parametrize("mode", MODES)
def test_spaces_and_metadata_are_those_of_sync_vector_env(make_manager, mode):
    ours, theirs = as_vector_env(make_manager(Tupled), autoreset_mode=mode), sync(Tupled, mode)

    for name in ("num_envs", "observation_space", "action_space", "single_observation_space", "single_action_space"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert (ours.metadata, ours.render_mode, ours.spec) == (theirs.metadata, theirs.render_mode, theirs.spec)
    assert repr(ours) == "ManagerVectorEnv(num_envs=3)"
    assert ours.unwrapped is ours


@pytest.mark.parametrize("mode", MODES)
def test_wrappers_of_gymnasium_say_the_same_of_it(make_manager, mode):
    def wrapped(envs):
        return wrappers.NormalizeReward(wrappers.RecordEpisodeStatistics(envs))

    ours, theirs = (
        wrapped(as_vector_env(make_manager(cart_pole, infos=True), autoreset_mode=mode)),
        wrapped(sync(cart_pole, mode)),
    )
    ours.reset(seed=1), theirs.reset(seed=1)
    n_episodes = 0
    for step in range(60):
        actions = np.full(3, step % 2)
        (*results, info), (*their_results, their_info) = ours.step(actions), theirs.step(actions)
        assert_same(results, their_results)
        episode, their_episode = info.get("episode", {}), their_info.get("episode", {})
        for key in ("r", "l"):
            np.testing.assert_array_equal(episode.get(key, 0), their_episode.get(key, 0))
        n_episodes += len(episode) > 0
    assert n_episodes >= 3


def test_next_step_ignores_the_action_of_an_environment_that_restarts(make_manager):
    envs = as_vector_env(make_manager(Obedient, infos=True))
    envs.reset()

    obs, reward, terminated, _, infos = envs.step([GO_ON, END, GO_ON])
    assert obs[1].tolist() == [1, 0, 0, 1]
    assert (reward.tolist(), terminated.tolist()) == ([0.5, 0.5, 0.5], [False, True, False])
    assert infos["count"].tolist() == [1, 1, 1]

    no_action_at_all = -7
    obs, reward, terminated, truncated, infos = envs.step([GO_ON, no_action_at_all, TRUNCATE])
    assert obs.tolist() == [[0, 0, 0, 2], [1, 0, 1, 0], [2, 0, 0, 2]]
    assert (reward.tolist(), terminated.any()) == ([0.5, 0.0, 0.5], False)
    assert truncated.tolist() == [False, False, True]
    assert infos["_count"].tolist() == [True, False, True]
    assert infos["_episode_number"].tolist() == [False, True, False]


def test_next_step_needs_no_action_when_all_episodes_ended_at_once(make_manager):
    ours, theirs = as_vector_env(make_manager(Obedient, infos=True)), sync(Obedient, "NextStep")
    ours.reset(), theirs.reset()

    for actions in ([END] * 3, [GO_ON] * 3, [GO_ON, GO_ON, END], [END, END, END], [END] * 3, [GO_ON] * 3):
        assert_same(ours.step(actions), theirs.step(actions))


@pytest.mark.parametrize("mode", MODES)
def test_without_infos_only_what_the_mode_needs_is_told(make_manager, mode):
    envs = as_vector_env(make_manager(Obedient), autoreset_mode=mode)

    assert envs.reset()[1] == {}
    infos = envs.step([END, GO_ON, GO_ON])[4]
    assert infos.keys() == ({"final_obs", "_final_obs", "final_info", "_final_info"} if mode == "SameStep" else set())
    assert envs.step([GO_ON] * 3)[4] == {}


@pytest.mark.parametrize("mode", MODES)
def test_what_was_handed_out_stays_as_it_is(make_manager, mode):
    envs = as_vector_env(make_manager(Obedient, zero_copy=True), autoreset_mode=mode)
    handed_out = [envs.reset()[0]]
    for step in range(6):
        handed_out.append(envs.step([GO_ON, END if step == 2 else GO_ON, GO_ON])[0])

    assert [obs[0, 3] for obs in handed_out] == [0, 1, 2, 3, 4, 5, 6]


def test_options_hold_for_the_episodes_that_begin_by_themselves_too(make_manager):
    envs = as_vector_env(make_manager(Obedient))
    envs.reset(options={"level": 2})
    envs.step([END] * 3)

    assert envs.get_attr("episode") == (1, 1, 1)
    assert envs.get_attr("options") == ({"level": 2},) * 3
    envs.reset()
    assert envs.get_attr("options") == (None,) * 3


def test_reset_mask_is_for_all_or_refused(make_manager):
    envs = as_vector_env(make_manager(Obedient))
    options = {"reset_mask": np.array([True] * 3), "level": 1}

    envs.reset(options=options)
    assert envs.get_attr("options") == ({"level": 1},) * 3
    assert "reset_mask" in options
    for mask in ([True, False, True], [True] * 4, [1, 1, 1]):
        with pytest.raises(UsageError, match="3 times True"):
            envs.reset(options={"reset_mask": np.array(mask)})


def test_environments_are_called_and_asked_through_it(make_manager):
    envs = as_vector_env(make_manager(Obedient))
    envs.reset(seed=5)
    envs.step([GO_ON] * 3)

    assert envs.call("add", 10) == (10, 11, 12)
    assert envs.call("add", 10, times=2) == (20, 21, 22)
    assert envs.call("count") == (1, 1, 1)  # as in Gymnasium, what is no function is handed out
    assert envs.get_attr("env_id") == (0, 1, 2)
    envs.set_attr("count", [7, 8, 9])
    assert envs.get_attr("count") == (7, 8, 9)
    envs.set_attr("count", 4)
    assert [frame[0, 0, 0] for frame in envs.render()] == [4, 4, 4]
    assert envs.np_random_seed == (5, 6, 7)
    assert len(envs.np_random) == 3


def test_what_cannot_be_called_or_asked_is_an_error(make_manager):
    envs = as_vector_env(make_manager(Obedient))

    with pytest.raises(AttributeError, match="nonsense"):
        envs.get_attr("nonsense")
    with pytest.raises(EnvRaised, match="not callable"):
        envs.call("not_a_function")  # the error comes out of it


def test_a_closed_bridge_has_closed_its_manager(make_manager):
    manager = make_manager(Obedient)
    envs = as_vector_env(manager)
    envs.close()
    envs.close()

    with pytest.raises(ManagerClosed):
        manager.reset()


def test_close_takes_the_keywords_of_other_vector_environments(make_manager):
    manager = make_manager(Obedient)
    envs = as_vector_env(manager)
    envs.close(timeout=1, terminate=True, anything_else=3)

    assert envs.closed
    with pytest.raises(ManagerClosed):
        manager.reset()


@pytest.mark.parametrize("name", ["envs", "env_fns", "step_async", "reset_wait"])
def test_what_other_vector_environments_have_besides_is_missing_with_advice(name):
    envs = as_vector_env(SimpleEnvManager(Obedient))

    assert not hasattr(envs, name)
    with pytest.raises(AttributeError, match=rf"ManagerVectorEnv has no .*{name}.*: .*(get_attr|send\(\))"):
        getattr(envs, name)


def test_a_forgotten_bridge_leaves_its_manager_open():
    manager = SimpleEnvManager(Obedient)
    as_vector_env(manager).reset()
    gc.collect()

    assert manager.get_attr("episode") == [0]


def test_actions_that_do_not_fit_are_refused_and_change_nothing(make_manager):
    envs = as_vector_env(make_manager(Obedient))
    envs.reset()
    for bad in ([GO_ON] * 2, [GO_ON] * 4, 0, [GO_ON, GO_ON, 77], {"a": [0, 0, 0]}):
        with pytest.raises(BadAction):
            envs.step(bad)
    envs.step([END, GO_ON, GO_ON])
    for bad in ([GO_ON] * 2, [GO_ON] * 4, 0, [GO_ON, GO_ON, 77], {"a": [0, 0, 0]}):
        with pytest.raises(BadAction):
            envs.step(bad)

    assert envs.step([GO_ON] * 3)[0][:, 3].tolist() == [0, 2, 2]


def test_an_exception_of_an_environment_is_raised_and_a_reset_heals(make_manager):
    envs = as_vector_env(make_manager(Obedient))
    envs.reset()

    with pytest.raises(EnvRaised, match="as told"):
        envs.step([GO_ON, RAISE, GO_ON])
    with pytest.raises(UsageError, match=r"call reset\(\)"):
        envs.step([GO_ON] * 3)
    assert envs.reset()[0].tolist() == [[0, 0, 1, 0], [1, 0, 1, 0], [2, 0, 1, 0]]
    envs.step([GO_ON] * 3)


def test_a_step_before_the_first_reset_is_refused(make_manager):
    with pytest.raises(UsageError, match=r"reset\(\)"):
        as_vector_env(make_manager(Obedient)).step([GO_ON] * 3)


# Workers that die.


def test_a_lost_step_in_same_step_mode_is_a_truncated_one_without_reward():
    envs = obedient(mode="SameStep")
    envs.reset()
    envs.step([GO_ON] * 3)

    obs, reward, terminated, truncated, infos = envs.step([GO_ON, DIE, GO_ON])
    assert obs.tolist() == [[0, 0, 0, 2], [1, 1, 0, 0], [2, 0, 0, 2]]  # env 1 is of generation 1
    assert reward.tolist() == [0.5, 0.0, 0.5]
    assert (terminated.any(), truncated.tolist()) == (False, [False, True, False])
    assert infos["final_obs"][1].tolist() == [1, 0, 0, 1]  # what was last handed out
    assert infos["final_info"]["lost"].tolist() == [False, True, False]
    assert infos["episode_number"].tolist() == [0, 0, 0]
    assert infos["_episode_number"].tolist() == [False, True, False]

    assert envs.step([GO_ON] * 3)[0].tolist() == [[0, 0, 0, 3], [1, 1, 0, 1], [2, 0, 0, 3]]
    envs.close()


def test_a_lost_step_in_next_step_mode_is_a_truncated_one_and_the_next_begins_anew():
    envs = obedient()
    envs.reset()
    envs.step([GO_ON] * 3)

    obs, reward, terminated, truncated, infos = envs.step([GO_ON, DIE, GO_ON])
    assert obs.tolist() == [[0, 0, 0, 2], [1, 0, 0, 1], [2, 0, 0, 2]]  # env 1: what was last handed out
    assert reward.tolist() == [0.5, 0.0, 0.5]
    assert (terminated.any(), truncated.tolist()) == (False, [False, True, False])
    assert infos["lost"].tolist() == infos["_lost"].tolist() == [False, True, False]

    obs, reward, _, truncated, infos = envs.step([GO_ON] * 3)
    assert obs.tolist() == [[0, 0, 0, 3], [1, 1, 0, 0], [2, 0, 0, 3]]
    assert (reward.tolist(), truncated.any()) == ([0.5, 0.0, 0.5], False)
    assert infos["_episode_number"].tolist() == [False, True, False]
    assert "lost" not in infos
    envs.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_step_is_told_without_infos_too(mode):
    envs = obedient(mode=mode, infos=False)
    envs.reset()

    infos = envs.step([GO_ON, DIE, GO_ON])[4]
    where = infos["final_info"] if mode == "SameStep" else infos
    assert where["lost"].tolist() == [False, True, False]
    envs.close()


def test_a_worker_that_dies_cuts_all_its_environments_but_one_that_is_restarting_begins_once_more():
    envs = obedient(4, n_workers=2)  # 0 and 1, 2 and 3
    envs.reset()
    envs.step([GO_ON, GO_ON, GO_ON, END])

    obs, reward, _, truncated, infos = envs.step([GO_ON, GO_ON, DIE, GO_ON])
    assert obs.tolist() == [[0, 0, 0, 2], [1, 0, 0, 2], [2, 0, 0, 1], [3, 1, 0, 0]]
    assert (reward.tolist(), truncated.tolist()) == ([0.5, 0.5, 0.0, 0.0], [False, False, True, False])
    assert infos["lost"].tolist() == [False, False, True, False]
    assert infos["_episode_number"].tolist() == [False, False, False, True]

    assert envs.step([GO_ON] * 4)[0].tolist() == [[0, 0, 0, 3], [1, 0, 0, 3], [2, 1, 0, 0], [3, 1, 0, 1]]
    envs.close()


@pytest.mark.parametrize("mode", MODES)
def test_the_only_worker_dies_and_all_go_on(mode):
    envs = obedient(2, mode, n_workers=1)
    envs.reset()
    envs.step([END, GO_ON])
    envs.step([GO_ON, DIE])

    obs = envs.step([GO_ON, GO_ON])[0]
    assert obs[:, 1].tolist() == [1, 1]
    assert envs.step([GO_ON, GO_ON])[3].any() == np.False_
    envs.close()


def test_an_environment_that_was_recycled_in_the_end_of_its_episode_shows_no_seam():
    envs = obedient(2, n_workers=2, restarts=RestartPolicy(recycle_after_steps=2))
    envs.reset()
    envs.step([GO_ON, GO_ON])

    obs, _, terminated, _, infos = envs.step([END, GO_ON])
    assert (obs[0].tolist(), terminated.tolist()) == ([0, 0, 0, 2], [True, False])
    obs, reward, terminated, truncated, infos = envs.step([GO_ON, GO_ON])
    assert (obs.tolist(), reward[0]) == ([[0, 1, 0, 0], [1, 0, 0, 3]], 0)
    assert not (terminated | truncated).any()
    assert "lost" not in infos
    assert envs.step([GO_ON, GO_ON])[0].tolist() == [[0, 1, 0, 1], [1, 0, 0, 4]]
    envs.close()


def test_an_environment_that_was_recycled_is_truncated_once_and_marked_where_episodes_begin_in_the_same_step():
    envs = obedient(2, n_workers=2, mode="SameStep", restarts=RestartPolicy(recycle_after_steps=2))
    envs.reset()
    envs.step([GO_ON, GO_ON])

    obs, reward, terminated, _, infos = envs.step([END, GO_ON])
    assert (obs[0].tolist(), reward[0], terminated.tolist()) == ([0, 0, 1, 0], 0.5, [True, False])
    obs, reward, terminated, truncated, infos = envs.step([GO_ON, GO_ON])
    assert (obs.tolist(), reward.tolist()) == ([[0, 1, 0, 0], [1, 0, 0, 3]], [0, 0.5])
    assert (terminated.tolist(), truncated.tolist()) == ([False, False], [True, False])
    assert infos["final_obs"][0].tolist() == [0, 0, 1, 0], "the first observation of the episode that was cut"
    assert infos["final_info"]["lost"].tolist() == [True, False]
    obs, _, terminated, truncated, infos = envs.step([GO_ON, GO_ON])
    assert obs.tolist() == [[0, 1, 0, 1], [1, 0, 0, 4]]
    assert not (terminated | truncated).any()
    envs.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_was_killed_between_two_steps_loses_the_step_after(mode):
    envs = obedient(mode=mode)
    envs.reset()
    os.kill(envs.manager.stats().workers[1].pid, signal.SIGKILL)

    _, reward, _, truncated, _ = envs.step([GO_ON] * 3)
    assert (reward.tolist(), truncated.tolist()) == ([0.5, 0.0, 0.5], [False, True, False])
    envs.step([GO_ON] * 3)
    assert envs.step([GO_ON] * 3)[0][:, 1].tolist() == [0, 1, 0]
    envs.close()


def test_past_the_budget_of_restarts_the_step_raises():
    envs = obedient(restarts=RestartPolicy(max_restarts=1, backoff_s=0))
    envs.reset()
    envs.step([DIE, GO_ON, GO_ON])
    envs.step([GO_ON] * 3)

    with pytest.raises(RestartsExhausted):
        envs.step([DIE, GO_ON, GO_ON])
    envs.reset()
    assert envs.step([GO_ON] * 3)[0][0].tolist() == [0, 2, 0, 1]
    envs.close()


def test_a_dropped_environment_cannot_be_done_without():
    envs = obedient(restarts=RestartPolicy(max_restarts=1, backoff_s=0, then="drop"))
    envs.reset()
    envs.step([DIE, GO_ON, GO_ON])
    envs.step([GO_ON] * 3)

    with pytest.raises(UsageError, match=r"\[0\] were dropped"):
        envs.step([DIE, GO_ON, GO_ON])
    with pytest.raises(UsageError, match=r"\[0\] were dropped"):
        envs.reset()
    envs.close()


# What it is made of.


def test_spaces_are_made_from_specs_where_an_environment_has_none(make_manager):
    envs = as_vector_env(make_manager(EchoEnvironment))

    assert isinstance(envs.single_observation_space, spaces.Box)
    assert envs.single_action_space.dtype == np.int64
    obs, _ = envs.reset(seed=1)
    assert obs in envs.observation_space
    obs = envs.step(np.arange(3))[0]
    assert obs in envs.observation_space
    assert envs.metadata == {"autoreset_mode": AutoresetMode.NEXT_STEP}


def test_unknown_modes_and_environments_of_several_agents_are_refused():
    manager = SimpleEnvManager(lambda context: EchoEnvironment(context, n_agents=2), 2)

    with pytest.raises(UsageError, match="NextStep"):
        as_vector_env(SimpleEnvManager(Obedient), autoreset_mode="nonsense")
    with pytest.raises(UsageError, match="one agent"):
        as_vector_env(manager).reset()
    manager.close()


def test_environments_of_several_behaviors_are_refused():
    pytest.importorskip("mpe2")

    def two_behaviors():
        from mpe2 import simple_adversary_v3

        return simple_adversary_v3.parallel_env()

    with SimpleEnvManager(two_behaviors) as manager, pytest.raises(UsageError, match="behaviors"):
        as_vector_env(manager)


def test_without_gymnasium_the_error_says_what_to_install(monkeypatch):
    manager = SimpleEnvManager(EchoEnvironment)
    monkeypatch.setitem(sys.modules, "gymnasium", None)

    with pytest.raises(MissingExtra, match=r"pip install 'envmanager\[gymnasium\]'"):
        as_vector_env(manager)
