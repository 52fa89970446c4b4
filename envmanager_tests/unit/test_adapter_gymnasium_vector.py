"""VectorGroup against Gymnasium's own vector environments in each of their autoreset modes."""

import gc

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from envmanager import (
    BadAction,
    SimpleEnvManager,
    SubprocessEnvManager,
    UsageError,
    Wait,
    make_manager,
)
from envmanager.adapters.choosing import as_environment, build_group
from envmanager.adapters.gymnasium_vector import VectorGroup, info_rows
from envmanager.adapters.late_vector import LateVectorGroup
from envmanager.data.specs import SpecMismatch
from envmanager.data.steps import Begin

MODES = ["NextStep", "SameStep", "Disabled"]
modes = pytest.mark.parametrize("mode", MODES)


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

    def render(self):
        return f"{self.count} of {self.length}"

    def length_plus(self, number):
        return self.length + number

    def _obs(self, text):
        return {"count": np.array([self.count, self.resets], np.float32), "text": text}


class Numbers(VectorEnv):
    """A vector of a class of its own, which returns the arrays that it goes on to change; one row ends in each step."""

    single_observation_space, single_action_space = spaces.Box(-99, 99, (1,), np.float32), spaces.Discrete(9)

    def __init__(self, num_envs=2, mode="Disabled"):
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": mode}
        self.n_steps, self.seed = 0, None
        self.obs = np.zeros((num_envs, 1), np.float32)
        self.reward = np.zeros(num_envs, np.float32)
        self.terminated, self.truncated = np.zeros(num_envs, bool), np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.seed = seed
        self.obs[mask], self.reward[mask], self.terminated[mask] = -1, 0, False
        return self.obs, {}

    def step(self, actions):
        self.n_steps += 1
        self.obs += 1
        self.reward[:], self.terminated[:] = actions, np.arange(self.num_envs) == self.n_steps % self.num_envs
        return self.obs, self.reward, self.terminated, self.truncated, {}

    def render(self):
        return "picture of all"


def group_of(vector_env, **options):
    group = build_group([vector_env], range(vector_env.num_envs), **options)
    assert isinstance(group, VectorGroup)
    return group


def countdown_vector(mode, lengths, **options):
    return SyncVectorEnv(
        [lambda length=length: Countdown(length) for length in lengths], autoreset_mode=mode, **options
    )


def countdowns(mode, lengths, infos=True, **options):
    return group_of(countdown_vector(mode, lengths, **options), infos=infos)


def act(group, reward=2):
    n = len(group.env_ids)
    return group.step({"default": (np.full(n, reward), np.array(["go"] * n, dtype=object))})["default"]


def begin(group, seeds=None, options=None):
    return group.reset(seeds=[None] * len(group.env_ids) if seeds is None else seeds, options=options)["default"]


def cartpoles(mode, n=3, **options):
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * n, autoreset_mode=mode, **options)


# Episodes.


@modes
def test_rows_are_those_of_the_bare_environments(mode):
    group = group_of(cartpoles(mode))
    seeds = [4, 8, 15]
    bare = [gymnasium.make("CartPole-v1") for _ in seeds]
    expected = [env.reset(seed=seed)[0] for env, seed in zip(bare, seeds, strict=True)]
    np.testing.assert_array_equal(begin(group, seeds).obs, expected)
    n_ended = 0

    for t in range(200):
        action = np.full(3, t % 3 == 0, np.int64)
        steps = group.step({"default": action})["default"]
        final = iter([] if steps.final_obs is None else steps.final_obs)
        for row, env in enumerate(bare):
            obs, reward, terminated, truncated, _ = env.step(action[row])
            assert (steps.reward[row], steps.terminated[row], steps.truncated[row]) == (reward, terminated, truncated)
            if terminated or truncated:
                np.testing.assert_array_equal(next(final), obs)
                obs, n_ended = env.reset()[0], n_ended + 1
            np.testing.assert_array_equal(steps.obs[row], obs)
        assert next(final, None) is None

    assert n_ended > 30
    group.close()


@modes
def test_an_environment_that_ends_begins_its_next_episode_in_the_same_step(mode):
    group = countdowns(mode, [2, 3])
    begin(group)
    act(group)
    steps = act(group)

    assert (steps.terminated.tolist(), steps.acting) == ([True, False], None)
    assert steps.final_obs["count"].tolist() == [[2, 1]]
    assert steps.final_obs["text"].tolist() == ["go"]
    assert steps.obs["count"].tolist() == [[0, 2], [2, 1]]
    assert steps.obs["text"].tolist() == ["start", "go"]
    assert [info["count"] for info in steps.info] == [2, 2]
    assert steps.reset_info == [{"resets": 2}]

    after = act(group)
    assert (after.reward.tolist(), after.terminated.tolist()) == ([2, 2], [False, True])
    assert after.obs["count"].tolist() == [[1, 2], [0, 2]]


@modes
def test_several_environments_may_end_in_the_same_step(mode):
    group = countdowns(mode, [2, 3, 2])
    assert begin(group).final_obs is None
    assert act(group).final_obs is None
    steps = act(group)

    assert steps.terminated.tolist() == [True, False, True]
    assert steps.obs["count"].tolist() == [[0, 2], [2, 1], [0, 2]]
    assert steps.final_obs["count"].tolist() == [[2, 1], [2, 1]]
    assert steps.reset_info == [{"resets": 2}, {"resets": 2}]


@modes
def test_no_step_is_lost_and_none_is_invented(mode):
    lengths = [1, 2, 3, 5]
    group = countdowns(mode, lengths)
    begin(group)
    for number in range(1, 31):
        steps = act(group)
        assert steps.reward.tolist() == [2] * 4
        assert steps.terminated.tolist() == [number % length == 0 for length in lengths]
        assert steps.obs["count"].tolist() == [[number % length, 1 + number // length] for length in lengths]


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_resets_of_ended_environments_take_the_options_of_the_last_reset(mode):
    group = countdowns(mode, [1, 3])
    options = {"level": 3}
    begin(group, options=options)
    act(group)

    assert [env.options for env in group.subjects] == [{"level": 3}, {"level": 3}]
    assert options == {"level": 3}


def test_a_row_that_ends_keeps_its_reward_and_its_end_when_the_reset_changes_the_vector_s_own_arrays():
    group = group_of(Numbers(2))
    begin(group)
    steps = group.step({"default": np.array([5, 6])})["default"]

    assert (steps.terminated.tolist(), steps.reward.tolist()) == ([False, True], [5, 6])
    assert (steps.obs.tolist(), steps.final_obs.tolist()) == ([[0], [-1]], [[0]])


def test_arrays_that_cannot_be_written_to_are_restarted_too():
    class ReadOnly(Numbers):
        def reset(self, **options):
            return self._sealed(super().reset(**options)[0]), {}

        def step(self, actions):
            obs, *others = super().step(actions)
            return self._sealed(obs), *others

        def _sealed(self, obs):
            obs = obs.copy()
            obs.flags.writeable = False
            return obs

    group = group_of(ReadOnly(2))
    begin(group)
    steps = group.step({"default": np.zeros(2, np.int64)})["default"]
    assert (steps.obs.tolist(), steps.final_obs.tolist()) == ([[0], [-1]], [[0]])


def test_final_observations_may_come_as_one_batch():
    class Batched(VectorEnv):
        num_envs, metadata = 2, {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        single_observation_space, single_action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros((2, 1), np.float32), {}

        def step(self, actions):
            ended = np.array([False, True])
            infos = {"final_obs": np.array([[3], [4]], np.float32), "_final_obs": ended}
            return np.ones((2, 1), np.float32), np.ones(2), ended, np.zeros(2, bool), infos

    group = group_of(Batched())
    begin(group)
    assert group.step({"default": np.zeros(2, np.int64)})["default"].final_obs.tolist() == [[4]]


def test_a_same_step_vector_without_final_observations_is_refused():
    group = group_of(Numbers(2, mode="SameStep"))
    begin(group)
    with pytest.raises(SpecMismatch, match="final_obs"):
        group.step({"default": np.zeros(2, np.int64)})


@pytest.mark.parametrize("metadata", [{"autoreset_mode": "NextStep"}, {}], ids=["NextStep", "not stated"])
def test_next_step_of_an_unknown_class_is_not_asked_for_a_reset_of_some_rows(metadata):
    vector_env = Numbers(2)
    vector_env.metadata = metadata
    assert isinstance(build_group([vector_env], [0, 1]), LateVectorGroup)


class Restless(VectorEnv):
    """Counts to 3 in each row, where it begins again in the same step, whatever mode it declares."""

    single_observation_space, single_action_space = spaces.Box(0, 9, (1,), np.float32), spaces.Discrete(2)

    def __init__(self, mode=None, final=None, earns=1.0, length=3):
        self.num_envs, self.metadata = 2, {} if mode is None else {"autoreset_mode": mode}
        self.final, self.earns, self.length = final, earns, length

    def reset(self, *, seed=None, options=None):
        self.count = np.arange(2) % self.length
        return self._obs(), {}

    def step(self, actions):
        self.count += 1
        infos, ended = {} if self.final is None else {self.final: self._obs()}, self.count == self.length
        self.count = np.where(ended, 0, self.count)
        return self._obs(), np.full(2, self.earns), ended, np.zeros(2, bool), infos

    def _obs(self):
        return self.count[:, None].astype(np.float32)


def play_on(group, n_steps=6, some_rows=False):
    begin(group)
    rows = np.arange(2)
    for _ in range(n_steps):
        steps = group.step({"default": np.zeros(len(rows), np.int64)}, rows if some_rows else None)["default"]
        rows = steps.agent_id[steps.acting_rows]
    return steps


@pytest.mark.parametrize("some_rows", [False, True])
@pytest.mark.parametrize(
    ("vector_env", "evidence"),
    [
        (Restless(final="final_observation"), "missing.*final_observation"),
        (Restless(final="final_obs"), "missing.*final_obs"),
        (Restless(), "missing.*a reward of 1"),
        (Restless(earns=0.0, length=1), "missing.*an end"),
        (Restless("NextStep", final="final_obs"), "NextStep.*final_obs"),
        (Restless("NextStep", length=1), "NextStep.*an end"),
        (Restless("Disabled", final="final_obs"), "Disabled.*final_obs"),
    ],
)
def test_a_vector_that_restarts_in_the_step_of_the_end_is_refused_in_another_mode(vector_env, evidence, some_rows):
    group = group_of(vector_env)
    with pytest.raises(SpecMismatch, match=f"SAME_STEP.*but is {evidence}"):
        play_on(group, some_rows=some_rows and group.steps_some_rows)


def test_a_reward_beside_an_ignored_action_is_dropped_from_a_vector_that_declares_next_step():
    group = group_of(Restless("NextStep"))
    assert play_on(group, 4).reward.tolist() == [0, 1]
    assert group.earned_at_restart == 1


@pytest.mark.parametrize("final", ["final_obs", "final_observation"])
def test_last_observations_have_the_name_that_they_had_before_gymnasium_1_too(final):
    group = group_of(Restless("SameStep", final), infos=True)
    steps = play_on(group)
    assert (steps.final_obs.tolist(), steps.reset_info) == ([[3]], [{}])


def test_last_observations_that_are_those_of_the_step_are_no_sign_of_a_restart():
    class Waits(Numbers):
        def step(self, actions):
            obs, *others, _ = super().step(actions)
            return obs, *others, {"final_obs": obs.copy(), "final_observation": "none"}

    assert play_on(group_of(Waits())).ended.any()


def test_a_mode_that_there_is_not_is_refused():
    with pytest.raises(UsageError, match="AutoresetMode"):
        group_of(Numbers(2, mode="next_step"))


# Episodes on demand.


def on_demand(group, *begins):
    return group.reset_on_demand([Begin(row, True, seed, options) for row, seed, options in begins])["default"]


@modes
def test_episodes_on_demand_begin_with_seeds_and_options_of_their_own(mode):
    group = countdowns(mode, [2, 3, 4])
    steps = on_demand(group, (0, 5, {"level": 1}), (2, None, {"level": 2}))
    assert (steps.env_id.tolist(), [env.options for env in group.subjects][::2]) == (
        [0, 2],
        [{"level": 1}, {"level": 2}],
    )
    assert group.subjects[0].np_random_seed == 5
    go = (np.full(2, 2), np.array(["go"] * 2, dtype=object))
    group.step({"default": go})
    steps = group.step({"default": go})["default"]
    assert (steps.env_id.tolist(), steps.terminated.tolist()) == ([0, 2], [True, False])
    assert steps.obs["count"][:, 0].tolist() == [2, 2]
    assert (steps.acting.tolist(), steps.final_obs["count"][:, 0].tolist()) == ([False, True], [2])
    assert (steps.info[0]["count"], steps.reset_info) == (2, [{}])
    group.on_demand.add([Begin(1, True, 6, {"level": 3})])
    steps = group.step({"default": (go[0][:1], go[1][:1])})["default"]
    assert (steps.env_id.tolist(), steps.obs["count"][:, 0].tolist()) == ([1, 2], [0, 3])
    assert (steps.reward.tolist(), steps.terminated.tolist()) == ([0, 2], [False, False])
    assert (group.subjects[1].options, group.subjects[1].np_random_seed) == ({"level": 3}, 6)
    group.on_demand.add([Begin(0, True), Begin(2, True)])
    steps = group.step({"default": None}, np.zeros(0, np.int64))["default"]
    assert (steps.env_id.tolist(), steps.obs["count"][:, 0].tolist()) == ([0, 2], [0, 0])
    assert [env.count for env in group.subjects] == [0, 0, 0]


@modes
def test_episodes_with_equal_options_begin_in_one_reset(mode):
    vector_env = countdown_vector(mode, [2, 3, 4])
    group, masks, reset = group_of(vector_env), [], vector_env.reset
    vector_env.reset = lambda **given: masks.append(given["options"]["reset_mask"].tolist()) or reset(**given)
    group = group_of(vector_env)
    on_demand(group, (0, 1, {"level": np.ones(2)}), (1, 2, {"level": np.ones(2)}), (2, None, {"level": np.ones(2)}))
    assert masks == [[True] * 3]
    group.on_demand.add([Begin(row, True, 1, {"level": row % 2}) for row in range(3)])
    group.step({"default": None}, np.zeros(0, np.int64))
    assert masks[1:] == [[True, False, True], [False, True, False]]


@pytest.mark.parametrize("vector_env", [Numbers(2, "SameStep"), Numbers(2), Numbers(2, "NextStep")])
def test_vectors_of_a_class_of_their_own_do_not_begin_on_demand(vector_env):
    assert not build_group([vector_env], [0, 1]).begins_on_demand


# Seeds, wrappers, and Gymnasium's processes.


def test_each_environment_receives_its_own_seed_and_the_same_seed_gives_the_same_episode():
    group = group_of(cartpoles("SameStep"))
    first, second = begin(group, [8, 9, 10]).obs, begin(group, [8, 9, 10]).obs
    shifted = begin(group, [9, 10, 11]).obs

    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first[1:], shifted[:2])
    assert len(np.unique(first, axis=0)) == 3


def test_an_environment_without_a_seed_keeps_its_generator():
    group = group_of(cartpoles("SameStep", 2))
    first = begin(group, [8, 9]).obs
    again = begin(group, [8, None]).obs
    assert (again[0] == first[0]).all()
    assert (again[1] != first[1]).any()


def test_a_vector_of_a_class_of_its_own_receives_the_first_seed():
    group = group_of(Numbers(2))
    begin(group, [31, 32])
    assert group.subject.seed == 31


@modes
def test_wrapped_rewards_are_those_of_the_wrapper(mode):
    group = group_of(gymnasium.wrappers.vector.TransformReward(cartpoles(mode), lambda reward: reward * 3))
    begin(group, [5, 6, 7])
    assert group.step({"default": np.ones(3, np.int64)})["default"].reward.tolist() == [3, 3, 3]


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])  # Gymnasium refuses this wrapper in SAME_STEP
def test_wrapped_vectors_are_restarted_through_their_wrappers(mode):
    vector_env = gymnasium.wrappers.vector.TransformObservation(cartpoles(mode), lambda obs: obs * 2)
    group, bare = group_of(vector_env), group_of(cartpoles(mode))
    np.testing.assert_array_equal(begin(group, [1, 2, 3]).obs, 2 * begin(bare, [1, 2, 3]).obs)
    for t in range(60):
        doubled, single = (
            each.step({"default": np.full(3, t % 3 == 0, np.int64)})["default"] for each in (group, bare)
        )
        np.testing.assert_array_equal(doubled.obs, 2 * single.obs)
        assert (doubled.final_obs is None) == (single.final_obs is None)
        if single.final_obs is not None:
            np.testing.assert_array_equal(doubled.final_obs, 2 * single.final_obs)


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_processes_of_gymnasium_s_own_work_too(mode):
    makers = [lambda: Countdown(2), lambda: Countdown(3)]
    group = group_of(AsyncVectorEnv(makers, context="fork", shared_memory=False, autoreset_mode=mode))
    try:
        begin(group, [3, 4])
        assert act(group).obs["count"].tolist() == [[1, 1], [1, 1]]
        steps = act(group)
        assert (steps.obs["count"].tolist(), steps.final_obs["count"].tolist()) == ([[0, 2], [2, 1]], [[2, 1]])
        assert act(group).obs["count"].tolist() == [[1, 2], [0, 2]]
        assert group.call("length_plus", (10,), [1, 0]) == [13, 12]
        assert group.get_attr("length", [1]) == [3]
        group.set_attr("length", [7, 8], [0, 1])
        assert group.get_attr("length", [0, 1]) == [7, 8]
        with pytest.raises(UsageError, match="name all env_ids"):
            group.set_attr("length", [9], [1])
    finally:
        group.close()
        del group
        gc.collect()  # its queue and pipes are only closed with it


def test_processes_of_gymnasium_s_own_that_share_memory_work_in_next_step_mode():
    def make():
        return AsyncVectorEnv([lambda: Countdown(2), lambda: Countdown(3)], context="fork")

    actions = (np.full(2, 2), np.array(["go", "go"], dtype=object))
    with SubprocessEnvManager(make, 2, n_workers=1) as manager:  # its process takes the shared memory along
        manager.reset()
        counts = [manager.recv(Wait.all()).obs["count"].tolist()]
        for _ in range(3):
            manager.send(actions, [0, 1])
            counts.append(manager.recv(Wait.all()).obs["count"].tolist())
    assert counts == [[[0, 1], [0, 1]], [[1, 1], [1, 1]], [[0, 2], [2, 1]], [[1, 2], [0, 2]]]


def test_gymnasium_s_processes_without_shared_memory_are_not_asked_either():
    vector_env = AsyncVectorEnv([lambda: Countdown(2)], context="fork", shared_memory=False)
    assert isinstance(build_group([vector_env], [0]), LateVectorGroup)
    vector_env.close()
    del vector_env
    gc.collect()


# What a vector returns.


def steps_of(result, **options):
    vector_env = cartpoles("SameStep", 2)
    group = group_of(vector_env, **options)
    begin(group)
    vector_env.step = lambda actions: result
    return group.step({"default": np.zeros(2, np.int64)})["default"]


OBS, NO = np.zeros((2, 4), np.float32), np.zeros(2, bool)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((np.zeros((2, 5), np.float32), np.zeros(2), NO, NO, {}), "obs should be"),
        ((OBS[:1], np.zeros(2), NO, NO, {}), "obs should be"),
        ((OBS, np.zeros(3), NO, NO, {}), "reward should be"),
        ((OBS, np.array([0, -1e39]), NO, NO, {}), "reward should be"),
        ((OBS, np.zeros(2), NO[:1], NO, {}), "terminated should be"),
        ((OBS, np.zeros(2), NO, np.zeros((2, 1), bool), {}), "truncated should be"),
        ((OBS, np.zeros(2), NO, NO), "the result of step should be a tuple of 5"),
        (None, "the result of step should be a tuple of 5"),
    ],
    ids=["obs' shape", "obs' rows", "rewards", "huge", "ends", "truncations", "four", "None"],
)
def test_a_result_of_the_wrong_shape_is_refused(result, message):
    with pytest.raises(SpecMismatch, match=message):
        steps_of(result)


def test_what_most_vectors_return_is_cast():
    steps = steps_of((OBS.astype(np.float64) + 1, [1, 2], np.array([0, 1]) * 0, [False, False], {}))
    assert (steps.obs.dtype, steps.obs.tolist()) == (np.float32, [[1] * 4] * 2)
    assert (steps.reward.dtype, steps.reward.tolist()) == (np.float32, [1, 2])
    assert (steps.terminated.dtype, steps.terminated.tolist()) == (np.bool_, [False, False])


def test_check_values_refuses_numbers_that_are_not_finite():
    for result in ((OBS * np.nan, np.zeros(2), NO, NO, {}), (OBS, np.full(2, np.inf), NO, NO, {})):
        with pytest.raises(SpecMismatch):
            steps_of(result, check_values=True)


def test_infos_of_a_vector_become_one_dict_per_environment():
    infos = {
        "score": np.array([1, 0]),
        "_score": np.array([True, False]),
        "nested": {"x": np.array([0.0, 2.0]), "_x": np.array([False, True])},
        "_nested": np.array([False, True]),
        "for_all": "of no use per agent",
        "unmasked": ["a", "b"],
    }

    assert info_rows(infos, 2) == [{"score": 1, "unmasked": "a"}, {"nested": {"x": 2.0}, "unmasked": "b"}]


# Managers.


def make_three(context):
    return Numbers(3)


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: cartpoles("NextStep", 2, copy=False),
        lambda: cartpoles("SameStep", 2, copy=False),
        lambda: cartpoles("Disabled", 2, copy=False),
        lambda: cartpoles("NextStep", 2),
        lambda: Numbers(2),
    ],
    ids=["NextStep", "SameStep", "Disabled", "copied", "own class"],
)
def test_batches_stay_unchanged_during_the_next_step_and_for_ever_without_zero_copy(make, zero_copy):
    with SimpleEnvManager(make, 2, zero_copy=zero_copy) as manager:
        manager.reset(seed=3)
        batch, kept = manager.recv(Wait.all()), []
        for number in range(40):
            copies = [batch.obs.copy(), batch.reward.copy(), batch.terminated.copy()]
            kept.append(([batch.obs, batch.reward, batch.terminated], copies))
            manager.send(np.full(2, number % 2), batch.env_ids)
            batch = manager.recv(Wait.all())
            for arrays, copies in kept[-1:] if zero_copy else kept:
                for array, copy in zip(arrays, copies, strict=True):
                    np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("make_manager", [SimpleEnvManager, SubprocessEnvManager])
def test_a_wrong_number_of_environments_is_refused_with_the_arithmetic(make_manager):
    options = {"n_workers": 2} if make_manager is SubprocessEnvManager else {}
    n = 2 if options else 4
    message = rf"a vector of 3 environments for a worker of {n}\. .* n_envs must be 3 times n_workers"
    with pytest.raises(UsageError, match=message):
        make_manager(make_three, 4, **options)


def test_a_factory_learns_how_many_environments_its_worker_has():
    with SubprocessEnvManager(lambda context: Numbers(context.n_envs), 5, n_workers=2) as manager:
        manager.reset()
        assert manager.recv(Wait.all()).env_ids.tolist() == [0, 1, 2, 3, 4]
        assert manager.call(lambda vector_env: vector_env.num_envs) == [3, 3, 3, 2, 2]


def test_different_factories_of_vectors_for_one_worker_are_refused():
    def make_a():
        return Numbers(2)

    def make_b():
        return Numbers(2)

    with pytest.raises(UsageError, match="different factories"):
        SimpleEnvManager([make_a, make_b], 2)
    with pytest.raises(UsageError, match="different factories"):
        SubprocessEnvManager([make_a, make_a, make_a, make_b], 4, n_workers=2)
    with SubprocessEnvManager([make_a, make_a, make_b, make_b], 4, n_workers=2) as manager:
        manager.reset()
        assert len(manager.recv(Wait.all())) == 4
    with pytest.raises(UsageError, match="it is a vector environment"):
        SimpleEnvManager([lambda: Countdown(2), make_b], 2)


@pytest.mark.parametrize("make_manager", [SimpleEnvManager, SubprocessEnvManager])
def test_partial_env_ids_are_refused_before_anything_is_sent(make_manager):
    options = {"n_workers": 2} if make_manager is SubprocessEnvManager else {}
    n = 6 if options else 3
    with make_manager(make_three, n, **options) as manager:
        manager.reset()
        manager.recv(Wait.all())
        for env_ids in ([0, 1], [2], list(range(n - 1))):
            with pytest.raises(BadAction, match=r"move together.*Nothing was sent"):
                manager.send(np.zeros(len(env_ids), np.int64), env_ids)
        assert manager.call(lambda vector_env: vector_env.n_steps) == [0] * n
        manager.send(np.arange(n), range(n))
        batch = manager.recv(Wait.all())
        assert sorted(zip(batch.env_ids.tolist(), batch.reward.tolist(), strict=True)) == [(i, i) for i in range(n)]


def test_on_demand_the_environments_that_play_move_together():
    with SubprocessEnvManager(lambda: cartpoles("Disabled"), 3, n_workers=1, episodes="on_demand") as manager:
        manager.reset(seed=1)
        manager.recv(Wait.all())
        manager.begin([0])
        with pytest.raises(BadAction, match=r"1 of the 2 environments .*all of \[1, 2\]\. Nothing was sent"):
            manager.send(np.zeros(1, np.int64), [1])
        manager.send(np.zeros(2, np.int64), [1, 2])
        batch = manager.recv(Wait.all())
        assert (sorted(batch.env_ids.tolist()), batch.env_ids[batch.first].tolist()) == ([0, 1, 2], [0])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_episodes_that_begin_in_any_order_have_the_observations_of_their_environments(mode):
    with SimpleEnvManager(lambda: cartpoles(mode), 3, episodes="on_demand") as manager:
        manager.reset(seed=1)
        manager.recv(Wait.all())
        manager.begin([2, 0, 1])
        batch = manager.recv(Wait.all())
        states = manager.call(lambda env: env.unwrapped.state, env_ids=batch.env_ids)
        np.testing.assert_array_equal(batch.obs, np.array(states, np.float32))


def test_actions_in_any_order_reach_their_environments():
    with SubprocessEnvManager(make_three, 6, n_workers=2) as manager:
        manager.reset()
        manager.recv(Wait.all())
        manager.send(np.array([5, 3, 1, 0, 2, 4]), [5, 3, 1, 0, 2, 4])
        batch = manager.recv(Wait.all())
        assert batch.reward.tolist() == batch.env_ids.tolist()
        manager.send(np.array([2, 0, 1]), [2, 0, 1])
        batch = manager.recv(Wait.all())
        assert (batch.env_ids.tolist(), batch.reward.tolist()) == ([0, 1, 2], [0, 1, 2])


@pytest.mark.parametrize("make_manager", [SimpleEnvManager, SubprocessEnvManager])
def test_calls_reach_the_sub_environments_of_a_sync_vector(make_manager):
    with make_manager(lambda: countdown_vector("SameStep", [2, 3]), 2, **_one_worker(make_manager)) as manager:
        manager.reset()
        assert manager.call("length_plus", 10) == [12, 13]
        assert manager.call("length_plus", 10, env_ids=[1]) == [13]
        assert manager.call(lambda env, by: env.length * by, 2, env_ids=[1, 0]) == [6, 4]
        assert manager.get_attr("length") == [2, 3]
        manager.set_attr("length", [9], env_ids=[1])
        assert manager.get_attr("length", env_ids=[1, 0]) == [9, 2]
        manager.set_attr("length", [4, 5])
        assert manager.render() == ["0 of 4", "0 of 5"]
        assert manager.render(env_ids=[1]) == ["0 of 5"]


@pytest.mark.parametrize("make_manager", [SimpleEnvManager, SubprocessEnvManager])
def test_calls_reach_the_vector_itself_where_it_has_no_sub_environments(make_manager):
    with make_manager(make_three, 3, **_one_worker(make_manager)) as manager:
        manager.reset()
        assert manager.call(lambda vector_env: vector_env.n_steps, env_ids=[1, 0]) == [0, 0]
        assert manager.get_attr("num_envs") == [3, 3, 3]
        manager.set_attr("n_steps", [7], env_ids=[1])
        assert manager.get_attr("n_steps", env_ids=[0]) == [7]
        assert manager.render(env_ids=[2]) == ["picture of all"]


def _one_worker(make_manager):
    return {"n_workers": 1} if make_manager is SubprocessEnvManager else {}


def test_a_vector_is_no_environment_of_its_own():
    with pytest.raises(UsageError, match="it is a vector environment: pass the function that makes it"):
        as_environment(cartpoles("SameStep"))


def test_the_vectorised_form_of_an_id_is_made_with_its_arguments():
    pytest.importorskip("ale_py")
    config = {"kind": "simple", "env": {"vector": "ALE/Pong-v5"}, "n_envs": 3, "env_kwargs": {"img_height": 42}}

    with make_manager(config) as manager:
        manager.reset(seed=1)
        assert manager.recv().obs.shape == (3, 4, 42, 84)
        assert type(manager.call(lambda vector: type(vector).__name__)[0]) is str


def test_a_vector_that_returns_some_rows_first_is_refused():
    config = {"kind": "simple", "env": {"vector": "ALE/Pong-v5"}, "n_envs": 4, "env_kwargs": {"batch_size": 2}}
    with pytest.raises(UsageError, match="a vector of 4 environments returns batch_size=2 of them at a time"):
        make_manager(config)


@pytest.mark.parametrize(
    ("env", "options", "says"),
    [
        ({"vector": "FrozenLake-v1"}, {}, "knows no vectorised form of 'FrozenLake-v1': write env: FrozenLake-v1"),
        ({"vector": "NoSuch-v1"}, {}, "knows no environment 'NoSuch-v1'"),
        (
            {"vector": "collections:Counter"},
            {},
            "'collections:Counter' is no id. If it makes vector environments, write env: collections:Counter,",
        ),
        ({"vektor": "CartPole-v1"}, {}, "env must be an id, a callable, {vector: an id},"),
        ({"vector": "CartPole-v1"}, {"env_kwargs": {"sutton": 1}}, "takes no argument 'sutton'"),
    ],
)
def test_an_id_without_a_usable_vectorised_form_is_refused(env, options, says):
    with pytest.raises(UsageError) as error:
        make_manager({"kind": "simple", "env": env, "n_envs": 2, **options})
    assert says in str(error.value)
