"""A manager that goes on from the state of another: each run is compared with the same run in one manager."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    EnvManager,
    RestartPolicy,
    SimpleEnvManager,
    StepInfo,
    SubprocessEnvManager,
    Task,
    UsageError,
    Wait,
)
from envmanager.keeping.state import packed, unpacked
from envmanager.observe import events
from envmanager_tests.process.test_kept_episodes import Chain, Make, Team

SUITE = "core"

KEPT = RestartPolicy(max_restarts=1000, backoff_s=0, keep_episodes=True)
N_ENVS = 6


class ByObservation:
    """Actions that depend on the observation alone."""

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo((np.abs(steps.obs.sum(1)) * 7).astype(np.int64) % 3)


@attrs.define
class Stream:
    """A digest of all rows of StepInfos, by environment, in their order."""

    hashes: dict[int, Any] = attrs.field(factory=dict)

    def add(self, infos: Sequence[StepInfo]) -> None:
        for info in infos:
            for name, steps in sorted(info.current.items()):
                for row, agent_id in enumerate(steps.agent_id.tolist()):
                    one = steps.take(np.array([row]))
                    parts = [name.encode(), one.agent_id, one.obs, one.reward, one.terminated, one.truncated]
                    own = self.hashes.setdefault(agent_id >> 32, hashlib.sha256())
                    for part in parts if one.final_obs is None else [*parts, one.final_obs]:
                        own.update(bytes(part) if isinstance(part, bytes) else part.tobytes())

    @property
    def digests(self) -> dict[int, str]:
        return {env_id: own.hexdigest() for env_id, own in sorted(self.hashes.items())}


def through_a_file(state: Any) -> Any:
    """Return a state as it comes out of a file of another process."""
    arrays: dict[str, np.ndarray] = {}
    facts = packed(state, arrays)
    return unpacked(*pickle.loads(pickle.dumps((facts, arrays))))


def played(
    make: Callable[[], EnvManager],
    moves: Sequence[int] = (),
    *,
    n_steps: int = 60,
    tasks: Callable[[], Any] = lambda: None,
    then: Callable[[], EnvManager] | None = None,
) -> tuple[dict[int, str], EnvManager]:
    """Play, with another manager after each of the steps ``moves``, and return the digests and the last manager."""
    manager, stream = make(), Stream()
    manager.set_policy("default", ByObservation())
    stream.add(manager.reset(tasks=tasks()))
    for number in range(n_steps):
        infos = manager.step()
        stream.add(infos)
        if number in moves:
            state = through_a_file(manager.state())
            manager.close()
            manager = (then or make)()
            manager.set_policy("default", ByObservation())
            stood = manager.reset(state=state, tasks=tasks())
            by_worker = {info.worker_id: info for info in infos}
            if manager.n_workers == len(state["workers"]):
                for info in stood:
                    assert_equal_rows(info, by_worker.get(info.worker_id))
    return stream.digests, manager


def assert_equal_rows(one: StepInfo, other: StepInfo | None) -> None:
    if other is None:
        return
    assert one.current.keys() == other.current.keys()
    for name, steps in one.current.items():
        assert np.array_equal(steps.obs, other.current[name].obs)
        assert np.array_equal(steps.reward, other.current[name].reward)
        assert np.array_equal(steps.ended, other.current[name].ended)


def simple(**options: Any) -> Callable[[], EnvManager]:
    return lambda: SimpleEnvManager(
        Make(), **{"n_envs": N_ENVS, "wait": Wait.all(), "seed": 5, "restarts": KEPT, **options}
    )


def processes(n_workers: int, env: Any = None, **options: Any) -> Callable[[], EnvManager]:
    more: Any = {"n_envs": N_ENVS, "n_workers": n_workers, "wait": Wait.all(), "seed": 5, "restarts": KEPT, **options}
    return lambda: SubprocessEnvManager(env or Make(), **more)


def test_the_steps_of_managers_one_after_the_other_are_those_of_one() -> None:
    one, manager = played(simple())
    manager.close()

    several, last = played(simple(), [0, 13, 14, 40])

    assert several == one
    assert last.stats().env_steps == 60 * N_ENVS
    assert last.stats().episodes_diverged == 0
    last.close()


def test_other_workers_may_go_on() -> None:
    one, manager = played(simple())
    manager.close()

    several, last = played(processes(3), [11], then=processes(2))

    assert several == one
    last.close()


@pytest.mark.parametrize("n_workers", [1, 2])
def test_agents_that_come_and_go_are_the_same(n_workers: int) -> None:
    one, manager = played(processes(n_workers, Team))
    manager.close()

    several, last = played(processes(n_workers, Team), [7, 30])

    assert several == one
    last.close()


def test_a_list_of_tasks_goes_on_at_its_place_with_its_results() -> None:
    tasks = [Task(seed=number, id=f"t{number}") for number in range(20)]

    def results(manager: EnvManager) -> list[Any]:
        told = [(each.index, each.task.id, each.env_id, each.total, each.length) for each in manager.tasks.results]
        manager.close()
        return told

    one, manager = played(simple(), tasks=lambda: tasks)
    of_one = results(manager)
    several, last = played(simple(), [3, 20, 35], tasks=lambda: tasks)

    assert several == one
    assert results(last) == of_one


class Counting:
    """A source of tasks with a place of its own."""

    def __init__(self) -> None:
        self.n = self.n_ended = 0

    def next_task(self, env_id: int) -> Task:
        self.n += 1
        return Task(seed=self.n)

    def ended(self, result: Any) -> None:
        self.n_ended += 1

    def state(self) -> list[int]:
        return [self.n, self.n_ended]

    def restore(self, state: list[int]) -> None:
        self.n, self.n_ended = state


@pytest.mark.parametrize("make", [simple(), processes(2)])
def test_a_source_of_tasks_is_told_where_it_stood(make: Callable[[], EnvManager]) -> None:
    one, manager = played(make, tasks=Counting)
    manager.close()
    several, last = played(make, [3, 20, 35], tasks=Counting)

    assert several == one
    last.close()


def test_an_iterator_of_tasks_has_no_state() -> None:
    with simple()() as manager:
        manager.set_policy("default", ByObservation())
        manager.reset(tasks=(Task(seed=number) for number in range(100)))

        with pytest.raises(UsageError, match="pass a list"):
            manager.state()


def test_steps_in_flight_are_sent_again() -> None:
    def each_stream(moves: Sequence[int]) -> dict[int, list[str]]:
        """Return the rows of each environment, however the workers respond."""
        manager, rows = processes(3, wait="any")(), dict[int, list[str]]()
        manager.set_policy("default", ByObservation())
        infos = manager.reset()
        for number in range(100):
            infos = manager.step()
            for info in infos:
                steps = info.current["default"]
                assert info.actions is not None
                for row, env_id in enumerate(steps.env_id.tolist()):
                    taken = info.actions["default"].action[row]
                    rows.setdefault(env_id, []).append(f"{taken} {steps.obs[row]} {steps.reward[row]}")
            if number in moves:
                state = through_a_file(manager.state())
                manager.close()
                manager = processes(3, wait="any")()
                manager.set_policy("default", ByObservation())
                manager.reset(state=state)
        manager.close()
        return rows

    undisturbed, moved = each_stream([]), each_stream([5, 30, 31])

    for env_id, rows in undisturbed.items():
        n = min(len(rows), len(moved[env_id]))
        assert n > 5
        assert moved[env_id][:n] == rows[:n]


def test_recv_gives_the_rows_at_which_the_trainer_stood() -> None:
    def rows(moves: Sequence[int]) -> tuple[list[Any], Any]:
        manager, seen = simple()(), []
        totals = manager.episodes
        manager.reset()
        batch = manager.recv()
        for number in range(60):
            manager.send((np.abs(batch.obs.sum(1)) * 7).astype(np.int64) % 3, batch.env_ids)
            batch = manager.recv()
            seen.append((batch.obs.tolist(), batch.reward.tolist(), batch.terminated.tolist()))
            if number in moves:
                state, before = through_a_file(manager.state()), batch
                manager.close()
                manager = simple()()
                manager.reset(state=state)
                batch, totals = manager.recv(), manager.episodes
                assert np.array_equal(batch.obs, before.obs)
                assert not batch.first.any()
        recent = [(each.agent_id, each.total, each.length) for each in totals.recent]
        counted = totals.count, totals.env_steps, recent
        manager.close()
        return seen, counted

    assert rows([4, 30, 31]) == rows([])


def test_what_stands_elsewhere_is_lost_with_the_next_step_and_begins_anew() -> None:
    with processes(N_ENVS)() as manager:
        manager.set_policy("default", ByObservation())
        manager.reset()
        for _ in range(5):
            manager.step()
        state = manager.state()
    state["rows"]["default"]["obs"][2] += 1.0
    with processes(N_ENVS)() as other:
        other.set_policy("default", ByObservation())
        stood = other.reset(state=state)
        diverged = [event for event in other.events if isinstance(event, events.EpisodesDiverged)]
        lost = [info for info in other.step() if info.lost is not None]

        assert len(stood) == N_ENVS
        assert [event.env_id for event in diverged] == [2]
        assert [info.worker_id for info in lost] == [2]
        assert other.step()


def test_attributes_that_were_set_are_set_again() -> None:
    with simple()() as manager:
        manager.set_policy("default", ByObservation())
        manager.set_attr("level", list(range(N_ENVS)))
        manager.reset()
        for _ in range(5):
            manager.step()
        state = through_a_file(manager.state())
        further = [info.current["default"].obs.tolist() for info in manager.step()]
    with processes(2)() as other:
        other.set_policy("default", ByObservation())
        other.reset(state=state)

        assert other.get_attr("level") == list(range(N_ENVS))
        infos = sorted(other.step(), key=lambda info: info.worker_id)
        assert [row for info in infos for row in info.current["default"].obs.tolist()] == [
            row for rows in further for row in rows
        ]
        assert other.stats().episodes_diverged == 0


class Seeded(Chain):
    """A chain whose numbers depend on the seed of its factory too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.level = seed % 7


def of_context(context: Any) -> Seeded:
    return Seeded(context.seed)


def test_an_environment_is_made_again_with_the_seed_that_its_factory_had() -> None:
    restarts = attrs.evolve(KEPT, recycle_after_steps=9)
    one, manager = played(processes(2, of_context, restarts=restarts))
    manager.close()

    several, last = played(processes(2, of_context, restarts=restarts), [12, 33])

    assert several == one
    assert last.stats().episodes_diverged == 0
    last.close()


def test_a_state_needs_kept_actions_and_a_reset_and_is_taken_between_calls(tmp_path: Path) -> None:
    with simple(restarts=None)() as manager, pytest.raises(UsageError, match="keep_episodes"):
        manager.state()
    with simple()() as manager:
        with pytest.raises(UsageError, match="reset"):
            manager.state()

        class Asks:
            def get_action(self, steps: AgentSteps) -> ActionInfo:
                manager.state()
                raise AssertionError

        manager.set_policy("default", Asks())
        manager.reset()
        with pytest.raises(UsageError, match="inside step"):
            manager.step()
        state = manager.state()
        with pytest.raises(UsageError, match="no other argument"):
            manager.reset(seed=1, state=state)
        with pytest.raises(UsageError, match="begun by"):
            manager.reset(state=state, tasks=[1, 2])
    with simple(n_envs=2)() as other, pytest.raises(UsageError, match="6 environments"):
        other.reset(state=state)
    with simple(restarts=None)() as other, pytest.raises(UsageError, match="keep_episodes"):
        other.reset(state=state)
    with simple()() as other, pytest.raises(UsageError, match="this version"):
        other.reset(state={"version": 0})


@pytest.mark.parametrize("n_calls", [1, 2])
def test_what_was_called_amid_an_episode_is_repeated_in_the_manager_that_goes_on(n_calls: int) -> None:
    def rows(*, moves: bool) -> dict[int, str]:
        manager, stream = simple()(), Stream()
        manager.set_policy("default", ByObservation())
        stream.add(manager.reset())
        for number in range(40):
            stream.add(manager.step())
            if number in range(3, 3 + n_calls) or number == 9:
                manager.set_attr("level", number)
            if number in (5, 10) and moves:
                state = through_a_file(manager.state())
                manager.close()
                manager = simple()()
                manager.set_policy("default", ByObservation())
                manager.reset(state=state)
        assert manager.stats().episodes_diverged == 0
        manager.close()
        return stream.digests

    assert rows(moves=True) == rows(moves=False)
