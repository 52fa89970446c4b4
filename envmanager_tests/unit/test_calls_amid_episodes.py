"""What ``call`` and ``set_attr`` did amid an episode: kept in its log, carried by tasks, repeated by the groups."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from pettingzoo.utils.env import ParallelEnv

from envmanager import Task, UsageError
from envmanager.adapters.choosing import build_group
from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import AgentSteps, Begin, Call
from envmanager.hosts.life import WorkerLife, WorkerPlan
from envmanager.keeping.log import EpisodeLog, Rounds
from envmanager.observe.events import EventLog
from envmanager.observe.timing import WorkerTimes
from envmanager.options import Timeouts
from envmanager.recording.codec import packed, unpacked

SPECS = {"default": BehaviorSpec(ArraySpec((), np.dtype(np.float64)), ArraySpec((), np.dtype(np.int64)))}


def set_level(value: int) -> Call:
    return Call(0, "set_attr", "level", (value,))


def push(x: float) -> Call:
    return Call(0, "call", "push", (x,))


def log_of(n_envs: int = 2, *, is_single: bool = True) -> EpisodeLog:
    return EpisodeLog(n_envs, SPECS, Rounds(), is_single=is_single)


def step(log: EpisodeLog, rows: list[int]) -> None:
    log.keep({"default": np.array(rows)}, {"default": np.array(rows)})


def ended(log: EpisodeLog, *rows: bool) -> None:
    n = len(rows)
    first = AgentSteps.first(agent_id=np.arange(n), obs=np.zeros(n))
    first.terminated = np.array(rows)
    log.ended(first, None)


@pytest.mark.parametrize("is_single", [True, False])
def test_a_call_comes_after_the_actions_that_its_environment_took_before(is_single: bool) -> None:
    log = log_of(is_single=is_single)
    for rows in ([0, 1], [0], [0, 1]):
        step(log, rows)
    log.note(0, [push(1)])
    log.note(1, [push(2)])
    step(log, [0, 1])
    assert [call.after for call in log.calls_of(0, 4, Begin(0, True))] == [3]
    assert [call.after for call in log.calls_of(1, 4, Begin(1, True))] == [2]


def test_a_call_while_a_step_is_in_flight_is_not_before_it() -> None:
    log = log_of()
    step(log, [0, 1])
    log.note(0, [push(1)])
    assert log.calls_of(0, 0, Begin(0, True)) == []
    assert log.calls_of(0, 1, Begin(0, True)) == [push(1)._replace(after=1)]


def test_actions_and_calls_with_which_an_episode_began_come_first() -> None:
    log, begun = log_of(), [push(7)._replace(after=2)]
    log.begin(0)
    log.note(0, begun, is_of_begin=True)
    step(log, [0, 1])
    log.note(0, [push(1)])
    begin = Begin(0, True, actions={"default": np.zeros(3)}, calls=begun)
    assert log.calls_of(0, 1, begin) == [push(7)._replace(after=2), push(1)._replace(after=4)]


def test_an_attribute_that_is_set_amid_an_episode_has_its_value_of_before_at_the_beginning() -> None:
    log = log_of()
    log.held[1]["level"] = 4
    for row in (0, 1):
        log.note(row, [set_level(5)])
    assert log.calls_of(0, 0, Begin(0, True)) == [Call(-1, "unset_attr", "level"), set_level(5)]
    assert log.calls_of(1, 0, Begin(1, True)) == [Call(-1, "set_attr", "level", (4,)), set_level(5)]


def test_calls_are_forgotten_with_their_episode_and_what_they_have_set_holds() -> None:
    log = log_of()
    log.note(0, [push(1), set_level(1)])
    log.note(1, [push(2)])
    step(log, [0, 1])
    log.note(0, [set_level(2)])  # the step in flight has ended the episode: it is of the next one
    ended(log, True, False)
    log.tidy()
    assert log.held == [{"level": 1}, {}]
    assert log.calls_of(0, 1, Begin(0, True)) == [Call(-1, "set_attr", "level", (1,)), set_level(2)]
    assert log.calls_of(1, 1, Begin(1, True)) == [push(2)]


def test_calls_of_an_episode_that_is_not_kept_take_no_memory() -> None:
    log = log_of()
    log.leave_out([0])
    for value in range(100):
        log.note(0, [set_level(value), push(value)])
        step(log, [0, 1])
    log.tidy()
    assert (log.calls, log.held[0]) == ([], {"level": 99})


def test_a_call_after_the_last_step_is_of_the_episode_that_has_begun_with_it() -> None:
    log = log_of()
    log.leave_out([0])
    step(log, [0, 1])
    log.note(0, [push(1)])
    log.tidy()
    ended(log, True, False)
    log.tidy()
    assert log.calls_of(0, 1, Begin(0, True)) == [push(1)]
    assert not log.unkept


def test_an_episode_that_began_with_the_last_step_is_not_kept_after_a_call_that_is_not_repeated() -> None:
    log = log_of()
    step(log, [0, 1])
    log.leave_out([0], is_called=True)
    ended(log, True, False)
    log.tidy()
    assert list(log.unkept) == [0]
    step(log, [0, 1])
    ended(log, True, False)
    log.tidy()
    assert not log.unkept


# Tasks.


def test_a_task_with_calls_of_plain_data_can_be_written_and_read() -> None:
    call = Call(2, "call", "push", ([1.0, {"a": np.arange(2)}],), {"hard": True})
    task = Task(seed=1, actions=[1, 2], calls=[Call(-1, "unset_attr", "level"), call])
    assert Task.from_dict(task.to_dict()) == pickle.loads(pickle.dumps(task)) == task
    assert type(task.to_dict()["calls"][0]) is list
    assert Task.from_dict({**task.to_dict(), "calls": [[0, "set_attr", "level", [3]]]}).calls == (set_level(3),)
    assert task != Task(seed=1, actions=[1, 2])


@pytest.mark.parametrize(
    "call", [Call(0, "call", len), Call(0, "set_attr", "level", (object(),))], ids=["a function", "an object"]
)
def test_a_task_whose_calls_are_no_plain_data_says_so(call: Call) -> None:
    with pytest.raises(UsageError, match="no plain data"):
        Task(calls=[call]).to_dict()


@pytest.mark.parametrize("calls", [[1], [()], [(0, "reset", "level")], [("a", "call", "push")]], ids=str)
def test_calls_of_another_form_are_refused(calls: Any) -> None:
    with pytest.raises(UsageError, match="call"):
        Task(calls=calls)


def test_a_begin_with_calls_can_be_recorded() -> None:
    begin = Begin(0, True, 1, None, actions={}, calls=[set_level(3)])
    assert unpacked(packed(begin)) == begin


# Groups.


class Noted(gymnasium.Env):  # type: ignore[misc]
    """An environment that observes its level at the reset, its level, and the sum of what was pushed."""

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(5)
    level = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._seen = np.array([self.level, self.level, 0.0])
        return self._seen, {}

    def step(self, action: Any) -> Any:
        self._seen[1] = self.level
        self._seen[2] = self._seen[2] * 10 + action
        return self._seen, 0.0, bool(action == 4), False, {}

    def push(self, x: float) -> None:
        self._seen[2] += x


class NotedTeam(ParallelEnv):  # type: ignore[misc]
    """Two agents, which both observe the same as one of Noted, of the sum of their actions."""

    metadata = {"name": "noted"}
    possible_agents = ["a_0", "a_1"]

    def __init__(self) -> None:
        self._env = Noted()

    def observation_space(self, agent: str) -> Any:
        return Noted.observation_space

    def action_space(self, agent: str) -> Any:
        return Noted.action_space

    @property
    def level(self) -> int:
        return self._env.level

    @level.setter
    def level(self, value: int) -> None:
        self._env.level = value

    def push(self, x: float) -> None:
        self._env.push(x)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        obs, _ = self._env.reset()
        return dict.fromkeys(self.agents, obs), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        obs, _, ends, _, _ = self._env.step(sum(actions.values()))
        acted, self.agents = self.agents, [] if ends else self.agents
        no = dict.fromkeys(acted, False)
        return (
            dict.fromkeys(acted, obs),
            dict.fromkeys(acted, 0.0),
            dict.fromkeys(acted, ends),
            no,
            {a: {} for a in acted},
        )

    def close(self) -> None:
        pass


@pytest.fixture(params=[1, 2], ids=["gymnasium", "pettingzoo"])
def n_agents(request: Any) -> Any:
    return request.param


def group_of(n_agents: int) -> Any:
    made: list[Any] = [Noted(), Noted()] if n_agents == 1 else [NotedTeam(), NotedTeam()]
    return build_group(made, [0, 1], infos=False, check_values=False)


def begin(actions: list[int], n_agents: int, *calls: Call) -> Begin:
    """Return a Begin in which the first agent takes ``actions``, and the others 0. ``calls``: as for one agent."""
    taken = np.array([[action, *[0] * (n_agents - 1)] for action in actions], np.int64).reshape(-1)
    own = [call._replace(after=call.after * n_agents if call.after > 0 else call.after) for call in calls]
    (name,) = group_of(n_agents).behavior_specs
    return Begin(0, True, 1, None, -1, {name: taken} if actions else {}, None, own)


def observed(group: Any, *begins: Begin) -> list[float]:
    (steps,) = group.reset_on_demand(begins).values()
    return steps.obs[0].tolist()  # type: ignore[no-any-return]


CALLS = (
    Call(-1, "unset_attr", "level"),
    push(0.5),
    set_level(3)._replace(after=1),
    push(0.25)._replace(after=2),
)


def test_calls_are_repeated_in_their_place(n_agents: int) -> None:
    group = group_of(n_agents)
    group.set_attr("level", [9], [0])
    seen = observed(group, begin([1, 2], n_agents, *CALLS))
    assert seen == [0.0, 3.0, (0.5 * 10 + 1) * 10 + 2]  # the last call came after the observation
    assert group.get_attr("level", [0, 1]) == [3, 0]


def test_calls_without_actions_are_repeated_after_the_reset(n_agents: int) -> None:
    group = group_of(n_agents)
    assert observed(group, begin([], n_agents, push(0.5), set_level(3))) == [0.0, 0.0, 0.0]
    (name,) = group.behavior_specs
    (steps,) = group.step({name: np.ones(n_agents, np.int64)}).values()
    assert steps.obs[0].tolist() == [0.0, 3.0, 5.0 + n_agents]


@pytest.mark.parametrize("how", ["ends", "raises", "at no step"])
def test_an_episode_that_does_not_come_there_leaves_the_attributes_as_they_were(n_agents: int, how: str) -> None:
    group, last = group_of(n_agents), Call(2, "call", "missing" if how == "raises" else "push", (1,))
    actions = [1, 4, 1] if how == "ends" else [1, 1, 1]
    last = last._replace(after=9) if how == "at no step" else last
    group.set_attr("level", [9], [0])
    assert not any(map(len, group.reset_on_demand([begin(actions, n_agents, *CALLS[:3], last)]).values()))
    ((_, _, error),) = group.not_begun.values()
    assert (error is None) == (how == "ends")
    assert group.get_attr("level", [0]) == [9]


def test_an_attribute_that_was_missing_is_so_again_at_a_beginning() -> None:
    group = group_of(1)
    group.set_attr("extra", [1], [0])
    observed(group, begin([1], 1, Call(-1, "unset_attr", "extra")))
    with pytest.raises(AttributeError):
        group.get_attr("extra", [0])


# Deadlines.


class Alone(WorkerLife):
    """A worker of which only the deadlines are asked."""

    def send(self, name: str, payload: Any = None) -> None:
        raise NotImplementedError

    kill = ask_to_close = send  # type: ignore[assignment]


def repeating_s(limits: Timeouts, *begins: Begin) -> float:
    plan = WorkerPlan(worker_id=0, env_ids=(0,), generation=1, timeouts=limits)
    return Alone(plan, EventLog([(0,)]), WorkerTimes()).repeating_s(list(begins))


def test_a_repetition_may_take_longer_for_each_action_and_call() -> None:
    limits = Timeouts(step_s=2, call_s=10)
    assert repeating_s(limits, begin([1, 2], 1, *CALLS), begin([1], 1)) == 3 * 2 + 4 * 10


def test_restore_s_is_the_most_that_a_repetition_may_take() -> None:
    limits = Timeouts(step_s=2, call_s=10, restore_s=5)
    assert repeating_s(limits, begin([1, 2], 1, *CALLS)) == 5
    assert repeating_s(limits, begin([1], 1)) == 2


def test_what_begins_without_actions_takes_no_longer_though_steps_have_no_limit() -> None:
    assert repeating_s(Timeouts(step_s=float("inf")), Begin(0, True, 1)) == 0.0
    assert repeating_s(Timeouts(step_s=float("inf"), restore_s=3), begin([1], 1)) == 3
