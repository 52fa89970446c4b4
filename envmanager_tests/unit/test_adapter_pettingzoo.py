"""ParallelEnvironment against real PettingZoo environments and scripted ones whose agents come and go."""

import numpy as np
import pytest
from gymnasium import spaces
from mpe2 import simple_speaker_listener_v4, simple_tag_v3
from pettingzoo import ParallelEnv
from pettingzoo.utils import BaseParallelWrapper, conversions

from envmanager.adapters.choosing import as_environment, build_group
from envmanager.adapters.pettingzoo import ParallelEnvironment, name_behaviors, prefix
from envmanager.data.specs import ArraySpec, BehaviorSpec, SpecMismatch
from envmanager.data.steps import ActionInfo, StepInfo
from envmanager.errors import UsageError


class Scripted(ParallelEnv):
    """Plays a script: for each step ``(agents alive after it, agents that end in it)``. Observes who, and the time."""

    metadata = {"name": "scripted"}

    def __init__(self, script, first=("a_0", "a_1"), possible=("a_0", "a_1", "a_2"), sizes=None):
        self.script, self.first, self.sizes = script, first, sizes or {}
        if possible is not None:
            self.possible_agents = list(possible)
        self.episodes, self.received, self.resets = 0, [], []

    def observation_space(self, agent):
        return spaces.Box(-9, 99, (self.sizes.get(agent, 2),), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(5)

    def reset(self, seed=None, options=None):
        self.resets.append((seed, options))
        self.episodes, self.time, self.agents = self.episodes + 1, 0, list(self.first)
        return {agent: self._obs(agent) for agent in self.agents}, {agent: {"began": agent} for agent in self.agents}

    def step(self, actions):
        self.received.append(actions)
        before, (alive, ended) = self.agents, self.script[self.time]
        self.time += 1
        self.agents = list(alive)
        everyone = dict.fromkeys([*before, *alive])
        return (
            {agent: self._obs(agent) for agent in everyone},
            {agent: float(actions.get(agent, 77)) for agent in everyone},
            {agent: agent in ended for agent in everyone},
            dict.fromkeys(everyone, False),
            {agent: {"time": self.time} for agent in everyone},
        )

    def _obs(self, agent):
        obs = np.zeros(self.sizes.get(agent, 2), np.float32)
        obs[:2] = [10 * self.episodes + self.time, int(agent[-1])]
        return obs


def begin(environment, seed=None, options=None):
    return environment.reset(seeds=[seed], options=options)


def act(environment, steps, action=1):
    """The next steps, everybody doing ``action``."""
    return environment.step(
        {behavior: np.full(len(own.acting_rows), action) for behavior, own in steps.items() if len(own.acting_rows)}
    )


def seen(environment, n_steps):
    steps = begin(environment)
    for _ in range(n_steps):
        steps = act(environment, steps)
    return steps["default"]


@pytest.mark.parametrize("module", [simple_speaker_listener_v4, simple_tag_v3])
def test_transitions_are_those_of_the_bare_environment(module):
    environment, bare = ParallelEnvironment(module.parallel_env(max_cycles=7)), module.parallel_env(max_cycles=7)
    steps, (obs, _) = begin(environment, seed=3), bare.reset(seed=3)
    names = {behavior: list(agents) for behavior, agents in environment._acting.items()}
    generator = np.random.default_rng(0)

    for _ in range(20):
        actions = {behavior: generator.integers(0, 3, len(agents)) for behavior, agents in names.items()}
        previous, steps = steps, environment.step(actions)
        info = StepInfo(previous, steps, {name: ActionInfo(action) for name, action in actions.items()}, 0)
        by_name = {agent: actions[b][row] for b, agents in names.items() for row, agent in enumerate(agents)}
        before, (obs, rewards, _, truncated, _) = obs, bare.step(by_name)
        for behavior, agents in names.items():
            got = info.transitions(behavior)
            np.testing.assert_array_equal(got.obs, [before[agent] for agent in agents])
            np.testing.assert_array_equal(got.next_obs, [obs[agent] for agent in agents])
            np.testing.assert_array_equal(got.reward, np.float32([rewards[agent] for agent in agents]))
            np.testing.assert_array_equal(got.truncated, [truncated[agent] for agent in agents])
        if not bare.agents:
            obs, _ = bare.reset()


def test_agents_with_different_spaces_are_behaviors_called_by_their_prefixes():
    assert set(ParallelEnvironment(simple_speaker_listener_v4.parallel_env()).behavior_specs) == {"speaker", "listener"}

    tag = ParallelEnvironment(simple_tag_v3.parallel_env())
    assert tag.behavior_specs["adversary"].observation.shape == (16,)
    assert tag.max_agents == {"adversary": 3, "agent": 1}


def test_knights_and_archers_fall_one_by_one_and_start_again_together():
    pytest.importorskip("pygame")
    from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies as module

    environment = ParallelEnvironment(module.parallel_env(max_cycles=400))
    steps, ended, sizes = begin(environment, seed=1), 0, set()
    for _ in range(600):
        previous, steps = steps, act(environment, steps, action=0)
        own = steps["default"]
        ended += int(own.ended.sum())
        sizes.add(len(own))
        acted = previous["default"].agent_id[previous["default"].acting_rows]
        assert set(acted.tolist()) <= set(own.agent_id.tolist())
        assert len(own.acting_rows) > 0
    environment.close()

    assert ended >= 4
    assert len(sizes) > 1


def test_an_agent_that_leaves_has_one_last_row_in_which_it_does_not_act():
    environment = ParallelEnvironment(Scripted([(["a_0"], ["a_1"]), (["a_0"], [])]))
    leaving = act(environment, begin(environment), action=3)["default"]

    assert leaving.terminated.tolist() == [False, True]
    assert leaving.acting.tolist() == [True, False]
    assert leaving.reward.tolist() == [3, 3]
    assert leaving.obs.tolist() == [[11, 0], [11, 1]]
    assert leaving.final_obs.tolist() == [[11, 1]]

    after = environment.step({"default": np.array([2])})["default"]
    assert (after.agent_id.tolist(), after.acting) == ([0], None)
    assert environment.subject.received[1] == {"a_0": 2}


def test_an_agent_that_joins_has_reward_zero_and_gives_no_transition():
    environment = ParallelEnvironment(Scripted([(["a_0", "a_1", "a_2"], [])]))
    steps = begin(environment)
    joined = act(environment, steps)

    own = joined["default"]
    assert (own.agent_id.tolist(), own.reward.tolist(), own.acting) == ([0, 1, 2], [1, 1, 0], None)
    info = StepInfo(steps, joined, {"default": ActionInfo(np.ones(2, np.int64))}, 0)
    assert info.transitions().agent_id.tolist() == [0, 1]


def test_agents_that_leave_while_others_join_keep_their_numbers():
    script = [(["a_0", "a_2"], ["a_1"]), (["a_0", "a_2", "a_1"], [])]
    environment = ParallelEnvironment(Scripted(script))

    assert seen(environment, 1).agent_id.tolist() == [0, 1, 2]
    assert seen(environment, 2).agent_id.tolist() == [0, 2, 1]


def test_when_nobody_is_left_the_next_episode_begins_in_the_same_step():
    environment = ParallelEnvironment(Scripted([([], ["a_0", "a_1"])]))
    steps = begin(environment, seed=5, options={"level": 1})
    own = act(environment, steps, action=2)["default"]

    assert (own.agent_id.tolist(), own.terminated.tolist(), own.acting) == ([0, 1], [True, True], None)
    assert own.reward.tolist() == [2, 2]
    assert own.final_obs.tolist() == [[11, 0], [11, 1]]
    assert own.obs.tolist() == [[20, 0], [20, 1]]
    assert own.info == [{"time": 1}, {"time": 1}]
    assert own.reset_info == [{"began": "a_0"}, {"began": "a_1"}]
    assert environment.subject.resets == [(5, {"level": 1}), (None, {"level": 1})]


def test_an_agent_that_fell_earlier_joins_the_next_episode():
    environment = ParallelEnvironment(Scripted([(["a_0"], ["a_1"]), ([], ["a_0"])]))
    own = seen(environment, 2)

    assert (own.agent_id.tolist(), own.terminated.tolist(), own.acting) == ([0, 1], [True, False], None)
    assert own.reward.tolist() == [1, 0]
    assert own.obs.tolist() == [[20, 0], [20, 1]]
    assert own.final_obs.tolist() == [[12, 0]]


def test_an_agent_that_is_not_in_the_next_episode_does_not_act():
    env = Scripted([([], ["a_0", "a_1"])])
    environment = ParallelEnvironment(env)
    steps = begin(environment)
    env.first = ("a_1", "a_2")
    own = act(environment, steps)["default"]

    assert own.agent_id.tolist() == [0, 1, 2]
    assert own.acting.tolist() == [False, True, True]
    assert own.obs.tolist() == [[11, 0], [20, 1], [20, 2]]
    assert own.final_obs.tolist() == [[11, 0], [11, 1]]


def test_an_environment_that_forgets_to_empty_its_agents_starts_again_all_the_same():
    environment = ParallelEnvironment(Scripted([(["a_0", "a_1"], ["a_0", "a_1"])]))

    assert seen(environment, 1).obs.tolist() == [[20, 0], [20, 1]]


def test_an_agent_that_ended_but_is_still_listed_plays_on():
    own = seen(ParallelEnvironment(Scripted([(["a_0", "a_1"], ["a_1"])])), 1)

    assert (own.terminated.tolist(), own.acting) == ([False, True], None)
    assert own.final_obs.tolist() == [own.obs[1].tolist()]


def test_a_behavior_whose_agents_are_all_gone_is_absent():
    env = Scripted([(["a_0"], ["b_1"]), (["a_0"], [])], first=("a_0", "b_1"), possible=("a_0", "b_1"), sizes={"b_1": 3})
    environment = ParallelEnvironment(env)
    leaving = act(environment, begin(environment))

    assert set(leaving) == {"a", "b"}
    assert set(act(environment, leaving)) == {"a"}


def test_without_possible_agents_behaviors_are_known_once_seen():
    env = Scripted([(["a_0", "b_1", "a_2"], [])], first=("a_0",), possible=None, sizes={"b_1": 3})
    group = build_group([env], [4])
    assert dict(group.behavior_specs) == {}

    steps = group.reset(seeds=[None], options=None)
    assert set(group.behavior_specs) == {"default"}
    steps = group.step({"default": np.ones(1, np.int64)})
    assert {name: own.agent_id.tolist() for name, own in steps.items()} == {
        "default": [4 << 32, 4 << 32 | 2],
        "b": [4 << 32 | 1],
    }


@pytest.mark.parametrize(
    "behavior_of", [{"a_0": "left", "a_1": "right", "a_2": "right"}, lambda agent: "x" + agent[-1]]
)
def test_the_user_may_say_which_agent_has_which_behavior(behavior_of):
    environment = ParallelEnvironment(Scripted([(["a_0", "a_1"], [])]), behavior_of=behavior_of)
    steps = act(environment, begin(environment))

    name = behavior_of.__getitem__ if isinstance(behavior_of, dict) else behavior_of
    assert {agent: steps[name(agent)].obs[0, 1] for agent in ("a_0", "a_1")} == {"a_0": 0, "a_1": 1}


def test_one_behavior_for_agents_with_different_spaces_is_refused():
    env = Scripted([], sizes={"a_1": 3})

    with pytest.raises(SpecMismatch, match="agent 'a_1' of behavior 'both'"):
        ParallelEnvironment(env, behavior_of=lambda agent: "both")


def spec(size):
    return BehaviorSpec(ArraySpec((size,)), ArraySpec())


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"a_0": 1, "b_0": 1}, {"a_0": "default", "b_0": "default"}),
        ({"a_0": 1, "a_1": 1, "b_0": 2}, {"a_0": "a", "a_1": "a", "b_0": "b"}),
        ({"c_0": 1, "a_0": 1, "b_0": 2}, {"c_0": "a+c", "a_0": "a+c", "b_0": "b"}),
        ({"a_0": 1, "a_1": 2, "a_2": 1}, {"a_0": "a_0", "a_1": "a_1", "a_2": "a_0"}),
        ({"a_0": 1, "a_1": 2, "b": 3}, {"a_0": "a_0", "a_1": "a_1", "b": "b"}),
        ({"a_0": 1, "a_1": 2, "a_0_0": 3}, {"a_0": "a_0", "a_1": "a_1", "a_0_0": "a_0_0"}),
        ({0: 1, 1: 2}, {0: "0", 1: "1"}),
    ],
)
def test_behaviors_have_readable_names_of_their_own(sizes, expected):
    assert name_behaviors({agent: spec(size) for agent, size in sizes.items()}) == expected


@pytest.mark.parametrize(
    ("name", "stem"), [("agent_0", "agent"), ("big_red_12", "big_red"), ("first", "first"), ("_1", "_1")]
)
def test_a_prefix_is_the_name_without_its_number(name, stem):
    assert prefix(name) == stem


@pytest.mark.parametrize(
    ("place", "change", "path"),
    [
        (0, lambda part: part.pop("a_1"), "obs of agent 'a_1'"),
        (0, lambda part: part.update(a_1=np.zeros(3, np.float32)), "obs of agent 'a_1'"),
        (1, lambda part: part.pop("a_0"), "reward of agent 'a_0'"),
        (1, lambda part: part.update(a_0="much"), "reward of agent 'a_0'"),
        (1, lambda part: part.update(a_0=1e39), "reward of agent 'a_0'"),
        (2, lambda part: part.update(a_0=2), "terminated of agent 'a_0'"),
        (3, lambda part: part.pop("a_1"), "truncated of agent 'a_1'"),
    ],
)
def test_what_a_step_must_not_return_is_named_with_its_agent(place, change, path):
    env = Scripted([(["a_0", "a_1"], [])])
    environment = ParallelEnvironment(env)
    steps = begin(environment)
    result = env.step({})
    change(result[place])
    env.step = lambda actions: result

    with pytest.raises(SpecMismatch) as caught:
        act(environment, steps)

    assert caught.value.path == path


def test_an_agent_that_vanishes_without_having_ended_is_refused():
    environment = ParallelEnvironment(Scripted([(["a_0"], [])]))

    with pytest.raises(SpecMismatch, match="terminated or truncated of agent 'a_1' should be true"):
        act(environment, begin(environment))


def test_in_a_game_of_turns_only_who_is_next_acts_and_all_are_told_what_came():
    pytest.importorskip("pygame")
    from pettingzoo.classic.tictactoe.tictactoe import raw_env

    environment = ParallelEnvironment(BaseParallelWrapper(conversions.turn_based_aec_to_parallel(raw_env())))
    steps = begin(environment)
    turns = [steps["default"].acting.tolist()]
    for field in (0, 3, 1, 4, 2):  # three in a row for the first
        assert not steps["default"].ended.any()
        steps = act(environment, steps, field)
        turns.append(steps["default"].acting.tolist())

    assert turns[:5] == [[True, False], [False, True]] * 2 + [[True, False]]
    assert turns[5] == [True, False], "a new game, which the first begins"
    assert steps["default"].reward.tolist() == [1.0, -1.0]
    assert steps["default"].terminated.tolist() == [True, True]
    assert steps["default"].final_obs["observation"][0].sum() == 5


def test_the_same_environment_behind_two_wrappers_is_refused():
    env = Scripted([])

    with pytest.raises(UsageError, match="the same environment twice"):
        build_group([BaseParallelWrapper(env), BaseParallelWrapper(env)], [0, 1])
    with pytest.raises(UsageError, match="the same environment twice"):
        build_group([ParallelEnvironment(env), ParallelEnvironment(env)], [0, 1])


def test_an_environment_that_is_inside_itself_is_looked_into_no_further():
    env = Scripted([(["a_0", "a_1"], [])] * 2)
    env.env = env

    steps = begin(as_environment(env))
    assert steps["default"].acting is None


def test_what_survives_a_cast_is_cast():
    env = Scripted([(["a_0", "a_1"], [])] * 3)
    group = build_group([env], [4])
    steps = group.reset(seeds=[None], options=None)
    result = env.step({})
    for agent in ("a_0", "a_1"):
        result[0][agent] = np.array(result[0][agent], np.float64)
        result[1][agent], result[2][agent] = np.bool_(True), 0
    env.step = lambda actions: result
    steps = group.step({"default": np.zeros(2, np.int64)})["default"]

    assert (steps.reward.tolist(), steps.terminated.tolist()) == ([1, 1], [False, False])
    assert steps.obs.dtype == np.float32


def test_an_info_of_an_agent_is_a_dict():
    env = Scripted([(["a_0", "a_1"], [])])
    group = build_group([env], [4])
    group.reset(seeds=[None], options=None)
    result = env.step({})
    result[4]["a_1"] = None
    env.step = lambda actions: result

    with pytest.raises(SpecMismatch, match="info of agent 'a_1' should be a dict"):
        group.step({"default": np.zeros(2, np.int64)})


def test_a_reset_without_agents_is_refused():
    with pytest.raises(SpecMismatch, match="the agents after reset"):
        begin(ParallelEnvironment(Scripted([], first=())))


def test_a_parallel_environment_is_recognised_and_hosted_with_others():
    assert isinstance(as_environment(Scripted([])), ParallelEnvironment)
    group = build_group([Scripted([(["a_0"], ["a_1"])] * 2), Scripted([(["a_0", "a_1"], [])] * 2)], [0, 1])
    group.reset(seeds=[1, 2], options=None)
    steps = group.step({"default": np.array([1, 2, 3, 4])})["default"]

    assert group.max_agents == {"default": 6}
    assert steps.acting.tolist() == [True, False, True, True]
    assert steps.reward.tolist() == [1, 2, 3, 4]
    assert steps.agent_id.tolist() == [0, 1, 1 << 32, 1 << 32 | 1]
