"""Steps: rows taken, joined and paired."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager import Environment, SimpleEnvManager
from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import (
    ActionInfo,
    AgentSteps,
    Batch,
    CommandName,
    EnvironmentCommand,
    EnvironmentResponse,
    Lost,
    StepInfo,
    concat_steps,
)
from envmanager.errors import WorkerDied


def steps_of(ids, ended=(), acting=None, reward=None, base=0.0):
    """Steps whose observation is ``base + id``, and its final observation the negative of that."""
    ids = np.array(ids, np.int64)
    over = np.isin(ids, list(ended))
    obs = {"x": (base + ids).astype(np.float32), "y": np.stack([ids, ids], axis=1)}
    return AgentSteps(
        ids,
        obs,
        np.array(ids if reward is None else reward, np.float32),
        over,
        np.zeros(len(ids), bool),
        {name: -leaf[over] for name, leaf in obs.items()} if over.any() else None,
        None if acting is None else np.isin(ids, list(acting)),
        [{"id": int(i)} for i in ids],
        [{"began": int(i)} for i in ids[over]],
    )


def test_first_steps_have_no_rewards_and_no_ends():
    steps = AgentSteps.first(agent_id=np.arange(2), obs=np.ones((2, 3), np.float32))

    assert steps.reward.tolist() == [0.0, 0.0]
    assert not steps.ended.any()
    assert steps.final_obs is None


@pytest.mark.parametrize(("ended", "final_obs"), [(True, None), (False, np.zeros((1, 3), np.float32))])
def test_steps_that_contradict_themselves_about_an_end_cannot_be_made(ended, final_obs):
    with pytest.raises(ValueError, match="final_obs has a row for each"):
        AgentSteps.stepped(
            agent_id=np.arange(1),
            obs=np.ones((1, 3), np.float32),
            reward=np.zeros(1, np.float32),
            terminated=np.array([ended]),
            truncated=np.array([False]),
            final_obs=final_obs,
        )


def as_lists(steps):
    """Everything a row says, row by row."""
    finals = iter(zip(*steps.final_obs.values(), strict=True)) if steps.final_obs is not None else iter(())
    begun = iter(steps.reset_info or [])
    return [
        (
            int(steps.agent_id[i]),
            float(steps.obs["x"][i]),
            steps.obs["y"][i].tolist(),
            float(steps.reward[i]),
            bool(steps.acting is None or steps.acting[i]),
            steps.info[i],
            [np.asarray(leaf).tolist() for leaf in next(finals)] if steps.ended[i] else None,
            next(begun) if steps.ended[i] else None,
        )
        for i in range(len(steps))
    ]


@st.composite
def some_steps(draw, first=0):
    ids = draw(st.lists(st.integers(first, first + 99), unique=True, min_size=1, max_size=6))
    ended = draw(st.sets(st.sampled_from(ids)))
    acting = draw(st.none() | st.sets(st.sampled_from(ids)))
    return steps_of(ids, ended, acting)


@given(some_steps(), some_steps(first=100))
def test_rows_taken_from_joined_steps_are_the_parts_again(one, other):
    joined = concat_steps([one, other])

    assert as_lists(joined.take(np.arange(len(one)))) == as_lists(one)
    assert as_lists(joined.take(np.arange(len(one), len(joined)))) == as_lists(other)


@given(some_steps(), st.data())
def test_rows_are_taken_in_the_order_asked_for(steps, data):
    rows = data.draw(st.permutations(range(len(steps))))

    assert as_lists(steps.take(np.array(rows))) == [as_lists(steps)[row] for row in rows]


def test_a_copy_does_not_follow_its_original():
    steps = steps_of([1, 2], ended=[2], acting=[1])
    copied, before = steps.copy(), as_lists(steps)

    for array in (steps.agent_id, steps.reward, steps.acting, steps.obs["x"], steps.final_obs["y"]):
        array[:] = 0
    steps.terminated[:] = False

    assert as_lists(copied) == before


def test_joining_one_part_copies_it():
    part = steps_of([1, 2])
    joined = concat_steps([part])
    part.obs["x"][:] = 9

    assert joined.obs["x"].tolist() == [1, 2]


def test_agents_of_one_environment_share_its_number():
    assert steps_of([3 << 32, 3 << 32 | 7, 4 << 32]).env_id.tolist() == [3, 3, 4]


def test_decision_and_terminal_steps_are_ml_agents_split():
    steps = steps_of([5, 6, 7], ended=[6, 7], acting=[5, 7])

    assert steps.decision_steps.agent_id.tolist() == [5, 7]
    assert steps.decision_steps.obs["x"].tolist() == [5, 7]
    assert steps.terminal_steps.agent_id.tolist() == [6, 7]
    assert steps.terminal_steps.obs["x"].tolist() == [-6, -7]
    assert steps.terminal_steps.interrupted.tolist() == [False, False]


def test_terminal_steps_of_steps_in_which_nothing_ended_are_none():
    assert len(steps_of([5, 6]).terminal_steps.agent_id) == 0


@pytest.mark.parametrize("name", ["step", "reset", "close"])
def test_commands_and_responses_compare_with_their_plain_names(name):
    assert EnvironmentCommand(name) == EnvironmentCommand(CommandName(name), None)
    assert EnvironmentCommand(name).name == name
    assert EnvironmentResponse(name, 2, "x") == EnvironmentResponse(name, 2, "x")
    assert EnvironmentResponse(name, 2, "x") != EnvironmentResponse(name, 3, "x")
    assert (str(CommandName(name)), hash(CommandName(name))) == (name, hash(name))


def test_a_name_that_is_no_command_is_refused():
    with pytest.raises(ValueError, match="dance"):
        EnvironmentCommand("dance")


def pair(before, after, last=None, **kwargs):
    acted = len(before.acting_rows)
    action = {"default": ActionInfo(np.arange(acted) * 10)}
    waiting = {} if last is None else last.still_waiting
    return StepInfo({"default": before}, {"default": after}, action, 0, waiting=waiting, **kwargs)


def test_transitions_pair_each_agent_with_itself():
    got = pair(steps_of([1, 2, 3]), steps_of([1, 2, 3], ended=[2], base=100)).transitions()

    assert got.agent_id.tolist() == [1, 2, 3]
    assert got.obs["x"].tolist() == [1, 2, 3]
    assert got.action.tolist() == [0, 10, 20]
    assert got.next_obs["x"].tolist() == [101, -102, 103]
    assert got.terminated.tolist() == [False, True, False]


def test_transitions_do_not_change_the_observation_to_act_on():
    after = steps_of([1, 2], ended=[2], base=100)
    pair(steps_of([1, 2]), after).transitions()

    assert after.obs["x"].tolist() == [101, 102]


def test_transitions_follow_agents_that_change_places():
    got = pair(steps_of([1, 2, 3]), steps_of([3, 1], ended=[1], base=100)).transitions()

    assert got.agent_id.tolist() == [1, 3]
    assert got.action.tolist() == [0, 20]
    assert got.next_obs["x"].tolist() == [-101, 103]


def test_agents_that_did_not_act_or_just_joined_give_no_transition():
    got = pair(steps_of([1, 2], acting=[2]), steps_of([1, 2, 9], base=100)).transitions()

    assert (got.agent_id.tolist(), got.action.tolist(), got.obs["x"].tolist()) == ([2], [0], [2])


def test_an_agent_that_waits_for_its_turn_gives_a_transition_when_it_acts_again_or_has_ended():
    """Its reward is the sum of what came since it acted, as the trainers credit it."""
    first = pair(steps_of([1, 2], acting=[1]), steps_of([1, 2], acting=[2], reward=[1, 2], base=10))
    first.keep_waiting("default")
    second = pair(first.current["default"], steps_of([1, 2], acting=[1], reward=[3, 4], base=20), first)
    second.keep_waiting("default")
    third = pair(second.current["default"], steps_of([1, 2], acting=[], ended=[1, 2], reward=[5, -6]), second)

    assert len(first.transitions().reward) == 0
    for info, agents, obs, reward, next_obs, ended in (
        (second, [1], [1], [4], [21], [False]),
        (third, [1, 2], [21, 12], [5, -2], [-1, -2], [True, True]),
    ):
        made = info.transitions()
        assert made.agent_id.tolist() == agents
        assert (made.obs["x"].tolist(), made.next_obs["x"].tolist()) == (obs, next_obs)
        assert (made.reward.tolist(), made.terminated.tolist()) == (reward, ended)


class Crowd(Environment):
    """Agents that come, act in some steps, get rewards in all, end, play on or leave, some without an end."""

    behavior_specs = {"default": BehaviorSpec(ArraySpec((1,)), ArraySpec((), np.int64))}
    max_agents = {"default": 4}

    def reset(self, *, seeds, options):
        self.random, self.n, self.ids = np.random.default_rng(seeds[0]), 3, [0, 1, 2]
        return {"default": AgentSteps.first(agent_id=np.arange(3), obs=self.drawn(3), acting=self.some(3, 0.5))}

    def drawn(self, n):
        return self.random.integers(0, 1000, (n, 1)).astype(np.float32)

    def some(self, n, share):
        return self.random.random(n) < share

    def step(self, actions):
        if not self.ids or (len(self.ids) < 4 and self.some(1, 0.5)):
            self.ids, self.n = [*self.ids, self.n], self.n + 1
        n = len(self.ids)
        ended, leaves = self.some(n, 0.2), self.some(n, 0.1)
        is_cut = ended & self.some(n, 0.5)
        steps = AgentSteps.stepped(
            agent_id=np.array(self.ids),
            obs=self.drawn(n),
            reward=self.random.integers(-9, 9, n).astype(np.float32),
            terminated=ended & ~is_cut,
            truncated=is_cut,
            final_obs=self.drawn(ended.sum()) if ended.any() else None,
            acting=self.some(n, 0.5) & ~leaves,
        )
        self.ids = [each for each, left in zip(self.ids, leaves, strict=True) if not left]
        return {"default": steps}

    def close(self):
        pass


class Counts:
    def __init__(self):
        self.n = 0

    def get_action(self, steps):
        self.n += len(steps)
        return ActionInfo(np.arange(self.n - len(steps), self.n))


def told_agent_by_agent(info, waiting):
    """The transitions of a StepInfo as tuples. ``waiting``: what each agent saw, did and got, by agent_id."""
    if info.previous is None or info.lost is not None:
        waiting.clear()
        return
    before, now = info.previous["default"], info.current["default"]
    rows = before.acting_rows.tolist()
    for row, action in zip(rows, info.actions["default"].action.tolist(), strict=True):
        waiting[int(before.agent_id[row])] = [float(before.obs[row, 0]), action, 0.0]
    final = iter(() if now.final_obs is None else now.final_obs[:, 0].tolist())
    place = {agent_id: row for row, agent_id in enumerate(now.agent_id.tolist())}
    last = dict(zip(before.agent_id.tolist(), before.obs[:, 0].tolist(), strict=True))
    for agent_id, row in place.items():
        ended = bool(now.ended[row])
        next_obs = next(final) if ended else float(now.obs[row, 0])
        if agent_id in waiting:
            waiting[agent_id][2] += float(now.reward[row])
            if ended or now.acting is None or now.acting[row]:
                obs, action, reward = waiting.pop(agent_id)
                yield agent_id, obs, action, reward, next_obs, bool(now.terminated[row]), bool(now.truncated[row])
    for agent_id in set(waiting) - set(place):
        obs, action, reward = waiting.pop(agent_id)
        if agent_id not in before.agent_id[rows]:  # else nothing came of its action
            yield agent_id, obs, action, reward, last[agent_id], False, True


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("zero_copy", [False, True])
def test_no_reward_or_end_after_an_action_is_missing_in_the_transitions_of_a_crowd(n_envs, zero_copy):
    with SimpleEnvManager(Crowd, n_envs, zero_copy=zero_copy) as manager:
        manager.set_policy("default", Counts())
        waiting, n = {}, 0
        for seed in (1, 2):
            infos = manager.reset(seed=seed)
            for _ in range(150):
                for info in infos:
                    made = info.transitions()
                    got = [each.tolist() for each in (made.agent_id, made.obs[:, 0], made.action, made.reward)]
                    got += [each.tolist() for each in (made.next_obs[:, 0], made.terminated, made.truncated)]
                    assert sorted(zip(*got, strict=True)) == sorted(told_agent_by_agent(info, waiting))
                    n += len(made.reward)
                infos = manager.step()
        assert n > 200


LOST = Lost(WorkerDied(worker_id=0, env_ids=[0], phase="step", exit="SIGSEGV"), 1, (0,))
SPECS = {"default": BehaviorSpec({"x": ArraySpec((), np.int64)}, (ArraySpec((3,)), ArraySpec((), np.int8)))}
NOBODY_MADE_A_TRANSITION = {
    "after a reset": StepInfo(None, {"default": steps_of([1])}, None, 0, specs=SPECS),
    "after a loss": StepInfo({"default": steps_of([1])}, {"default": steps_of([1])}, None, 0, LOST, SPECS),
    "before the behavior appeared": StepInfo({}, {"default": steps_of([1])}, {}, 0, specs=SPECS),
    "without steps": StepInfo({}, {}, {}, 0, specs=SPECS),
}


@pytest.mark.parametrize("info", NOBODY_MADE_A_TRANSITION.values(), ids=NOBODY_MADE_A_TRANSITION)
def test_where_there_are_no_transitions_there_are_arrays_of_no_rows_as_the_spec_says(info):
    made = info.transitions()

    for obs in (made.obs, made.next_obs):
        assert (obs["x"].shape, obs["x"].dtype) == ((0,), np.int64)
    assert [(part.shape, part.dtype) for part in made.action] == [((0, 3), np.float32), ((0,), np.int8)]
    assert (made.reward.shape, made.reward.dtype) == ((0,), np.float32)
    assert (made.agent_id.shape, made.agent_id.dtype) == ((0,), np.int64)
    assert [(flag.shape, flag.dtype) for flag in (made.terminated, made.truncated)] == [((0,), np.bool_)] * 2


def test_agents_of_a_lost_environment_have_no_transitions_and_others_have_theirs():
    """Agents 1 and 2 are in environment 0, which is lost, agent 3 in environment 1."""
    other = 1 << 32 | 3
    info = pair(steps_of([1, 2, other]), steps_of([1, 2, other], ended=[2], base=100), lost=LOST)

    assert info.is_step
    assert info.transitions().agent_id.tolist() == [other]
    assert info.transitions().action.tolist() == [20]


def test_when_no_agent_is_in_both_there_are_no_transitions():
    made = pair(steps_of([1]), steps_of([2])).transitions()

    assert [len(part) for part in (made.obs["x"], made.action, made.reward, made.next_obs["x"], made.agent_id)] == [
        0
    ] * 5
    assert made.next_obs["x"].dtype == steps_of([1]).obs["x"].dtype


def test_without_a_spec_no_transitions_look_like_what_is_there():
    made = pair(steps_of([1]), steps_of([1]), lost=LOST).transitions()

    assert (made.obs["x"].shape, made.obs["x"].dtype) == ((0,), steps_of([1]).obs["x"].dtype)
    assert (made.action.shape, made.action.dtype) == ((0,), np.int64)


def test_a_behavior_of_which_nothing_is_known_has_no_transitions():
    made = pair(steps_of([1]), steps_of([1])).transitions("ghosts")

    assert [part.shape for part in made] == [(0,)] * 7


def test_a_copied_step_info_keeps_its_values():
    info = pair(steps_of([1, 2]), steps_of([1, 2], base=100))
    kept = info.copy()
    info.previous["default"].obs["x"][:] = 0
    info.current["default"].obs["x"][:] = 0

    assert kept.transitions().obs["x"].tolist() == [1, 2]
    assert kept.transitions().next_obs["x"].tolist() == [101, 102]


def test_rows_of_an_action_take_its_outputs_along():
    info = ActionInfo({"go": np.arange(4)}, {"value": np.arange(4) * 2.0}, version=3).take(slice(1, 3))

    assert (info.action["go"].tolist(), info.outputs["value"].tolist(), info.version) == ([1, 2], [2, 4], 3)


def test_a_copied_batch_is_no_view():
    flags = np.zeros(2, bool)
    batch = Batch(np.arange(2), np.ones((2, 3)), np.ones(2), flags, flags, flags, is_view=True)
    kept = batch.copy()
    batch.obs[:] = 0

    assert (len(kept), kept.is_view, kept.obs.min()) == (2, False, 1)


def test_steps_survive_pickling():
    steps = steps_of([1, 2], ended=[1], acting=[2])

    assert as_lists(pickle.loads(pickle.dumps(steps))) == as_lists(steps)
