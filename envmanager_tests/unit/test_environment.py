"""Environments side by side: what goes to whom, what is checked, and how foreign objects are recognised."""

import numpy as np
import pytest

from envmanager.adapters.choosing import ADAPTERS, VECTORS, as_environment, build_group
from envmanager.adapters.side_by_side import SideBySide, check_steps
from envmanager.data.specs import ArraySpec, BehaviorSpec, SpecMismatch
from envmanager.data.steps import AgentSteps
from envmanager.environment import Environment
from envmanager.errors import UsageError

SPEC = BehaviorSpec(ArraySpec((2,), np.float32, -100, 100), ArraySpec((), np.int64, 0, 9))


def rows(agents, value=0.0, **changes):
    n = len(agents)
    fields = {
        "agent_id": np.array(agents, np.int64),
        "obs": np.full((n, 2), value, np.float32),
        "reward": np.zeros(n, np.float32),
        "terminated": np.zeros(n, bool),
        "truncated": np.zeros(n, bool),
        "info": [{"agent": agent} for agent in agents],
    }
    return AgentSteps(**{**fields, **changes})


class Sheep(Environment):
    """A herd of behavior "sheep"; remembers what it was told; ``answer`` replaces what a step returns."""

    def __init__(self, n_sheep=1, behavior="sheep", spec=SPEC):
        self.n_sheep, self.behavior, self.spec = n_sheep, behavior, spec
        self.told, self.seeds, self.closed, self.answer = [], [], False, None

    @property
    def behavior_specs(self):
        return {self.behavior: self.spec}

    def reset(self, *, seeds, options):
        self.seeds.append((list(seeds), options))
        return {self.behavior: rows(range(self.n_sheep))}

    def step(self, actions):
        self.told.append({name: action.tolist() for name, action in actions.items()})
        return {self.behavior: rows(range(self.n_sheep), len(self.told))} if self.answer is None else self.answer

    def close(self):
        self.closed = True


def begun(*environments, env_ids=None, **kwargs):
    options = {"infos": False, "check_values": False, **kwargs}
    group = SideBySide(environments, range(len(environments)) if env_ids is None else env_ids, **options)
    group.reset(seeds=[None] * len(environments), options=None)
    return group


def test_rows_lie_one_below_the_other_with_the_bits_of_their_environment():
    group = begun(Sheep(2), Sheep(1), env_ids=(3, 7))
    steps = group.step({"sheep": np.array([4, 5, 6])})["sheep"]

    assert steps.env_id.tolist() == [3, 3, 7]
    assert (steps.agent_id & 0xFFFFFFFF).tolist() == [0, 1, 0]


def test_each_environment_gets_its_own_rows_of_the_actions():
    herds = [Sheep(2), Sheep(1), Sheep(3)]
    begun(*herds).step({"sheep": np.arange(6)})

    assert [herd.told for herd in herds] == [[{"sheep": [0, 1]}], [{"sheep": [2]}], [{"sheep": [3, 4, 5]}]]


def test_agents_that_do_not_act_get_no_action():
    first, second = Sheep(2), Sheep(1)
    group = begun(first, second)
    first.answer = {"sheep": rows([0, 1], acting=np.array([False, True]))}

    steps = group.step({"sheep": np.arange(3)})["sheep"]
    group.step({"sheep": np.array([8, 9])})

    assert steps.acting.tolist() == [False, True, True]
    assert (first.told[1], second.told[1]) == ({"sheep": [8]}, {"sheep": [9]})


def test_different_behaviors_go_their_own_ways():
    sheep, goats = Sheep(2), Sheep(1, behavior="goats")
    steps = begun(sheep, goats).step({"goats": np.array([7]), "sheep": np.array([1, 2])})

    assert {name: own.env_id.tolist() for name, own in steps.items()} == {"sheep": [0, 0], "goats": [1]}
    assert (sheep.told, goats.told) == ([{"sheep": [1, 2]}], [{"goats": [7]}])


def test_a_step_of_some_rows_leaves_the_others_alone():
    herds = [Sheep(), Sheep(), Sheep()]
    steps = begun(*herds).step({"sheep": np.array([5, 6])}, rows=np.array([2, 0]))["sheep"]

    assert steps.env_id.tolist() == [2, 0]
    assert [herd.told for herd in herds] == [[{"sheep": [6]}], [], [{"sheep": [5]}]]


def test_an_environment_may_keep_its_action():
    class Keeper(Sheep):
        def step(self, actions):
            actions["sheep"][:] = 9
            return super().step(actions)

    batch = np.array([1, 2])
    begun(Keeper(), Keeper()).step({"sheep": batch})

    assert batch.tolist() == [1, 2]


def test_seeds_are_dealt_one_each_and_options_go_to_all():
    herds = [Sheep(), Sheep()]
    SideBySide(herds, (0, 1), infos=False, check_values=False).reset(seeds=[5, 6], options={"level": 2})

    assert [herd.seeds for herd in herds] == [[([5], {"level": 2})], [([6], {"level": 2})]]


def test_infos_are_dropped_unless_asked_for():
    actions = {"sheep": np.array([1, 2])}

    assert begun(Sheep(), Sheep()).step(actions)["sheep"].info is None
    assert begun(Sheep(), Sheep(), infos=True).step(actions)["sheep"].info == [{"agent": 0}] * 2


def test_how_many_agents_there_may_be_is_added_up():
    assert dict(begun(Sheep(), Sheep(), Sheep(behavior="goats")).max_agents) == {"sheep": 2, "goats": 1}


def test_the_environment_at_fault_is_named():
    bad = Sheep()
    group = begun(Sheep(), bad, env_ids=(4, 6))
    bad.answer = {"sheep": rows([0], reward=np.zeros(1, complex))}

    with pytest.raises(SpecMismatch, match="reward should be float32"):
        group.step({"sheep": np.array([1, 2])})
    assert group.current_env_id == 6


@pytest.mark.parametrize(("answer", "path"), [(None, "the result"), ({"wolves": rows([0])}, "the result")])
def test_a_result_that_is_no_mapping_of_known_behaviors_is_refused(answer, path):
    class Wrong(Sheep):
        def step(self, actions):
            return answer

    with pytest.raises(SpecMismatch) as caught:
        begun(Wrong()).step({"sheep": np.array([1])})
    assert caught.value.path == path


def test_two_specs_of_one_behavior_are_refused():
    other = BehaviorSpec(ArraySpec((3,)), SPEC.action)

    with pytest.raises(UsageError, match="behavior 'sheep' has another spec in env 9"):
        build_group([Sheep(), Sheep(spec=other)], [8, 9])


def test_a_behavior_that_appears_later_becomes_known():
    class Growing(Sheep):
        @property
        def behavior_specs(self):
            return {"sheep": SPEC, **({"lambs": SPEC} if self.told else {})}

    herd = Growing()
    group = begun(herd)
    herd.answer = {"lambs": rows([5])}
    steps = group.step({"sheep": np.array([1])})

    assert set(group.behavior_specs) == {"sheep", "lambs"}
    assert steps["lambs"].agent_id.tolist() == [5]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"obs": np.zeros((1, 2), np.float32)}, "obs"),
        ({"obs": np.zeros((2, 2))}, "obs"),
        ({"obs": [[0, 0], [0, 0]]}, "obs"),
        ({"obs": {"x": 1}}, "obs"),
        ({"reward": np.zeros(3, np.float32)}, "reward"),
        ({"terminated": np.zeros(2, np.int8)}, "terminated"),
        ({"truncated": None}, "truncated"),
        ({"truncated": np.array([True, False])}, "final_obs"),
        ({"truncated": np.array([True, False]), "final_obs": np.zeros((2, 2), np.float32)}, "final_obs"),
        ({"final_obs": np.zeros((1, 2), np.float32)}, "final_obs"),
        ({"agent_id": [0, 1]}, "agent_id"),
        ({"agent_id": None}, "agent_id"),
        ({"agent_id": np.array(0)}, "agent_id"),
        ({"agent_id": np.arange(2, dtype=np.int32)}, "agent_id"),
        ({"agent_id": np.array([4, 4])}, "agent_id"),
        ({"agent_id": np.array([0, -1])}, "agent_id"),
        ({"agent_id": np.array([0, 2**32])}, "agent_id"),
        ({"agent_id": np.arange(3)}, "obs"),
        ({"acting": [True, False]}, "acting"),
        ({"acting": np.ones(3, bool)}, "acting"),
        ({"acting": np.ones(2, np.int8)}, "acting"),
        ({"info": [{}]}, "info"),
        ({"info": ({}, {})}, "info"),
        ({"info": [{}, None]}, "info[1]"),
        ({"reset_info": [{}]}, "reset_info"),
    ],
)
def test_steps_that_do_not_fit_are_refused_by_name(changes, path):
    with pytest.raises(SpecMismatch) as caught:
        check_steps(SPEC, rows([0, 1], **changes), check_numbers=False)
    assert caught.value.path == path


def test_steps_that_fit_pass():
    final = np.full((1, 2), 3, np.float32)
    ended = {"truncated": np.array([False, True]), "final_obs": final, "reset_info": [{}]}
    check_steps(SPEC, rows([7, 2**32 - 1], acting=np.array([True, False]), **ended), check_numbers=True)
    check_steps(SPEC, rows([]), check_numbers=True)


@pytest.mark.parametrize("infos", [False, True])
def test_an_info_is_a_dict_also_when_nobody_asked_for_it(infos):
    herd = Sheep()
    group = begun(herd, infos=infos)
    herd.answer = {"sheep": rows([0], info=[None])}

    with pytest.raises(SpecMismatch, match="a dict"):
        group.step({"sheep": np.array([1])})


@pytest.mark.parametrize(
    "changes",
    [
        {"obs": np.full((1, 2), np.nan, np.float32)},
        {"obs": np.full((1, 2), 101, np.float32)},
        {"reward": np.array([np.inf], np.float32)},
        {"terminated": np.array([True]), "final_obs": np.full((1, 2), -101, np.float32)},
    ],
)
def test_values_are_looked_at_only_on_request(changes):
    steps = rows([0], **changes)
    check_steps(SPEC, steps, check_numbers=False)

    with pytest.raises(SpecMismatch):
        check_steps(SPEC, steps, check_numbers=True)


def test_attributes_are_those_of_the_rows_asked_for():
    group = begun(Sheep(1), Sheep(2), Sheep(3))
    group.set_attr("n_sheep", [7], [1])

    assert group.get_attr("n_sheep", [2, 1]) == [3, 7]
    assert group.call("step", [{"sheep": np.array([4])}], [0])[0]["sheep"].agent_id.tolist() == [0]
    assert group.current_env_id is None


def test_while_an_attribute_is_read_its_environment_is_named():
    group = begun(Sheep(), Sheep(), env_ids=(4, 6))

    with pytest.raises(AttributeError):
        group.get_attr("wool", [1])
    assert group.current_env_id == 6


def test_close_closes_all():
    herds = [Sheep(), Sheep()]
    begun(*herds).close()

    assert [herd.closed for herd in herds] == [True, True]


def test_close_closes_all_even_when_one_exits():
    class Runaway(Sheep):
        def close(self):
            raise SystemExit(3)

    last = Sheep()

    with pytest.raises(SystemExit):
        begun(Runaway(), last).close()
    assert last.closed


def test_an_environment_of_ours_is_taken_as_it_is():
    herd = Sheep()

    assert as_environment(herd) is herd


def test_something_else_is_no_environment():
    with pytest.raises(UsageError, match=r"it is int 3\. An environment is"):
        as_environment(3)


NAMES_OF_LIBRARIES = {
    "dm_env": "dm_env",
    "envpool": "EnvPool",
    "gem": "GEM",
    "gymnasium": "gymnasium",
    "mlagents_envs": "ML-Agents",
    "pettingzoo": "PettingZoo",
    "textarena": "TextArena",
}


def test_what_is_no_environment_is_told_all_libraries_that_have_an_adapter():
    libraries = {name.partition(".")[0] for name in (*ADAPTERS, *VECTORS)} - {"envmanager"}

    with pytest.raises(UsageError) as raised:
        as_environment(3)

    assert {library: NAMES_OF_LIBRARIES[library] in str(raised.value) for library in libraries} == dict.fromkeys(
        libraries, True
    )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("gym.core.Env", "shimmy"),
        ("gym.vector.vector_env.VectorEnv", "gymnasium.vector.VectorEnv"),
        ("pyspiel.Game", "OpenSpielCompatibilityV0"),
        ("open_spiel.python.rl_environment.Environment", "OpenSpielCompatibilityV0"),
    ],
)
def test_environments_that_can_be_converted_come_with_advice(name, advice):
    module, _, cls = name.rpartition(".")
    foreign = type(cls, (), {"__module__": module})()

    with pytest.raises(UsageError, match=advice):
        as_environment(foreign)


class OldEnv:
    """An environment of the old gym's interface, whose library makes it a gym.Env only if there is a gym."""

    def reset(self):
        return 0

    def step(self, action):
        return 0, 0.0, False, {}


class SeededEnv(OldEnv):
    def reset(self, *, seed=None, options=None):
        return 0, {}


class ManyAgents(OldEnv):
    possible_agents = ("a", "b")


class OfSpecs(OldEnv):
    def observation_spec(self): ...


@pytest.mark.parametrize(
    ("env", "advice"),
    [(OldEnv, "old gym"), (SeededEnv, "gymnasium.Env"), (ManyAgents, "ParallelEnv"), (OfSpecs, "dm_env.Environment")],
)
def test_an_environment_of_no_known_class_gets_the_advice_that_its_methods_ask_for(env, advice):
    with pytest.raises(UsageError) as raised:
        as_environment(env())

    first = str(raised.value).partition(". An environment is ")[0]
    assert first.startswith(f"its class {__name__}.{env.__name__} derives from no known class")
    assert advice in first


class OfStates:
    """A functional environment, with the methods of jumanji, and specs as dm_env has."""

    observation_spec = None

    def reset(self, key):
        return 0, 0

    def step(self, state, action):
        return state, 0


class OfKeysAndStates(OfStates):
    """A functional environment as in gymnax."""

    def step(self, key, state, action, params=None):
        return 0, state, 0.0, False, {}


@pytest.mark.parametrize("env", [OfStates, OfKeysAndStates])
def test_an_environment_that_is_a_function_of_its_state_is_told_how_to_become_a_vector(env):
    with pytest.raises(UsageError, match=r"is functional.*VectorEnv over jax\.jit\(jax\.vmap\(step\)\)"):
        as_environment(env())


class Fence:
    """A wrapper of nobody's."""

    def __init__(self, env):
        self.env = env


class FencedSheep(Sheep):
    def __init__(self, env):
        super().__init__()
        self.env = env


@pytest.mark.parametrize(
    "wrap",
    [
        lambda herd: herd,
        FencedSheep,
        lambda herd: FencedSheep(FencedSheep(herd)),
    ],
    ids=["itself", "wrapped", "wrapped twice"],
)
def test_the_same_environment_cannot_be_hosted_twice(wrap):
    herd = Sheep()

    with pytest.raises(UsageError, match="the same environment twice"):
        build_group([wrap(herd), wrap(herd)], [0, 1])


@pytest.mark.parametrize("shared", ["CartPole", 3, Fence(None), np], ids=["text", "number", "object", "module"])
def test_environments_may_share_what_is_no_environment(shared):
    assert build_group([FencedSheep(shared), FencedSheep(shared)], [0, 1]).env_ids == (0, 1)


def test_an_environment_that_contains_itself_is_one_environment():
    round_trip = FencedSheep(None)
    round_trip.env = FencedSheep(round_trip)

    assert build_group([round_trip, Sheep()], [0, 1]).env_ids == (0, 1)
