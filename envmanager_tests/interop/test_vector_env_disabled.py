"""The Gymnasium bridge where it begins no episode by itself: ``autoreset_mode="Disabled"``."""

import os
import signal
import threading

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envmanager import RestartPolicy, SimpleEnvManager, SubprocessEnvManager
from envmanager.errors import BadObservation, EnvRaised, UsageError, WorkerDied
from envmanager.interop import as_vector_env
from envmanager.testing import EchoEnvironment
from envmanager_tests.interop.envs import (
    DIE,
    END,
    GO_ON,
    TRUNCATE,
    Arm,
    Obedient,
    Talker,
    Tupled,
    cart_pole,
    frozen_lake,
)

FIRST, SECOND, BOTH = [True, False], [False, True], [True, True]


class Resettable(Obedient):
    """As told by its options, a reset raises or returns nonsense; infos with a lock cannot travel."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        if options == {"raise": True}:
            raise ArithmeticError("no such level")
        if options == {"if": "obedient"} and not self.obedient:
            raise ArithmeticError("not now")
        return (obs[:2] if options == {"short": True} else obs), {**info, "lock": threading.Lock()}


def disabled(manager):
    return as_vector_env(manager, autoreset_mode="Disabled")


def masked(mask, **options):
    return {"reset_mask": np.array(mask), **options}


def assert_same(ours, theirs):
    for *_, infos in (ours, theirs):
        for key in ("options", "_options"):
            infos.pop(key, None)  # SyncVectorEnv tells an environment of no options in two ways: None and {}
    assert data_equivalence(ours, theirs), f"\n{ours}\ninstead of\n{theirs}"


@pytest.mark.parametrize("factory", [cart_pole, frozen_lake, Talker, Tupled, Arm], ids=lambda factory: factory.__name__)
def test_every_step_and_reset_is_that_of_sync_vector_env(make_manager, factory):
    ours = disabled(make_manager(factory, infos=True))
    theirs = SyncVectorEnv([factory] * 3, autoreset_mode=AutoresetMode.DISABLED)
    theirs.action_space.seed(5)
    assert ours.metadata == theirs.metadata
    assert_same(ours.reset(seed=7), theirs.reset(seed=7))

    n_resets = 0
    while n_resets < 12:
        actions = theirs.action_space.sample()
        result = theirs.step(actions)
        assert_same(ours.step(actions), result)
        ended = result[2] | result[3]
        if ended.any():
            n_resets += 1
            seed = [n_resets, None, 4] if n_resets % 3 == 0 else None
            assert_same(ours.reset(seed=seed, options=masked(ended)), theirs.reset(seed=seed, options=masked(ended)))


def test_running_environments_can_be_reset_alone_and_the_others_go_on(make_manager):
    ours = disabled(make_manager(cart_pole, infos=True))
    theirs = SyncVectorEnv([cart_pole] * 3, autoreset_mode=AutoresetMode.DISABLED)
    ours.reset(seed=1), theirs.reset(seed=1)
    for mask, seed in (([True, False, True], None), ([False, True, False], 8), ([True, True, False], [1, 1, 1])):
        assert_same(ours.step([0, 1, 0]), theirs.step([0, 1, 0]))
        assert_same(ours.reset(seed=seed, options=masked(mask)), theirs.reset(seed=seed, options=masked(mask)))
    assert_same(ours.step([0, 1, 0]), theirs.step([0, 1, 0]))


def test_an_episode_that_ended_is_reset_once(make_manager):
    envs = disabled(make_manager(Obedient, 2, infos=True))
    envs.reset()

    obs, _, terminated, truncated, infos = envs.step([END, TRUNCATE])
    assert (terminated.tolist(), truncated.tolist()) == (FIRST, SECOND)
    assert obs.tolist() == [[0, 0, 0, 1], [1, 0, 0, 1]]
    assert "final_obs" not in infos
    obs, infos = envs.reset(options=masked(FIRST))
    assert obs.tolist() == [[0, 0, 1, 0], [1, 0, 0, 1]]
    assert infos["_episode_number"].tolist() == FIRST
    obs, infos = envs.reset(options=masked(SECOND))
    assert obs.tolist() == [[0, 0, 1, 0], [1, 0, 1, 0]]
    assert infos["_episode_number"].tolist() == SECOND
    assert envs.step([GO_ON, GO_ON])[0].tolist() == [[0, 0, 1, 1], [1, 0, 1, 1]]


def test_a_reset_of_all_resets_those_once_too_whose_episodes_ended(make_manager):
    ours, theirs = disabled(make_manager(cart_pole)), SyncVectorEnv([cart_pole] * 3, autoreset_mode="Disabled")
    ours.reset(seed=3), theirs.reset(seed=3)
    n_resets = 0
    while n_resets < 6:
        *result, _ = theirs.step([1, 1, 0])
        assert_same((*ours.step([1, 1, 0])[:4], {}), (*result, {}))
        if (result[2] | result[3]).any():
            n_resets += 1
            options = masked([True] * 3) if n_resets % 2 else None
            assert_same(ours.reset(options=options), theirs.reset(options=options))


def test_a_step_of_an_episode_that_has_ended_is_refused(make_manager):
    envs = disabled(make_manager(Obedient, 2))
    envs.reset()
    envs.step([GO_ON, END])

    for _ in range(2):
        with pytest.raises(UsageError, match=r"\[1\] have ended.*reset_mask"):
            envs.step([GO_ON, GO_ON])
    envs.reset(options=masked(FIRST))
    with pytest.raises(UsageError, match=r"\[1\] have ended"):
        envs.step([GO_ON, GO_ON])
    envs.reset()
    assert envs.step([GO_ON, GO_ON])[0][:, 3].tolist() == [1, 1]


def test_options_are_for_those_named_and_replace_the_episode_that_began_without(make_manager):
    envs = disabled(make_manager(Obedient, 2))
    envs.reset(options={"level": 1})
    envs.step([END, GO_ON])

    options = masked(FIRST, level=2)
    envs.reset(options=options)
    assert envs.get_attr("options") == ({"level": 2}, {"level": 1})
    assert options.keys() == {"reset_mask", "level"}
    envs.step([END, GO_ON])
    envs.reset(options=masked(FIRST))
    assert envs.get_attr("options") == (None, {"level": 1})
    envs.reset(options=masked(BOTH, level=3))
    assert envs.get_attr("options") == ({"level": 3},) * 2


def test_masks_and_seeds_that_do_not_fit_are_refused_and_change_nothing(make_manager):
    envs = disabled(make_manager(Obedient, 2))
    with pytest.raises(UsageError, match="first reset"):
        envs.reset(options=masked(FIRST))
    envs.reset(options=masked(BOTH))
    for mask in ([False, False], [True] * 3, [1, 0], True, [[True, False]]):
        with pytest.raises(UsageError, match="2 bools"):
            envs.reset(options=masked(mask))
    with pytest.raises(UsageError, match="seed"):
        envs.reset(seed=[1, 2, 3], options=masked(FIRST))

    assert envs.get_attr("episode") == (0, 0)


def test_what_was_handed_out_is_the_users_own(make_manager):
    envs = disabled(make_manager(Obedient, 2, zero_copy=True))
    envs.reset()[0][:] = -1
    assert envs.reset(options=masked(FIRST))[0][1].tolist() == [1, 0, 0, 0]
    envs.step([GO_ON, GO_ON])[0][:] = -1
    obs = envs.reset(options=masked(SECOND))[0]
    assert obs.tolist() == [[0, 0, 1, 1], [1, 0, 1, 0]]
    obs[:] = -1
    assert envs.reset(options=masked(FIRST))[0][1].tolist() == [1, 0, 1, 0]


def test_without_infos_a_reset_tells_none_and_they_need_not_travel(make_manager):
    envs = disabled(make_manager(Resettable, 2))
    envs.reset()

    assert envs.reset(options=masked(FIRST))[1] == {}


def test_a_reset_that_fails_is_told_and_another_may_follow(make_manager):
    envs = disabled(make_manager(Resettable, 2))
    envs.reset()
    envs.step([END, GO_ON])

    with pytest.raises(EnvRaised, match="no such level"):
        envs.reset(options={**masked(FIRST), "raise": True})
    with pytest.raises(BadObservation, match="obs should be"):
        envs.reset(options={**masked(FIRST), "short": True})
    with pytest.raises(UsageError, match="have ended"):
        envs.step([GO_ON, GO_ON])
    assert envs.reset(options=masked(FIRST))[0][0].tolist() == [0, 0, 4, 0]  # not the episode 1 of before the failures
    assert envs.step([GO_ON, GO_ON])[0].tolist() == [[0, 0, 4, 1], [1, 0, 0, 2]]


def test_after_a_reset_that_failed_nobody_goes_on_who_was_named(make_manager):
    envs = disabled(make_manager(Resettable, 3))
    envs.reset()
    envs.step([GO_ON] * 3)
    envs.set_attr("obedient", [True, False, True])
    with pytest.raises(EnvRaised, match="not now"):
        envs.reset(seed=[5, 6, 7], options=masked([True, True, False]) | {"if": "obedient"})
    envs.set_attr("obedient", True)

    with pytest.raises(UsageError, match=r"\[0, 1\] have ended"):
        envs.step([GO_ON] * 3)
    assert envs.reset(options=masked([True, False, False]))[0][0].tolist() == [0, 0, 2, 0]
    with pytest.raises(UsageError, match=r"\[1\] have ended"):
        envs.step([GO_ON] * 3)
    envs.reset(options=masked([False, True, False]))
    assert envs.step([GO_ON] * 3)[0].tolist() == [[0, 0, 2, 1], [1, 0, 2, 1], [2, 0, 0, 2]]


def test_after_a_step_that_failed_only_a_reset_of_all_helps():
    envs = disabled(SubprocessEnvManager(Obedient, 2, restarts=RestartPolicy(max_restarts=0)))
    envs.reset()
    with pytest.raises(WorkerDied, match=r"EXIT\(3\)"):
        envs.step([GO_ON, DIE])

    with pytest.raises(UsageError, match=r"call reset\(\)"):
        envs.reset(options=masked(FIRST))
    envs.reset()
    assert envs.step([GO_ON, GO_ON])[0][:, 3].tolist() == [1, 1]
    envs.close()


def test_after_a_reset_of_some_in_which_a_worker_died_for_good_a_reset_of_all_helps():
    envs = disabled(SubprocessEnvManager(Obedient, 2, restarts=RestartPolicy(max_restarts=0)))
    envs.reset()
    envs.step([END, GO_ON])
    os.kill(envs.manager.stats().workers[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        envs.reset(options=masked(SECOND))

    with pytest.raises(WorkerDied):
        envs.reset(options=masked(SECOND))
    assert envs.reset()[0][:, 3].tolist() == [0, 0]
    assert envs.step([GO_ON, GO_ON])[0][:, 3].tolist() == [1, 1]
    envs.close()


def test_a_lost_episode_ends_with_what_was_last_handed_out():
    restarts = RestartPolicy(backoff_s=0)
    envs = disabled(SubprocessEnvManager(Obedient, 2, restarts=restarts, infos=True))
    envs.reset()
    envs.step([GO_ON, GO_ON])
    envs.reset(options=masked(SECOND))  # which the manager does not know of

    obs, reward, _, truncated, infos = envs.step([GO_ON, DIE])
    assert obs.tolist() == [[0, 0, 0, 2], [1, 0, 1, 0]]
    assert (reward.tolist(), truncated.tolist(), infos["lost"].tolist()) == ([0.5, 0.0], SECOND, SECOND)
    assert envs.reset(options=masked(truncated))[0].tolist() == [[0, 0, 0, 2], [1, 1, 1, 0]]
    assert envs.step([GO_ON, GO_ON])[0].tolist() == [[0, 0, 0, 3], [1, 1, 1, 1]]
    envs.close()


def test_a_worker_that_dies_before_its_reset_is_replaced():
    envs = disabled(SubprocessEnvManager(Obedient, 2, restarts=RestartPolicy(backoff_s=0)))
    envs.reset()
    os.kill(envs.manager.stats().workers[1].pid, signal.SIGKILL)

    with pytest.raises(WorkerDied, match="SIGKILL"):
        envs.reset(options=masked(SECOND))
    with pytest.raises(UsageError, match=r"\[1\] have ended"):
        envs.step([GO_ON, GO_ON])
    first = envs.reset(options=masked(SECOND))[0][1]
    obs, _, _, truncated, _ = envs.step([GO_ON, GO_ON])  # now the manager tells that the worker was replaced
    assert (obs[1].tolist(), truncated.tolist()) == (first.tolist(), SECOND)
    before = envs.reset(options=masked(SECOND))[0][1]
    after = envs.step([GO_ON, GO_ON])[0][1]
    assert (after - before).tolist() == [0, 0, 0, 1]  # of one episode
    envs.close()


def test_environments_that_are_not_gymnasiums_are_refused(make_manager):
    with pytest.raises(UsageError, match="one by one"):
        disabled(make_manager(EchoEnvironment))


def test_gymnasiums_statistics_are_those_of_sync_vector_env(make_manager):
    def wrapped(envs):
        return gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)

    ours, theirs = (
        wrapped(disabled(make_manager(cart_pole, infos=True))),
        wrapped(SyncVectorEnv([cart_pole] * 3, autoreset_mode=AutoresetMode.DISABLED)),
    )
    ours.reset(seed=1), theirs.reset(seed=1)
    n_episodes = 0
    for step in range(60):
        (*results, info), (*their_results, their_info) = (each.step(np.full(3, step % 2)) for each in (ours, theirs))
        assert_same((*results, {}), (*their_results, {}))
        for key in ("r", "l"):
            np.testing.assert_array_equal(
                info.get("episode", {}).get(key, 0), their_info.get("episode", {}).get(key, 0)
            )
        ended = results[2] | results[3]
        if ended.any():
            n_episodes += 1
            ours.reset(options=masked(ended)), theirs.reset(options=masked(ended))
    assert n_episodes >= 3


def test_of_a_manager_in_this_process_too_an_error_leaves_the_episode_that_began():
    envs = disabled(SimpleEnvManager(Resettable, 2, infos=True))
    envs.reset()
    envs.step([END, END])
    with pytest.raises(EnvRaised, match="no such level"):
        envs.reset(options={**masked(FIRST), "raise": True})

    obs, infos = envs.reset(options=masked(SECOND))
    assert obs.tolist() == [[0, 0, 0, 1], [1, 0, 1, 0]]
    assert infos["episode_number"].tolist() == [0, 1]
    envs.close()
