"""Steps of many agents as chained rows: nothing is mixed, nothing is invented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import ActionInfo, AgentSteps, ArraySpec, StepInfo, UsageError, WorkerDied
from envmanager.data.steps import Lost
from envmanager.training.algorithms.ppo import advantages
from envmanager.training.algorithms.store import NOWHERE, StepStore

DOCS = Path(__file__).parents[2] / "docs"
SPEC = ArraySpec((1,), np.float32)
NO_COLUMNS: dict[str, ArraySpec] = {}


def seen(
    agents: list[int],
    obs: list[float],
    *,
    reward: float = 0.0,
    terminated: Any = False,
    truncated: Any = False,
    **more: Any,
) -> dict[str, AgentSteps]:
    n = len(agents)
    flags = [np.broadcast_to(flag, n).copy() for flag in (terminated, truncated)]
    rewards = np.full(n, reward, np.float32)
    column = np.array(obs, np.float32)[:, None]
    return {"default": AgentSteps(np.array(agents), column, rewards, *flags, **more)}


class Worker:
    """Makes the StepInfos of one worker, one after the other."""

    def __init__(self, worker_id: int, agents: list[int]) -> None:
        self.worker_id, self.agents = worker_id, agents
        self.last: Any = None

    def reset(self, obs: list[float]) -> StepInfo:
        self.last = seen(self.agents, obs)
        return StepInfo(None, self.last, None, self.worker_id)

    def step(
        self, obs: list[float], *, lost: bool = False, lost_envs: Any = (), mark: int = 0, **more: Any
    ) -> StepInfo:
        previous, self.last, told = self.last, seen(self.agents, obs, **more), None
        if lost or lost_envs:
            cause = WorkerDied(
                worker_id=self.worker_id, env_ids=(0,), phase="step", exit="SIGKILL", output="", ticket=1
            )
            told = Lost(cause, 1, tuple(lost_envs) or (0,))
        n = len(previous["default"])
        actions = ActionInfo(np.zeros(n, np.int64), {"mark": np.full(n, mark)})
        taken = None if lost else {"default": actions}
        return StepInfo(previous, self.last, taken, self.worker_id, told)


def store(capacity: int = 100) -> StepStore:
    return StepStore(SPEC, {"mark": ArraySpec((), np.int64)}, capacity)


def chain(store: StepStore, row: int) -> list[float]:
    """The observations from a row on."""
    found = []
    while row != NOWHERE:
        found.append(float(store.obs[row % store.capacity, 0]))
        row = int(store.successor[row % store.capacity])
    return found


def test_rows_of_uneven_workers_are_chained_by_agent() -> None:
    steps, fast, slow = store(), Worker(0, [0]), Worker(1, [7])
    steps.add(fast.reset([0.0]), "default")
    steps.add(slow.reset([100.0]), "default")
    for n in (1.0, 2.0):
        steps.add(fast.step([n]), "default")
    steps.add(slow.step([101.0]), "default")
    steps.add(fast.step([3.0]), "default")
    assert chain(steps, 0) == [0, 1, 2, 3]
    assert chain(steps, 1) == [100, 101]
    assert steps.n_acted == 4


def test_a_row_has_the_action_taken_there_and_what_it_brought() -> None:
    steps, worker = store(), Worker(0, [3, 4])
    steps.add(worker.reset([0.0, 10.0]), "default")
    assert steps.add(worker.step([1.0, 11.0], mark=5, reward=2.0), "default").tolist() == [0, 1]
    assert steps.columns["mark"][:4].tolist() == [5, 5, 0, 0]
    assert steps.reward[:2].tolist() == [2.0, 2.0]
    assert steps.acted[:4].tolist() == [True, True, False, False]


def test_a_terminated_episode_ends_its_chain_and_a_truncated_one_ends_with_what_was_seen_last() -> None:
    steps, worker = store(), Worker(0, [0, 1])
    steps.add(worker.reset([0.0, 10.0]), "default")
    final = np.array([[9.0], [19.0]], np.float32)
    steps.add(worker.step([1.0, 11.0], terminated=[True, False], truncated=[False, True], final_obs=final), "default")
    assert steps.terminated[:2].tolist() == [True, False]
    assert chain(steps, 0) == [0.0]
    assert chain(steps, 1) == [10.0, 19.0]


def test_a_lost_step_is_no_step_and_its_observation_is_where_the_chain_ends() -> None:
    steps, worker = store(), Worker(0, [0])
    steps.add(worker.reset([0.0]), "default")
    steps.add(worker.step([1.0]), "default")
    assert not len(steps.add(worker.step([50.0], lost=True, truncated=True, final_obs=np.ones((1, 1))), "default"))
    steps.add(worker.step([51.0]), "default")
    assert chain(steps, 0) == [0.0, 1.0]
    assert chain(steps, 2) == [50.0, 51.0]
    assert steps.acted[:3].tolist() == [True, False, True]


def test_an_environment_that_is_lost_alone_ends_its_chain_and_not_those_of_others() -> None:
    steps, worker = store(), Worker(0, [0, 1 << 32])
    steps.add(worker.reset([0.0, 10.0]), "default")
    steps.add(worker.step([1.0, 11.0]), "default")
    final = np.array([[1.0]], np.float32)
    cut = worker.step([50.0, 12.0], lost_envs=[0], truncated=[True, False], final_obs=final)
    assert len(steps.add(cut, "default")) == 1
    steps.add(worker.step([51.0, 13.0]), "default")
    assert chain(steps, 0) == [0.0, 1.0]
    assert chain(steps, 1) == [10.0, 11.0, 12.0, 13.0]
    assert chain(steps, 4) == [50.0, 51.0]


def test_after_a_reset_of_the_environments_nothing_is_joined_to_what_was_before() -> None:
    steps, worker = store(), Worker(0, [0])
    steps.add(worker.reset([0.0]), "default")
    steps.add(worker.step([1.0]), "default")
    steps.abandon_all()
    steps.add(worker.reset([20.0]), "default")
    steps.add(worker.step([21.0]), "default")
    assert chain(steps, 0) == [0.0, 1.0]
    assert chain(steps, 2) == [20.0, 21.0]


def test_cleared_it_keeps_the_observations_that_are_about_to_be_acted_on() -> None:
    steps, worker = store(), Worker(0, [0])
    steps.add(worker.reset([0.0]), "default")
    steps.add(worker.step([1.0]), "default")
    steps.clear()
    assert len(steps) == 1
    (row,) = steps.add(worker.step([2.0], mark=8), "default").tolist()
    assert chain(steps, row) == [1.0, 2.0]
    assert steps.columns["mark"][row] == 8


def test_rows_that_were_written_over_are_not_joined_to() -> None:
    steps, fast, slow = store(capacity=6), Worker(0, [0]), Worker(1, [1])
    steps.add(slow.reset([100.0]), "default")
    steps.add(fast.reset([0.0]), "default")
    for n in range(1, 8):
        steps.add(fast.step([float(n)]), "default")
    assert not len(steps.add(slow.step([101.0]), "default")), "the row it belongs to is gone"
    assert chain(steps, steps.first) == [float(n) for n in range(3, 8)]
    steps.add(slow.step([102.0]), "default")
    assert chain(steps, steps.n_rows - 2) == [101.0, 102.0]


def test_agents_that_do_not_act_open_no_row_and_their_chain_goes_on_when_they_do() -> None:
    steps = store()
    first = seen([0, 1], [0.0, 10.0])
    second = seen([0, 1], [1.0, 11.0], acting=np.array([False, True]))
    third = seen([0, 1], [2.0, 12.0])
    steps.add(StepInfo(None, first, None, 0), "default")
    both = ActionInfo(np.zeros(2, np.int64), {"mark": np.array([1, 2])})
    steps.add(StepInfo(first, second, {"default": both}, 0), "default")
    one = ActionInfo(np.zeros(1, np.int64), {"mark": np.array([3])})
    steps.add(StepInfo(second, third, {"default": one}, 0), "default")
    assert chain(steps, 0) == [0.0, 2.0]
    assert chain(steps, 1) == [10.0, 11.0, 12.0]
    assert steps.columns["mark"][:3].tolist() == [1, 2, 3]


def test_an_agent_that_vanishes_leaves_only_what_it_saw() -> None:
    steps = store()
    first, second = seen([0, 1], [0.0, 10.0]), seen([1], [11.0])
    steps.add(StepInfo(None, first, None, 0), "default")
    both = ActionInfo(np.zeros(2, np.int64), {"mark": np.array([1, 2])})
    assert steps.add(StepInfo(first, second, {"default": both}, 0), "default").tolist() == [1]
    assert chain(steps, 0) == [0.0]
    assert not steps.acted[0]


def test_restored_it_holds_the_same_rows() -> None:
    steps, worker = store(capacity=6), Worker(0, [0])
    steps.add(worker.reset([0.0]), "default")
    for n in range(1, 9):
        steps.add(worker.step([float(n)], mark=n), "default")
    again = store(capacity=6)
    again.restore({name: np.array(array) for name, array in steps.state().items()})
    assert (again.first, again.n_rows, again.n_acted) == (steps.first, steps.n_rows, steps.n_acted)
    assert chain(again, again.first) == chain(steps, steps.first)


def plain_advantages(
    rewards: list[float], values: list[float], last_value: float, gamma: float, decay: float
) -> list[float]:
    """By the definition: a discounted sum of the errors of the values."""
    following = [*values[1:], last_value]
    errors = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * decay) ** k * error for k, error in enumerate(errors[i:])) for i in range(len(errors))]


def test_advantages_follow_each_chain_by_itself() -> None:
    # Agent A in rows 0, 2, 3 (3: only seen), agent B in rows 1, 4, 5 (5: terminated).
    value = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    reward = np.array([0.5, 1.5, 2.5, 99.0, 3.5, 4.5])
    acted = np.array([True, True, True, False, True, True])
    terminated = np.array([False] * 5 + [True])
    successor = np.array([2, 4, 3, NOWHERE, 5, NOWHERE])
    got = advantages(value, reward, terminated, acted, successor, gamma=0.9, gae_lambda=0.8)
    a = plain_advantages([0.5, 2.5], [1.0, 3.0], 4.0, 0.9, 0.8)
    b = plain_advantages([1.5, 3.5, 4.5], [2.0, 5.0, 6.0], 0.0, 0.9, 0.8)
    np.testing.assert_allclose(got[[0, 2]], a, rtol=1e-6)
    np.testing.assert_allclose(got[[1, 4, 5]], b, rtol=1e-6)
    assert got[3] == 0.0


def growing(capacity: int) -> StepStore:
    return StepStore(SPEC, {"mark": ArraySpec((), np.int64)}, capacity, grows=True)


def play(worker: Worker, into: list[StepStore], times: range) -> None:
    for time in times:
        info = worker.reset([float(time)] * 2) if worker.last is None else worker.step([float(time)] * 2, mark=time)
        for each in into:
            each.add(info, "default")


def assert_same_rows(one: StepStore, other: StepStore) -> None:
    rows = np.arange(one.first, one.n_rows)
    assert (one.first, one.n_rows, one.n_acted) == (other.first, other.n_rows, other.n_acted)
    a, b = one.places(rows), other.places(rows)
    for name in ("obs", "reward", "acted", "terminated", "successor"):
        np.testing.assert_array_equal(getattr(one, name)[a], getattr(other, name)[b], err_msg=name)
    acted = one.acted[a]
    np.testing.assert_array_equal(one.columns["mark"][a][acted], other.columns["mark"][b][acted])


def test_a_store_that_grows_holds_what_one_of_enough_room_does_whenever_it_is_cleared() -> None:
    small, large = growing(3), store(10_000)
    worker = Worker(0, [0, 1])
    for begin, end in ((0, 1), (1, 4), (4, 30), (30, 31), (31, 200)):
        play(worker, [small, large], range(begin, end))
        assert_same_rows(small, large)
        for each in (small, large):
            each.clear()
    assert small.capacity < 1000, "it grows no further than it must"


def test_a_store_that_has_grown_is_restored_as_it_was() -> None:
    grown, again = growing(3), growing(3)
    play(Worker(0, [0, 1]), [grown], range(50))
    grown.clear()
    play(Worker(1, [7, 8]), [grown], range(50))
    again.restore(grown.state())
    assert_same_rows(grown, again)


def test_a_store_that_shares_frames_does_not_grow() -> None:
    with pytest.raises(UsageError, match="not both"):
        StepStore(ArraySpec((4, 36, 36), np.uint8), {}, 10, share_frames=True, grows=True)


ONLY_THE_FIRST = np.array([True, False])


def in_turns() -> tuple[StepStore, Worker]:
    """Both agents have acted; then the second waits while the first acts."""
    steps, worker = store(), Worker(0, [0, 1])
    steps.add(worker.reset([0.0, 10.0]), "default")
    steps.add(worker.step([1.0, 11.0], reward=1.0, acting=ONLY_THE_FIRST), "default")
    return steps, worker


def test_what_comes_to_an_agent_in_anothers_turn_belongs_to_its_last_action() -> None:
    steps, worker = in_turns()
    steps.add(worker.step([2.0, 12.0], reward=[0.0, 5.0]), "default")
    assert steps.reward[:3].tolist() == [1.0, 6.0, 0.0]
    assert chain(steps, 1) == [10.0, 12.0]


def test_an_episode_that_ends_in_anothers_turn_ends_the_chain_of_who_waits() -> None:
    steps, worker = in_turns()
    final = np.array([[9.0], [19.0]], np.float32)
    steps.add(worker.step([2.0, 12.0], reward=[1.0, -1.0], terminated=True, final_obs=final), "default")
    assert steps.terminated[:2].tolist() == [False, True], "the first has gone on to row 2, which ends"
    assert steps.terminated[2]
    assert steps.reward[1] == 0.0
    assert chain(steps, 1) == [10.0]


def test_an_episode_that_is_cut_in_anothers_turn_ends_with_what_was_seen_last() -> None:
    steps, worker = in_turns()
    final = np.array([[9.0], [19.0]], np.float32)
    steps.add(worker.step([2.0, 12.0], truncated=True, final_obs=final), "default")
    assert chain(steps, 1) == [10.0, 19.0]


def test_a_step_lost_in_anothers_turn_cuts_the_chain_of_who_waits() -> None:
    steps, worker = in_turns()
    steps.add(worker.step([2.0, 12.0], lost=True, truncated=True, final_obs=np.ones((2, 1))), "default")
    assert chain(steps, 1) == [10.0]


def test_texts_are_refused_with_their_keys_and_the_page_that_says_what_to_do() -> None:
    observation = {"mission": ArraySpec(dtype=object), "place": SPEC, "more": (ArraySpec(dtype=object),)}
    with pytest.raises(UsageError, match=r"obs\['mission'\], obs\['more'\]\[0\]\.") as caught:
        StepStore(observation, NO_COLUMNS, 10)
    page, _, section = str(caught.value).partition("as docs/")[2].removesuffix(" shows.").partition("#")
    assert f"## {section.capitalize()}\n" in (DOCS / page).read_text()
