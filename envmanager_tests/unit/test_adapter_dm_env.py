"""DmEnvironment against a small dm_env environment and dm_control's."""

import collections

import dm_env
import numpy as np
import pytest
from dm_env import specs as dm_specs

from envmanager.adapters.choosing import as_environment, build_group
from envmanager.adapters.dm_env import DmEnvironment, row_reader, to_spec
from envmanager.data.specs import ArraySpec, SpecMismatch
from envmanager.errors import UsageError


class Walk(dm_env.Environment):
    """Walks by its action; three steps; observes into the same array each time."""

    def __init__(self, discount=0.0):
        self.discount, self.closed = discount, False

    def reset(self):
        self.count, self.place = 0, np.zeros(2)
        return dm_env.restart(self._obs())

    def step(self, action):
        self.count += 1
        self.place += action["by"]
        if self.count < 3:
            return dm_env.transition(reward=float(action["kind"][0]), observation=self._obs())
        return dm_env.TimeStep(dm_env.StepType.LAST, 9.0, self.discount, self._obs())

    def observation_spec(self):
        return collections.OrderedDict(
            place=dm_specs.Array((2,), np.float64),
            rest=[dm_specs.DiscreteArray(9, np.int32), dm_specs.StringArray(())],
        )

    def action_spec(self):
        return {"by": dm_specs.BoundedArray((2,), np.float64, -1, 1), "kind": [dm_specs.DiscreteArray(4)]}

    def close(self):
        self.closed = True

    def _obs(self):
        return {"rest": [np.int32(self.count), "walking"], "place": self.place}


def begin(environment, seed=None, options=None):
    return environment.reset(seeds=[seed], options=options)["default"]


def act(environment, by=0.5, kind=3):
    action = {"by": np.full((1, 2), by), "kind": (np.array([kind], np.int32),)}
    return environment.step({"default": action})["default"]


def test_nested_specs_become_trees():
    specs = DmEnvironment(Walk()).behavior_specs["default"]

    assert specs.observation == {
        "place": ArraySpec((2,), np.float64),
        "rest": (ArraySpec((), np.int32, 0, 8), ArraySpec(dtype=object)),
    }
    assert specs.action == {"by": ArraySpec((2,), np.float64, -1, 1), "kind": (ArraySpec((), np.int32, 0, 3),)}


def test_actions_have_the_structure_their_spec_has():
    spec = Walk().action_spec()
    batch = {"by": np.zeros((2, 2)), "kind": (np.array([1, 2], np.int32),)}

    action = row_reader(spec)(batch, 1)

    assert isinstance(action["kind"], list)
    spec["by"].validate(action["by"])
    spec["kind"][0].validate(action["kind"][0])
    action["by"][:] = 5
    assert not batch["by"].any()


def test_a_step_brings_reward_and_observation():
    environment = DmEnvironment(Walk())
    first = begin(environment)
    steps = act(environment)

    assert (first.reward.tolist(), first.obs["place"].tolist()) == ([0], [[0, 0]])
    assert (steps.reward.tolist(), steps.obs["place"].tolist()) == ([3], [[0.5, 0.5]])
    assert (steps.obs["rest"][0].tolist(), steps.obs["rest"][1].tolist()) == ([1], ["walking"])


@pytest.mark.parametrize(("discount", "terminated"), [(0.0, True), (1.0, False), (0.5, False), (np.array(0.0), True)])
def test_the_discount_of_the_last_step_says_how_the_episode_ended(discount, terminated):
    environment = DmEnvironment(Walk(discount))
    begin(environment)
    act(environment), act(environment)
    steps = act(environment)

    assert (steps.terminated.tolist(), steps.truncated.tolist()) == ([terminated], [not terminated])
    assert (steps.reward.tolist(), steps.final_obs["place"].tolist()) == ([9], [[1.5, 1.5]])
    assert steps.obs["place"].tolist() == [[0, 0]]


def test_an_environment_that_cannot_be_seeded_says_so():
    with pytest.warns(UserWarning, match=r"Walk is a dm_env environment that cannot be seeded.*context\.seed"):
        begin(DmEnvironment(Walk()), seed=3)


def test_a_seed_method_is_used():
    class Seeded(Walk):
        def seed(self, seed):
            self.got = seed

    environment = DmEnvironment(Seeded())
    begin(environment, seed=3)

    assert environment.subject.got == 3


def test_reset_options_are_refused():
    with pytest.raises(UsageError, match="no reset options"):
        begin(DmEnvironment(Walk()), options={"level": 2})


@pytest.mark.parametrize(
    ("step", "path"),
    [
        (dm_env.restart({}), "the result of step"),
        (None, "the result of step"),
        (dm_env.TimeStep(dm_env.StepType.LAST, 1.0, None, {}), "the discount of the last step"),
        (dm_env.transition(None, {}), "reward"),
        (dm_env.transition(1e39, {}), "reward"),
        (dm_env.transition(1.0, {"place": np.zeros(2)}), "obs"),
        (dm_env.transition(1.0, {"place": np.zeros(3), "rest": [np.int32(0), ""]}), "obs['place']"),
    ],
)
def test_what_a_step_must_not_return_is_named(step, path):
    env = Walk()
    environment = DmEnvironment(env)
    begin(environment)
    env.step = lambda action: step

    with pytest.raises(SpecMismatch) as caught:
        act(environment)

    assert caught.value.path == path


def test_texts_are_objects_and_infinite_bounds_none():
    assert to_spec(dm_specs.StringArray((3,))).is_object
    assert to_spec(dm_specs.BoundedArray((2,), np.float32, -np.inf, [1, 2])) == ArraySpec((2,), maximum=[1, 2])


def test_a_dm_env_environment_is_recognised_hosted_and_closed():
    envs = [Walk(), Walk()]
    group = build_group(envs, [2, 5])
    group.reset(seeds=[None, None], options=None)
    steps = group.step({"default": {"by": np.eye(2), "kind": (np.array([1, 2], np.int32),)}})["default"]
    group.close()

    assert isinstance(as_environment(Walk()), DmEnvironment)
    assert steps.env_id.tolist() == [2, 5]
    assert steps.obs["place"].tolist() == [[1, 0], [0, 1]]
    assert [env.closed for env in envs] == [True, True]


@pytest.fixture
def cartpole(monkeypatch):
    """dm_control's cartpole without a display, or a skip where dm_control does not work."""
    monkeypatch.setenv("MUJOCO_GL", "disable")
    suite = pytest.importorskip("dm_control.suite", exc_type=ImportError)

    def make():
        try:
            return suite.load("cartpole", "swingup", environment_kwargs={"flat_observation": False})
        except AttributeError as error:
            pytest.skip(f"dm_control does not work with this mujoco: {error}")

    return make


@pytest.mark.filterwarnings("ignore")
def test_dm_control_gives_the_same_as_by_hand_with_the_same_seed(cartpole):
    environment, bare = DmEnvironment(cartpole()), cartpole()
    bare.task.random.seed(7)
    steps, expected = begin(environment, seed=7), bare.reset()
    generator = np.random.default_rng(0)

    for _ in range(20):
        for key, value in expected.observation.items():
            np.testing.assert_array_equal(steps.obs[key][0], value)
        action = generator.uniform(-1, 1, (1, 1))
        steps, expected = environment.step({"default": action})["default"], bare.step(action[0])
        assert steps.reward[0] == np.float32(expected.reward)
