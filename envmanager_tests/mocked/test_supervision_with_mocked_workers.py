"""Supervision without a process: a scripted step queue says who failed, and fakes take the place of those that did."""

from __future__ import annotations

import queue
from collections import Counter
from typing import Any
from unittest import mock

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_mock import MockerFixture

from envmanager import (
    ActionInfo,
    AgentSteps,
    BadAction,
    EnvironmentResponse,
    ResetConfig,
    RestartPolicy,
    RestartsExhausted,
    StepInfo,
    SubprocessEnvManager,
    UsageError,
    Wait,
    WorkerDied,
    derive_seed,
)
from envmanager.data.seeding import derive_seeds, reseeded
from envmanager.env_manager import EnvWorker
from envmanager.observe import events
from envmanager.testing import EchoEnvironment, FakeWorker
from envmanager.testing.fault_checks import CheckedTrainer

AT_ONCE = RestartPolicy(backoff_s=0.0)


def never_called() -> None:
    raise AssertionError("the trainer's process made an environment")


def died(worker_id: int, exit: str = "SIGSEGV") -> WorkerDied:
    return WorkerDied(worker_id=worker_id, env_ids=[worker_id], phase="step", exit=exit)


def steps_of(worker_id: int, says: float) -> dict[str, AgentSteps]:
    flags = np.zeros(1, np.bool_)
    return {
        "default": AgentSteps(np.array([worker_id << 32]), np.full((1, 3), says), np.zeros(1, np.float32), flags, flags)
    }


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


class Scripted:
    """A manager of autospecced workers; the n-th process of worker k begins at ``100 * k + n``."""

    def __init__(self, mocker: MockerFixture, n_envs: int = 2, **options: Any) -> None:
        self.made: Counter[int] = Counter()
        self._mocker = mocker
        self.create_worker = mocker.patch.object(SubprocessEnvManager, "create_worker", side_effect=self._make)
        self.manager = SubprocessEnvManager(never_called, n_envs, **{"restarts": AT_ONCE, **options})
        self.queue: queue.Queue[EnvironmentResponse] = queue.Queue()
        self.manager.step_queue = self.queue
        self.manager.set_policy("default", Zeros())

    def _make(self, worker_id: int, step_queue: Any, env_factory: Any) -> Any:
        fake = self._mocker.create_autospec(EnvWorker, instance=True)
        fake.worker_id = worker_id
        fake.recv.return_value = EnvironmentResponse(
            "reset", worker_id, steps_of(worker_id, 100 * worker_id + self.made[worker_id])
        )
        self.made[worker_id] += 1
        return fake

    def answer(self, *worker_ids: int) -> None:
        for worker_id in worker_ids:
            self.queue.put(EnvironmentResponse("step", worker_id, steps_of(worker_id, -1)))

    def fail(self, worker_id: int, error: Exception | None = None) -> None:
        self.queue.put(EnvironmentResponse("failed", worker_id, died(worker_id) if error is None else error))

    def step(self) -> dict[int, StepInfo]:
        """Everything in flight, by worker."""
        infos = self.manager.step(Wait.all())
        assert len({info.worker_id for info in infos}) == len(infos)
        return {info.worker_id: info for info in infos}

    def commands(self, worker_id: int) -> list[str]:
        """What the worker that now has this number was asked for."""
        return [str(call.args[0]) for call in self.manager.env_workers[worker_id].send.call_args_list]


@pytest.fixture
def scripted(mocker: MockerFixture) -> Any:
    made: list[Scripted] = []

    def make(**options: Any) -> Scripted:
        made.append(Scripted(mocker, **options))
        return made[-1]

    yield make
    for each in made:
        each.manager.close()


# Who is made in its place.


def test_a_failed_worker_is_created_again_with_the_same_three_arguments(scripted: Any, mocker: MockerFixture) -> None:
    script = scripted()
    script.manager.reset()
    script.create_worker.reset_mock()
    script.fail(1)
    script.answer(0)
    script.manager.step()

    assert script.create_worker.call_args_list == [mocker.call(1, script.queue, never_called)]


def test_the_new_worker_is_reset_and_takes_the_place_of_the_old_one(scripted: Any) -> None:
    script = scripted()
    script.manager.reset({"options": {"level": 2}})
    old = script.manager.env_workers[1]
    script.fail(1)
    script.answer(0)
    script.manager.step()
    new = script.manager.env_workers[1]

    assert new is not old
    new.send.assert_called_once_with("reset", ResetConfig(options={"level": 2}, generation=1))
    new.recv.assert_called_once_with()


def test_what_was_cut_arrives_as_one_lost_step_that_joins_on_to_the_last_one(scripted: Any) -> None:
    script = scripted()
    before = script.manager.reset()[1]
    error = died(1)
    script.fail(1, error)
    script.answer(0)
    infos = script.step()
    lost = infos[1]

    assert (sorted(infos), infos[0].lost) == ([0, 1], None)
    assert (lost.actions, len(lost.transitions().reward)) == (None, 0)
    assert (lost.lost.cause, lost.lost.generation) == (error, 1)
    assert lost.previous is before.current
    now = lost.current["default"]
    assert now.final_obs.tolist() == [[100.0] * 3], "what was handed out last"
    assert now.obs.tolist() == [[101.0] * 3], "where the new worker begins"
    assert (now.truncated.tolist(), now.terminated.tolist(), now.reward.tolist()) == ([True], [False], [0.0])
    script.answer(0, 1)
    assert script.step()[1].previous is lost.current


def test_the_trainer_goes_on_with_the_new_worker(scripted: Any) -> None:
    script = scripted()
    script.manager.reset()
    script.fail(1)
    script.answer(0)
    lost = script.step()[1]
    script.answer(0, 1)
    infos = script.step()

    assert [infos[worker_id].lost for worker_id in (0, 1)] == [None, None]
    assert infos[1].previous is lost.current
    assert infos[1].actions is not None
    assert script.commands(1) == ["reset", "step"]
    stats = script.manager.stats()
    assert [(worker.generation, worker.restarts, worker.steps) for worker in stats.workers] == [(0, 0, 2), (1, 1, 1)]
    assert (stats.restarts, stats.steps_lost) == (1, 1)


def test_a_step_that_was_answered_before_the_death_comes_first(scripted: Any) -> None:
    script = scripted()
    script.manager.reset()
    script.answer(1)
    script.fail(1)
    script.answer(0)
    first = script.manager.step(Wait.all())
    script.answer(0)
    second = script.manager.step(Wait.all())

    assert [(info.worker_id, info.lost is not None) for info in first] == [(1, False), (0, False)]
    assert [(info.worker_id, info.lost is not None) for info in second] == [(1, True), (0, False)]
    assert script.manager.stats().steps_lost == 0


def test_the_new_worker_may_fail_in_its_first_reset(scripted: Any, mocker: MockerFixture) -> None:
    script = scripted()
    script.manager.reset()
    first, second = died(1, "SIGSEGV"), died(1, "EXIT(3)")
    made = script.create_worker.side_effect

    def fails_once(worker_id: int, *rest: Any) -> Any:
        fake = made(worker_id, *rest)
        if script.made[1] == 2:
            fake.recv.return_value = EnvironmentResponse("failed", 1, second)
        return fake

    script.create_worker.side_effect = fails_once
    script.fail(1, first)
    script.answer(0)
    lost = script.step()[1]

    assert (lost.lost.cause, lost.lost.generation) == (first, 2)
    assert script.manager.stats().restarts == 2


def test_a_worker_that_cannot_be_created_is_tried_again(scripted: Any, mocker: MockerFixture) -> None:
    script = scripted()
    script.manager.reset()
    made = script.create_worker.side_effect
    script.create_worker.reset_mock()
    script.create_worker.side_effect = [OSError(11, "no more processes"), made(1, None, None)]
    script.fail(1)
    script.answer(0)
    lost = script.step()[1]

    assert lost.lost.generation == 2
    assert script.create_worker.call_args_list == [mocker.call(1, script.queue, never_called)] * 2


def test_a_delayed_replacement_is_created_when_it_is_due_and_nobody_waits_for_it(
    scripted: Any, mocker: MockerFixture
) -> None:
    now = mocker.patch("envmanager.kernel.host.WorkerHost.now", return_value=1000.0)
    script = scripted(restarts=RestartPolicy(backoff_s=10.0))
    script.manager.reset()
    script.fail(1)
    script.answer(0)
    assert len(script.step()) == 2
    script.fail(1)
    for _ in range(5):
        script.answer(0)
        assert [info.worker_id for info in script.manager.step()] == [0]
    assert script.made[1] == 2, "the second replacement is not due"
    now.return_value += 15.0  # ten seconds, and half of it for the jitter
    script.answer(0)

    assert script.step()[1].lost.generation == 2
    assert script.made[1] == 3


# What it is reset with.


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, ResetConfig()),
        ({"seed": 7}, ResetConfig(seed=7)),
        ({"seed": [7, 8]}, ResetConfig(seed=[derive_seed(7, 0, 1), derive_seed(8, 1, 1)])),
        ({"seed": [None, 8], "options": {"a": 1}}, ResetConfig(seed=[None, derive_seed(8, 1, 1)], options={"a": 1})),
    ],
    ids=["nothing", "a number", "a list", "a list with a hole"],
)
def test_a_replacement_is_reset_as_the_last_reset_asked_with_seeds_of_its_own(
    scripted: Any, config: Any, expected: ResetConfig
) -> None:
    script = scripted()
    script.manager.reset({"seed": 1, "options": {"earlier": True}} if config else None)
    script.manager.reset(config)
    script.fail(1)
    script.answer(0)
    script.manager.step(Wait.all())

    script.manager.env_workers[1].send.assert_called_once_with("reset", attrs.evolve(expected, generation=1))


def test_a_reset_without_a_seed_keeps_the_seed_for_replacements(scripted: Any) -> None:
    script = scripted(seed=5)
    script.manager.reset()
    script.manager.reset()
    script.fail(1)
    script.answer(0)
    script.manager.step(Wait.all())

    script.manager.env_workers[1].send.assert_called_once_with("reset", ResetConfig(seed=5, generation=1))


seeds = st.integers(0, 2**63)


@given(st.none() | seeds, st.integers(0, 5))
def test_one_seed_stays_as_each_generation_derives_its_own(seed: int | None, generation: int) -> None:
    assert reseeded(seed, generation) == seed


@given(st.lists(st.none() | seeds, min_size=1, max_size=6), st.integers(1, 50))
def test_of_a_list_every_seed_becomes_another_and_a_hole_stays_a_hole(own: list[int | None], generation: int) -> None:
    again = reseeded(own, generation)

    assert isinstance(again, list)
    assert [seed is None for seed in again] == [seed is None for seed in own]
    assert again == reseeded(list(own), generation), "the same again"
    assert all(seed is None or (seed != before and 0 <= seed < 2**31) for seed, before in zip(again, own, strict=True))


def test_no_two_generations_or_environments_of_a_list_share_a_seed() -> None:
    drawn = [seed for generation in range(1, 30) for seed in reseeded([4] * 30, generation)]  # type: ignore[union-attr]

    assert len(set(drawn)) == len(drawn)


def test_a_replacement_plays_with_the_seeds_that_one_number_gives_its_generation() -> None:
    first, second = (derive_seeds(reseeded(7, generation), [0, 1, 2], generation) for generation in (0, 1))

    assert not set(first) & set(second)


# When it is enough.


def test_past_the_budget_the_first_and_the_last_failure_are_raised_once(scripted: Any) -> None:
    script = scripted(restarts=RestartPolicy(max_restarts=2, backoff_s=0.0))
    script.manager.reset()
    errors = [died(1, f"EXIT({code})") for code in (1, 2, 3)]
    for error in errors[:2]:
        script.fail(1, error)
        script.answer(0)
        assert len(script.manager.step(Wait.all())) == 2
    script.fail(1, errors[2])
    script.answer(0)
    with pytest.raises(RestartsExhausted) as raised:
        script.manager.step(Wait.all())

    assert (raised.value.first, raised.value.last) == (errors[0], errors[2])
    assert [info.worker_id for info in script.manager.step(Wait.all())] == [0]
    assert [(worker.failed, worker.dropped) for worker in script.manager.stats().workers] == [
        (False, False),
        (True, False),
    ]
    assert script.made[1] == 3


def test_a_worker_is_dropped_and_the_others_go_on(scripted: Any) -> None:
    script = scripted(n_envs=3, restarts=RestartPolicy(max_restarts=0, then="drop"))
    script.manager.reset()
    script.fail(1)
    script.answer(0, 2)
    assert [info.worker_id for info in script.manager.step(Wait.all())] == [0, 2]
    dropped = script.manager.env_workers[1]
    script.answer(0, 2)
    assert [info.worker_id for info in script.manager.step(Wait.all())] == [0, 2]
    assert [info.worker_id for info in script.manager.reset()] == [0, 2]

    assert [call.args[0] for call in dropped.send.call_args_list] == ["reset", "step"], "left alone for good"
    assert [worker.dropped for worker in script.manager.stats().workers] == [False, True, False]
    assert script.manager.events.count(events.Dropped) == 1
    assert script.made == {0: 1, 1: 1, 2: 1}


def test_step_goes_on_when_the_worker_that_held_the_others_back_is_dropped(scripted: Any) -> None:
    script = scripted(restarts=RestartPolicy(max_restarts=0, then="drop"), wait=Wait(max_lead=1))
    script.manager.reset()
    script.answer(0)
    assert [info.worker_id for info in script.manager.step()] == [0]
    script.fail(1)
    assert script.manager.step() == []
    script.answer(0)
    assert [info.worker_id for info in script.manager.step()] == [0]


def test_when_every_worker_is_dropped_the_last_failure_is_raised_and_reset_raises_too(scripted: Any) -> None:
    script = scripted(restarts=RestartPolicy(max_restarts=0, then="drop"))
    script.manager.reset()
    script.fail(0)
    script.fail(1)
    with pytest.raises(WorkerDied) as raised:
        script.manager.step(Wait.all())
    assert raised.value.worker_id == 1
    with pytest.raises(UsageError, match="every worker has failed"):
        script.manager.step()
    with pytest.raises(WorkerDied):
        script.manager.reset()


# The policy outside.


def test_the_user_may_act_once_on_what_a_dead_worker_showed_last(scripted: Any) -> None:
    script = scripted()
    script.manager.reset()
    script.manager.recv(Wait.all())
    script.manager.send(np.zeros((1, 3)), [0])
    script.answer(0)
    script.fail(1)
    assert script.manager.recv(Wait(max_ready=1)).env_ids.tolist() == [0], "the user does not know yet"
    script.manager.send(np.ones((1, 3)), [1])
    batch = script.manager.recv(Wait.all())

    assert (batch.env_ids.tolist(), batch.lost.tolist()) == ([1], [True])
    assert (batch.obs.tolist(), batch.final_obs.tolist()) == ([[101.0] * 3], [[100.0] * 3])
    assert (batch.truncated.tolist(), batch.terminated.tolist(), batch.reward.tolist()) == ([True], [False], [0.0])
    assert script.manager.stats().steps_lost == 1
    assert script.commands(1) == ["reset"], "the action was not meant for the new worker"
    script.manager.send(np.ones((1, 3)), [1])
    assert script.commands(1) == ["reset", "step"]


def test_a_second_action_for_a_worker_that_had_died_is_refused(scripted: Any) -> None:
    script = scripted()
    script.manager.reset()
    script.manager.recv(Wait.all())
    script.manager.send(np.zeros((1, 3)), [0])
    script.answer(0)
    script.fail(1)
    script.manager.recv(Wait(max_ready=1))
    script.manager.send(np.ones((1, 3)), [1])
    with pytest.raises(BadAction, match="waiting"):
        script.manager.send(np.ones((1, 3)), [1])

    assert script.manager.stats().steps_lost == 1


def test_an_action_in_flight_when_its_worker_dies_is_lost(scripted: Any) -> None:
    script = scripted()
    script.manager.reset()
    script.manager.recv(Wait.all())
    script.manager.send(np.zeros((2, 3)), [0, 1])
    script.answer(0)
    script.fail(1)
    batch = script.manager.recv(Wait.all())

    assert dict(zip(batch.env_ids.tolist(), batch.lost.tolist(), strict=True)) == {0: False, 1: True}
    stats = script.manager.stats()
    assert (stats.steps, stats.steps_lost, stats.restarts) == (1, 1, 1)


def test_an_action_for_a_step_that_was_answered_before_the_death_is_dropped(scripted: Any) -> None:
    script = scripted(n_envs=1)
    script.manager.reset()
    script.manager.recv()
    script.manager.send(np.zeros((1, 3)), [0])
    script.answer(0)
    script.fail(0)
    assert script.manager.recv().lost.tolist() == [False]
    script.manager.send(np.zeros((1, 3)), [0])
    batch = script.manager.recv()

    assert (batch.lost.tolist(), batch.final_obs.tolist()) == ([True], [[-1.0] * 3])
    assert script.manager.stats().steps_lost == 1


def test_who_sends_to_a_worker_that_was_given_up_gets_its_error_again(scripted: Any) -> None:
    script = scripted(restarts=RestartPolicy(max_restarts=1, backoff_s=0.0))
    script.manager.reset()
    script.manager.recv(Wait.all())
    script.create_worker.side_effect = OSError(11, "no more processes")
    script.fail(1)
    with pytest.raises(RestartsExhausted) as raised:
        script.manager.recv(Wait.all(timeout_s=0.0))
    with pytest.raises(RestartsExhausted) as again:
        script.manager.send(np.zeros((2, 3)), [0, 1])
    assert again.value is raised.value
    script.manager.send(np.zeros((1, 3)), [0])
    script.answer(0)
    assert script.manager.recv(Wait.all()).env_ids.tolist() == [0]


# Whatever order things come in.


class MortalWorker(FakeWorker):
    """It answers when it is told to, unless it has died before."""

    def __init__(self, worker_id: int, step_queue: Any, env_factory: Any) -> None:
        super().__init__(worker_id, step_queue, env_factory)
        self.hold = True
        self.is_dead = False

    def die(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            self._held_back.clear()
            self.fail(died(self.worker_id))


moves = st.lists(st.tuples(st.sampled_from(["release", "die", "step", "call"]), st.integers(0, 2)), max_size=40)


@given(moves)
def test_whatever_dies_when_every_step_is_paired_and_delivered_or_lost(moves: list[tuple[str, int]]) -> None:
    answers: queue.Queue[EnvironmentResponse] = queue.Queue()
    made: list[MortalWorker] = []

    def create(worker_id: int, _: Any, env_factory: Any) -> MortalWorker:
        made.append(MortalWorker(worker_id, answers, env_factory))
        return made[-1]

    policy = RestartPolicy(max_restarts=1000, backoff_s=0.0)
    with (
        mock.patch.object(SubprocessEnvManager, "create_worker", side_effect=create),
        SubprocessEnvManager(EchoEnvironment, 3, restarts=policy) as manager,
    ):
        manager.step_queue = answers
        trainer = CheckedTrainer(manager)
        trainer.reset()
        for move, number in moves:
            if move == "step":
                trainer.step(Wait(timeout_s=0.0, max_ready=number + 1))
            elif move == "call":
                assert manager.call("who", "you", env_ids=[number]) == [f"you: env {number}"]
            else:
                getattr(manager.env_workers[number], move)()
        for _ in range(3):
            for worker in manager.env_workers:
                worker.release()
            trainer.step(Wait.any(timeout_s=0.0))

        n_deaths = sum(worker.is_dead for worker in made)
        asked = sum(name == "step" for worker in made for name, _ in worker.sent)
        stats = manager.stats()
        assert stats.restarts == n_deaths == len(made) - 3
        last_told = {info.worker_id: info.lost.generation for info in trainer.lost if info.lost is not None}
        assert [last_told.get(worker.worker_id, 0) for worker in stats.workers] == [w.generation for w in stats.workers]
        assert len(trainer.lost) <= n_deaths  # a replacement may die before it was handed out
        assert asked == stats.steps + stats.steps_lost + sum(worker.waiting for worker in stats.workers)
        assert stats.steps_lost <= n_deaths
