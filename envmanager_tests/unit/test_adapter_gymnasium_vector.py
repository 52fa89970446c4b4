"""VectorEnvironment against Gymnasium's own vector environments in each of their autoreset modes."""

import gc

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from envmanager.adapters.choosing import as_environment, build_group
from envmanager.adapters.gymnasium_vector import VectorEnvironment, info_rows
from envmanager.data.specs import SpecMismatch
from envmanager.data.steps import ActionInfo, StepInfo

MODES = ["NextStep", "SameStep", "Disabled"]


class Countdown(gymnasium.Env):
    """Counts to its length; observes its count, how often it was reset, and a text."""

    observation_space = spaces.Dict({"count": spaces.Box(0, 99, (2,), np.float32), "text": spaces.Text(20)})
    action_space = spaces.Tuple([spaces.Discrete(9, start=1), spaces.Text(5)])

    def __init__(self, length):
        self.length, self.resets = length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.resets, self.options = 0, self.resets + 1, options
        return self._obs("start"), {"resets": self.resets}

    def step(self, action):
        assert action in self.action_space
        self.count += 1
        ended = self.count == self.length
        return self._obs(action[1]), float(action[0]), ended, False, {"count": self.count}

    def _obs(self, text):
        return {"count": np.array([self.count, self.resets], np.float32), "text": text}


def countdowns(mode, lengths):
    return VectorEnvironment(
        SyncVectorEnv([lambda length=length: Countdown(length) for length in lengths], autoreset_mode=mode)
    )


def act(environment, steps, reward=2):
    n = len(steps.acting_rows)
    texts = np.array(["go"] * n, dtype=object)
    return environment.step({"default": (np.full(n, reward), texts)})["default"]


def begin(environment, seed=None, options=None):
    return environment.reset(seeds=[seed], options=options)["default"]


def cartpoles(mode, n=3):
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * n, autoreset_mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_transitions_are_those_of_the_bare_environments(mode):
    environment = VectorEnvironment(cartpoles(mode))
    seeds = [int(word) for word in np.random.SeedSequence(4).generate_state(3) >> 1]
    bare = [gymnasium.make("CartPole-v1") for _ in seeds]
    obs = [env.reset(seed=seed)[0] for env, seed in zip(bare, seeds, strict=True)]
    steps, info = begin(environment, seed=4), None
    n_transitions = 0

    for t in range(60):
        rows = steps.acting_rows
        action = np.full(len(rows), t % 3 == 0, np.int64)
        previous, steps = steps, environment.step({"default": action})["default"]
        info = StepInfo({"default": previous}, {"default": steps}, {"default": ActionInfo(action)}, 0)
        got = info.transitions()
        n_transitions += len(got.agent_id)
        for i, agent in enumerate(got.agent_id.tolist()):
            np.testing.assert_array_equal(got.obs[i], obs[agent])
            obs[agent], reward, terminated, truncated, _ = bare[agent].step(got.action[i])
            np.testing.assert_array_equal(got.next_obs[i], obs[agent])
            assert (got.reward[i], got.terminated[i], got.truncated[i]) == (reward, terminated, truncated)
            if terminated or truncated:
                obs[agent] = bare[agent].reset()[0]

    assert n_transitions > 150
    environment.close()


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_an_agent_that_ends_goes_on_at_once(mode):
    environment = countdowns(mode, [2, 3])
    steps = act(environment, act(environment, begin(environment)))

    assert (steps.terminated.tolist(), steps.acting) == ([True, False], None)
    assert steps.final_obs["count"].tolist() == [[2, 1]]
    assert steps.final_obs["text"].tolist() == ["go"]
    assert steps.obs["count"].tolist() == [[0, 2], [2, 1]]
    assert steps.obs["text"].tolist() == ["start", "go"]
    assert [info["count"] for info in steps.info] == [2, 2]
    assert steps.reset_info == [{"resets": 2}]


def test_an_agent_whose_restart_takes_a_step_sits_it_out():
    environment = countdowns("NextStep", [2, 3])
    ending = act(environment, act(environment, begin(environment)))
    after = act(environment, ending)

    assert (ending.terminated.tolist(), ending.acting.tolist()) == ([True, False], [False, True])
    assert ending.obs["count"].tolist() == [[2, 1], [2, 1]]
    assert ending.final_obs["count"].tolist() == [[2, 1]]
    assert (after.reward.tolist(), after.terminated.tolist()) == ([0, 2], [False, True])
    assert after.obs["count"][0].tolist() == [0, 2]
    assert after.acting.tolist() == [True, False]


def test_when_all_end_at_once_the_restarting_step_is_taken_too():
    environment = countdowns("NextStep", [2, 2])
    steps = act(environment, act(environment, begin(environment)))
    assert (steps.terminated.tolist(), steps.acting) == ([True, True], None)
    assert steps.obs["count"].tolist() == [[0, 2], [0, 2]]
    assert steps.final_obs["count"].tolist() == [[2, 1], [2, 1]]
    assert steps.reset_info == [{"resets": 2}, {"resets": 2}]

    steps = act(environment, steps)
    assert (steps.reward.tolist(), steps.obs["count"].tolist()) == ([2, 2], [[1, 2], [1, 2]])


def test_resets_of_ended_environments_take_the_options_of_the_last_reset():
    environment = countdowns("Disabled", [1, 3])
    act(environment, begin(environment, options={"level": 3}))

    assert [env.options for env in environment.subject.envs] == [{"level": 3}, {"level": 3}]


@pytest.mark.parametrize("mode", MODES)
def test_what_was_returned_does_not_change_with_the_next_step(mode):
    vector_env = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, copy=False, autoreset_mode=mode)
    environment = VectorEnvironment(vector_env)
    first = begin(environment, seed=1)
    kept = first.copy()

    environment.step({"default": np.ones(2, np.int64)})

    np.testing.assert_array_equal(first.obs, kept.obs)


def test_the_same_seed_gives_the_same_and_each_agent_its_own_episode():
    environment = VectorEnvironment(cartpoles("SameStep"))

    first, second = begin(environment, seed=8).obs, begin(environment, seed=8).obs
    neighbour = begin(environment, seed=9).obs

    np.testing.assert_array_equal(first, second)
    assert len(np.unique(np.concatenate([first, neighbour]), axis=0)) == 6


def test_a_vector_environment_that_is_not_made_of_single_ones_gets_the_seed_itself():
    environment = VectorEnvironment(gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point"))
    by_hand = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point")

    steps = begin(environment, seed=5)
    expected, _ = by_hand.reset(seed=5)
    for _ in range(30):
        np.testing.assert_array_equal(steps.obs[steps.acting_rows], expected[steps.acting_rows])
        steps = environment.step({"default": np.ones(len(steps.acting_rows), np.int64)})["default"]
        expected, _, terminated, truncated, _ = by_hand.step(np.ones(3, np.int64))
        np.testing.assert_array_equal(steps.terminated, terminated)
        if (terminated | truncated).all():
            expected, *_ = by_hand.step(np.ones(3, np.int64))


def test_final_observations_may_come_as_one_batch():
    class Batched(gymnasium.vector.VectorEnv):
        num_envs, metadata = 2, {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        single_observation_space, single_action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros((2, 1), np.float32), {}

        def step(self, actions):
            ended = np.array([False, True])
            infos = {"final_obs": np.array([[3], [4]], np.float32), "_final_obs": ended}
            return np.ones((2, 1), np.float32), np.ones(2), ended, np.zeros(2, bool), infos

    environment = VectorEnvironment(Batched())
    begin(environment)

    assert environment.step({"default": np.zeros(2, np.int64)})["default"].final_obs.tolist() == [[4]]


def test_processes_of_gymnasium_s_own_work_too():
    makers = [lambda: Countdown(2), lambda: Countdown(3)]
    environment = VectorEnvironment(AsyncVectorEnv(makers, context="fork", shared_memory=False))
    try:
        steps = act(environment, begin(environment, seed=3))
        assert steps.obs["count"].tolist() == [[1, 1], [1, 1]]
    finally:
        environment.close()
        del environment
        gc.collect()  # its queue and pipes are only closed with it


def test_a_batch_of_the_wrong_shape_is_refused():
    environment = VectorEnvironment(cartpoles("SameStep"))
    begin(environment)
    environment.subject.step = lambda actions: (np.zeros((3, 5), np.float32), np.zeros(3), *[np.zeros(3, bool)] * 2, {})

    with pytest.raises(SpecMismatch, match="obs should be"):
        environment.step({"default": np.zeros(3, np.int64)})


def test_a_vector_environment_is_recognised_and_can_be_hosted():
    assert isinstance(as_environment(cartpoles("SameStep")), VectorEnvironment)
    group = build_group([cartpoles("NextStep", 2), cartpoles("NextStep", 3)], [0, 1])
    steps = group.reset(seeds=[1, 2], options=None)["default"]

    assert group.max_agents == {"default": 5}
    assert steps.env_id.tolist() == [0, 0, 1, 1, 1]
    for t in range(30):
        actions = np.full(len(steps.acting_rows), t % 2)
        steps = group.step({"default": actions})["default"]
        assert len(steps) == 5


def test_infos_of_a_vector_environment_become_one_dict_per_agent():
    infos = {
        "score": np.array([1, 0]),
        "_score": np.array([True, False]),
        "nested": {"x": np.array([0.0, 2.0]), "_x": np.array([False, True])},
        "_nested": np.array([False, True]),
        "for_all": "of no use per agent",
        "unmasked": ["a", "b"],
    }

    assert info_rows(infos, 2) == [{"score": 1, "unmasked": "a"}, {"nested": {"x": 2.0}, "unmasked": "b"}]
