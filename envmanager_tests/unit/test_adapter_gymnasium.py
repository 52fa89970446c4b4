"""GymnasiumEnvironment against the same environments stepped by hand."""

import weakref

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from envmanager.adapters.choosing import build_group
from envmanager.adapters.gymnasium import GymnasiumEnvironment
from envmanager.adapters.side_by_side import SideBySide
from envmanager.data.specs import SpecMismatch, zeros
from envmanager.data.steps import AGENT_BITS, AgentSteps, RowBuffer
from envmanager.data.trees import leaves, leaves_like
from envmanager.errors import UsageError


class DictEnv(gymnasium.Env):
    """Nested observations and actions; episodes of three steps; changes its observation arrays in place."""

    observation_space = spaces.Dict(
        {
            "pair": spaces.Tuple([spaces.Discrete(9), spaces.Box(-9, 9, (2,), np.float64)]),
            "image": spaces.Box(0, 255, (2, 2), np.uint8),
        }
    )
    action_space = spaces.Dict({"move": spaces.Box(-1, 1, (2,)), "kind": spaces.Tuple([spaces.Discrete(3)])})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        self.place, self.image = self.np_random.normal(size=2).clip(-9, 9), np.zeros((2, 2), np.uint8)
        return self._obs(), {"began": True}

    def step(self, action):
        assert action in self.action_space
        self.count += 1
        self.place += action["move"] * 0.1
        self.image += np.uint8(action["kind"][0])
        return self._obs(), self.count, False, self.count == 3, {"count": self.count}

    def _obs(self):
        return {"image": self.image, "pair": (self.count, self.place)}


class TextEnv(gymnasium.Env):
    """Answers a text with a text."""

    observation_space = action_space = spaces.Text(40)

    def reset(self, *, seed=None, options=None):
        return "hello", {}

    def step(self, action):
        return action[::-1], 0.0, action == "bye", False, {}


class Scripted(gymnasium.Env):
    """Returns what the test put in."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def __init__(self, result=None, first=None):
        self.result = result
        self.first = (np.zeros(2, np.float32), {}) if first is None else first
        self.resets, self.closed = [], False

    def reset(self, *, seed=None, options=None):
        self.resets.append((seed, options))
        return self.first

    def step(self, action):
        return self.result

    def close(self):
        self.closed = True


def result(obs=None, reward=0.0, terminated=False, truncated=False):
    return np.zeros(2, np.float32) if obs is None else obs, reward, terminated, truncated, {}


def pong():
    import ale_py

    gymnasium.register_envs(ale_py)
    return FrameStackObservation(AtariPreprocessing(gymnasium.make("ALE/Pong-v5", frameskip=1)), 4)


MAKERS = {
    "CartPole": lambda: gymnasium.make("CartPole-v1"),
    "Pendulum, cut after 20 steps": lambda: gymnasium.make("Pendulum-v1", max_episode_steps=20),
    "FrozenLake": lambda: gymnasium.make("FrozenLake-v1"),
    "Blackjack (tuple)": lambda: gymnasium.make("Blackjack-v1"),
    "dict": DictEnv,
    "Pong": pong,
}


def by_hand(env, seed, actions):
    """``[(obs, reward, terminated, truncated, final_obs)]`` of the bare environment, restarted where it ends."""
    rows = [(copy_of(env.reset(seed=seed)[0]), 0.0, False, False, None)]
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(action)
        final = copy_of(obs) if terminated or truncated else None
        following = env.reset()[0] if terminated or truncated else obs
        rows.append((copy_of(following), reward, terminated, truncated, final))
    return rows


def copy_of(obs):
    if isinstance(obs, dict):
        return {key: copy_of(child) for key, child in obs.items()}
    return tuple(copy_of(child) for child in obs) if isinstance(obs, tuple) else np.array(obs)


def batch_of(structure, actions):
    parts = [leaves_like(structure, action) for action in actions]
    columns = [np.array(column) for column in zip(*parts, strict=True)]
    return rebuilt(structure, iter(columns))


def rebuilt(structure, columns):
    if isinstance(structure, dict):
        return {key: rebuilt(child, columns) for key, child in structure.items()}
    return tuple(rebuilt(child, columns) for child in structure) if isinstance(structure, tuple) else next(columns)


def assert_row(steps, row, expected):
    obs, reward, terminated, truncated, final = expected
    for column, part in zip(leaves(steps.obs), leaves_like(steps.obs, obs), strict=True):
        np.testing.assert_array_equal(column[row], part)
    assert steps.reward[row] == np.float32(reward)
    assert (steps.terminated[row], steps.truncated[row]) == (terminated, truncated)
    if final is not None:
        place = np.count_nonzero(steps.ended[:row])
        for column, part in zip(leaves(steps.final_obs), leaves_like(steps.final_obs, final), strict=True):
            np.testing.assert_array_equal(column[place], part)


def buffers_for(group, count):
    """What a transport with ``count`` slots offers."""
    spec, k = group.behavior_specs["default"].observation, len(group.env_ids)
    return [
        RowBuffer(
            AgentSteps(
                np.zeros(k, np.int64), zeros(spec, k), np.ones(k, np.float32), np.ones(k, bool), np.ones(k, bool)
            ),
            zeros(spec, k),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", MAKERS)
def test_rows_are_what_each_bare_environment_gives(name):
    make, k, n_steps = MAKERS[name], 3, 60
    group = GymnasiumEnvironment([make() for _ in range(k)], range(k), check_values=name == "FrozenLake")
    space = group.subjects[0].action_space
    space.seed(1)
    actions = [[space.sample() for _ in range(k)] for _ in range(n_steps)]
    expected = [by_hand(make(), seed, [row[i] for row in actions]) for i, seed in enumerate([5, 6, 7])]
    slots, spec = buffers_for(group, 3), group.behavior_specs["default"]

    group.offer_rows(slots[0])
    steps = group.reset(seeds=[5, 6, 7], options=None)["default"]
    for t in range(n_steps):
        for row in range(k):
            assert_row(steps, row, expected[row][t])
        group.offer_rows(slots[(t + 1) % 3])
        steps = group.step({"default": batch_of(spec.action, actions[t])})["default"]

    for row in range(k):
        assert_row(steps, row, expected[row][n_steps])
    group.close()


def test_agent_ids_carry_the_env_ids():
    group = GymnasiumEnvironment([Scripted(), Scripted()], (4, 9))

    steps = group.reset(seeds=[None, None], options=None)["default"]

    assert steps.agent_id.tolist() == [4 << AGENT_BITS, 9 << AGENT_BITS]
    assert group.max_agents == {"default": 2}


def test_a_step_in_which_nothing_ended_is_the_buffer_s_own_object():
    group = GymnasiumEnvironment([Scripted(result())])
    (slot,) = buffers_for(group, 1)
    group.offer_rows(slot)

    assert group.reset(seeds=[1], options=None)["default"] is slot.steps
    assert group.step({"default": np.array([0])})["default"] is slot.steps


def test_what_others_have_left_in_a_buffer_does_not_look_like_an_end():
    group = GymnasiumEnvironment([Scripted(result()), Scripted(result())], range(2))
    (slot,) = buffers_for(group, 1)
    group.offer_rows(slot)
    group.reset(seeds=[1, 2], options=None)
    slot.steps.terminated[:] = slot.steps.truncated[:] = True  # a step of some rows was copied there

    steps = group.step({"default": np.zeros(2, np.int64)})["default"]

    assert not steps.ended.any()


def test_final_observations_lie_close_together_in_the_order_of_rows():
    envs = [Scripted(result(np.full(2, i / 10, np.float32), terminated=i in (1, 3))) for i in range(4)]
    group = GymnasiumEnvironment(envs, range(4))
    (slot,) = buffers_for(group, 1)
    group.offer_rows(slot)
    group.reset(seeds=[None] * 4, options=None)

    steps = group.step({"default": np.zeros(4, np.int64)})["default"]

    assert steps.final_obs[:, 0].tolist() == [np.float32(0.1), np.float32(0.3)]
    assert np.shares_memory(steps.final_obs, slot.final_obs)
    assert steps.reward is slot.steps.reward


def test_a_buffer_that_was_offered_once_is_not_kept():
    group = GymnasiumEnvironment([Scripted(result())])
    group.reset(seeds=[None], options=None)
    slots = buffers_for(group, 2)
    for slot in slots:
        group.offer_rows(slot)
        assert group.step({"default": np.array([0])})["default"] is slot.steps
    first = weakref.ref(slots[0])

    del slot
    slots.clear()

    assert first() is None


def test_a_buffer_that_other_environments_have_written_serves_the_next():
    (slot,) = buffers_for(GymnasiumEnvironment([Scripted(result())], [3]), 1)
    for env_id in (3, 4):
        group = GymnasiumEnvironment([Scripted(result())], [env_id])
        group.offer_rows(slot)

        assert group.reset(seeds=[None], options=None)["default"].env_id.tolist() == [env_id]


def test_a_step_of_some_rows_leaves_the_other_environments_alone():
    group = GymnasiumEnvironment([DictEnv() for _ in range(3)], range(3), infos=True)
    group.reset(seeds=[1, 2, 3], options=None)
    action = {"move": np.ones((2, 2), np.float32), "kind": (np.array([1, 2]),)}

    steps = group.step({"default": action}, rows=np.array([2, 0]))["default"]

    assert steps.env_id.tolist() == [2, 0]
    assert [env.count for env in group.subjects] == [1, 0, 1]
    assert steps.obs["image"][:, 0, 0].tolist() == [1, 2]
    assert [info["count"] for info in steps.info] == [1, 1]


def test_some_rows_that_end_bring_their_own_final_observations():
    envs = [Scripted(result(np.full(2, i / 10, np.float32), terminated=i > 0)) for i in range(3)]
    group = GymnasiumEnvironment(envs, range(3))
    group.reset(seeds=[None] * 3, options=None)

    steps = group.step({"default": np.zeros(2, np.int64)}, rows=np.array([0, 2]))["default"]

    assert steps.terminated.tolist() == [False, True]
    assert steps.final_obs.tolist() == [[np.float32(0.2)] * 2]


def test_infos_come_only_when_asked_for():
    with_infos = GymnasiumEnvironment([DictEnv()], infos=True)
    without = GymnasiumEnvironment([DictEnv()])
    action = {"move": np.ones((1, 2), np.float32), "kind": (np.array([1]),)}

    first = with_infos.reset(seeds=[1], options=None)["default"].info
    steps = [with_infos.step({"default": action})["default"] for _ in range(3)]
    without.reset(seeds=[1], options=None)
    bare = [without.step({"default": action})["default"] for _ in range(3)]

    assert first == [{"began": True}]
    assert (steps[2].info, steps[2].reset_info) == ([{"count": 3}], [{"began": True}])
    assert (bare[0].info, bare[2].info, bare[2].reset_info) == (None, None, None)


def test_restarts_take_the_options_of_the_last_reset_and_no_seed():
    env = Scripted(result(terminated=True))
    group = GymnasiumEnvironment([env])

    group.reset(seeds=[11], options={"level": 2})
    group.step({"default": np.array([0])})
    group.reset(seeds=[None], options=None)
    group.step({"default": np.array([0])})

    assert env.resets == [(11, {"level": 2}), (None, {"level": 2}), (None, None), (None, None)]


def test_an_environment_that_empties_its_options_gets_them_again():
    class Emptying(Scripted):
        def reset(self, *, seed=None, options=None):
            self.resets.append(options.pop("level"))
            return self.first

    env = Emptying(result(truncated=True))
    group = GymnasiumEnvironment([env])
    group.reset(seeds=[None], options={"level": 3})
    group.step({"default": np.array([0])})

    assert env.resets == [3, 3]


def test_texts_travel_as_objects():
    group = GymnasiumEnvironment([TextEnv(), TextEnv()], (0, 1))
    first = group.reset(seeds=[None, None], options=None)["default"].obs.tolist()

    actions = np.array(["abc", "bye"], dtype=object)
    steps = group.step({"default": actions})["default"]

    assert first == ["hello", "hello"]
    assert steps.obs.tolist() == ["cba", "hello"]
    assert steps.final_obs.tolist() == ["eyb"]


def test_lists_in_object_observations_stay_lists():
    class Lists(Scripted):
        observation_space = spaces.Sequence(spaces.Discrete(5))

    env = Lists(result([1, 2]), first=([3], {}))
    group = GymnasiumEnvironment([env])
    group.reset(seeds=[None], options=None)

    assert group.step({"default": np.array([0])})["default"].obs[0] == [1, 2]


@pytest.mark.parametrize(
    ("broken", "path", "evidence"),
    [
        (result(np.zeros(3, np.float32)), "obs", "float32[3]"),
        (result(np.full(2, 1e300)), "obs", "float64[2]"),
        (result([0.0, 0.0]), "obs", "a list"),
        (result(reward=None), "reward", "None"),
        (result(reward=np.zeros(1)), "reward", "float64[1]"),
        (result(terminated=2), "terminated", "int 2"),
        (result(truncated=0.5), "truncated", "float 0.5"),
        (result(truncated=None), "truncated", "None"),
        (result()[:4], "the result of step", "as in gym before 0.26"),
        (None, "the result of step", "None"),
    ],
)
def test_what_a_step_must_not_return_is_named(broken, path, evidence):
    group = GymnasiumEnvironment([Scripted(result()), Scripted(broken)], (3, 5))
    group.reset(seeds=[None, None], options=None)

    with pytest.raises(SpecMismatch) as caught:
        group.step({"default": np.zeros(2, np.int64)})

    assert caught.value.path == path
    assert evidence in caught.value.got
    assert group.current_env_id == 5


@pytest.mark.parametrize("first", [np.zeros(2, np.float32), (np.zeros(2, np.float32),), None, (np.zeros(3), {})])
def test_what_a_reset_must_not_return_is_refused(first):
    env = Scripted()
    env.first = first

    with pytest.raises(SpecMismatch):
        GymnasiumEnvironment([env]).reset(seeds=[None], options=None)


@pytest.mark.parametrize("method", ["reset", "step"])
def test_of_a_coroutine_the_error_says_which_kind_awaits_it(method):
    class Awaits(Scripted):
        pass

    async def returns(*_, **__):
        return result()

    setattr(Awaits, method, returns)
    group = GymnasiumEnvironment([Awaits(result())])

    def play():
        group.reset(seeds=[None], options=None)
        group.step({"default": np.zeros(1, np.int64)})

    with pytest.raises(SpecMismatch, match="kind: asyncio"):
        play()


def test_a_wrong_leaf_is_named_by_its_path():
    class Wrong(DictEnv):
        def _obs(self):
            return {"image": self.image, "pair": (self.count, self.place.astype(np.float32)[:1])}

    with pytest.raises(SpecMismatch) as caught:
        GymnasiumEnvironment([Wrong()]).reset(seeds=[1], options=None)

    assert caught.value.path == "obs['pair'][1]"


@pytest.mark.parametrize(
    "broken", [result(np.array([np.nan, 0], np.float32)), result(np.full(2, 3, np.float32)), result(reward=np.inf)]
)
def test_values_are_looked_at_only_on_request(broken):
    lenient = GymnasiumEnvironment([Scripted(broken)])
    strict = GymnasiumEnvironment([Scripted(broken)], check_values=True)
    for group in (lenient, strict):
        group.reset(seeds=[None], options=None)

    lenient.step({"default": np.array([0])})
    with pytest.raises(SpecMismatch):
        strict.step({"default": np.array([0])})


def test_after_a_step_no_environment_is_named():
    group = GymnasiumEnvironment([Scripted(result())])
    group.reset(seeds=[None], options=None)
    group.step({"default": np.array([0])})

    assert group.current_env_id is None


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_close_closes_all_even_when_one_raises(error):
    class Stuck(Scripted):
        def close(self):
            raise error("stuck")

    last = Scripted()
    group = GymnasiumEnvironment([Stuck(), last], (0, 1))

    with pytest.raises(error, match="stuck"):
        group.close()
    assert last.closed


def test_attributes_are_reached_through_wrappers():
    group = GymnasiumEnvironment([gymnasium.make("CartPole-v1") for _ in range(2)], (0, 1))

    group.set_attr("gravity", [1.0, 2.0], [0, 1])

    assert group.get_attr("gravity", [1, 0]) == [2.0, 1.0]


def test_equal_spaces_are_hosted_together_and_others_side_by_side():
    class Longer(Scripted):
        observation_space = spaces.Box(-1, 1, (3,))

    assert isinstance(build_group([Scripted(), Scripted()], [0, 1]), GymnasiumEnvironment)
    with pytest.raises(UsageError, match="behavior 'default' has another spec in env 1"):
        build_group([Scripted(), Longer()], [0, 1])


def test_a_wrapped_environment_side_by_side_gives_the_same_as_the_short_way():
    make = MAKERS["CartPole"]
    short = GymnasiumEnvironment([make(), make()], (0, 1))
    long = SideBySide([GymnasiumEnvironment.wrap(make()) for _ in range(2)], (0, 1), infos=False, check_values=True)
    steps = [group.reset(seeds=[1, 2], options=None)["default"] for group in (short, long)]

    for _ in range(30):
        for mine, other in ((steps[0].obs, steps[1].obs), (steps[0].agent_id, steps[1].agent_id)):
            np.testing.assert_array_equal(mine, other)
        steps = [group.step({"default": np.ones(2, np.int64)})["default"] for group in (short, long)]
        np.testing.assert_array_equal(steps[0].ended, steps[1].ended)
        np.testing.assert_array_equal(steps[0].final_obs, steps[1].final_obs)


@pytest.mark.parametrize("reward", [1e39, -1e39, np.float64(1e39), 10**400, np.array(1e39)])
def test_a_finite_reward_beyond_the_floats_of_its_column_is_refused_with_the_reason(reward):
    group = build_group([Scripted(result(reward=reward))], [0])
    group.reset(seeds=[None], options=None)
    with pytest.raises(SpecMismatch, match="reward should be a number that fits float32"):
        group.step({"default": np.zeros(1, np.int64)})


@pytest.mark.parametrize("reward", [3.4e38, np.inf, -np.inf, np.nan, np.float16(5), np.float16(np.inf)])
def test_a_reward_that_the_column_can_hold_arrives_unchanged(reward):
    group = build_group([Scripted(result(reward=reward))], [0])
    group.reset(seeds=[None], options=None)
    steps = group.step({"default": np.zeros(1, np.int64)})["default"]
    np.testing.assert_array_equal(steps.reward, np.array([reward], np.float32))


@pytest.mark.parametrize("is_in_one_piece", [True, False])
def test_rewards_of_any_class_of_numbers_are_written_into_the_rows_offered(is_in_one_piece):
    rewards = [True, 3, 0.5, np.float64(-2.5), np.float32(7), np.int8(-3)]
    group = build_group([Scripted(result(reward=each)) for each in rewards], list(range(6)))
    slot = RowBuffer.empty(group.behavior_specs["default"].observation, np.arange(6))
    if not is_in_one_piece:
        slot.steps.reward = np.zeros(12, np.float32)[::2]
    group.reset(seeds=[None] * 6, options=None)
    group.offer_rows(slot)
    steps = group.step({"default": np.zeros(6, np.int64)})["default"]

    assert steps.reward is slot.steps.reward
    assert steps.reward.tolist() == [1, 3, 0.5, -2.5, 7, -3]


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f4", "f8", ">f4", ">i8"])
def test_observations_are_copied_into_their_rows_however_they_lie_in_memory(dtype):
    space = spaces.Box(0, 1, (2,), np.dtype(dtype))
    native = np.array([0, 1], np.dtype(dtype).newbyteorder("="))
    seen = [native, native.astype(native.dtype.newbyteorder()), np.repeat(native, 2)[::2], native.astype(np.float64)]
    envs = [Scripted(result(obs)) for obs in seen]
    for env in envs:
        env.observation_space = space
    group = GymnasiumEnvironment(envs, range(4))
    steps = group.step({"default": np.zeros(4, np.int64)})["default"]

    assert steps.obs.dtype == space.dtype
    assert steps.obs.tolist() == [native.tolist()] * 4


@pytest.mark.parametrize("numpy_does", ["warn", "raise", "ignore"])
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_observations_in_float64_are_rounded_and_never_become_infinite(numpy_does):
    seen = [0.1, 1e-42, -3e38, np.inf, np.nan]
    group = GymnasiumEnvironment([Scripted(result(np.array([1.0, each]))) for each in seen], range(5))
    with np.errstate(all=numpy_does):
        steps = group.step({"default": np.zeros(5, np.int64)})["default"]
        for beyond in ([3e38, 4e38], [np.inf, -4e38]):
            group = GymnasiumEnvironment([Scripted(result(np.array(beyond)))])
            with pytest.raises(SpecMismatch):
                group.step({"default": np.zeros(1, np.int64)})

    np.testing.assert_array_equal(steps.obs[:, 1], np.array(seen, np.float32))
