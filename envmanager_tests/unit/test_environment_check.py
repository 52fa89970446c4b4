"""What ``check_environment`` finds: one deliberately broken environment per finding."""

from __future__ import annotations

import importlib
import itertools
from typing import Any, ClassVar

import dm_env
import gymnasium
import numpy as np
import pettingzoo
import pytest
from dm_env import specs

from envmanager.check import environment
from envmanager.check.environment import QUESTIONS
from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import AgentSteps
from envmanager.environment import EnvContext, Environment
from envmanager.errors import UsageError


def check_environment(factory, **options):
    """What is found in this process; ``process/test_check.py`` has what needs a worker."""
    return environment.check_environment(factory, in_process=True, **options)


class Sound(gymnasium.Env):
    """Episodes of five steps, observations from the seeded generator. The broken ones change one thing."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    length = 5

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_steps = 0
        return self.observe(), {}

    def step(self, action):
        self.n_steps += 1
        return self.observe(), self.reward(action), self.n_steps >= self.length, False, {}

    def observe(self):
        return self.np_random.random(2, np.float32)

    def reward(self, action):
        return float(action)


def found(factory, question, *, n_steps=60):
    """The outcomes and texts for one question."""
    return [
        (finding.outcome, finding.text)
        for finding in check_environment(factory, n_steps=n_steps)
        if finding.question == question
    ]


def only(factory, question, **options):
    findings = found(factory, question, **options)
    assert len(findings) == 1
    return findings[0]


def problems(factory, *, n_steps=60):
    findings = check_environment(factory, n_steps=n_steps)
    return [finding.question for finding in findings if finding.outcome == "problem"]


def test_a_sound_environment_gets_one_good_answer_per_question():
    findings = check_environment(Sound, n_steps=60)

    assert [(finding.question, finding.outcome) for finding in findings] == [(question, "ok") for question in QUESTIONS]


def test_a_constructor_that_raises_is_the_only_finding():
    def broken():
        raise OSError("no such port")

    (finding,) = check_environment(broken)

    assert (finding.question, finding.outcome) == ("constructs", "problem")
    assert "it raised OSError: no such port (" in finding.text
    assert f"{__file__}:" in finding.text


@pytest.mark.parametrize("made", [None, 3])
def test_what_is_no_environment_is_a_problem(made):
    (finding,) = check_environment(lambda: made)

    assert (finding.question, finding.outcome) == ("constructs", "problem")


def test_an_unusable_factory_is_the_callers_mistake():
    with pytest.raises(UsageError):
        check_environment(3)


def test_spaces_that_differ_from_instance_to_instance_are_a_problem():
    sizes = iter((2, 3))

    class Changing(Sound):
        def __init__(self):
            self.size = next(sizes)
            self.observation_space = gymnasium.spaces.Box(0, 1, (self.size,))

        def observe(self):
            return self.np_random.random(self.size, np.float32)

    assert [outcome for outcome, _ in found(Changing, "constructs")] == ["ok", "problem"]


def test_an_environment_that_can_be_made_once_only_is_a_problem():
    made = []

    def once():
        if made:
            raise OSError("the port is taken")
        made.append(True)
        return Sound()

    outcome, text = found(once, "constructs")[1]
    assert outcome == "problem"
    assert "a second one cannot" in text


class RaisesAtReset(Sound):
    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no level")


class WrongShapeAtReset(Sound):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}


class OutOfRangeAtReset(Sound):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([0, 7], np.float32), {}


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (RaisesAtReset, "it raised RuntimeError: no level"),
        (WrongShapeAtReset, "float32[3]"),
        (OutOfRangeAtReset, "as high as 7"),
    ],
)
def test_a_reset_that_breaks_its_spec_is_a_problem(broken, text):
    (outcome, said), *_ = found(broken, "reset")

    assert outcome == "problem"
    assert text in said


def test_after_a_reset_that_failed_only_closing_is_tried():
    assert [finding.question for finding in check_environment(RaisesAtReset)] == [
        "constructs",
        "reset",
        "seeding",
        "close",
    ]


class RaisesInStep(Sound):
    def reward(self, action):
        if self.n_steps == 3:
            raise ValueError("fell over")
        return 0.0


class WrongDtypeInStep(Sound):
    def observe(self):
        return super().observe() if self.n_steps == 0 else np.zeros(2, np.complex64)


class WiderDtype(Sound):
    def observe(self):
        return super().observe().astype(np.float64)


class BeyondItsSpace(Sound):
    def observe(self):
        return super().observe() + np.float32(self.n_steps)


class NotFinite(Sound):
    def observe(self):
        return np.full(2, np.nan if self.n_steps == 2 else 0.5, np.float32)


class NanReward(Sound):
    def reward(self, action):
        return float("nan")


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (RaisesInStep, "Step 3: it raised ValueError: fell over"),
        (WrongDtypeInStep, "Step 1: "),
        (WrongDtypeInStep, "complex64[2]"),
        (BeyondItsSpace, "In step 1 obs should be float32[2] in [0"),
        (NotFinite, "In step 2 obs should be finite"),
        (NanReward, "In step 1 reward should be finite"),
    ],
)
def test_a_step_that_breaks_its_spec_is_a_problem(broken, text):
    (outcome, said), *_ = found(broken, "steps")

    assert outcome == "problem"
    assert text in said


@pytest.mark.parametrize("reward", [np.ones(2, np.float32), [1.0, 2.0], (0, 1)], ids=["vector", "list", "tuple"])
def test_advice_for_several_rewards_is_about_rewards(reward):
    class OfSeveral(Sound):
        def reward(self, action):
            return reward

    (finding,) = [each for each in check_environment(OfSeveral, n_steps=3) if each.outcome == "problem"]
    assert "LinearReward" in finding.text
    assert "ParallelEnv" in finding.text
    assert "space" not in finding.advice


@pytest.mark.parametrize(("broken", "is_of_space"), [(WrongDtypeInStep, True), (NanReward, False)])
def test_only_advice_for_observations_speaks_of_their_space(broken, is_of_space):
    (finding,) = [each for each in check_environment(broken, n_steps=3) if each.outcome == "problem"]
    assert ("observation space" in finding.advice) == is_of_space


def test_values_that_are_cast_are_worth_a_note():
    ((outcome, said),) = found(WiderDtype, "steps")

    assert (outcome, "float64[2]" in said) == ("note", True)


class Couple(pettingzoo.ParallelEnv):
    """Two agents who never end, and whose tuples hold float64 and int64 for float32 and a bool."""

    metadata = {"name": "couple"}
    possible_agents = ["a", "b"]

    def observation_space(self, agent):
        return gymnasium.spaces.Dict({"x": gymnasium.spaces.Box(0, 1, (2,))})

    def action_space(self, agent):
        return gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return self.of_each({"x": np.zeros(2)}), self.of_each({})

    def step(self, actions):
        values = {"x": np.zeros(2)}, np.bool_(True), 0, False, {}
        return tuple(self.of_each(value) for value in values)

    def of_each(self, value):
        return dict.fromkeys(self.possible_agents, value)


def test_a_field_that_is_cast_for_several_agents_is_noted_once():
    notes = [text for outcome, text in found(Couple, "steps", n_steps=3) if outcome == "note"]

    assert [note.partition(" should be ")[0] for note in notes] == ["obs['x']", "reward", "terminated"]
    assert "float32[2]" in notes[0]
    assert "float64[2]" in notes[0]


class Robots(Couple):
    """Two agents, of which the first ends in step 2 of 5."""

    def __init__(self, stays):
        self.stays = stays

    def reset(self, seed=None, options=None):
        self.n_steps = 0
        return super().reset(seed, options)

    def step(self, actions):
        self.n_steps += 1
        playing = self.agents
        ended = {agent: self.n_steps >= 5 or (agent == "a" and self.n_steps >= 2) for agent in playing}
        if not self.stays:
            self.agents = [agent for agent in playing if not ended[agent]]
        no, obs = dict.fromkeys(playing, False), {agent: {"x": np.zeros(2, np.float32)} for agent in playing}
        return obs, dict.fromkeys(playing, 0.0), ended, no, {}


@pytest.mark.parametrize("stays", [True, False])
def test_an_agent_that_ended_and_is_never_taken_from_the_agents_is_a_problem(stays):
    outcome, text = only(lambda: Robots(stays), "episodes")
    assert (outcome, "'a'" in text, "'b'" in text) == ("problem" if stays else "ok", stays, False)


class Rows(gymnasium.vector.VectorEnv):
    """Two rows that count to 4. The next episode begins in the step after the end, which may earn a reward."""

    num_envs = 2
    single_observation_space, single_action_space = gymnasium.spaces.Box(0, 9, (1,)), gymnasium.spaces.Discrete(2)

    def __init__(self, mode=None, earns=0.0):
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.earns = earns

    def reset(self, *, seed=None, options=None):
        self.count = np.arange(2)
        return self._obs(), {}

    def step(self, actions):
        self.count = np.where(self.count == 4, -1, self.count) + 1
        return self._obs(), np.where(self.count > 0, 1.0, self.earns), self.count == 4, np.zeros(2, bool), {}

    def _obs(self):
        return self.count[:, None].astype(np.float32)


def test_a_vector_without_a_declared_mode_is_tried_for_next_step_and_noted():
    (note, _) = found(Rows, "episodes")
    assert note[0] == "note"
    assert "NEXT_STEP is assumed" in note[1]
    assert problems(lambda: Rows(earns=1.0), n_steps=20) == ["steps"]


def test_a_vector_that_declares_next_step_and_earns_in_the_step_of_a_restart_is_noted():
    assert [outcome for outcome, _ in found(lambda: Rows("NextStep"), "episodes")] == ["ok"]
    (note, _) = found(lambda: Rows("NextStep", earns=2.5), "episodes")
    assert note[0] == "note"
    assert "a reward of 2.5" in note[1]


class OwnWide(Environment):
    """An envmanager.Environment that returns rewards of float64."""

    SPEC = BehaviorSpec(ArraySpec((1,)), ArraySpec((), np.int64))

    @property
    def behavior_specs(self):
        return {"default": self.SPEC}

    def reset(self, *, seeds, options):
        return self.step({})

    def step(self, actions):
        no = np.zeros(1, np.bool_)
        return {"default": AgentSteps(np.zeros(1, np.int64), np.zeros((1, 1), np.float32), np.zeros(1), no, no)}

    def close(self):
        pass


def test_columns_of_an_environment_of_the_library_that_are_cast_are_noted():
    (note,) = [text for outcome, text in found(OwnWide, "steps", n_steps=3) if outcome == "note"]

    assert note.startswith("reward should be float32[1], but is float64[1]")


def test_each_kind_of_bad_value_is_said_once():
    assert len(found(NanReward, "steps")) == 1


def test_an_environment_that_raises_is_not_tried_for_seeds():
    assert only(RaisesInStep, "seeding") == ("note", "Not tried, because of the problem above.")


def test_an_environment_that_raises_is_not_to_be_tried_for_more_steps():
    assert [each.advice for each in check_environment(RaisesInStep, n_steps=60) if each.question == "episodes"] == [""]


class CannotRestart(Sound):
    n_resets = 0

    def reset(self, *, seed=None, options=None):
        self.n_resets += 1
        if self.n_resets == 2:
            raise RuntimeError("already started")
        return super().reset(seed=seed)


class BadFirstObservation(Sound):
    n_resets = 0

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.n_resets += 1
        return (obs if self.n_resets == 1 else obs + np.float32(5)), info


class StaysOver(Sound):
    over = False

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        self.over |= terminated
        return obs, reward, self.over, truncated, info


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (CannotRestart, "reset() after an episode's end, in step 5: it raised RuntimeError: already started"),
        (BadFirstObservation, "The first observation after an episode's end does not fit (step 5): obs should be"),
        (StaysOver, "The first episode took 5 steps, and each of the 55 after it only one."),
    ],
)
def test_an_episode_that_does_not_restart_is_a_problem(broken, text):
    outcome, said = only(broken, "episodes")

    assert outcome == "problem"
    assert text in said


def test_episodes_that_did_not_end_are_a_note():
    class Endless(Sound):
        length = 10**9

    assert only(Endless, "episodes") == ("note", "No episode ended within 600 steps, so restarting was not tried.")
    assert problems(Endless, n_steps=10) == []


def test_the_trial_goes_on_until_an_episode_has_ended():
    class Long(Sound):
        length = 200

    assert only(Long, "episodes")[1].endswith("(1 in 200 steps).")


class Unseeded(Sound):
    def observe(self):
        return np.random.default_rng().random(2, np.float32)


class KeepsState(Sound):
    """What an episode before a reset did shows after it."""

    offset = 0.0

    def observe(self):
        return np.full(2, self.offset, np.float32)

    def step(self, action):
        self.offset = min(1.0, self.offset + 0.001)
        return super().step(action)


class KeepsStateAndTensors(KeepsState):
    """Loads PyTorch, and draws nothing from it."""

    held: ClassVar[list[Any]] = []

    def reset(self, *, seed=None, options=None):
        self.held.append(importlib.import_module("torch").get_rng_state())
        return super().reset(seed=seed)


class DiffersFromInstanceToInstance(Sound):
    made = 0

    def __init__(self):
        type(self).made += 1
        self.offset = np.float32(self.made / 1000)

    def observe(self):
        return np.full(2, self.offset)


class FailsTheSecondTime(Sound):
    n_steps_ever = 0

    def step(self, action):
        self.n_steps_ever += 1
        if self.n_steps_ever == 70:
            raise ValueError("worn out")
        return super().step(action)


class UnseededRestart(Sound):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=np.random.SeedSequence().entropy % 2**31 if seed is None else seed)


class DrawsFromTheModule(Sound):
    def observe(self):
        return np.random.random(2).astype(np.float32)


class SeedsTheModule(DrawsFromTheModule):
    def reset(self, *, seed=None, options=None):
        if seed is not None:
            np.random.seed(seed)
        return super().reset(seed=seed)


class SeedsTheModuleAndKeepsState(SeedsTheModule):
    """What it draws is decided by the seed; what it counts is not."""

    n_ever = 0

    def reward(self, action):
        self.n_ever += 1
        return float(self.n_ever)


AGAIN = "after a second reset of the same environment"
NEW = "in a second, new environment"


@pytest.mark.parametrize(
    ("broken", "place", "cause"),
    [
        (Unseeded, f"{NEW}, already at the reset: obs[0] was ", "a generator that the seed does not"),
        (KeepsState, f"{AGAIN}, already at the reset: obs[0] was 0.0 and is 0.06", "outlives an episode"),
        (KeepsStateAndTensors, f"{AGAIN}, already at the reset: obs[0] was ", "outlives an episode"),
        (DiffersFromInstanceToInstance, f"{NEW}, already at the reset: obs[0] was ", "a class attribute"),
        (UnseededRestart, f"{NEW}, from step 5 on: obs[0] was ", "a generator that the seed does not"),
        (DrawsFromTheModule, f"{NEW}, already at the reset: obs[0] was ", "it draws from numpy.random, which"),
        (SeedsTheModuleAndKeepsState, f"{AGAIN}, from step 1 on: reward was 1.0 and is 61.0", "outlives an episode"),
    ],
)
def test_what_the_seed_does_not_decide_is_noted_with_its_first_step_and_place_and_a_likely_cause(broken, place, cause):
    outcome, text = only(broken, "repeats")

    assert outcome == "note"
    assert place in text
    assert cause in text
    assert problems(broken, n_steps=60) == []


def test_an_environment_that_seeds_a_global_generator_is_repeatable():
    assert only(SeedsTheModule, "repeats")[0] == "ok"


def test_nan_is_no_difference():
    class SaysNothing(Sound):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))

        def observe(self):
            return np.full(2, np.nan, np.float32)

    assert only(SaysNothing, "repeats")[0] == "ok"


class TimesItself(Sound):
    """Its infos, and nothing else, differ from time to time."""

    n_ever = itertools.count()

    def step(self, action):
        *step, _ = super().step(action)
        return *step, {"times": {"of_step": next(TimesItself.n_ever)}, "self": self}


def test_infos_that_differ_are_noted_apart():
    (ok, (outcome, text)) = found(TimesItself, "repeats")

    assert ok[0] == "ok"
    assert outcome == "note"
    assert f"The infos differ {NEW}, from step 1 on: info['times']['of_step'] was " in text


def test_a_failure_of_the_second_time_is_a_problem():
    outcome, text = found(FailsTheSecondTime, "steps")[1]

    assert (outcome, text[: len("Step 10 ")]) == ("problem", "Step 10 ")
    assert f"{AGAIN}: it raised ValueError: worn out" in text


def test_a_seed_without_an_effect_is_a_note():
    class Constant(Sound):
        def observe(self):
            return np.zeros(2, np.float32)

    assert only(Constant, "seeding") == (
        "note",
        "Another seed gives the same first 50 steps with the same actions.",
    )


class ReusesItsArray(Sound):
    def observe(self):
        self.array = getattr(self, "array", np.zeros(2, np.float32))
        self.array[:] = super().observe()
        return self.array


class ReturnsViews(ReusesItsArray):
    def observe(self):
        return super().observe()[:]


class ReturnsOneConstant(Sound):
    constant = np.zeros(2, np.float32)

    def observe(self):
        return self.constant


class ReusesInDict(Sound):
    observation_space = gymnasium.spaces.Dict(a=gymnasium.spaces.Tuple([gymnasium.spaces.Box(0, 1, (2,))]))
    array = np.zeros(2, np.float32)

    def observe(self):
        self.array[:] = super().observe()
        return {"a": (self.array,)}


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (ReusesItsArray, "It changes observations that it has returned earlier."),
        (ReturnsViews, "It changes observations that it has returned earlier."),
        (ReusesInDict, "It changes observations that it has returned earlier."),
        (ReturnsOneConstant, "It returns the same array object several times."),
    ],
)
def test_arrays_that_change_after_they_were_returned_are_a_note(env, text):
    assert only(env, "arrays") == ("note", text)
    assert problems(env) == []


def test_a_close_that_raises_is_a_problem():
    class CannotClose(Sound):
        def close(self):
            raise OSError("busy")

    outcome, text = only(CannotClose, "close")

    assert outcome == "problem"
    assert "it raised OSError: busy" in text


class Growing(Environment):
    """An Environment that an agent never seen before joins in every third step."""

    def __init__(self):
        self.n_known = 1

    @property
    def behavior_specs(self):
        return {"walker": BehaviorSpec(ArraySpec((1,)), ArraySpec((), np.int64, 0, 3))}

    def reset(self, *, seeds, options):
        self.generator = np.random.default_rng(seeds[0])
        self.n_steps = 0
        return self.steps([0], 0.0)

    def step(self, actions):
        self.n_steps += 1
        if self.n_steps % 3:
            return self.steps([0], float(actions["walker"][0]))
        self.n_known += 1  # a new agent each time, and it acts too
        return self.steps([0, self.n_known], float(actions["walker"].sum()))

    def steps(self, ids, reward):
        n = len(ids)
        obs = self.generator.random((n, 1), np.float32)
        flags = (np.zeros(n, bool), np.zeros(n, bool))
        return {"walker": AgentSteps(np.array(ids), obs, np.full(n, reward, np.float32), *flags)}

    def close(self):
        pass


def test_agents_with_new_numbers_after_a_second_reset_are_no_difference():
    assert [outcome for outcome, _ in found(Growing, "repeats", n_steps=6)] == ["ok"]


class OfTexts(Sound):
    observation_space = gymnasium.spaces.Text(10)

    def observe(self):
        return "abc"[: self.np_random.integers(1, 4)]


def test_observations_that_are_objects_are_compared_too():
    numbers = itertools.count()

    class UnseededTexts(OfTexts):
        def observe(self):
            return str(next(numbers))

    assert [outcome for outcome, _ in found(OfTexts, "repeats")] == ["ok"]
    assert "at the reset: obs was '" in only(UnseededTexts, "repeats")[1]


class TwoBehaviors(Environment):
    """A runner that a chaser hunts; the chaser's rewards are drawn without the seed."""

    behavior_specs = {
        name: BehaviorSpec(ArraySpec((1,)), ArraySpec((), np.int64, 0, 3)) for name in ("runner", "chaser")
    }

    def reset(self, *, seeds, options):
        return self.steps(0.0)

    def step(self, actions):
        return self.steps(np.random.default_rng().random())

    def steps(self, reward):
        flag, obs = np.zeros(1, bool), np.zeros((1, 1), np.float32)
        return {
            name: AgentSteps(np.array([k]), obs, np.full(1, reward * k, np.float32), flag, flag)
            for k, name in enumerate(self.behavior_specs)
        }

    def close(self):
        pass


def test_findings_name_the_behavior_where_there_are_several():
    assert only(TwoBehaviors, "constructs", n_steps=3)[1].count("behavior ") == 2
    assert "from step 1 on: chaser: reward was 0." in only(TwoBehaviors, "repeats", n_steps=3)[1]


def test_an_environment_that_cannot_be_watched_says_so():
    outcome, text = only(LockedSound, "arrays")

    assert outcome == "note"
    assert "could not be seen" in text


class LockedSound(Sound):
    def __setattr__(self, name, value):
        if name in ("step", "reset"):
            raise AttributeError(name)
        super().__setattr__(name, value)


class Unseedable(dm_env.Environment):
    def observation_spec(self):
        return specs.BoundedArray((1,), np.float32, 0, 1)

    def action_spec(self):
        return specs.DiscreteArray(2)

    def reset(self):
        return dm_env.restart(np.zeros(1, np.float32))

    def step(self, action):
        return dm_env.termination(1.0, np.zeros(1, np.float32))


def test_an_environment_that_takes_no_seed_is_tried_without():
    findings = check_environment(Unseedable, n_steps=20)

    assert [finding.outcome for finding in findings if finding.question in ("reset", "steps", "episodes")] == ["ok"] * 3
    (seeding,) = [finding for finding in findings if finding.question == "seeding"]
    assert seeding.outcome == "note"
    assert "cannot be seeded" in seeding.text


class OnePerProcess(Sound):
    n_open = 0

    def __init__(self):
        if OnePerProcess.n_open:
            raise RuntimeError("one emulator per process")
        OnePerProcess.n_open += 1

    def close(self):
        OnePerProcess.n_open -= 1


class SeedsThemAll(Sound):
    """An environment that seeds and draws from a generator of its class."""

    def reset(self, *, seed=None, options=None):
        SeedsThemAll.shared = np.random.default_rng(seed)
        return super().reset(seed=seed)

    def observe(self):
        return self.shared.random(2, np.float32)


@pytest.mark.parametrize(
    ("env", "what"),
    [
        (OnePerProcess, "one raised RuntimeError: one emulator per process"),
        (SeedsThemAll, "the first returned something"),
    ],
)
def test_an_environment_of_which_a_process_can_hold_one_is_noted_with_what_to_set(env, what):
    (sharing,) = [finding for finding in check_environment(env, n_steps=60) if finding.question == "sharing"]

    assert sharing.outcome == "note"
    assert sharing.text.startswith(f"A process can hold one: with two in it, {what}")
    assert "n_workers = n_envs" in sharing.advice


def test_a_random_environment_does_not_count_as_disturbed_by_another():
    assert only(Unseeded, "sharing")[0] == "ok"


def test_two_are_not_tried_where_one_fails():
    assert found(RaisesInStep, "sharing") == []


class RoundsUp(Sound):
    """An environment whose observations are beyond their bound by rounding, each by another amount."""

    def observe(self):
        return np.float32(1) + self.np_random.random(2, np.float32) / 1000


def test_one_mistake_of_an_array_is_one_finding_wherever_it_is_seen():
    assert problems(RoundsUp, n_steps=60) == ["reset"]
    assert [question for question in ("steps", "episodes") if found(RoundsUp, question)] == []


class AnotherMistakeInStep(RoundsUp):
    def step(self, action):
        obs, *others = super().step(action)
        return (-obs, *others)


def test_another_mistake_of_the_same_array_is_another_finding():
    assert problems(AnotherMistakeInStep, n_steps=60) == ["reset", "steps"]


@pytest.mark.parametrize("broken", [RaisesAtReset, CannotRestart])
def test_advice_for_a_reset_does_not_speak_of_actions(broken):
    (problem,) = [finding for finding in check_environment(broken) if finding.outcome == "problem"]

    assert "action" not in problem.advice


def test_each_finding_is_reported_when_it_is_known():
    reported = []

    findings = check_environment(Sound, n_steps=60, on_finding=reported.append)

    assert sorted(reported, key=lambda finding: QUESTIONS.index(finding.question)) == findings
    assert [finding.question for finding in reported[:3]] == ["constructs", "reset", "steps"]


def test_a_factory_gets_its_context():
    def factory(context: EnvContext):
        assert context.env_id == 0
        assert context.seed is not None
        return Sound()

    assert problems(factory) == []


def test_an_environment_that_cannot_begin_without_a_seed_is_a_problem():
    class NeedsASeed(Sound):
        def reset(self, *, seed=None, options=None):
            if seed is not None:
                self.drawn = np.random.default_rng(seed)
            return super().reset(seed=int(self.drawn.integers(100)), options=options)

    ((outcome, text),) = [each for each in found(NeedsASeed, "reset") if each[0] == "problem"]
    assert outcome == "problem"
    assert "without a seed, in a new environment: it raised AttributeError" in text
