"""MlagentsEnvManager over fakes and in this process, with ML-Agents' agent managers, real and mocked."""

from __future__ import annotations

import queue
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlagents")

from mlagents.trainers.agent_processor import AgentManager, AgentManagerQueue
from mlagents.trainers.settings import (
    ConstantSettings,
    GaussianSettings,
    NetworkSettings,
    ParameterRandomizationSettings,
    UniformSettings,
)
from mlagents.trainers.simple_env_manager import SimpleEnvManager as MlagentsSimpleEnvManager
from mlagents.trainers.stats import StatsReporter
from mlagents.trainers.trajectory import Trajectory
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
from mlagents_envs.side_channel.stats_side_channel import StatsAggregationMethod

from envmanager import RestartPolicy, SimpleEnvManager, SubprocessEnvManager, UsageError, WorkerDied
from envmanager.interop.mlagents import MlagentsEnvManager, MlagentsFactory
from envmanager.testing import FakeEnvironment, FakeWorker
from envmanager_tests.interop_mlagents.envs import (
    CONTINUOUS,
    DISCRETE,
    Agent,
    CorridorEnv,
    Frame,
    ScriptedEnv,
    make_corridor,
)
from envmanager_tests.interop_mlagents.policies import ToldPolicy

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

CORRIDOR = "Corridor?team=0"


@pytest.fixture
def over_fakes(mocker):
    """What makes a SubprocessEnvManager whose workers are fakes, one environment each. It is closed after the test."""
    made = []

    def make(env_factory, n_envs, **options):
        answers = queue.Queue()
        mocker.patch.object(
            SubprocessEnvManager,
            "create_worker",
            side_effect=lambda worker_id, _, factory: FakeWorker(worker_id, answers, factory),
        )
        manager = SubprocessEnvManager(env_factory, n_envs=n_envs, **options)
        manager.step_queue = answers
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.close()


@pytest.fixture
def agent_manager(mocker):
    def make(*new_policies):
        made = mocker.create_autospec(AgentManager, instance=True)
        made.policy = None
        made.policy_queue = mocker.Mock()
        made.policy_queue.get_nowait.side_effect = [*new_policies, *[AgentManagerQueue.Empty()] * 50]
        return made

    return make


def with_policy(manager, fed):
    """A bridge that was reset, feeds ``fed`` and has a policy for the behavior Walker."""
    bridge = MlagentsEnvManager(manager)
    bridge.reset()
    bridge.set_agent_manager("Walker", fed)
    bridge.set_policy("Walker", ToldPolicy(DISCRETE))
    return bridge


class Scripts:
    """A factory of scripted environments, the i-th script for environment i, which remembers what it made."""

    def __init__(self, *scripts, specs=None):
        self._scripts, self._specs = scripts, {"Walker": DISCRETE} if specs is None else specs
        self.made: list[ScriptedEnv] = []
        self.channels: list[Any] = []

    def __call__(self, context):
        def make(worker_id, side_channels):
            self.channels.append(side_channels)
            self.made.append(ScriptedEnv(self._specs, *self._scripts[context.env_id]))
            return self.made[-1]

        return MlagentsFactory(make)(context)


def walkers(*agents, **others):
    return {"Walker": Frame(agents, **others)}


def ids_fed(mock):
    """Per call of add_experiences: the agents that decide, those that ended, the worker, the agents that acted."""
    return [
        (decisions.agent_id.tolist(), terminals.agent_id.tolist(), worker_id, list(map(int, taken.agent_ids)))
        for decisions, terminals, worker_id, taken in (call.args for call in mock.add_experiences.call_args_list)
    ]


def test_a_reset_hands_out_the_first_steps_of_every_worker(over_fakes):
    script = [walkers(Agent(1), Agent(2))]
    bridge = MlagentsEnvManager(over_fakes(Scripts(script, script), 2))

    assert bridge.reset(config={}) == 2

    assert [step.worker_id for step in bridge.first_step_infos] == [0, 1]
    assert [list(step.name_behavior_ids) for step in bridge.first_step_infos] == [["Walker"], ["Walker"]]
    decisions = [step.current_all_step_result["Walker"][0].agent_id.tolist() for step in bridge.first_step_infos]
    assert decisions == [[1, 2], [3, 4]]
    assert all(step.brain_name_to_action_info == step.environment_stats == {} for step in bridge.first_step_infos)


def test_agent_managers_are_fed_first_steps_then_steps_with_their_own_share_of_the_actions(over_fakes, agent_manager):
    bridge = MlagentsEnvManager(over_fakes(Scripts([walkers(Agent(1))], [walkers(Agent(1), Agent(2))]), 2))
    policy, fed = ToldPolicy(DISCRETE), agent_manager()
    bridge.reset()
    bridge.set_agent_manager("Walker", fed)
    bridge.set_policy("Walker", policy)

    steps = bridge.get_steps()
    assert ids_fed(fed) == [([1], [], 0, []), ([2, 3], [], 1, [])]
    assert bridge.first_step_infos == []
    assert bridge.process_steps(steps) == 2

    assert ids_fed(fed)[2:] == [([1], [], 0, [1]), ([2, 3], [], 1, [2, 3])]
    assert policy.calls == [([1, 2, 3], 0)], "one call for all workers"


def test_the_policy_queue_is_emptied_before_a_step_and_its_last_policy_acts(over_fakes, agent_manager):
    bridge = MlagentsEnvManager(over_fakes(Scripts([walkers(Agent(1))]), 1))
    old, skipped, newest = (ToldPolicy(DISCRETE) for _ in range(3))
    fed = agent_manager(skipped, newest)
    bridge.reset()
    bridge.set_agent_manager("Walker", fed)
    bridge.set_policy("Walker", old)

    bridge.get_steps()

    assert (len(old.calls), len(skipped.calls), len(newest.calls)) == (0, 0, 1)
    assert fed.policy is newest
    assert fed.policy_queue.get_nowait.call_count == 3


def test_only_workers_that_answered_are_handed_out(over_fakes, agent_manager):
    manager = over_fakes(Scripts(*[[walkers(Agent(1))]] * 3), 3)
    bridge = MlagentsEnvManager(manager)
    bridge.reset()
    bridge.set_policy("Walker", ToldPolicy(DISCRETE))
    manager.env_workers[1].hold = True

    assert [step.worker_id for step in bridge.get_steps()] == [0, 2]
    manager.env_workers[1].release()
    assert sorted(step.worker_id for step in bridge.get_steps()) == [0, 1, 2]


def test_a_reset_ends_all_episodes_and_begins_with_new_numbers(over_fakes, agent_manager):
    fed = agent_manager()
    bridge = with_policy(over_fakes(Scripts([walkers(Agent(1))]), 1), fed)
    bridge.process_steps(bridge.get_steps())
    fed.end_episode.assert_not_called()

    bridge.reset()

    fed.end_episode.assert_called_once_with()
    assert bridge.first_step_infos[0].current_all_step_result["Walker"][0].agent_id.tolist() == [2]


def test_behaviors_that_appear_late_in_one_worker_are_merged(over_fakes, agent_manager):
    late = [walkers(Agent(1)), {**walkers(Agent(1)), "Late": Frame([Agent(7)])}]
    envs = Scripts([walkers(Agent(1))], late, specs={"Walker": DISCRETE, "Late": CONTINUOUS})
    bridge = MlagentsEnvManager(over_fakes(envs, 2))
    bridge.reset()
    bridge.set_policy("Walker", ToldPolicy(DISCRETE))
    assert bridge.training_behaviors == {"Walker": DISCRETE}

    steps = bridge.get_steps()

    assert [list(step.name_behavior_ids) for step in steps] == [["Walker"], ["Walker", "Late"]]
    assert bridge.training_behaviors == {"Walker": DISCRETE, "Late": CONTINUOUS}


def test_agents_without_an_agent_manager_are_passed_over(over_fakes, agent_manager, caplog):
    bridge = MlagentsEnvManager(over_fakes(Scripts([walkers(Agent(1))]), 1))
    bridge.reset()
    bridge.set_policy("Walker", ToldPolicy(DISCRETE))

    assert bridge.process_steps(bridge.get_steps()) == 1


def test_a_worker_without_agents_to_decide_for_steps_on(over_fakes, agent_manager):
    script = [walkers(Agent(1)), walkers(ended=[Agent(1)]), walkers(Agent(2))]
    fed = agent_manager()
    bridge = with_policy(over_fakes(Scripts(script), 1), fed)

    for _ in range(2):
        bridge.process_steps(bridge.get_steps())

    assert ids_fed(fed) == [([1], [], 0, []), ([], [1], 0, [1]), ([2], [], 0, [])]


def sent(parameters):
    """What the environments should have been sent, as ML-Agents itself would."""
    channel = EnvironmentParametersChannel()
    for name, settings in parameters.items():
        settings.apply(name, channel)
    return channel.message_queue


def test_parameters_reach_every_environment_with_a_reset_and_between(over_fakes):
    envs = Scripts(*[[walkers(Agent(1))]] * 2)
    bridge = MlagentsEnvManager(over_fakes(envs, 2))
    first: dict[str, ParameterRandomizationSettings] = {
        "gravity": ConstantSettings(value=9.5),
        "mass": UniformSettings(min_value=1, max_value=2, seed=3),
    }
    then = {"mass": GaussianSettings(mean=1, st_dev=2, seed=4)}

    bridge.reset(config=first)
    bridge.set_env_parameters(then)

    for channel, *_ in envs.channels:
        assert channel.message_queue == sent(first) + sent(then)
    assert [env.n_resets for env in envs.made] == [2, 2]


def died(worker_id):
    return WorkerDied(worker_id=worker_id, env_ids=[worker_id], phase="step", exit="SIGKILL")


def test_a_lost_worker_begins_anew_and_the_others_go_on(over_fakes, agent_manager):
    envs = Scripts(*[[walkers(Agent(1))]] * 2)
    manager = over_fakes(envs, 2, restarts=RestartPolicy(max_restarts=1))
    fed = agent_manager()
    bridge = with_policy(manager, fed)
    bridge.process_steps(bridge.get_steps())
    bridge.set_env_parameters({"gravity": ConstantSettings(value=9.5)})
    manager.env_workers[1].hold = True
    bridge.process_steps(bridge.get_steps())
    fed.add_experiences.reset_mock()

    manager.env_workers[1].fail(died(1))
    for _ in range(2):
        bridge.process_steps(bridge.get_steps())

    of_worker = defaultdict(list)
    for decisions, terminals, worker_id, taken in ids_fed(fed):
        of_worker[worker_id].append((decisions, terminals, taken))
    assert of_worker[0] == [([1], [], [1])] * len(of_worker[0])
    assert of_worker[1][0] == ([3], [], []), "the agent is new, and nobody acted or ended"
    assert of_worker[1][1:] == [([3], [], [3])] * (len(of_worker[1]) - 1)
    fed.end_episode.assert_not_called()
    assert len(envs.made) == 3
    assert envs.channels[2][0].message_queue == sent({"gravity": ConstantSettings(value=9.5)})


def test_agents_made_anew_have_no_group_mates_among_those_that_were_lost(over_fakes, agent_manager):
    manager = over_fakes(Scripts([walkers(Agent(1, group_id=4), Agent(2, group_id=4))]), 1)
    fed = agent_manager()
    bridge = with_policy(manager, fed)
    bridge.process_steps(bridge.get_steps())

    manager.env_workers[0].hold = True
    manager.env_workers[0].fail(died(0))
    bridge.process_steps(bridge.get_steps())

    groups = [call.args[0].group_id.tolist() for call in fed.add_experiences.call_args_list]
    assert groups == [[1, 1], [1, 1], [2, 2]]


def test_a_recurrent_policy_is_asked_by_worker_so_that_its_memories_are_found(over_fakes):
    scripts = [[walkers(Agent(1))], [walkers(Agent(1), Agent(2))]]
    bridge = MlagentsEnvManager(over_fakes(Scripts(*scripts), 2))
    policy = ToldPolicy(DISCRETE, memory=NetworkSettings.MemorySettings())
    bridge.reset()
    bridge.set_policy("Walker", policy)

    steps = bridge.get_steps()

    assert policy.calls == [([1], 0), ([2, 3], 1)]
    taken = [step.brain_name_to_action_info["Walker"] for step in steps]
    assert [list(each.agent_ids) for each in taken] == [[1], [2, 3]]
    assert [len(each.outputs["entropy"]) for each in taken] == [1, 2]


def test_statistics_of_a_worker_are_recorded_for_it(agent_manager):
    manager = SimpleEnvManager(MlagentsFactory(make_corridor), n_envs=3, infos=True)
    bridge = MlagentsEnvManager(manager)
    fed = agent_manager()
    bridge.reset()
    bridge.set_agent_manager(CORRIDOR, fed)
    bridge.set_policy(CORRIDOR, ToldPolicy(CorridorEnv.SPEC))

    for _ in range(CorridorEnv.LENGTH):
        steps = bridge.get_steps()
        bridge.process_steps(steps)

    stats = {"Corridor/Length": [(4.0, StatsAggregationMethod.AVERAGE)] * 3}
    assert steps[0].environment_stats == stats
    fed.record_environment_stats.assert_called_with(stats, 0)
    bridge.close()


def test_closing_closes_the_manager(over_fakes):
    manager = over_fakes(Scripts([walkers(Agent(1))]), 1)

    MlagentsEnvManager(manager).close()

    assert "closed" in repr(manager)


def test_a_manager_of_other_environments_is_refused():
    with (
        SimpleEnvManager(FakeEnvironment, n_envs=2) as manager,
        pytest.raises(UsageError, match="give it MlagentsFactory"),
    ):
        MlagentsEnvManager(manager)


def trajectories(env_manager, behavior, n_steps):
    """What ML-Agents' trainers would train on."""
    policy = ToldPolicy(DISCRETE)
    agents = AgentManager(policy, behavior, StatsReporter(behavior), max_trajectory_length=3)
    env_manager.reset(config={})
    env_manager.set_agent_manager(behavior, agents)
    env_manager.set_policy(behavior, policy)
    for _ in range(n_steps):
        env_manager.process_steps(env_manager.get_steps())
    found = []
    while not agents.trajectory_queue.empty():
        found.append(agents.trajectory_queue.get_nowait())
    env_manager.close()
    return found


def plain(value):
    """A trajectory, or a part of one, as lists and numbers, without the name of its agent."""
    if isinstance(value, Trajectory):
        value = value._replace(agent_id="")
    if hasattr(value, "discrete"):
        return plain([value.continuous, value.discrete])
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def test_trajectories_are_those_of_ml_agents_own_manager():
    env = make_corridor(0, [])
    env.reset()  # as the adapter does once
    theirs = trajectories(MlagentsSimpleEnvManager(env, EnvironmentParametersChannel()), CORRIDOR, 30)
    factory = MlagentsFactory(lambda _, side_channels: make_corridor(0, side_channels))
    ours = trajectories(MlagentsEnvManager(SimpleEnvManager(factory)), CORRIDOR, 30)

    assert len(theirs) > 10
    assert plain(ours) == plain(theirs)


def test_trajectories_of_agents_in_groups_are_those_of_ml_agents_own_manager():
    def mate(agent_id, **row):
        return Agent(agent_id, group_id=1, group_reward=agent_id / 8, **row)

    script = [
        walkers(mate(1, obs=1), mate(2, obs=-1), Agent(3, obs=0.5)),
        walkers(mate(2, obs=1, reward=1), mate(1, obs=-1), masks=[[[True, False, False], [False, False, False]]]),
        walkers(mate(1, obs=-0.5, reward=2), Agent(3, reward=0.5), ended=[mate(2, obs=0.75, reward=3)]),
        walkers(mate(4), mate(1, obs=1), ended=[Agent(3, interrupted=True)]),
        walkers(ended=[mate(1, obs=3, reward=4), mate(4, obs=4, interrupted=True)]),
    ]
    env = ScriptedEnv({"Walker": DISCRETE}, *script)
    theirs = trajectories(MlagentsSimpleEnvManager(env, EnvironmentParametersChannel()), "Walker", 14)
    ours = trajectories(MlagentsEnvManager(SimpleEnvManager(Scripts(script))), "Walker", 14)

    assert any(step.group_status for trajectory in theirs for step in trajectory.steps)
    assert any(step.action_mask for trajectory in theirs for step in trajectory.steps)
    assert plain(ours) == plain(theirs)
