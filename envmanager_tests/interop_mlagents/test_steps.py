"""Translation between AgentSteps and ML-Agents' classes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlagents")

from mlagents.trainers.action_info import ActionInfo as MlagentsActionInfo
from mlagents.trainers.torch_entities.action_log_probs import LogProbsTuple
from mlagents_envs.base_env import ActionTuple

from envmanager.adapters.mlagents import agent_steps, to_spec
from envmanager.data.steps import AGENT_BITS, ActionInfo
from envmanager.interop.mlagents_steps import Numbers, StepTranslator, share_of, to_actions
from envmanager_tests.interop_mlagents.envs import CONTINUOUS, DISCRETE, Agent, decision_steps, terminal_steps


def steps_of(deciding=(), ended=(), *, env_id=0, masks=None, spec=DISCRETE):
    steps = agent_steps(to_spec(spec), decision_steps(spec, deciding, masks), terminal_steps(spec, ended))
    steps.agent_id = steps.agent_id + (env_id << AGENT_BITS)
    return steps


def test_numbers_count_up_and_stay_until_they_are_forgotten():
    numbers = Numbers()

    assert numbers.of([70, 50]).tolist() == [1, 2]
    assert numbers.of([50, 60]).tolist() == [2, 3]
    numbers.forget([50, 99])
    assert numbers.of([50, 70]).tolist() == [4, 1]


def test_only_the_numbers_of_some_environments_are_forgotten():
    numbers = Numbers()
    a, b = (1 << AGENT_BITS) + 5, (2 << AGENT_BITS) + 5
    assert numbers.of([a, b]).tolist() == [1, 2]

    numbers.forget_envs([2])

    assert numbers.of([a, b]).tolist() == [1, 3]


def test_what_the_environment_said_comes_out_again():
    masks = [[[False, True, False], [False, False, False]]]
    deciding = [Agent(4, obs=4, reward=0.5, group_reward=2), Agent(6, obs=6, reward=1)]
    ended = [Agent(5, obs=5, reward=-1, group_reward=3, interrupted=True)]

    decisions, terminals = StepTranslator().translate(steps_of(deciding, ended, masks=masks))

    expected = decision_steps(DISCRETE, deciding, masks)
    assert np.array_equal(decisions.obs[0], expected.obs[0])
    assert np.array_equal(decisions.action_mask[0], expected.action_mask[0])
    assert decisions.reward.tolist() == [0.5, 1]
    assert decisions.group_reward.tolist() == [2, 0]
    assert np.array_equal(terminals.obs[0], terminal_steps(DISCRETE, ended).obs[0])
    assert terminals.reward.tolist() == [-1]
    assert terminals.interrupted.tolist() == [True]
    assert terminals.group_reward.tolist() == [3]


def test_without_masked_actions_there_are_no_masks():
    decisions, _ = StepTranslator().translate(steps_of([Agent(1)]))

    assert decisions.action_mask is None


def test_an_agent_keeps_its_number_until_its_episode_ends():
    translator = StepTranslator()
    first, _ = translator.translate(steps_of([Agent(1), Agent(2)]))
    then, ended = translator.translate(steps_of([Agent(2), Agent(1, obs=9, reward=9)], [Agent(1, obs=5, reward=5)]))

    assert first.agent_id.tolist() == [1, 2]
    assert ended.agent_id.tolist() == [1]
    assert (ended.reward.tolist(), ended.obs[0].tolist()) == ([5], [[5, 5]])
    assert then.agent_id.tolist() == [2, 3], "a new episode under the same id"
    assert then.reward.tolist() == [0, 0], "what the old episode brought"
    assert then.obs[0].tolist() == [[0, 0], [9, 9]]


def test_agents_and_groups_of_two_environments_do_not_mix():
    translator = StepTranslator()
    agents = [Agent(1, group_id=3), Agent(2, group_id=3), Agent(3)]
    here, _ = translator.translate(steps_of(agents, env_id=0))
    there, _ = translator.translate(steps_of(agents, env_id=1))

    assert here.agent_id.tolist() + there.agent_id.tolist() == [1, 2, 3, 4, 5, 6]
    assert here.group_id.tolist() == [1, 1, 0]
    assert there.group_id.tolist() == [2, 2, 0]


def test_episodes_that_were_lost_do_not_end_and_are_never_heard_of_again():
    translator = StepTranslator()
    translator.translate(steps_of([Agent(1)]))

    decisions, terminals = translator.translate(steps_of([Agent(1)], [Agent(1, interrupted=True)]), is_lost=True)

    assert len(terminals) == 0
    assert decisions.agent_id.tolist() == [2]


def test_translated_steps_have_arrays_of_their_own():
    steps = steps_of([Agent(1, obs=1)], [Agent(2, obs=2)])
    decisions, terminals = StepTranslator().translate(steps)

    steps.obs["observations"][0][:] = 7
    steps.reward[:] = 7
    assert decisions.obs[0].tolist() == [[1, 1]]
    assert decisions.reward.tolist() == terminals.reward.tolist() == [0]


def taken(n: int) -> MlagentsActionInfo:
    numbers = np.arange(n)
    action = ActionTuple(continuous=numbers.reshape(n, 1) / 10, discrete=numbers.reshape(n, 1))
    outputs = {
        "action": action,
        "log_probs": LogProbsTuple(continuous=-numbers.reshape(n, 1)),
        "entropy": numbers.astype(np.float32),
        "temperature": 0.5,
    }
    return MlagentsActionInfo(action, action, outputs, [10 + number for number in numbers])


def test_a_worker_gets_back_its_rows_of_what_the_policy_decided():
    actions = to_actions(taken(5), 5)
    assert actions.action["discrete"].tolist() == [[0], [1], [2], [3], [4]]

    share = share_of(actions.take(slice(1, 3)))

    assert share.agent_ids == [11, 12]
    assert share.action.discrete.tolist() == share.env_action.discrete.tolist() == [[1], [2]]
    assert share.outputs["action"].continuous.tolist() == np.array([[0.1], [0.2]], np.float32).tolist()
    assert type(share.outputs["log_probs"]) is LogProbsTuple
    assert share.outputs["log_probs"].continuous.tolist() == [[-1], [-2]]
    assert share.outputs["entropy"].tolist() == [1, 2]
    assert share.outputs["temperature"] == 0.5


def test_the_share_of_a_worker_without_agents_is_empty():
    assert share_of(to_actions(taken(2), 2).take(slice(0, 0))) == MlagentsActionInfo.empty()
    assert share_of(ActionInfo({"discrete": np.zeros((0, 1), np.int32)})) == MlagentsActionInfo.empty()


def test_actions_have_the_parts_that_the_spec_has():
    n = 2
    continuous = ActionTuple(continuous=np.zeros((n, 1)))
    discrete = ActionTuple(discrete=np.zeros((n, 1)))

    for actions, spec in ((continuous, CONTINUOUS), (discrete, DISCRETE)):
        info = MlagentsActionInfo(actions, actions, {"action": actions}, [1, 2])
        assert to_actions(info, n).action.keys() == to_spec(spec).action.keys()
