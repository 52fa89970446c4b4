"""What a trainer gets of a worker that was replaced: every old episode ends once, and none goes on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager.data.steps import ActionInfo, AgentSteps, Batch, Lost, StepInfo, only_agents
from envmanager.data.trees import leaves
from envmanager.kernel.recovery import followed_by, last_rows, lost
from envmanager.kernel.row_steps import batches_with
from envmanager.kernel.table import Entry

SHAPES = {
    "array": lambda leaf: leaf,
    "dict": lambda leaf: {"camera": np.stack([leaf, -leaf], axis=1), "speed": leaf},
    "tuple": lambda leaf: (leaf, leaf.astype(np.int64)),
    "nested": lambda leaf: {"a": (leaf, {"b": leaf * 2})},
}


def steps_of(ids, *, says, shape="array", terminated=(), truncated=(), acting=None, infos=False, reward=None):
    """Steps whose observation is ``says`` plus the agent's id, and its final observation the same plus 1/2."""
    ids = np.array(ids, np.int64)
    ended = np.isin(ids, [*terminated, *truncated])
    make = SHAPES[shape]
    return AgentSteps(
        ids,
        make((says + ids).astype(np.float64)),
        np.array(np.zeros(len(ids)) if reward is None else reward, np.float32),
        np.isin(ids, list(terminated)),
        np.isin(ids, list(truncated)),
        make(says + 0.5 + ids[ended]) if ended.any() else None,
        None if acting is None else np.isin(ids, list(acting)),
        [{"says": says, "id": int(id)} for id in ids] if infos else None,
        [{"began": int(id)} for id in ids[ended]] if infos and ended.any() else None,
    )


def values(tree):
    """Observations by agent: what ``steps_of`` was told to say, and the same in every leaf."""
    return [leaf.tolist() for leaf in leaves(tree)]


def told(says, ids, shape="array"):
    return values(SHAPES[shape](says + np.array(ids, np.float64)))


SHAPED = pytest.mark.parametrize("shape", SHAPES)


# A worker that failed.


@SHAPED
def test_lost_episodes_are_truncated_without_reward_at_the_last_observation(shape):
    cut = lost({"walker": steps_of([4, 2, 9], says=100, shape=shape, reward=[1, 2, 3])})["walker"]

    assert cut.agent_id.tolist() == [4, 2, 9]
    assert cut.truncated.tolist() == [True] * 3
    assert cut.terminated.tolist() == [False] * 3
    assert (cut.reward.tolist(), cut.reward.dtype) == ([0.0] * 3, np.float32)
    assert values(cut.final_obs) == told(100, [4, 2, 9], shape)


def test_an_episode_that_had_just_ended_and_begun_anew_is_cut_where_it_began():
    cut = lost({"walker": steps_of([1, 2], says=100, terminated=[2], reward=[5, 7])})["walker"]

    assert cut.terminated.tolist() == [False, False]
    assert cut.truncated.tolist() == [True, True]
    assert cut.reward.tolist() == [0.0, 0.0]
    assert cut.final_obs.tolist() == [101, 102], "its old end was handed out already"


def test_agents_whose_last_episode_is_over_have_nothing_to_lose():
    last = {
        "walker": steps_of([1, 2, 3], says=100, terminated=[1, 3], acting=[2, 3]),
        "flyer": steps_of([4], says=100, truncated=[4], acting=[]),
    }
    cut = lost(last)

    assert set(cut) == {"walker"}
    assert cut["walker"].agent_id.tolist() == [2, 3]
    assert cut["walker"].final_obs.tolist() == [102, 103]


def test_an_agent_whose_turn_it_is_not_loses_its_episode_too():
    cut = lost({"player": steps_of([1, 2], says=100, acting=[1])})["player"]

    assert cut.agent_id.tolist() == [1, 2]


def test_nothing_was_handed_out_so_nothing_is_lost():
    assert lost({}) == {}


@pytest.mark.parametrize("infos", [False, True])
def test_a_loss_has_infos_where_steps_have_and_they_are_empty(infos):
    cut = lost({"walker": steps_of([1, 2], says=100, infos=infos)})["walker"]

    assert cut.info == ([{}, {}] if infos else None)


@SHAPED
def test_what_was_handed_out_can_change_without_changing_what_was_cut(shape):
    last = steps_of([1, 2], says=100, shape=shape)
    first = steps_of([1, 2], says=200, shape=shape)
    both = followed_by(lost({"walker": last}), {"walker": first})["walker"]
    for leaf in (*leaves(last.obs), *leaves(first.obs)):
        leaf[:] = -1

    assert values(both.final_obs) == told(100, [1, 2], shape)
    assert values(both.obs) == told(200, [1, 2], shape)


# What comes after.


@SHAPED
def test_the_same_agents_go_on_with_the_first_observations_of_the_new_generation(shape):
    cut = lost({"walker": steps_of([1, 2], says=100, shape=shape)})
    both = followed_by(cut, {"walker": steps_of([1, 2], says=200, shape=shape)})["walker"]

    assert both.agent_id.tolist() == [1, 2]
    assert values(both.obs) == told(200, [1, 2], shape)
    assert values(both.final_obs) == told(100, [1, 2], shape)
    assert both.ended.tolist() == [True, True]
    assert both.acting is None


@SHAPED
def test_agents_that_do_not_come_back_end_and_act_no_more_and_new_ones_join(shape):
    cut = lost({"walker": steps_of([5, 1, 3], says=100, shape=shape)})
    both = followed_by(cut, {"walker": steps_of([3, 7, 5, 8], says=200, shape=shape)})["walker"]

    assert both.agent_id.tolist() == [3, 7, 5, 8, 1]
    assert both.truncated.tolist() == [True, False, True, False, True]
    assert both.acting is not None
    assert both.acting.tolist() == [True, True, True, True, False]
    assert values(both.final_obs) == told(100, [3, 5, 1], shape)
    expected = SHAPES[shape](np.array([203, 207, 205, 208, 101], np.float64))
    assert values(both.obs) == values(expected)
    assert both.reward.tolist() == [0.0] * 5


def test_the_same_agents_in_another_order_have_that_in_which_their_actions_are_expected():
    cut = lost({"walker": steps_of([1, 2], says=100)})
    both = followed_by(cut, {"walker": steps_of([2, 1], says=200)})["walker"]

    assert both.agent_id.tolist() == [2, 1]
    assert both.obs.tolist() == [202, 201]
    assert both.final_obs.tolist() == [102, 101]


@pytest.mark.parametrize("ids", [[1, 2], [2, 1, 3]], ids=["same agents", "others"])
def test_who_does_not_act_at_first_does_not_act(ids):
    cut = lost({"player": steps_of([1, 2], says=100)})
    both = followed_by(cut, {"player": steps_of(ids, says=200, acting=[2, 3])})["player"]

    acting = dict(zip(both.agent_id.tolist(), both.acting.tolist(), strict=True))
    assert acting == {1: False, 2: True, 3: True} if 3 in ids else {1: False, 2: True}


def test_behaviors_may_go_and_come():
    cut = lost({"walker": steps_of([1, 2], says=100), "flyer": steps_of([3], says=100)})
    both = followed_by(cut, {"flyer": steps_of([3], says=200), "swimmer": steps_of([4], says=200)})

    assert list(both) == ["walker", "flyer", "swimmer"]
    walker, flyer, swimmer = both.values()
    assert (walker.ended.tolist(), walker.acting.tolist(), walker.obs.tolist()) == ([True] * 2, [False] * 2, [101, 102])
    assert (flyer.ended.tolist(), flyer.acting, flyer.obs.tolist()) == ([True], None, [203])
    assert (swimmer.ended.tolist(), swimmer.acting, swimmer.obs.tolist()) == ([False], None, [204])
    assert swimmer.final_obs is None


@pytest.mark.parametrize(
    ("ids", "info", "reset_info"),
    [
        ([1, 2], [{}, {}], [(200, 1), (200, 2)]),
        ([2, 3], [{}, {"says": 200, "id": 3}, {}], [(200, 2), None]),
    ],
    ids=["same agents", "others"],
)
def test_infos_of_the_new_generation_are_those_of_episodes_that_began(ids, info, reset_info):
    cut = lost({"walker": steps_of([1, 2], says=100, infos=True)})
    both = followed_by(cut, {"walker": steps_of(ids, says=200, infos=True)})["walker"]

    assert both.info == info
    expected = [{} if each is None else {"says": each[0], "id": each[1]} for each in reset_info]
    assert both.reset_info == expected


def test_every_row_that_ended_has_a_reset_info_when_infos_are_asked_for():
    cut = lost({"walker": steps_of([1, 2], says=100, infos=True)})
    (walker,) = followed_by(cut, {}).values()

    assert walker.reset_info == [{}, {}]


# A worker that is recycled.


def test_a_new_episode_of_a_recycled_worker_is_not_cut():
    last = {
        "walker": steps_of([1, 2, 3], says=100, terminated=[1], truncated=[3], acting=[1, 2]),
        "flyer": steps_of([4], says=100, terminated=[4]),
    }
    cut = lost(last, with_new=False)

    assert set(cut) == {"walker"}
    assert cut["walker"].agent_id.tolist() == [2]
    assert cut["walker"].final_obs.tolist() == [102]


# What was handed out last, by recv.


def rows(env_ids, says):
    flags = np.zeros(len(env_ids), np.bool_)
    return AgentSteps(only_agents(env_ids), np.full(len(env_ids), says), np.zeros(len(env_ids)), flags, flags)


def last_of(worker_id, *batches, blocks=((0, 1, 2), (3, 4))):
    """The observations of a worker's environments after these batches, each ``(env_ids, says)``; 0 at the reset."""
    entries = [Entry(number, block) for number, block in enumerate(blocks)]
    for entry in entries:
        entry.previous_step = StepInfo(None, {"default": rows(entry.env_ids, 0)}, None, entry.worker_id)
    for env_ids, says in batches:
        batch = Batch.of(rows(env_ids, says))
        for entry in entries:
            own = rows([env_id for env_id in env_ids if env_id in entry.env_ids], says)
            if len(own):
                entry.batches = batches_with(entry, batch)
    return last_rows(entries[worker_id]).obs.tolist()


def test_a_row_was_last_seen_in_the_newest_batch_that_holds_it():
    batches = [([0, 1, 2], 1), ([1], 2), ([4, 0, 3], 3), ([2, 1], 4)]

    assert last_of(0, *batches) == [3, 4, 4]
    assert last_of(1, *batches) == [3, 3]


def test_what_no_batch_held_was_last_seen_at_the_reset():
    assert last_of(0, ([1], 2)) == [0, 2, 0]


def test_a_row_that_was_left_alone_for_long_was_last_seen_long_ago():
    assert last_of(0, ([0, 1, 2], 1), *[([1], says) for says in range(2, 20)]) == [1, 19, 1]


# For any agents whatever.

agent_ids = st.lists(st.integers(0, 9), max_size=6, unique=True)


@st.composite
def played(draw, says):
    """Steps of an environment: who ended, and who of them plays on."""
    ids = draw(agent_ids)
    ended = [id for id in ids if draw(st.booleans())]
    terminated = [id for id in ended if draw(st.booleans())]
    stays_away = [id for id in ended if draw(st.booleans())]
    acting = None if not stays_away and draw(st.booleans()) else [id for id in ids if id not in stays_away]
    return steps_of(
        ids,
        says=says,
        shape="nested",
        terminated=terminated,
        truncated=[id for id in ended if id not in terminated],
        acting=acting,
        infos=True,
        reward=range(len(ids)),
    )


@st.composite
def behaviors(draw, says, names="ab"):
    found = {name: draw(played(says)) for name in names if draw(st.booleans())}
    return {name: steps for name, steps in found.items() if len(steps)}


@st.composite
def beginnings(draw, says, names="ab"):
    found = {}
    for name in names:
        ids = draw(agent_ids)
        if ids:
            acting = draw(st.sampled_from([None, ids[:-1]]))
            found[name] = steps_of(ids, says=says, shape="nested", acting=acting, infos=True)
    return found


def row_of(steps, agent_id):
    """One agent's row as plain values; ``final_obs`` is None when it goes on."""
    (row,) = np.flatnonzero(steps.agent_id == agent_id)
    one = steps.take(np.array([row]))
    return {
        "obs": values(one.obs),
        "final_obs": None if one.final_obs is None else values(one.final_obs),
        "reward": float(one.reward[0]),
        "terminated": bool(one.terminated[0]),
        "truncated": bool(one.truncated[0]),
        "acting": one.acting is None or bool(one.acting[0]),
        "info": one.info[0],
    }


def expected_after(steps, first, agent_id, *, final_obs, reward, terminated, info):
    """What must be told of an agent whose episode is over: its end, and whether and where it goes on."""
    back = first is not None and agent_id in first.agent_id
    begun = row_of(first, agent_id) if back else None
    return {
        "obs": begun["obs"] if back else final_obs,
        "final_obs": final_obs,
        "reward": reward,
        "terminated": terminated,
        "truncated": not terminated,
        "acting": back and begun["acting"],
        "info": info,
    }


def check_beginnings(both, first, old_ids):
    """All are in the order in which they begin, then those that do not; new ones are there as they began."""
    for name, steps in first.items():
        ids = steps.agent_id.tolist()
        new = [agent_id for agent_id in ids if agent_id not in old_ids.get(name, [])]
        gone = [agent_id for agent_id in old_ids.get(name, []) if agent_id not in ids]
        assert both[name].agent_id.tolist() == [*ids, *gone]
        for agent_id in new:
            assert row_of(both[name], agent_id) == row_of(steps, agent_id)


def check_shapes(steps):
    n, n_ended = len(steps), int(steps.ended.sum())
    assert all(len(leaf) == n for leaf in leaves(steps.obs))
    assert (steps.final_obs is None) == (n_ended == 0)
    assert n_ended == 0 or all(len(leaf) == n_ended for leaf in leaves(steps.final_obs))
    assert len({*steps.agent_id.tolist()}) == n
    assert steps.acting is None or (steps.acting.dtype, len(steps.acting)) == (np.bool_, n)
    assert len(steps.info) == n
    assert n == len(steps.reward) == len(steps.terminated) == len(steps.truncated)


@given(behaviors(says=100), beginnings(says=200))
def test_whoever_was_playing_loses_one_episode_and_nobody_else_does(last, first):
    both = followed_by(lost(last), first)

    old_ids = {}
    for name, steps in last.items():
        playing = steps.agent_id[steps.acting_rows].tolist()
        old_ids[name] = playing
        for agent_id in playing:
            before = row_of(steps, agent_id)
            assert row_of(both[name], agent_id) == expected_after(
                steps, first.get(name), agent_id, final_obs=before["obs"], reward=0.0, terminated=False, info={}
            )
    check_beginnings(both, first, old_ids)
    assert set(both) == {*first, *(name for name, ids in old_ids.items() if ids)}
    for steps in both.values():
        check_shapes(steps)


@given(behaviors(says=100, names="a"), beginnings(says=200, names="a"))
def test_a_loss_gives_no_transitions_and_the_next_step_joins_on_to_the_new_generation(last, first):
    if not last:
        return
    both = followed_by(lost(last), first)
    told_lost = StepInfo(last, both, None, 0, lost=Lost(None, 1, (0,)))
    assert len(told_lost.transitions("a").reward) == 0

    if "a" not in both or not len(both["a"].acting_rows):
        return
    acted = both["a"].agent_id[both["a"].acting_rows]
    after = steps_of(acted, says=300, shape="nested", infos=True)
    info = StepInfo(both, {"a": after}, {"a": ActionInfo(np.arange(len(acted)))}, 0)
    made = info.transitions("a")

    assert made.agent_id.tolist() == acted.tolist()
    assert values(made.obs) == told(200, acted, "nested"), "obs of the new generation"
