"""The Gymnasium bridge where it begins no episode by itself: ``autoreset_mode="Disabled"``."""

import gc
import itertools
import os
import signal
import threading

import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers

from envmanager import RestartPolicy, SimpleEnvManager, SubprocessEnvManager
from envmanager.errors import BadAction, BadObservation, EnvRaised, UsageError, WorkerDied
from envmanager.interop import as_sb3_vec_env, as_vector_env
from envmanager.testing import FakeEnvironment
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
    assert data_equivalence(ours, theirs), f"\n{ours}\ninstead of\n{theirs}"


def play_beside(ours, theirs, *, n_resets, seed_of=lambda _: None, actions=None, same=assert_same):
    """Step both, reset what has ended, ``n_resets`` times, and compare all that they return. ``seed_of(k)``: its seed.

    ``actions``: those of each step, by default samples.
    """
    same(ours.reset(seed=7), theirs.reset(seed=7))
    k = 0
    while k < n_resets:
        given = theirs.action_space.sample() if actions is None else actions
        result = theirs.step(given)
        same(ours.step(given), result)
        ended = result[2] | result[3]
        if ended.any():
            k += 1
            seed = seed_of(k)
            same(ours.reset(seed=seed, options=masked(ended)), theirs.reset(seed=seed, options=masked(ended)))


@pytest.mark.parametrize("factory", [cart_pole, frozen_lake, Talker, Tupled, Arm], ids=lambda factory: factory.__name__)
def test_every_step_and_reset_is_that_of_sync_vector_env(make_manager, factory):
    ours = disabled(make_manager(factory, infos=True))
    theirs = SyncVectorEnv([factory] * 3, autoreset_mode=AutoresetMode.DISABLED)
    theirs.action_space.seed(5)
    assert ours.metadata == theirs.metadata
    play_beside(ours, theirs, n_resets=12, seed_of=lambda k: [k, None, 4] if k % 3 == 0 else None)


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


def test_options_are_for_those_named_and_for_one_episode(make_manager):
    envs = disabled(make_manager(Obedient, 2))
    envs.reset(options={"level": 1})
    envs.step([END, GO_ON])

    options = masked(FIRST, level=2)
    envs.reset(options=options)
    assert envs.get_attr("options") == ({"level": 2}, {"level": 1})
    assert options.keys() == {"reset_mask", "level"}
    envs.step([END, GO_ON])
    envs.reset(options=masked(FIRST))
    assert envs.get_attr("options") == ({}, {"level": 1})
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


@pytest.mark.parametrize(("options", "error"), [({"raise": True}, EnvRaised), ({"short": True}, BadObservation)])
def test_after_a_reset_of_some_that_failed_only_a_reset_of_all_helps(make_manager, options, error):
    envs = disabled(make_manager(Resettable, 2))
    envs.reset()
    envs.step([END, GO_ON])

    with pytest.raises(error, match=r"no such level|obs should be"):
        envs.reset(options=masked(FIRST, **options))
    for _ in range(2):
        with pytest.raises(UsageError, match=r"call reset\(\)"):
            envs.reset(options=masked(FIRST))
        with pytest.raises(UsageError, match="have ended"):
            envs.step([GO_ON, GO_ON])
    assert envs.reset()[0].tolist() == [[0, 0, 2, 0], [1, 0, 1, 0]]
    assert envs.step([GO_ON, GO_ON])[0].tolist() == [[0, 0, 2, 1], [1, 0, 1, 1]]


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

    with pytest.raises(UsageError, match=r"call reset\(\)"):
        envs.reset(options=masked(SECOND))
    assert envs.reset()[0][:, 3].tolist() == [0, 0]
    assert envs.step([GO_ON, GO_ON])[0][:, 3].tolist() == [1, 1]
    envs.close()


def test_a_lost_episode_ends_with_what_was_last_handed_out():
    restarts = RestartPolicy(backoff_s=0)
    envs = disabled(SubprocessEnvManager(Obedient, 2, restarts=restarts, infos=True))
    envs.reset()
    envs.step([GO_ON, GO_ON])
    envs.reset(options=masked(SECOND))

    obs, reward, _, truncated, infos = envs.step([GO_ON, DIE])
    assert obs.tolist() == [[0, 0, 0, 2], [1, 0, 1, 0]]
    assert (reward.tolist(), truncated.tolist(), infos["lost"].tolist()) == ([0.5, 0.0], SECOND, SECOND)
    assert envs.reset(options=masked(truncated))[0].tolist() == [[0, 0, 0, 2], [1, 1, 0, 0]]
    assert envs.step([GO_ON, GO_ON])[0].tolist() == [[0, 0, 0, 3], [1, 1, 0, 1]]
    envs.close()


def test_the_reset_of_an_environment_whose_worker_has_died_is_of_the_next_one():
    envs = disabled(SubprocessEnvManager(Obedient, 2, restarts=RestartPolicy(backoff_s=0), infos=True))
    envs.reset()
    os.kill(envs.manager.stats().workers[1].pid, signal.SIGKILL)

    obs, infos = envs.reset(options=masked(SECOND))
    assert obs.tolist() == [[0, 0, 0, 0], [1, 1, 0, 0]]
    assert (infos["episode_number"].tolist(), infos["_episode_number"].tolist()) == ([0, 0], SECOND)
    obs, _, _, truncated, infos = envs.step([GO_ON, GO_ON])
    assert (obs.tolist(), truncated.tolist()) == ([[0, 0, 0, 1], [1, 1, 0, 1]], [False, False])
    assert "lost" not in infos
    envs.close()


def test_an_episode_that_is_lost_in_a_reset_of_others_ends_in_the_next_step():
    restarts = RestartPolicy(backoff_s=0)
    envs = disabled(SubprocessEnvManager(Obedient, 4, n_workers=2, restarts=restarts, infos=True))
    envs.reset()
    envs.step([END, GO_ON, GO_ON, GO_ON])
    os.kill(envs.manager.stats().workers[0].pid, signal.SIGKILL)

    obs, infos = envs.reset(options=masked([True, False, False, False]))
    assert obs.tolist() == [[0, 1, 0, 0], [1, 0, 0, 1], [2, 0, 0, 1], [3, 0, 0, 1]]
    assert infos["_episode_number"].tolist() == [True, False, False, False]
    obs, reward, terminated, truncated, infos = envs.step([GO_ON] * 4)
    assert obs.tolist() == [[0, 1, 0, 1], [1, 0, 0, 1], [2, 0, 0, 2], [3, 0, 0, 2]]
    assert (reward.tolist(), terminated.any()) == ([0.5, 0, 0.5, 0.5], False)
    assert truncated.tolist() == infos["lost"].tolist() == [False, True, False, False]
    assert envs.reset(options=masked(truncated))[0][1].tolist() == [1, 1, 0, 0]
    assert not envs.step([GO_ON] * 4)[3].any()
    os.kill(envs.manager.stats().workers[0].pid, signal.SIGKILL)
    envs.reset(options=masked([True, False, False, False]))
    envs.reset(options=masked([False, True, False, False]))  # of one that is yet to be told of
    assert not envs.step([GO_ON] * 4)[3].any()
    envs.close()


def test_a_lost_environment_begins_again_with_a_new_seed_and_the_same_each_time():
    def numbers_after_a_loss():
        restarts = RestartPolicy(backoff_s=0)
        envs = disabled(SubprocessEnvManager(cart_pole, 2, restarts=restarts))
        envs.reset(seed=[4, 5])
        os.kill(envs.manager.stats().workers[1].pid, signal.SIGKILL)
        assert envs.step([0, 0])[3].tolist() == SECOND
        obs = envs.reset(options=masked(SECOND))[0][1].tolist()
        envs.close()
        return obs

    first = numbers_after_a_loss()
    assert first == numbers_after_a_loss()
    assert first != cart_pole().reset(seed=5)[0].tolist()


def test_environments_that_cannot_begin_on_demand_are_refused(make_manager):
    class Restless(FakeEnvironment):
        can_rest = False

    manager = make_manager(Restless)
    with pytest.raises(UsageError, match="Disabled"):
        disabled(manager)
    as_vector_env(manager).reset()


def test_other_bridges_of_the_same_manager_begin_by_themselves_again(make_manager):
    manager = make_manager(Obedient, 2)
    disabled(manager).reset()
    envs = as_vector_env(manager, autoreset_mode="SameStep")
    envs.reset()
    assert envs.step([END, GO_ON])[0].tolist() == [[0, 0, 2, 0], [1, 0, 1, 1]]
    disabled(manager).reset()
    pytest.importorskip("stable_baselines3")
    vec_env = as_sb3_vec_env(manager)
    vec_env.reset()
    assert vec_env.step([END, GO_ON])[0].tolist() == [[0, 0, 5, 0], [1, 0, 3, 1]]


def test_each_mask_after_each_other_gives_what_sync_vector_env_gives(make_manager):
    ours, theirs = disabled(make_manager(Arm, infos=True)), SyncVectorEnv([Arm] * 3, autoreset_mode="Disabled")
    theirs.action_space.seed(3)
    assert_same(ours.reset(seed=[4, 5, 6], options={"level": 1}), theirs.reset(seed=[4, 5, 6], options={"level": 1}))
    masks = [np.array(mask) for mask in itertools.product([False, True], repeat=3) if any(mask)]
    for number, (first, second) in enumerate(itertools.permutations(masks, 2)):
        seed = [None, number, [number, None, 3]][number % 3]
        for mask in (first, second):
            assert_same(
                ours.reset(seed=seed, options=masked(mask, number=number)),
                theirs.reset(seed=seed, options=masked(mask, number=number)),
            )
        actions = theirs.action_space.sample()
        result = theirs.step(actions)
        assert_same(ours.step(actions), result)
        if (ended := result[2] | result[3]).any():
            assert_same(ours.reset(options=masked(ended)), theirs.reset(options=masked(ended)))


def test_a_bad_action_after_a_reset_of_some_changes_nothing(make_manager):
    envs = disabled(make_manager(Obedient, 2))
    envs.reset()
    envs.reset(options=masked(FIRST))
    with pytest.raises(BadAction):
        envs.step([GO_ON, 99])
    assert envs.step([GO_ON, GO_ON])[0].tolist() == [[0, 0, 1, 1], [1, 0, 0, 1]]


def test_processes_of_gymnasium_s_give_the_same(make_manager):
    ours = disabled(make_manager(cart_pole, infos=True))
    theirs = AsyncVectorEnv([cart_pole] * 3, shared_memory=False, autoreset_mode=AutoresetMode.DISABLED)
    try:
        play_beside(ours, theirs, n_resets=6, actions=[1, 1, 0])
    finally:
        theirs.close()
        del theirs
        gc.collect()  # its queue and pipes are only closed with it


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("kind", [SimpleEnvManager, SubprocessEnvManager])
def test_vectors_in_workers_give_what_sync_vector_env_gives(kind, mode):
    class Counting(Talker):
        n_resets = 0

        def reset(self, **given):
            self.n_resets += 1
            return super().reset(**given)

    def make(context):
        return SyncVectorEnv([Counting] * context.n_envs, autoreset_mode=mode)

    options = {"n_workers": 2} if kind is SubprocessEnvManager else {}
    ours = disabled(kind(make, 4, **options))
    theirs = SyncVectorEnv([Counting] * 4, autoreset_mode=AutoresetMode.DISABLED)
    theirs.action_space.seed(5)
    # Each environment has a seed, because a vector in SAME_STEP resets once more, which costs it random numbers.
    play_beside(ours, theirs, n_resets=12, seed_of=lambda k: [k, 2, 3, 4], same=assert_alike)
    if mode is not AutoresetMode.SAME_STEP:
        assert ours.get_attr("n_resets") == theirs.get_attr("n_resets")
    ours.close()


def assert_alike(ours, theirs):
    assert_same((*ours[:-1], {}), (*theirs[:-1], {}))  # a vector's infos are arrays, whose numbers are NumPy's


def test_rewards_that_gymnasium_normalizes_are_those_of_sync_vector_env(make_manager):
    ours = wrappers.NormalizeReward(disabled(make_manager(cart_pole, infos=True)))
    theirs = wrappers.NormalizeReward(SyncVectorEnv([cart_pole] * 3, autoreset_mode=AutoresetMode.DISABLED))
    assert_same(ours.reset(seed=1), theirs.reset(seed=1))
    for step in range(80):
        actions = np.array([step % 2, 1, step % 3 == 0], np.int64)
        result = theirs.step(actions)
        assert_same(ours.step(actions), result)
        if (ended := result[2] | result[3]).any():
            assert_same(ours.reset(options=masked(ended)), theirs.reset(options=masked(ended)))


def test_gymnasiums_statistics_are_those_of_whole_episodes(make_manager):
    # Not compared with SyncVectorEnv, which takes the mask out of the options before the wrapper looks for it.
    envs = wrappers.RecordEpisodeStatistics(disabled(make_manager(cart_pole)))
    envs.reset(seed=1)
    total, n_episodes = np.zeros(3), 0
    for step in range(80):
        _, reward, terminated, truncated, infos = envs.step(np.array([step % 2, 1, step % 3 == 0], np.int64))
        total += reward
        ended = terminated | truncated
        if ended.any():
            assert infos["episode"]["r"].tolist() == infos["episode"]["l"].tolist() == (total * ended).tolist()
            total[ended], n_episodes = 0, n_episodes + ended.sum()
            envs.reset(options=masked(ended))
    assert n_episodes > 10
