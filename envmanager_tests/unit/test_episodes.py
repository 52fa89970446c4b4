"""Counting steps, episodes and returns from StepInfos."""

from __future__ import annotations

import math

import numpy as np

from envmanager.data.steps import ActionInfo, AgentSteps, Batch, Lost, StepInfo
from envmanager.errors import WorkerDied
from envmanager.observe.episodes import RECENT, Episodes, FinishedEpisode


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
    actions = {"default": ActionInfo(np.zeros(1))} if lost is None else None
    return StepInfo({}, behaviors, actions, worker_id, lost)


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


def lost_to(worker_id=0, env_ids=()):
    return Lost(
        WorkerDied(worker_id=worker_id, env_ids=[worker_id], phase="step", exit="SIGSEGV"), 1, env_ids or (worker_id,)
    )


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
        later(default=agents(*two, joined, truncated=two), lost=lost_to(env_ids=(0, 1))),
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


def test_an_environment_that_is_lost_alone_leaves_the_others_of_its_worker_alone():
    two = (env(0), env(1))
    lost = later(default=agents(*two, reward=[0, 5], truncated=two), lost=lost_to(env_ids=(0,)))
    lost.actions = {}
    episodes = counted(
        first(default=agents(*two)),
        later(default=agents(*two, reward=7)),
        lost,
        later(default=agents(*two, reward=1, ended=two)),
    )

    assert episodes.returns_by_env() == {"0": [1.0], "1": [12.0, 1.0]}
    assert (episodes.env_steps, episodes.worker_steps, episodes.lost) == (5, 3, 1)


def test_an_episode_truncated_by_a_healthy_worker_is_an_episode():
    episodes = counted(first(default=agents(env(0))), later(default=agents(env(0), reward=3, truncated=[env(0)])))

    assert ([each.total for each in episodes.recent], episodes.lost) == ([3.0], 0)


def test_the_running_mean_is_over_the_last_episodes():
    one = agents(env(0))
    episodes = counted(first(default=one))
    assert math.isnan(episodes.mean_of_recent())

    for reward in [1000.0] * 5 + [2.0] * RECENT:
        episodes.add(later(default=agents(env(0), reward=reward, ended=[env(0)])))

    assert episodes.mean_of_recent() == 2.0


def test_each_episode_that_ends_is_told_with_its_behavior_and_return():
    ends = []
    episodes = Episodes(on_end=ends.append)
    episodes.add(first(seer=agents(env(0)), doer=agents(env(0, 1), env(1))))
    episodes.add(later(seer=agents(env(0), reward=2.0), doer=agents(env(0, 1), env(1), reward=1.0, ended=[env(1)])))
    assert ends == [FinishedEpisode("doer", env(1), 1.0, 0)]


def places_of(episodes):
    n_placed = sum(map(len, episodes._places_of.values()))
    return len(episodes._agent_at), n_placed, len(episodes._running)


def test_agents_that_come_back_under_new_ids_take_no_more_memory():
    episodes = Episodes(keeps_returns=False)
    ends = []
    episodes.on_end = ends.append
    episodes.add(first(default=agents(env(0, 0), env(1, 0))))
    for k in range(1000):
        episodes.add(later(default=agents(env(0, k), env(1, 0), reward=[k, 1.0], ended=[env(0, k)])))
        episodes.add(later(default=agents(env(0, k + 1), env(1, 0))))

    assert [(end.agent_id, end.total) for end in ends] == [(env(0, k), float(k)) for k in range(1000)]
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


# Lengths.


class Played:
    """StepInfos of one worker, each with the steps before it."""

    def __init__(self, episodes):
        self.episodes = episodes
        self.before = None

    def __call__(self, lost=None, **behaviors):
        actions = None if self.before is None or lost is not None else {}
        self.episodes.add(StepInfo(self.before, behaviors, actions, 0, lost))
        self.before = behaviors


def acting(steps, *agent_ids):
    steps.acting = np.isin(steps.agent_id, agent_ids)
    return steps


def lengths(episodes):
    return [(episode.agent_id, episode.length) for episode in episodes.recent]


def test_a_length_is_how_many_steps_an_episode_had():
    play = Played(episodes := Episodes())
    play(default=agents(env(0), env(1)))
    for k in range(1, 7):
        play(default=agents(env(0), env(1), ended=[env(0)] * (k % 2 == 0) + [env(1)] * (k % 3 == 0)))

    assert lengths(episodes) == [(env(0), 2), (env(1), 3), (env(0), 2), (env(0), 2), (env(1), 3)]
    assert episodes.mean_length() == 12 / 5


def test_only_who_was_to_act_has_taken_a_step():
    play = Played(episodes := Episodes())
    white, black = env(0), env(0, 1)
    play(default=acting(agents(white, black), white))
    play(default=acting(agents(white, black), black))
    play(default=acting(agents(white, black, reward=[1, -1]), white))
    play(default=acting(agents(white, black, ended=[white, black]), white))

    assert [(end.agent_id, end.total, end.length) for end in episodes.recent] == [(white, 1.0, 2), (black, -1.0, 1)]


def test_who_joins_has_taken_no_step_yet_and_who_moves_to_another_row_has():
    play = Played(episodes := Episodes())
    old, new = env(0), env(0, 1)
    play(default=agents(old))
    play(default=agents(new, old))
    play(default=agents(old, new))
    play(default=agents(new, old, ended=[old, new]))

    assert lengths(episodes) == [(new, 2), (old, 3)]


def test_who_is_not_in_every_step_keeps_the_length():
    play = Played(episodes := Episodes())
    play(default=agents(env(0), env(1)))
    play(default=agents(env(0), env(1)))
    play(default=agents(env(0)))
    play(default=agents(env(0), env(1)))
    play(default=agents(env(0), env(1), ended=[env(1)]))

    assert lengths(episodes) == [(env(1), 2)]


def test_an_episode_without_reward_has_its_length_after_its_agent_was_away():
    play = Played(episodes := Episodes(keeps_returns=False))
    play(default=agents(env(0), env(0, 1)))
    play(default=agents(env(0), env(0, 1)))
    play(default=agents(env(0)))
    play(default=agents(env(0), env(0, 2)))
    play(default=agents(env(0), env(0, 1), env(0, 2)))
    play(default=agents(env(0), env(0, 1), env(0, 2), ended=[env(0, 1), env(0, 2)]))

    assert lengths(episodes) == [(env(0, 1), 2), (env(0, 2), 2)]


def test_a_reset_begins_all_episodes_of_its_environments_also_of_agents_that_come_later():
    play = Played(episodes := Episodes())
    play(default=agents(env(0), env(0, 1)))
    play(default=agents(env(0), env(0, 1), reward=100.0))
    play(default=agents(env(0)))
    play.before = None
    play(default=agents(env(0)))
    play(default=agents(env(0), env(0, 1), reward=1.0))
    play(default=agents(env(0), env(0, 1), reward=1.0, ended=[env(0), env(0, 1)]))

    assert [(end.total, end.length) for end in episodes.recent] == [(2.0, 2), (2.0, 1)]


def test_a_loss_begins_lengths_anew():
    play = Played(episodes := Episodes())
    play(default=agents(env(0)))
    play(default=agents(env(0)))
    play(default=agents(env(0), truncated=[env(0)]), lost=lost_to())
    play(default=agents(env(0), reward=2.0, ended=[env(0)]))

    assert [(end.total, end.length) for end in episodes.recent] == [(2.0, 1)]


# What can be asked.


def ended_episodes(n, **options):
    play = Played(episodes := Episodes(keeps_returns=False, **options))
    play(seer=agents(env(0)), doer=agents(env(1)))
    for k in range(n):
        play(seer=agents(env(0), reward=k, ended=[env(0)]), doer=agents(env(1), reward=-k, ended=[env(1)]))
    return episodes


def test_those_that_ended_since_the_last_time_are_taken_once():
    episodes = ended_episodes(3)

    assert [end.total for end in episodes.take()] == [0, 0, 1, -1, 2, -2]
    assert episodes.take() == []


def test_of_more_than_are_kept_the_last_are_taken_and_memory_does_not_grow():
    episodes = ended_episodes(1000, n_recent=4)

    assert (episodes.count, len(episodes.recent)) == (2000, 4)
    assert [end.total for end in episodes.take()] == [998, -998, 999, -999]


def test_episodes_are_told_by_environment_behavior_and_agent():
    episodes = ended_episodes(3)

    assert [end.total for end in episodes.of(env_id=1)] == [0, -1, -2]
    assert episodes.of(behavior="seer") == episodes.of(agent_id=env(0)) == episodes.of(env_id=0)
    assert episodes.of(env_id=0, behavior="doer") == []
    assert {end.env_id for end in episodes.of()} == {0, 1}


def test_means_are_of_all_behaviors_or_of_one():
    episodes = ended_episodes(3)

    assert episodes.mean_of_recent() == 0.0
    assert (episodes.mean_of_recent("seer"), episodes.mean_length("doer")) == (1.0, 1.0)
    assert math.isnan(episodes.mean_of_recent("nobody"))


# Batches of rows.


def batch(*env_ids, reward=0.0, ended=(), truncated=(), lost=()):
    ids = np.array(env_ids)
    rewards = np.broadcast_to(np.asarray(reward, np.float32), ids.shape).copy()
    return Batch(ids, np.zeros(len(ids)), rewards, np.isin(ids, ended), np.isin(ids, truncated), np.isin(ids, lost))


def of_batches(n_envs, *batches, brings_first=True):
    episodes = Episodes(keeps_returns=False)
    episodes.begin_rows(n_envs)
    seen: list[int] = []
    for one in batches:
        first = ~np.isin(one.env_ids, seen) if brings_first else None
        seen += one.env_ids.tolist()
        episodes.add_batch("default", one, first)
    return episodes


def ends(episodes):
    return [(end.env_id, end.total, end.length) for end in episodes.recent]


def test_rows_come_in_any_order_and_number():
    episodes = of_batches(
        3,
        batch(2, 0),
        batch(0, reward=1),
        batch(1, 2, reward=[0, 10]),
        batch(2, 1, 0, reward=[20, 300, 2], ended=[0, 2]),
        batch(0, 1, reward=[5, 400], ended=[0], truncated=[1]),
    )

    assert ends(episodes) == [(2, 30.0, 2), (0, 3.0, 2), (0, 5.0, 1), (1, 700.0, 2)]
    assert episodes.env_steps == 7, "first observations are no steps"


def test_who_sends_without_having_received_gets_steps_at_once():
    assert ends(of_batches(1, batch(0, reward=1, ended=[0]), brings_first=False)) == [(0, 1.0, 1)]


def test_a_lost_row_is_no_step_and_no_episode_and_begins_one():
    episodes = of_batches(
        2,
        batch(0, 1),
        batch(0, 1, reward=100),
        batch(1, 0, reward=[100, 0], truncated=[0], lost=[0]),
        batch(0, 1, reward=1, ended=[0, 1]),
    )

    assert ends(episodes) == [(0, 1.0, 1), (1, 201.0, 3)]
    assert (episodes.lost, episodes.count, episodes.env_steps) == (1, 2, 5)


def test_a_lost_row_of_an_environment_that_rested_is_no_lost_episode():
    episodes = of_batches(2, batch(0, 1), batch(0, 1, lost=[0]), batch(0, 1, reward=1, ended=[0, 1]))

    assert ends(episodes) == [(0, 1.0, 1), (1, 1.0, 2)]
    assert (episodes.lost, episodes.count) == (0, 2)


def test_what_was_under_way_when_counting_began_is_passed_over():
    episodes = Episodes(keeps_returns=False)
    two = agents(env(0), env(1, 1))
    episodes.ignore_running([first(default=two)], 2)
    before = {"default": two}
    for k in range(1, 5):
        now = {"default": agents(env(0), env(1, 1), reward=1, ended=[env(0)] if k % 2 else two.agent_id)}
        episodes.add(StepInfo(before, now, {}, 0))
        before = now

    assert ends(episodes) == [(0, 1.0, 1), (0, 1.0, 1), (0, 1.0, 1), (1, 2.0, 2)]
    assert episodes.count == 4


def test_printed_they_are_their_counts_and_means():
    assert repr(Episodes()) == "<Episodes: 0 ended, 0 lost>"
    episodes = of_batches(1, batch(0), batch(0, reward=2.5, ended=[0]))
    assert repr(episodes) == "<Episodes: 1 ended, 0 lost, mean return 2.5, mean length 1>"
