"""An AECEnv as an Environment: what agents are told is what a loop over ``agent_iter()`` tells them."""

from collections import Counter

import gymnasium
import numpy as np
import pettingzoo
import pytest
from mpe2 import simple_speaker_listener_v4
from pettingzoo.utils import BaseWrapper, wrappers

from envmanager.adapters.choosing import as_environment, build_group
from envmanager.adapters.pettingzoo import ParallelEnvironment
from envmanager.adapters.turns import Turns
from envmanager.check.environment import check_environment
from envmanager.data.specs import SpecMismatch
from envmanager.errors import UsageError
from envmanager.policy import RandomPolicy
from envmanager.simple_env_manager import SimpleEnvManager
from envmanager_tests.games import Brawl

ORDERS = [("a_0", "a_1", "a_2", "b_0"), ("b_0", "a_2", "a_0", "a_1"), ("b_1", "b_0"), ("a_1",)]


def drawn(obs, generator):
    return int(generator.choice(np.flatnonzero(obs["action_mask"])))


def as_told(obs, reward, terminated, truncated, acts):
    return [obs["observation"].tolist(), obs["action_mask"].tolist(), float(reward), terminated, truncated, acts]


def by_agent_iter(env, seed, n_episodes):
    """Play with a seed. Return, for each reset and move, what each agent is told or sees."""
    generator, told = np.random.default_rng(seed), []
    for number in range(n_episodes):
        env.reset(seed=seed if number == 0 else None)
        now, sums = {}, Counter()
        for agent in env.agent_iter():
            obs, reward, terminated, truncated, _ = env.last()
            sums[agent] += reward
            now[agent] = as_told(obs, reward, terminated, truncated, not (terminated or truncated))
            if terminated or truncated:
                env.step(None)
                continue
            now |= {each: as_told(env.observe(each), 0, False, False, False) for each in env.agents if each != agent}
            action = drawn(env.observe(agent), generator)
            told.append(now)
            env.step(action)
            now = {}
        told.append(now)
        assert sums == {agent: env.given[agent] for agent in sums}
    return told


def by_environment(environment, names, seed, n_episodes):
    """Play in the same way, with rests between the episodes."""
    generator, told, environment.rests = np.random.default_rng(seed), [], True
    for number in range(n_episodes):
        steps = environment.reset(seeds=[seed if number == 0 else None], options=None)
        while True:
            now, actions = {}, {}
            for behavior, each in steps.items():
                ended, finals, actions[behavior] = each.ended.tolist(), iter(range(len(each))), []
                for row, agent_id in enumerate(each.agent_id.tolist()):
                    acts = each.acting is None or bool(each.acting[row])
                    obs, at = (each.final_obs, next(finals)) if ended[row] else (each.obs, row)
                    obs = {key: column[at] for key, column in obs.items()}
                    flags = bool(each.terminated[row]), bool(each.truncated[row])
                    now[names[agent_id]] = as_told(obs, each.reward[row], *flags, acts)
                    if acts:
                        actions[behavior].append(drawn(obs, generator))
            told.append(now)
            if not any(actions.values()):
                break
            steps = environment.step({name: np.array(each) for name, each in actions.items()})
    return told


@pytest.mark.parametrize("dies", ["first", "later", "never"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_each_move_tells_what_a_loop_over_agents_tells_and_rewards_sum_to_those_given(order, dies):
    expected = by_agent_iter(Brawl(order, dies=dies), 3, 30)
    told = by_environment(as_environment(Brawl(order, dies=dies)), order, 3, 30)

    assert told == expected
    deaths = [move for move in told if 0 < sum(each[3] or each[4] for each in move.values()) < len(move)]
    assert bool(deaths) is (dies != "never" and len(order) > 1)


def test_rewards_that_come_in_the_turns_of_others_are_in_the_transition_of_the_agents_last_move():
    class Late(Brawl):
        """Two agents in turn. Each move gives 1 to the one that waits, and the sixth ends the game."""

        def _next(self, agents):
            return agents[self._n % 2]

        def step(self, action):
            mover = self.agent_selection
            if self.terminations[mover]:
                self._was_dead_step(action)
                return
            self._n += 1
            self._cumulative_rewards[mover] = 0.0
            self.rewards = {agent: float(agent != mover) for agent in self.agents}
            self._accumulate_rewards()
            self.terminations = dict.fromkeys(self.agents, self._n == 6)
            self.agent_selection = self._next(self.agents)

    with SimpleEnvManager(lambda: Late(("a_0", "a_1"))) as manager:
        manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"]))
        manager.reset()
        made = [manager.step()[0].transitions() for _ in range(6)]

    assert [each.agent_id.tolist() for each in made] == [[], [0], [1], [0], [1], [1, 0]]
    assert [each.reward.tolist() for each in made] == [[], [1], [1], [1], [1], [0, 1]]
    assert made[-1].terminated.tolist() == [True, True]


class Odd(Brawl):
    """A game in which the second move does something that an AECEnv should not do."""

    def __init__(self, trick):
        super().__init__(("a_0", "a_1"), dies="never")
        self.trick, self.received = trick, []

    def step(self, action):
        self.received.append(action)
        if len(self.received) == 2 or (action is None and self.trick == "stays"):
            getattr(self, self.trick)()
        else:
            super().step(action)

    def vanishes(self):
        self.agents.remove("a_1")
        self.agent_selection = "a_0"

    def is_removed_with_its_end(self):
        self.agents.remove("a_1")
        self.terminations["a_1"], self._cumulative_rewards["a_1"] = True, 7.0
        self.agent_selection = "a_0"

    def stays(self):
        self.terminations["a_1"] = True
        self.agent_selection = "a_1"

    def selects_a_stranger(self):
        self.agent_selection = "c_9"


def moved(environment, n_moves):
    steps = environment.reset(seeds=[0], options=None)
    for _ in range(n_moves):
        move = drawn(
            {key: column[steps["default"].acting_rows[0]] for key, column in steps["default"].obs.items()},
            np.random.default_rng(0),
        )
        steps = environment.step({"default": np.array([move])})
    return steps["default"]


@pytest.mark.parametrize(
    ("trick", "said"),
    [
        ("vanishes", r"terminated or truncated of agent 'a_1' should be true, as it left"),
        ("stays", r"after step\(None\) of agent 'a_1', which has ended should be .*_was_dead_step"),
        ("selects_a_stranger", r"agent_selection should be one of the agents \['a_0', 'a_1'\], but is 'c_9'"),
    ],
)
def test_an_environment_that_breaks_the_rules_of_turns_is_told_which(trick, said):
    with pytest.raises(SpecMismatch, match=said):
        moved(as_environment(Odd(trick)), 2)


def test_an_agent_that_the_environment_removes_with_its_end_gets_its_last_reward():
    steps = moved(as_environment(Odd("is_removed_with_its_end")), 2)

    assert (steps.terminated.tolist(), steps.acting.tolist()) == ([False, True], [True, False])
    assert steps.reward[1] == 7


def test_steps_of_the_dead_never_reach_the_trainer_and_get_none():
    received = []

    class Noted(Brawl):
        def step(self, action):
            is_dead = self.terminations[self.agent_selection] or self.truncations[self.agent_selection]
            received.append((is_dead, action is None))
            super().step(action)

    told = by_environment(as_environment(Noted()), ORDERS[0], 1, 10)

    assert set(received) == {(False, False), (True, True)}
    assert sum(is_dead for is_dead, _ in received) == 40
    assert sum(not is_dead for is_dead, _ in received) == len(told) - 10


def test_a_reset_amid_a_game_begins_another():
    environment, fresh = as_environment(Brawl()), as_environment(Brawl())
    by_environment(environment, ORDERS[0], 5, 1)
    steps = environment.reset(seeds=[5], options=None)
    row = int(steps["a"].acting_rows[0]) if len(steps["a"].acting_rows) else None
    if row is not None:
        move = np.flatnonzero(steps["a"].obs["action_mask"][row])[:1]
        environment.step({"a": move, "b": move[:0]})

    assert by_environment(environment, ORDERS[0], 6, 3) == by_environment(fresh, ORDERS[0], 6, 3)


class MaskInInfo(BaseWrapper):
    """Moves the masks from observations to infos. ``cut``: number of its entries that are missing."""

    def __init__(self, env, cut=0):
        super().__init__(env)
        self.cut = cut

    def observation_space(self, agent):
        return self.env.observation_space(agent)["observation"]

    def observe(self, agent):
        self.env.infos[agent] = {"action_mask": self.env.observe(agent)["action_mask"][self.cut :]}
        return self.env.observe(agent)["observation"]

    def last(self, observe=True):
        obs = self.observe(self.agent_selection)
        return obs, *self.env.last(observe=False)[1:]


def test_masks_in_infos_become_those_of_observations():
    environment = as_environment(Turns(MaskInInfo(Brawl()), mask_from_info=True))

    assert environment.behavior_specs == as_environment(Brawl()).behavior_specs
    assert by_environment(environment, ORDERS[0], 2, 5) == by_agent_iter(Brawl(), 2, 5)


def test_a_mask_in_an_info_that_fits_no_action_is_refused():
    with pytest.raises(SpecMismatch, match=r"info\['action_mask'\] of agent '.*' should be 4 numbers"):
        as_environment(Turns(MaskInInfo(Brawl(), cut=1), mask_from_info=True)).reset(seeds=[0], options=None)


def test_masks_from_infos_need_actions_that_are_choices():
    class Pushes(MaskInInfo):
        def action_space(self, agent):
            return gymnasium.spaces.Box(-1, 1, (1,))

    with pytest.raises(SpecMismatch, match="the action space of agent 'a_0' should be Discrete"):
        as_environment(Turns(Pushes(Brawl()), mask_from_info=True))


def test_without_a_mask_in_the_info_all_is_allowed():
    env = Turns(MaskInInfo(Brawl()), mask_from_info=True)
    env.env.observe = lambda agent: env.env.env.observe(agent)["observation"]
    env.env.last = lambda: (env.env.observe(env.agent_selection), *env.env.env.last(observe=False)[1:])
    obs, _ = env.reset(seed=0)

    assert obs["a_0"]["action_mask"].tolist() == [1, 1, 1, 1]


def test_an_aec_environment_is_recognised_in_wrappers_and_shows_itself_to_calls():
    env = wrappers.OrderEnforcingWrapper(Brawl())
    environment = as_environment(env)

    assert isinstance(environment, ParallelEnvironment)
    assert environment.subject is env
    with pytest.raises(UsageError, match="the same environment twice"):
        build_group([env, wrappers.OrderEnforcingWrapper(env.env)], [0, 1])
    with SimpleEnvManager(Brawl, seed=1) as manager:
        manager.reset()
        assert manager.get_attr("agents") == [list(ORDERS[0])]


def test_agents_of_a_game_of_equals_are_of_the_behaviors_that_are_named():
    environment = ParallelEnvironment(Brawl(("a_0", "a_1")), behavior_of={"a_0": "first", "a_1": "second"})

    assert list(environment.behavior_specs) == ["first", "second"]
    assert by_environment(environment, ("a_0", "a_1"), 4, 5) == by_agent_iter(Brawl(("a_0", "a_1")), 4, 5)


def test_an_environment_of_rounds_gives_the_same_rewards_in_turns():
    totals = []
    for make in (simple_speaker_listener_v4.env, simple_speaker_listener_v4.parallel_env):
        with SimpleEnvManager(lambda make=make: make(max_cycles=5), seed=1) as manager:
            for behavior, spec in manager.behavior_specs.items():
                manager.set_policy(behavior, RandomPolicy(spec, seed=2))
            manager.reset(seed=3)
            episodes = manager.episodes
            while len(episodes.recent) < 2:
                manager.step()
            totals.append(sorted((each.behavior, round(each.total, 3)) for each in episodes.recent))
    assert totals[0] == totals[1]


def test_an_illegal_move_ends_the_game_with_the_reward_of_the_wrapper():
    pytest.importorskip("pygame")
    from pettingzoo.classic.tictactoe.tictactoe import env

    environment = as_environment(env())
    environment.reset(seeds=[0], options=None)
    environment.step({"default": np.array([4])})
    steps = environment.step({"default": np.array([4])})["default"]

    assert steps.reward.tolist() == [0, -1]
    assert steps.terminated.all()
    assert steps.acting.tolist() == [True, False], "a new game"


def test_a_check_plays_only_legal_moves():
    findings = check_environment(Brawl, n_steps=100, in_process=True)

    assert [each.text for each in findings if each.outcome == "problem"] == []
    assert "repeats" in {each.question for each in findings if each.outcome == "ok"}


def test_a_game_without_agents_is_refused():
    class Empty(Brawl):
        def reset(self, seed=None, options=None):
            super().reset(seed, options)
            self.agents = []

    with pytest.raises(SpecMismatch, match="the agents after reset"):
        as_environment(Empty()).reset(seeds=[0], options=None)


def test_a_seed_for_a_reset_that_takes_none_is_refused():
    class Unseeded(Brawl):
        def reset(self, options=None):
            super().reset()

    with pytest.raises(UsageError, match=r"Unseeded\.reset\(\) has no parameter 'seed'"):
        as_environment(Unseeded()).reset(seeds=[1], options=None)


def test_an_agent_that_is_dead_before_its_first_move_has_no_row():
    class Stillborn(Brawl):
        def reset(self, seed=None, options=None):
            super().reset(seed, options)
            self.terminations["a_1"], self.agent_selection = True, "a_0"
            self._deads_step_first()

    steps = as_environment(Stillborn(("a_0", "a_1"))).reset(seeds=[0], options=None)

    assert steps["default"].agent_id.tolist() == [0]


def test_the_class_of_pettingzoo_that_is_meant_is_named():
    class Foreign:
        possible_agents = ()

        def reset(self, seed=None, options=None):
            """Begin."""

        def step(self, action):
            """Move."""

    assert issubclass(Brawl, pettingzoo.AECEnv)
    with pytest.raises(UsageError, match=r"pettingzoo\.ParallelEnv or AECEnv"):
        as_environment(Foreign())
