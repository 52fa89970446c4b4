"""MlagentsEnvironment against scripted environments."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlagents")

from mlagents_envs.environment import UnityEnvironment
from mlagents_envs.mock_communicator import MockCommunicator
from mlagents_envs.side_channel.engine_configuration_channel import EngineConfig, EngineConfigurationChannel
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
from mlagents_envs.side_channel.stats_side_channel import StatsAggregationMethod, StatsSideChannel

from envmanager import ArraySpec, BadObservation, EnvContext, RandomPolicy, SimpleEnvManager, UsageError
from envmanager.adapters.mlagents import STATS, MlagentsEnvironment, MlagentsFactory
from envmanager.check.environment import check_environment
from envmanager_tests.interop_mlagents.envs import (
    CONTINUOUS,
    DISCRETE,
    HYBRID,
    Agent,
    Frame,
    ScriptedEnv,
    make_corridor,
)


def adapted(spec, *frames, **channels):
    return MlagentsEnvironment(ScriptedEnv({"Walker": spec}, *[{"Walker": frame} for frame in frames]), **channels)


def begin(environment, options=None):
    return environment.reset(seeds=[None], options=options)["Walker"]


def act(environment, n=1):
    return environment.step({"Walker": {"discrete": np.ones((n, 1), np.int32)}})["Walker"]


def place(steps):
    return steps.obs["observations"][0][:, 0].tolist()


def test_hybrid_specs_become_trees_with_ml_agents_names_and_bounds():
    spec = adapted(HYBRID, Frame([Agent(0)])).behavior_specs["Walker"]

    assert spec.observation["observations"] == (ArraySpec((2,), np.float32), ArraySpec((1, 3), np.float32))
    assert spec.observation["observations"][0].name == "place"
    assert spec.observation["action_mask"] == (ArraySpec((3,), bool), ArraySpec((2,), bool))
    assert spec.action == {
        "continuous": ArraySpec((2,), np.float32),
        "discrete": ArraySpec((2,), np.int32, 0, np.array([2, 1])),
    }


def test_a_spec_has_no_part_for_actions_there_are_none_of():
    assert list(adapted(DISCRETE, Frame()).behavior_specs["Walker"].action) == ["discrete"]
    continuous = adapted(CONTINUOUS, Frame()).behavior_specs["Walker"]
    assert list(continuous.action) == ["continuous"]
    assert "action_mask" not in continuous.observation


def test_agents_that_want_a_decision_act_in_ml_agents_order():
    environment = adapted(DISCRETE, Frame(), Frame([Agent(7, obs=0.7, reward=1.5), Agent(3, obs=0.25, reward=-2)]))
    begin(environment)

    steps = act(environment, 0)

    assert steps.agent_id.tolist() == [7, 3]
    assert steps.acting is None
    assert steps.reward.tolist() == [1.5, -2]
    assert place(steps) == [np.float32(0.7), 0.25]
    assert not steps.ended.any()


def test_an_agent_that_plays_on_under_another_id_is_two_rows():
    new, old, other = Agent(5, obs=5), Agent(2, obs=2, reward=9), Agent(3, obs=3, reward=0.5)
    environment = adapted(DISCRETE, Frame([Agent(2), Agent(3)]), Frame([new, other], ended=[old]))
    begin(environment)

    steps = act(environment, 2)

    assert steps.agent_id.tolist() == [5, 3, 2]
    assert steps.acting.tolist() == [True, True, False]
    assert steps.terminated.tolist() == [False, False, True]
    assert steps.reward.tolist() == [0, 0.5, 9]
    assert steps.final_obs["observations"][0][:, 0].tolist() == [2]
    assert place(steps) == [5, 3, 2]


def test_an_agent_that_plays_on_under_the_same_id_is_one_row_with_the_old_episodes_reward():
    frame = Frame([Agent(1, obs=10, reward=0.25), Agent(2, obs=20, reward=0.75)], ended=[Agent(2, obs=2, reward=9)])
    environment = adapted(DISCRETE, Frame([Agent(1), Agent(2)]), frame)
    begin(environment)

    steps = act(environment, 2)

    assert steps.agent_id.tolist() == [1, 2]
    assert steps.acting is None
    assert steps.terminated.tolist() == [False, True]
    assert steps.reward.tolist() == [0.25, 9]
    assert place(steps) == [10, 20]
    assert steps.final_obs["observations"][0][:, 0].tolist() == [2]


def test_final_observations_are_in_row_order_and_interrupted_is_truncated():
    frame = Frame(
        [Agent(1), Agent(2)],
        ended=[Agent(9, obs=9), Agent(2, obs=2, interrupted=True), Agent(1, obs=1)],
    )
    environment = adapted(DISCRETE, Frame([Agent(1), Agent(2), Agent(9)]), frame)
    begin(environment)

    steps = act(environment, 3)

    assert steps.agent_id.tolist() == [1, 2, 9]
    assert steps.truncated.tolist() == [False, True, False]
    assert steps.terminated.tolist() == [True, False, True]
    assert steps.final_obs["observations"][0][:, 0].tolist() == [1, 2, 9]


def test_actions_arrive_as_action_tuples():
    environment = adapted(HYBRID, Frame([Agent(1), Agent(2)]))
    begin(environment)
    continuous, discrete = np.array([[0.5, -0.5], [1, 0]], np.float32), np.array([[2, 0], [1, 1]], np.int32)

    environment.step({"Walker": {"discrete": discrete, "continuous": continuous}})

    ((behavior, action),) = environment.env.actions
    assert behavior == "Walker"
    assert np.array_equal(action.continuous, continuous)
    assert np.array_equal(action.discrete, discrete)


def test_behaviors_without_agents_or_actions_are_left_alone():
    specs = {"Walker": DISCRETE, "Flyer": CONTINUOUS, "Fish": CONTINUOUS}
    environment = MlagentsEnvironment(
        ScriptedEnv(specs, {"Walker": Frame([Agent(1)]), "Flyer": Frame(), "Fish": Frame([Agent(2)])})
    )
    begin(environment)

    environment.step({"Walker": {"discrete": np.zeros((1, 1))}, "Flyer": {"continuous": np.zeros((0, 1))}})

    assert [behavior for behavior, _ in environment.env.actions] == ["Walker"]


@pytest.mark.parametrize(
    "masks",
    [
        [[[0, 1, 1, 1, 0]]],
        [[[0, 1]], [[1]], [[1, 0]]],
        [[[0, 1, 1]], [[1, 0]]],
    ],
    ids=["one for all branches", "more than there are branches", "one per branch"],
)
def test_masks_are_those_of_the_branches_however_many_arrays_they_come_in(masks):
    environment = adapted(HYBRID, Frame([Agent(1)]), Frame([Agent(1)], masks=masks))
    begin(environment)

    of_branches = environment.step({})["Walker"].obs["action_mask"]

    assert [mask.tolist() for mask in of_branches] == [[[False, True, True]], [[True, False]]]
    assert all(mask.dtype == bool for mask in of_branches)


def test_an_agentless_step_and_one_without_arrays_have_masks_of_their_shape():
    environment = adapted(HYBRID, Frame([Agent(1)]), Frame(masks=[np.zeros((0, 5))]), Frame([Agent(1)], masks=[]))
    begin(environment)

    for n in (0, 1):
        of_branches = environment.step({})["Walker"].obs["action_mask"]
        assert [mask.shape for mask in of_branches] == [(n, 3), (n, 2)]


@pytest.mark.parametrize("width", [3, 4, 6])
def test_a_mask_over_all_branches_of_another_width_breaks_the_spec(width):
    factory = MlagentsFactory(
        lambda worker_id, channels: ScriptedEnv(
            {"Walker": HYBRID}, {"Walker": Frame([Agent(1)])}, {"Walker": Frame([Agent(1)], masks=[[[0] * width]])}
        )
    )
    with SimpleEnvManager(factory) as manager:
        manager.set_policy("Walker", RandomPolicy(manager.behavior_specs["Walker"]))
        manager.reset()
        with pytest.raises(BadObservation, match="action_mask"):
            manager.step()


def test_masks_travel_and_are_false_where_ml_agents_gives_none():
    masks = [[[False, True, True]]]
    environment = adapted(DISCRETE, Frame([Agent(1)]), Frame([Agent(1)], masks=masks))

    assert begin(environment).obs["action_mask"][0].tolist() == [[False, False, False]]
    assert act(environment).obs["action_mask"][0].tolist() == masks[0]


def test_groups_and_their_rewards_travel_also_with_the_last_observation():
    frame = Frame([Agent(1, group_id=4, group_reward=0.5)], ended=[Agent(2, group_id=4, group_reward=2)])
    environment = adapted(DISCRETE, Frame([Agent(1), Agent(2)]), frame)
    begin(environment)

    steps = act(environment, 2)

    assert steps.obs["group_id"].tolist() == [4, 4]
    assert steps.obs["group_reward"].tolist() == [0.5, 2]
    assert steps.final_obs["group_id"].tolist() == [4]
    assert steps.final_obs["group_reward"].tolist() == [2]


def test_a_behavior_may_appear_late():
    specs = {"Walker": DISCRETE, "Late": CONTINUOUS}
    frames = [{"Walker": Frame([Agent(1)])}, {"Walker": Frame([Agent(1)]), "Late": Frame([Agent(2)])}]
    environment = MlagentsEnvironment(ScriptedEnv(specs, *frames))
    begin(environment)
    assert list(environment.behavior_specs) == ["Walker"]

    steps = environment.step({"Walker": {"discrete": np.zeros((1, 1))}})

    assert steps["Late"].agent_id.tolist() == [2]
    assert environment.behavior_specs.keys() == environment.mlagents_specs.keys() == {"Walker", "Late"}


def test_a_reset_brings_no_rewards_and_no_ends():
    steps = begin(adapted(DISCRETE, Frame([Agent(1, reward=5)], ended=[Agent(2)])))

    assert steps.agent_id.tolist() == [1]
    assert steps.reward.tolist() == [0]


def test_there_is_room_for_twice_the_agents_of_the_first_reset():
    assert adapted(DISCRETE, Frame([Agent(1), Agent(2), Agent(3)])).max_agents == {"Walker": 6}


def test_reset_options_are_environment_parameters():
    channel, wanted = EnvironmentParametersChannel(), EnvironmentParametersChannel()
    wanted.set_float_parameter("gravity", 9.5)
    wanted.set_uniform_sampler_parameters("mass", 1, 2, 7)

    begin(
        adapted(DISCRETE, Frame([Agent(1)]), parameters=channel),
        {"gravity": 9.5, "mass": bytes(wanted.message_queue[1])},
    )

    assert channel.message_queue == wanted.message_queue


def test_parameters_need_their_side_channel():
    environment = adapted(DISCRETE, Frame([Agent(1)]))

    with pytest.raises(UsageError, match="'gravity' cannot be sent"):
        begin(environment, {"gravity": 9.5})


def test_a_seed_that_cannot_be_given_is_not_swallowed():
    environment = adapted(DISCRETE, Frame([Agent(1)]))

    with pytest.warns(UserWarning, match="cannot be seeded"):
        environment.reset(seeds=[1], options=None)


def test_statistics_are_in_the_first_agents_info_and_wait_for_one():
    stats = StatsSideChannel()
    environment = adapted(DISCRETE, Frame([Agent(1)]), Frame(), Frame([Agent(1), Agent(2)]), stats=stats)
    begin(environment)
    stats.stats["height"].append((2.0, StatsAggregationMethod.AVERAGE))

    assert act(environment).info == []
    assert act(environment, 0).info == [{STATS: {"height": [(2.0, StatsAggregationMethod.AVERAGE)]}}, {}]
    assert act(environment, 2).info == [{}]
    assert not stats.stats


def test_the_factory_gives_the_slot_as_worker_id_and_the_side_channels():
    made = []
    engine = EngineConfig.default_config()

    def make(worker_id, side_channels):
        made.append((worker_id, [type(channel) for channel in side_channels]))
        return ScriptedEnv({"Walker": DISCRETE}, {"Walker": Frame([Agent(1)])})

    context = EnvContext(env_id=3, worker_id=1, generation=2, slot=11)
    MlagentsFactory(make)(context)
    MlagentsFactory(make, engine)(context)

    channels = [EnvironmentParametersChannel, StatsSideChannel]
    assert made == [(11, channels), (11, [*channels, EngineConfigurationChannel])]


def test_an_environment_that_cannot_be_reset_is_closed():
    class Broken(ScriptedEnv):
        def reset(self):
            raise ConnectionError("no Unity")

    broken = Broken({})
    with pytest.raises(ConnectionError):
        MlagentsFactory(lambda worker_id, side_channels: broken)(EnvContext(0, 0))

    assert broken.closed


def test_the_environment_keeps_the_contract_of_environments():
    findings = check_environment(MlagentsFactory(make_corridor), n_steps=60)

    assert [finding for finding in findings if finding.outcome == "problem"] == []


def test_any_policy_of_this_library_can_act():
    with SimpleEnvManager(MlagentsFactory(make_corridor), n_envs=2) as manager:
        ((behavior, spec),) = manager.behavior_specs.items()
        manager.set_policy(behavior, RandomPolicy(spec, seed=1))
        manager.reset()
        infos = [info for _ in range(50) for info in manager.step()]

    transitions = [info.transitions(behavior) for info in infos]
    assert sum(len(each.reward) for each in transitions) == 100
    assert sum(each.terminated.sum() + each.truncated.sum() for each in transitions) >= 6


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize("discrete", [True, False])
def test_a_unity_environment_is_understood(mocker, discrete):
    """Up to the socket it is ML-Agents' real one; its mocked build has three agents, of which the last always ends."""
    build = MockCommunicator(discrete_action=discrete)
    mocker.patch.object(UnityEnvironment, "_get_communicator", return_value=build)

    def make(worker_id, side_channels):
        return UnityEnvironment(None, worker_id, side_channels=side_channels)

    with SimpleEnvManager(MlagentsFactory(make)) as manager:
        ((behavior, spec),) = manager.behavior_specs.items()
        manager.set_policy(behavior, RandomPolicy(spec))
        manager.reset({"options": {"gravity": 1.0}})
        (info,) = manager.step()

    steps = info.current[behavior]
    assert spec.observation["observations"] == (ArraySpec((3,), np.float32),)
    assert steps.acting_rows.tolist() == [0, 1]
    assert steps.terminated.tolist() == [False, False, True]
    assert steps.final_obs["observations"][0].tolist() == [[1, 2, 3]]
    assert info.actions[behavior].action.keys() == {"discrete" if discrete else "continuous"}
    assert build.has_been_closed
