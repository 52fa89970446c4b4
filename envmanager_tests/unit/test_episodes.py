"""Counting steps, episodes and returns from StepInfos."""

from __future__ import annotations

import math

import numpy as np

from envmanager.data.steps import ActionInfo, AgentSteps, Lost, StepInfo
from envmanager.errors import WorkerDied
from envmanager.observe.episodes import RECENT, Episodes


def agents(*agent_ids, reward=0.0, ended=(), truncated=()):
    n = len(agent_ids)
    ids = np.array(agent_ids, np.int64)
    rewards = np.broadcast_to(np.asarray(reward, np.float32), (n,)).copy()
    flags = (np.isin(ids, ended), np.isin(ids, truncated))
    return AgentSteps(ids, np.zeros((n, 1), np.float32), rewards, *flags, np.zeros((flags[0] | flags[1]).sum()))


def env(env_id, k=0):
    return env_id << 32 | k


def first(worker_id=0, **behaviors):
    return StepInfo(None, behaviors, None, worker_id)


def later(worker_id=0, lost=None, **behaviors):
    return StepInfo({}, behaviors, {"default": ActionInfo(np.zeros(1))}, worker_id, lost)


def counted(*infos):
    episodes = Episodes()
    for info in infos:
        episodes.add(info)
    return episodes


def test_a_return_is_the_sum_of_an_episodes_rewards():
    two = (env(0), env(1))
    episodes = counted(
        first(default=agents(*two)),
        later(default=agents(*two, reward=[1, 10])),
        later(default=agents(*two, reward=[2, 20], ended=[env(0)])),
        later(default=agents(*two, reward=[4, 40], truncated=[env(1)])),
        later(default=agents(*two, reward=[8, 80], ended=two)),
    )

    assert episodes.returns_by_env() == {"0": [3.0, 12.0], "1": [70.0, 80.0]}
    assert episodes.count == 4


def test_steps_are_counted_in_environments_not_in_agents():
    pair = {"red": agents(env(0), env(0, 1), env(1)), "blue": agents(env(1, 1))}
    episodes = counted(first(**pair), later(**pair), later(**pair))

    assert (episodes.env_steps, episodes.worker_steps) == (4, 2)


def test_the_first_observations_are_no_step():
    assert counted(first(default=agents(env(0)))).env_steps == 0


def test_an_env_with_several_agents_has_returns_per_agent():
    episodes = counted(
        first(red=agents(env(0)), blue=agents(env(0, 1), env(1))),
        later(red=agents(env(0), reward=1, ended=[env(0)]), blue=agents(env(0, 1), env(1), reward=[2, 3])),
    )

    assert episodes.returns_by_env() == {"0/0": [1.0], "0/1": [], "1": []}


def test_agents_that_come_and_go_keep_their_own_returns():
    episodes = counted(
        first(default=agents(env(0))),
        later(default=agents(env(0), reward=1)),
        later(default=agents(env(0, 1), env(0), reward=[5, 1])),
        later(default=agents(env(0, 1), reward=5, ended=[env(0, 1)])),
        later(default=agents(env(0), reward=1, ended=[env(0)])),
    )

    assert episodes.returns_by_env() == {"0/0": [3.0], "0/1": [10.0]}


def test_many_agents_are_all_counted():
    many = [env(i) for i in range(1000)]
    episodes = counted(first(default=agents(*many)), later(default=agents(*many, reward=range(1000), ended=many)))

    assert episodes.returns_by_env() == {str(i): [float(i)] for i in range(1000)}


def test_workers_are_kept_apart():
    episodes = counted(
        first(0, default=agents(env(0))),
        first(1, default=agents(env(1))),
        later(1, default=agents(env(1), reward=7, ended=[env(1)])),
        later(0, default=agents(env(0), reward=1, ended=[env(0)])),
    )

    assert episodes.returns_by_env() == {"0": [1.0], "1": [7.0]}


def lost_to(worker_id=0):
    return Lost(WorkerDied(worker_id=worker_id, env_ids=[worker_id], phase="step", exit="SIGSEGV"), generation=1)


def test_an_episode_that_was_lost_gives_no_return_and_no_step():
    episodes = counted(
        first(default=agents(env(0))),
        later(default=agents(env(0), reward=100)),
        later(default=agents(env(0), truncated=[env(0)]), lost=lost_to()),
        later(default=agents(env(0), reward=1, ended=[env(0)])),
    )

    assert episodes.returns_by_env() == {"0": [1.0]}
    assert (episodes.env_steps, episodes.count, episodes.lost) == (2, 1, 1)


def test_a_loss_counts_every_agent_that_was_playing_and_none_that_joins():
    two, joined = (env(0), env(1)), env(1, 1)
    episodes = counted(
        first(default=agents(*two)),
        later(default=agents(*two, reward=100)),
        later(default=agents(*two, joined, truncated=two), lost=lost_to()),
        later(default=agents(*two, joined, reward=[1, 2, 4], ended=[*two, joined])),
    )

    assert episodes.returns_by_env() == {"0": [1.0], "1/0": [2.0], "1/1": [4.0]}
    assert episodes.lost == 2


def test_a_loss_leaves_the_returns_of_other_workers_alone():
    episodes = counted(
        first(0, default=agents(env(0))),
        first(1, default=agents(env(1))),
        later(1, default=agents(env(1), reward=7)),
        later(0, default=agents(env(0), truncated=[env(0)]), lost=lost_to(0)),
        later(1, default=agents(env(1), reward=7, ended=[env(1)])),
    )

    assert episodes.returns_by_env() == {"0": [], "1": [14.0]}


def test_an_episode_truncated_by_a_healthy_worker_is_an_episode():
    episodes = counted(first(default=agents(env(0))), later(default=agents(env(0), reward=3, truncated=[env(0)])))

    assert (episodes.all_returns(), episodes.lost) == ([3.0], 0)


def test_the_running_mean_is_over_the_last_episodes():
    one = agents(env(0))
    episodes = counted(first(default=one))
    assert math.isnan(episodes.mean_of_recent())

    for reward in [1000.0] * 5 + [2.0] * RECENT:
        episodes.add(later(default=agents(env(0), reward=reward, ended=[env(0)])))

    assert episodes.mean_of_recent() == 2.0


def test_each_episode_that_ends_is_told_with_its_behavior_and_return():
    ends = []
    episodes = Episodes(on_end=lambda *end: ends.append(end))
    episodes.add(first(seer=agents(env(0)), doer=agents(env(0, 1), env(1))))
    episodes.add(later(seer=agents(env(0), reward=2.0), doer=agents(env(0, 1), env(1), reward=1.0, ended=[env(1)])))
    assert ends == [("doer", env(1), 1.0)]


def places_of(episodes):
    return len(episodes._agent_at), len(episodes._place_of), len(episodes._running)


def test_agents_that_come_back_under_new_ids_take_no_more_memory():
    episodes = Episodes(keeps_returns=False)
    ends = []
    episodes.on_end = lambda *end: ends.append(end)
    episodes.add(first(default=agents(env(0, 0), env(1, 0))))
    for k in range(1000):
        episodes.add(later(default=agents(env(0, k), env(1, 0), reward=[k, 1.0], ended=[env(0, k)])))
        episodes.add(later(default=agents(env(0, k + 1), env(1, 0))))

    assert ends == [("default", env(0, k), float(k)) for k in range(1000)]
    assert (episodes.returns, episodes.count) == ({}, 1000)
    assert places_of(episodes) == (3, 2, 64), "two who play, and one who has just left"


def test_an_agent_that_is_not_in_every_step_keeps_its_running_return():
    episodes = counted(
        first(default=agents(env(0), env(1))),
        later(default=agents(env(0), env(1), reward=[1.0, 2.0])),
        later(default=agents(env(0), reward=1.0)),
        later(default=agents(env(0), env(1), reward=[1.0, 3.0], ended=[env(1)])),
    )

    assert episodes.returns_by_env() == {"0": [], "1": [5.0]}


def test_an_agent_that_comes_back_under_its_own_id_goes_on_with_its_returns():
    episodes = counted(
        first(default=agents(env(0), env(1))),
        later(default=agents(env(0), env(1), reward=2.0, ended=[env(1)])),
        later(default=agents(env(0))),
        later(default=agents(env(0), env(1))),
        later(default=agents(env(0), env(1), reward=3.0, ended=[env(1)])),
    )

    assert episodes.returns_by_env() == {"0": [], "1": [2.0, 3.0]}
