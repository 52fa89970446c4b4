"""A worker that fails is replaced alone: nothing is mispaired, nothing is stitched, and the others never notice."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    ArraySpec,
    BehaviorSpec,
    EnvContext,
    Environment,
    EnvManager,
    EnvRaised,
    RestartPolicy,
    RestartsExhausted,
    SimpleEnvManager,
    StepInfo,
    SubprocessEnvManager,
    Timeouts,
    Wait,
    WorkerDied,
    derive_seed,
)
from envmanager.observe import events
from envmanager.processes.process_host import ProcessHost
from envmanager.testing import EchoEnvironment, FakeEnvironment, Step, faulty
from envmanager.testing.contract import NumberedActions
from envmanager.testing.fault_checks import CheckedTrainer, is_gone, until
from envmanager.testing.faults import Leak
from envmanager.testing.leaks import SLACK_S
from envmanager_tests.envs import EchoGym
from envmanager_tests.start_methods import MARKED_START_METHODS

SUITE = "core portable start-methods faults"

WITHIN_S = 60.0


def kill(manager: EnvManager, worker_id: int) -> None:
    pid = manager.stats().workers[worker_id].pid or 0
    os.kill(pid, signal.SIGKILL)
    until(lambda: is_gone(pid))


class KilledTwice(EchoEnvironment):
    """Its first two workers are killed from outside while they make it."""

    def __init__(self, context: EnvContext, folder: Path) -> None:
        if context.env_id == 1 and len(list(folder.iterdir())) < 2:
            (folder / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(context)


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_a_worker_that_is_killed_while_it_starts_for_the_first_time_is_started_again(
    start_method: Any, tmp_path: Path
) -> None:
    make = functools.partial(KilledTwice, folder=tmp_path)
    with SubprocessEnvManager(make, 3, n_workers=3, start_method=start_method) as manager:
        run = CheckedTrainer(manager)
        run.reset({"seed": 3})
        run.step(Wait.all())
        assert [worker.restarts for worker in manager.stats().workers] == [0, 2, 0]
        assert [worker.generation for worker in manager.stats().workers] == [0, 0, 0]
        assert [type(event) for event in manager.events][-1] is not events.Died
        assert sum(isinstance(event, events.Died) for event in manager.events) == 2


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_worker_that_is_killed_while_it_starts_more_often_than_it_may_restart_raises(
    max_restarts: int, tmp_path: Path
) -> None:
    make = functools.partial(KilledTwice, folder=tmp_path)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        SubprocessEnvManager(make, 2, n_workers=2, restarts=RestartPolicy(max_restarts))
    assert len(list(tmp_path.iterdir())) == 1 + max_restarts


@pytest.mark.sample("2-zero-copy")
@pytest.mark.parametrize("zero_copy", [False, True], ids=["copied", "zero-copy"])
@pytest.mark.parametrize("n_workers", [4, 2])
@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_a_killed_worker_comes_back_alone_and_every_step_stays_paired(
    start_method: Any, n_workers: int, zero_copy: bool
) -> None:
    with SubprocessEnvManager(
        EchoEnvironment, 4, n_workers=n_workers, start_method=start_method, zero_copy=zero_copy
    ) as manager:
        run = CheckedTrainer(manager)
        run.reset({"seed": 3})
        for n, victim in enumerate([1, 0, 1], start=1):
            for _ in range(7):
                run.step(Wait.all())
            kill(manager, victim)
            run.until_lost(n=n)
            assert run.lost[-1].worker_id == victim
            assert run.lost[-1].lost is not None
            assert isinstance(run.lost[-1].lost.cause, WorkerDied)
        for _ in range(20):
            assert len(run.step(Wait.all())) == n_workers

        stats = manager.stats()
        assert [worker.generation for worker in stats.workers[:2]] == [1, 2]
        assert [worker.restarts for worker in stats.workers[:2]] == [1, 2]
        assert stats.restarts == 3
        assert manager.events.count(events.Restarted) == manager.events.count(events.Died) == 3
        assert manager.events.count(events.Started) == n_workers + 3


@pytest.mark.parametrize("wait", [Wait.all(), Wait(min_ready=2, max_ready=2), Wait.any(max_lead=3)], ids=str)
def test_every_wait_goes_on_after_a_loss(wait: Wait) -> None:
    with SubprocessEnvManager(EchoEnvironment, 3) as manager:
        run = CheckedTrainer(manager)
        run.reset({"seed": 3})
        kill(manager, 2)
        for _ in range(30):
            assert len({info.worker_id for info in run.step(wait)}) >= 1
        run.until_lost()
        wanted = {worker_id: run.n_infos[worker_id] + 4 for worker_id in range(3)}
        run.step_until(lambda: all(run.n_infos[worker_id] >= n for worker_id, n in wanted.items()), wait=wait)


def test_after_a_reset_with_a_list_of_seeds_a_replacement_gets_another_seed() -> None:
    with SubprocessEnvManager(FakeEnvironment, 2) as manager:
        manager.reset({"seed": [7, 8]})
        run_to_loss(manager, 1, reset=False)
        seeds = manager.get_attr("seeds")

    assert seeds == [[7], [derive_seed(8, 1, 1)]]


def run_to_loss(manager: EnvManager, victim: int, *, reset: bool = True) -> StepInfo:
    manager.set_policy("default", NumberedActions())
    if reset:
        manager.reset()
    kill(manager, victim)
    give_up = time.monotonic() + WITHIN_S
    while time.monotonic() < give_up:
        for info in manager.step():
            if info.lost:
                return info
    raise AssertionError("the worker was not replaced")


def test_an_unseeded_replacement_stays_unseeded() -> None:
    with SubprocessEnvManager(FakeEnvironment, 1) as manager:
        run_to_loss(manager, 0)
        assert manager.get_attr("seeds") == [[None]]


class CountsOptions(FakeEnvironment):
    def reset(self, *, seeds: Any, options: Any) -> Any:
        self.options = options
        return super().reset(seeds=seeds, options=options)


def test_a_replacement_is_reset_with_the_options_of_the_last_reset() -> None:
    with SubprocessEnvManager(CountsOptions, 2) as manager:
        manager.reset({"options": {"level": 4}})
        run_to_loss(manager, 0, reset=False)
        assert manager.get_attr("options") == [{"level": 4}, {"level": 4}]


# send and recv


class Picky(EchoEnvironment):
    """Refuses one level. Its replacements refuse the levels of the first generation too."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__(context)
        self.least = context.generation
        self.known: list[int] = []

    @property
    def level(self) -> int:
        return self.known[-1]

    @level.setter
    def level(self, level: int) -> None:
        if level <= self.least:
            raise ValueError(f"level {level} is too low")
        self.known.append(level)

    def reset(self, **arguments: Any) -> Any:
        self.known.append(-1)
        return super().reset(**arguments)


@pytest.mark.parametrize("transport", ["native", "portable"])
def test_a_replacement_repeats_the_attributes_in_order_before_its_reset(transport: Any) -> None:
    with SubprocessEnvManager(Picky, 2, transport=transport) as manager:
        run = CheckedTrainer(manager)
        run.reset()
        for level in (3, 5, 4):
            manager.set_attr("level", level)
        with pytest.raises(EnvRaised, match="level 0 is too low"):
            manager.set_attr("level", 0, env_ids=[1])
        manager.set_attr("label", "mine", env_ids=[1])
        kill(manager, 1)
        run.until_lost()

        assert manager.get_attr("known") == [[-1, 3, 5, 4], [4, -1]]  # what is set again hides what was set before
        assert manager.get_attr("label") == ["env 0", "mine"]


def test_a_replacement_has_the_newest_values_where_calls_for_some_of_its_environments_overlap() -> None:
    with SubprocessEnvManager(Picky, 3, n_workers=1) as manager:
        run = CheckedTrainer(manager)
        run.reset()
        for label, env_ids in (("a", [0, 1]), ("b", [1, 2]), ("c", [0, 1])):
            manager.set_attr("label", label, env_ids=env_ids)
        kill(manager, 0)
        run.until_lost()
        assert manager.get_attr("label") == ["c", "c", "b"]


class Keeps(EchoEnvironment):
    """Refuses a goal once, in its first replacement."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__(context)
        self.refuses = context.generation == 1

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "goal" and self.refuses:
            self.refuses = False
            raise ValueError("no goal yet")
        if name == "goal" and value == [-1]:
            raise ValueError("a bad goal")
        super().__setattr__(name, value)


def test_a_replacement_gets_the_values_of_the_call_though_the_trainer_has_changed_them_since() -> None:
    with SubprocessEnvManager(Keeps, 2, restarts=RestartPolicy(on_exception="restart", backoff_s=0)) as manager:
        run = CheckedTrainer(manager)
        run.reset()
        goal = [3]
        manager.set_attr("goal", [goal, goal])
        goal[0] = 4
        kill(manager, 1)
        run.until_lost()
        assert manager.get_attr("goal") == [[3], [3]]


def test_a_reset_after_a_refused_attribute_brings_a_worker_with_all_of_them() -> None:
    with SubprocessEnvManager(Keeps, 2) as manager:
        run = CheckedTrainer(manager)
        run.reset()
        manager.set_attr("goal", [[3], [4]])
        manager.set_attr("label", "mine", env_ids=[1])
        kill(manager, 1)
        with pytest.raises(EnvRaised, match="no goal yet"):
            run.step_until(lambda: False)
        run.reset()
        assert (manager.get_attr("goal"), manager.get_attr("label")) == ([[3], [4]], ["env 0", "mine"])


def test_attributes_that_some_workers_have_taken_hold_there_though_another_has_refused_them() -> None:
    with SubprocessEnvManager(Keeps, 2) as manager:
        run = CheckedTrainer(manager)
        run.reset()
        with pytest.raises(EnvRaised, match="a bad goal"):
            manager.set_attr("goal", [[3], [-1]])
        kill(manager, 0)
        with pytest.raises(EnvRaised, match="no goal yet"):
            run.step_until(lambda: False)


def test_an_attribute_that_a_replacement_refuses_is_raised_as_by_set_attr() -> None:
    with SubprocessEnvManager(Picky, 2) as manager:
        run = CheckedTrainer(manager)
        run.reset()
        manager.set_attr("level", 1)
        kill(manager, 1)
        with pytest.raises(EnvRaised, match="level 1 is too low") as raised:
            run.step_until(lambda: False)
        assert (raised.value.worker_id, raised.value.phase, raised.value.type_name) == (1, "call", "ValueError")
        run.go_on([0])


def test_recv_marks_the_rows_of_a_lost_worker() -> None:
    with SubprocessEnvManager(EchoEnvironment, 4, n_workers=2) as manager:
        manager.reset()
        batch = manager.recv(Wait.all())
        for number in range(3):
            manager.send(batch.env_ids + 10 * number, batch.env_ids)
            batch = manager.recv(Wait.all())
        kill(manager, 1)
        manager.send(batch.env_ids, batch.env_ids)
        after = manager.recv(Wait.all())

        assert after.env_ids.tolist() == [0, 1, 2, 3]
        assert after.lost.tolist() == after.truncated.tolist() == [False, False, True, True]
        assert after.reward[2:].tolist() == [0.0, 0.0]
        assert after.obs[:, 2].tolist() == [4, 4, 0, 0]
        assert (after.final_obs == batch.obs[2:]).all()
        manager.send(after.env_ids + 70, after.env_ids)
        assert manager.recv(Wait.all()).obs[:, 3].tolist() == [70, 71, 72, 73]


def test_with_zero_copy_batches_are_views_again_after_a_restart() -> None:
    with SubprocessEnvManager(EchoGym, 3, zero_copy=True) as manager:
        manager.reset()
        batch = manager.recv(Wait.all())
        views = []
        for number in range(12):
            if number in (3, 6):
                kill(manager, 1)
            manager.send(batch.env_ids + 10 * number, batch.env_ids)
            batch = manager.recv(Wait.all())
            views.append(batch.is_view)
            if not batch.lost.any():
                assert batch.obs[:, 3].tolist() == [10 * number, 10 * number + 1, 10 * number + 2]
        assert views.count(False) == manager.stats().restarts == 2


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copied", "zero-copy"])
def test_a_lost_worker_whose_rows_were_stepped_apart_ends_with_what_each_last_showed(zero_copy: bool) -> None:
    with SubprocessEnvManager(EchoEnvironment, 3, n_workers=1, zero_copy=zero_copy) as manager:
        manager.reset()
        manager.recv()
        manager.send(np.array([10, 11, 12]), [0, 1, 2])
        manager.recv()
        for number, env_id in ((20, 1), (30, 1), (40, 2)):
            manager.send(np.array([number]), [env_id])
            manager.recv()
        kill(manager, 0)
        lost = manager.recv(Wait.any(timeout_s=WITHIN_S)) if manager.events.count(events.Died) else _next(manager)

        assert lost.lost.all()
        assert lost.final_obs[:, 3].tolist() == [10, 30, 40]


def _next(manager: SubprocessEnvManager) -> Any:
    """The next batch, when the death may not have been noticed: an action brings it out."""
    manager.send(np.array([1]), [0])
    return manager.recv()


class Shuffled(Environment):
    """Two agents, whose rows are in another order in the second generation. Shows each its number and its action."""

    def __init__(self, context: EnvContext) -> None:
        self._fails = context.generation == 0
        self._agent_id = np.array([0, 1] if context.generation else [1, 0])

    @property
    def behavior_specs(self) -> Any:
        return {"default": BehaviorSpec(ArraySpec((2,), np.int64), ArraySpec((), np.int64))}

    def reset(self, *, seeds: Any, options: Any) -> Any:
        return self.step({"default": np.zeros(2, np.int64)}, fails=False)

    def step(self, actions: Any, *, fails: bool = True) -> Any:
        if fails and self._fails:
            raise RuntimeError("fell over")
        obs, no = np.stack([self._agent_id, actions["default"]], axis=1), np.zeros(2, np.bool_)
        return {"default": AgentSteps(self._agent_id, obs, np.zeros(2, np.float32), no, no)}

    def close(self) -> None:
        pass


class OwnNumbers:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(steps.agent_id.copy())


def test_agents_that_a_replacement_has_in_another_order_get_their_own_actions() -> None:
    restarts = RestartPolicy(on_exception="restart", backoff_s=0)
    with SimpleEnvManager(Shuffled, 1, restarts=restarts) as manager:
        manager.set_policy("default", OwnNumbers())
        manager.reset()
        lost, after = [manager.step(Wait.all())[0] for _ in range(2)]

        assert lost.lost is not None
        assert after.current["default"].obs.tolist() == [[0, 0], [1, 1]]
        assert after.transitions().next_obs.tolist() == [[0, 0], [1, 1]]


# other phases


class DiesInCall(FakeEnvironment):
    def end(self) -> None:
        os._exit(5)


def test_a_death_in_a_call_is_raised_by_it_and_the_worker_comes_back() -> None:
    with SubprocessEnvManager(DiesInCall, 2) as manager:
        manager.set_policy("default", NumberedActions())
        manager.reset()
        with pytest.raises(WorkerDied, match=r"EXIT\(5\)"):
            manager.call("end", env_ids=[0])
        assert manager.get_attr("closed", env_ids=[0]) == [False], "a call waits for the replacement"
        assert {info.worker_id: info.lost is not None for info in manager.step(Wait.all())} == {0: True, 1: False}


def test_a_reset_while_a_worker_is_being_replaced_begins_afresh() -> None:
    with SubprocessEnvManager(EchoEnvironment, 3) as manager:
        run = CheckedTrainer(manager)
        run.reset({"seed": 3})
        kill(manager, 0)
        run.step(Wait(timeout_s=0.0))
        assert len(run.reset()) == 3
        for _ in range(5):
            assert len(run.step(Wait.all())) == 3
        assert not run.lost


def test_a_reset_after_all_was_given_up_brings_every_worker_back() -> None:
    with SubprocessEnvManager(EchoEnvironment, 3, restarts=RestartPolicy(max_restarts=0)) as manager:
        run = CheckedTrainer(manager)
        run.reset({"seed": 3})
        for worker_id in range(3):
            kill(manager, worker_id)
        for _ in range(3):
            with pytest.raises(WorkerDied):
                run.step(Wait.all())
        assert len(run.reset()) == 3
        assert len(run.step(Wait.all())) == 3


# recycling


def test_other_episodes_of_a_recycled_worker_are_lost_after_the_step() -> None:
    with SubprocessEnvManager(
        EchoEnvironment, 2, n_workers=1, restarts=RestartPolicy(recycle_after_steps=5)
    ) as manager:  # episodes of 7 and of 8 steps
        manager.set_policy("default", NumberedActions())
        assert manager.episodes.lost == 0
        manager.reset()
        step, cut, after = [info for _ in range(9) for info in manager.step()][-3:]

        assert step.lost is None
        assert step.current["default"].terminated.tolist() == [True, False]
        assert len(step.transitions().action) == 2
        assert cut.lost is not None
        assert (cut.lost.cause.phase, cut.lost.generation) == ("recycled", 1)
        rows = cut.current["default"]
        assert (rows.terminated.tolist(), rows.truncated.tolist()) == ([False, False], [False, True])
        assert rows.obs[:, 2].tolist() == [0, 0]
        assert rows.final_obs.tolist() == step.current["default"].obs[1:].tolist()
        assert len(cut.transitions().action) == 0
        assert after.transitions().obs[:, :3].tolist() == [[0, 0, 0], [1, 0, 0]]
        assert (manager.episodes.lost, manager.stats().steps_lost, manager.stats().restarts) == (1, 0, 0)


LAYOUTS = {
    "in this process": lambda make, **options: SimpleEnvManager(make, 3, **options),
    "one worker": lambda make, **options: SubprocessEnvManager(make, 3, n_workers=1, **options),
    "two workers": lambda make, **options: SubprocessEnvManager(make, 5, n_workers=2, **options),
    "views": lambda make, **options: SubprocessEnvManager(make, 3, n_workers=1, zero_copy=True, **options),
    "a share": lambda make, **options: SubprocessEnvManager(make, 4, n_workers=1, local_envs=1, **options),
}


@pytest.mark.parametrize("start", LAYOUTS.values(), ids=LAYOUTS)
def test_all_rows_of_a_worker_that_was_recycled_are_lost_after_the_step(start: Any) -> None:
    with start(EchoGym, restarts=RestartPolicy(recycle_after_steps=1)) as manager:
        manager.reset()
        first = manager.recv(Wait.all())
        manager.send(np.arange(manager.n_envs) + 10, first.env_ids)
        last = manager.recv(Wait.all()).copy()
        for action in range(20, 27):  # the other steps of environment 1, whose episodes take eight
            manager.send(np.array([action]), [1])
            batch = manager.recv(Wait.all()).copy()
        assert (batch.env_ids.tolist(), batch.reward.tolist()) == ([1], [26])
        assert (batch.terminated.tolist(), batch.lost.tolist()) == ([True], [False])

        manager.send(np.array([27]), [1])  # for what the old generation has begun
        cut = manager.recv(Wait.all())
        assert cut.env_ids.tolist() == [0, 1, 2], "all environments of its worker, in order"
        assert cut.lost.tolist() == cut.truncated.tolist() == [True] * 3
        assert not cut.reward.any()
        assert not cut.terminated.any()
        assert cut.obs[:, 0].tolist() == [0, 1, 2]
        assert not cut.obs[:, 2:].any(), "not the first observations of the new generation"
        assert cut.final_obs.tolist() == [last.obs[0].tolist(), batch.obs[0].tolist(), last.obs[2].tolist()]
        actions = np.arange(manager.n_envs) + 30
        manager.send(actions, np.arange(manager.n_envs))
        assert manager.recv(Wait.all()).obs[:, 3].tolist() == actions.tolist()
        assert manager.stats().steps_lost == 1


def n_leaked(pid: int) -> int:
    """How many descriptors of the kind that Leak leaks a process holds."""
    held = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    return held.count(os.devnull)


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_what_a_worker_has_leaked_goes_with_the_process_that_is_recycled(start_method: Any) -> None:
    leaking = faulty(Leak(n_descriptors=3), times=sys.maxsize)
    policy = RestartPolicy(recycle_after_steps=5)
    with SubprocessEnvManager(leaking, 1, restarts=policy, start_method=start_method) as manager:
        run = CheckedTrainer(manager, recycling=True)
        run.reset()
        leaker = run.pid_of(0)
        n_at_first = n_leaked(leaker)
        for _ in range(4):
            run.step()
        assert n_leaked(leaker) == n_at_first + 4 * 3
        run.step_until(lambda: run.recycled)

        until(lambda: is_gone(leaker))
        assert n_leaked(run.pid_of(0)) == n_at_first
        assert run.lost == []


# what holds the processes


def test_starting_a_replacement_may_fail_and_be_tried_again(mocker: Any) -> None:
    with SubprocessEnvManager(EchoEnvironment, 2, restarts=RestartPolicy(backoff_s=0.01)) as manager:
        run = CheckedTrainer(manager)
        run.reset({"seed": 3})
        real = ProcessHost.make_worker
        refusals = iter([OSError(11, "Resource temporarily unavailable")])

        def make_worker(host: ProcessHost, worker_id: int) -> Any:
            for refusal in refusals:
                raise refusal
            return real(host, worker_id)

        mocker.patch.object(ProcessHost, "make_worker", make_worker)
        kill(manager, 1)
        run.until_lost()
        assert manager.stats().workers[1].generation == 2
        assert isinstance(run.lost[0].lost and run.lost[0].lost.cause, WorkerDied)


def test_a_recycled_worker_that_will_not_close_is_killed_in_the_background() -> None:
    class Stubborn(FakeEnvironment):
        def close(self) -> None:
            time.sleep(600)

    policy = RestartPolicy(recycle_after_steps=2)
    with SubprocessEnvManager(
        lambda: Stubborn([Step(), Step(terminated=True)]), 1, restarts=policy, timeouts=Timeouts(close_s=0.5)
    ) as manager:
        manager.set_policy("default", NumberedActions())
        manager.reset()
        first = manager.stats().workers[0].pid
        before = time.monotonic()
        manager.step()
        manager.step()
        assert time.monotonic() - before < 0.5 + SLACK_S
        assert manager.stats().workers[0].pid != first
        while os.path.exists(f"/proc/{first}"):
            manager.step()
            assert time.monotonic() - before < WITHIN_S


def test_a_loop_that_only_looks_at_transitions_survives_a_worker_that_dies() -> None:
    n_transitions = n_lost = 0
    with SubprocessEnvManager(EchoEnvironment, 3) as manager:
        manager.set_policy("default", NumberedActions())
        manager.reset()
        pid = manager.stats().workers[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while not n_lost or n_transitions < 20:
            for info in manager.step():
                transitions = info.transitions()
                assert transitions.obs.shape == (len(transitions.reward), 5)
                assert len(transitions.reward) == (0 if info.lost else 1)
                n_transitions += len(transitions.reward)
                n_lost += info.lost is not None
    assert n_lost == 1


# A manager inside an environment.


class DiesAtOnce(FakeEnvironment):
    def __init__(self, context: EnvContext) -> None:
        super().__init__()
        if context.env_id == DIES:
            os._exit(5)


DIES = 3
"""Which of the inner environments: the outer manager has no worker of that number."""


class NeedsOthers(FakeEnvironment):
    """Environment 1 dies in its second step; when made again it needs a manager of its own, which cannot start."""

    def __init__(self, context: EnvContext, inner: type = DiesAtOnce, n_inner: int = DIES + 1) -> None:
        super().__init__()
        self._dies = context.env_id == 1 and context.generation == 0
        if context.generation > 0:
            SubprocessEnvManager(inner, n_inner)

    def step(self, actions: Any) -> Any:
        if self._dies:
            os._exit(1)
        return super().step(actions)


class NobodyLives(FakeEnvironment):
    def __init__(self) -> None:
        os._exit(5)


class NeedsOneOther(NeedsOthers):
    """The inner worker that dies has the number of a healthy outer one."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__(context, NobodyLives, 1)


@pytest.mark.parametrize("factory", [NeedsOthers, NeedsOneOther])
def test_what_a_manager_inside_an_environment_raises_is_charged_to_the_worker_of_that_environment(factory: Any) -> None:
    restarts = RestartPolicy(max_restarts=1, backoff_s=0.0, on_exception="restart")
    with SubprocessEnvManager(factory, 2, restarts=restarts) as manager:
        manager.set_policy("default", NumberedActions())
        manager.reset()
        with pytest.raises(RestartsExhausted) as caught:
            manager.step(Wait.all())

        assert (caught.value.worker_id, caught.value.env_ids) == (1, (1,))
        assert isinstance(caught.value.last, EnvRaised)
        assert caught.value.last.type_name == "WorkerDied"
        assert [(worker.failed, worker.restarts) for worker in manager.stats().workers] == [(False, 0), (True, 1)]
        assert [info.worker_id for info in manager.step(Wait.all())] == [0]


def test_a_manager_inside_an_environment_that_was_closed_is_the_environments_mistake() -> None:
    def make() -> FakeEnvironment:
        inner = SimpleEnvManager(FakeEnvironment)
        inner.close()
        inner.reset()
        return FakeEnvironment()

    for kind in (SimpleEnvManager, SubprocessEnvManager):
        with pytest.raises(EnvRaised, match="raised ManagerClosed at start"):
            kind(make)
