"""Managers without a process: workers, queue and connections replaced by mocks, as a user's tests would."""

from __future__ import annotations

import os
import queue
import sys
import threading
import weakref
from typing import Any

import cloudpickle
import numpy as np
import pytest
from pytest_mock import MockerFixture

from envmanager import (
    ActionInfo,
    AgentSteps,
    EnvContext,
    EnvironmentCommand,
    EnvironmentResponse,
    EnvRaised,
    ManagerClosed,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    UsageError,
    Wait,
    WorkerDied,
)
from envmanager.env_manager import EnvWorker
from envmanager.kernel.host import ResponseSource
from envmanager.subprocess_env_manager import worker
from envmanager.testing import EchoEnvironment, FakeEnvironment, FakeWorker, Raise, Step
from envmanager_tests.in_a_thread import begun_in_a_thread


def steps_of(n: int = 1) -> dict[str, AgentSteps]:
    flags = np.zeros(n, np.bool_)
    return {"default": AgentSteps(np.arange(n), np.zeros((n, 3), np.float32), np.zeros(n, np.float32), flags, flags)}


def responses(*of: EnvironmentResponse) -> list[Any]:
    return [*of, queue.Empty()]


@pytest.fixture
def create_worker(mocker: MockerFixture) -> Any:
    def fake(worker_id: int, step_queue: Any, env_factory: Any) -> Any:
        made = mocker.create_autospec(EnvWorker, instance=True)
        made.worker_id = worker_id
        made.recv.return_value = EnvironmentResponse("reset", worker_id, steps_of())
        return made

    return mocker.patch.object(SubprocessEnvManager, "create_worker", side_effect=fake)


def never_called() -> None:
    raise AssertionError("the trainer's process made an environment")


def test_each_worker_is_created_with_three_positional_arguments(create_worker: Any, mocker: MockerFixture) -> None:
    with SubprocessEnvManager(never_called, n_envs=3) as manager:
        step_queue = manager.step_queue

        assert create_worker.call_args_list == [mocker.call(i, step_queue, never_called) for i in range(3)]
        assert all(not made.send.called for made in manager.env_workers), "the constructor sends nothing"


@pytest.mark.parametrize("kind", [SubprocessEnvManager, SimpleEnvManager])
def test_a_manager_of_fakes_opens_and_starts_nothing(kind: Any, mocker: MockerFixture) -> None:
    mocker.patch.object(kind, "create_worker", side_effect=FakeWorker)
    before = os.listdir("/proc/self/fd"), threading.enumerate()
    with kind(FakeEnvironment, n_envs=2) as manager:
        assert (os.listdir("/proc/self/fd"), threading.enumerate()) == before
        manager.set_policy("default", Zeros())
        manager.reset()

        assert all(isinstance(worker, FakeWorker) for worker in manager.env_workers)
        assert len(manager.step(Wait.all())) == len(manager.env_workers)


def test_fakes_may_be_made_by_a_subclass_and_replaced_later() -> None:
    class OverFakes(SubprocessEnvManager):
        def create_worker(self, worker_id: int, step_queue: Any, env_factory: Any) -> FakeWorker:
            return FakeWorker(worker_id, step_queue, env_factory)

    with OverFakes(EchoEnvironment, n_envs=2, restarts=RestartPolicy(backoff_s=0)) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        first = list(manager.env_workers)
        first[1].hold = True
        manager.step()
        first[1].fail(WorkerDied(worker_id=1, env_ids=[1], phase="step", exit="SIGKILL"))

        (lost,) = [info for info in manager.step(Wait.all()) if info.lost]
        assert lost.worker_id == 1
        assert [new is old for new, old in zip(manager.env_workers, first, strict=True)] == [True, False]


def test_a_manager_of_fakes_that_nobody_closes_is_freed_when_the_last_reference_goes(mocker: MockerFixture) -> None:
    mocker.patch.object(SubprocessEnvManager, "create_worker", side_effect=FakeWorker)
    manager = SubprocessEnvManager(FakeEnvironment, n_envs=2)
    manager.reset()
    gone = weakref.ref(manager)
    del manager
    assert gone() is None


def test_reset_is_sent_to_every_worker_and_answered_in_turn(create_worker: Any) -> None:
    with SubprocessEnvManager(never_called, n_envs=2) as manager:
        config = {"seed": 3}
        infos = manager.reset(config)

        for made in manager.env_workers:
            made.send.assert_called_once_with("reset", config)
        assert [info.worker_id for info in infos] == [0, 1]
        assert [info.previous for info in infos] == [None, None]


def test_reset_waits_out_workers_in_flight_first(create_worker: Any, mocker: MockerFixture) -> None:
    with SubprocessEnvManager(never_called, n_envs=2) as manager:
        manager.reset()
        order = mocker.Mock()
        manager.step_queue = order.queue
        order.queue.get_nowait.side_effect = queue.Empty
        order.queue.get.side_effect = [EnvironmentResponse("step", 1, steps_of())]
        manager.send(np.zeros(1), [1])
        for made in manager.env_workers:
            order.attach_mock(made.send, f"send_{made.worker_id}")
        manager.reset()

        names = [call[0] for call in order.mock_calls if not call[0].endswith("nowait")]
        assert names == ["queue.get", "send_0", "send_1"]


def test_step_queues_workers_that_are_not_waiting_and_takes_what_is_there(
    create_worker: Any, mocker: MockerFixture
) -> None:
    with SubprocessEnvManager(never_called, n_envs=3) as manager:
        manager.step_queue = mocker.create_autospec(queue.Queue, instance=True)
        two = responses(EnvironmentResponse("step", 0, steps_of()), EnvironmentResponse("step", 1, steps_of()))
        manager.step_queue.get_nowait.side_effect = [*two, *two]
        manager.reset()
        policy = mocker.Mock()
        policy.get_action.side_effect = lambda steps: ActionInfo(np.full(len(steps), 5))
        manager.set_policy("default", policy)
        last = manager.step()
        for made in manager.env_workers:
            made.send.reset_mock()

        infos = manager.step()

        assert [len(call.args[0]) for call in policy.get_action.call_args_list] == [3, 2], "once for all that are idle"
        for made in manager.env_workers[:2]:
            made.send.assert_called_once_with("step", {"default": np.array([5])})
        assert not manager.env_workers[2].send.called
        assert [info.worker_id for info in infos] == [0, 1]
        assert [worker.waiting for worker in manager.stats().workers] == [False, False, True]
        assert infos[0].previous is last[0].current
        assert infos[0].actions["default"].action.tolist() == [5]
        assert not manager.step_queue.get.called, "what was there was enough"


def test_step_blocks_only_when_nothing_is_there(create_worker: Any, mocker: MockerFixture) -> None:
    with SubprocessEnvManager(never_called, n_envs=1) as manager:
        manager.reset()
        manager.set_policy("default", Zeros())
        manager.step_queue = mocker.create_autospec(queue.Queue, instance=True)
        manager.step_queue.get_nowait.side_effect = queue.Empty
        manager.step_queue.get.side_effect = [EnvironmentResponse("step", 0, steps_of()), queue.Empty]

        assert len(manager.step()) == 1
        assert manager.step(Wait.any(timeout_s=0.5)) == []
        assert 0 < manager.step_queue.get.call_args.kwargs["timeout"] <= 0.5
        assert manager.stats().workers[0].waiting, "nothing is lost by a timeout"


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


def test_a_failure_out_of_the_queue_is_raised_once_and_the_others_come_next(
    create_worker: Any, mocker: MockerFixture
) -> None:
    died = WorkerDied(worker_id=1, env_ids=[1], phase="step", exit="SIGSEGV")
    with SubprocessEnvManager(never_called, n_envs=3, restarts=RestartPolicy(max_restarts=0)) as manager:
        manager.reset()
        manager.set_policy("default", Zeros())
        manager.step_queue = answers = queue.Queue()
        answers.put(EnvironmentResponse("step", 0, steps_of()))
        answers.put(EnvironmentResponse("failed", 1, died))
        answers.put(EnvironmentResponse("step", 2, steps_of()))

        with pytest.raises(WorkerDied) as raised:
            manager.step()
        assert raised.value is died
        assert [info.worker_id for info in manager.step()] == [0, 2]
        answers.put(EnvironmentResponse("step", 2, steps_of()))
        assert [info.worker_id for info in manager.step()] == [2]
        assert manager.env_workers[1].send.call_count == 2, "reset and one step: the failed worker is out"


def test_send_to_a_failed_worker_raises_its_error_again(create_worker: Any) -> None:
    died = WorkerDied(worker_id=0, env_ids=[0], phase="step", exit="SIGKILL")
    with SubprocessEnvManager(never_called, n_envs=2, restarts=RestartPolicy(max_restarts=0)) as manager:
        manager.reset()
        manager.step_queue = queue.Queue()
        manager.send(np.zeros(2), [0, 1])
        manager.step_queue.put(EnvironmentResponse("failed", 0, died))
        with pytest.raises(WorkerDied):
            manager.recv()
        with pytest.raises(WorkerDied):
            manager.send(np.zeros(1), [0])
        assert manager.stats().workers[0].failed


def test_when_all_workers_have_failed_step_says_so(create_worker: Any) -> None:
    with SubprocessEnvManager(never_called, n_envs=1, restarts=RestartPolicy(max_restarts=0)) as manager:
        manager.reset()
        manager.set_policy("default", Zeros())
        manager.step_queue = queue.Queue()
        manager.step_queue.put(
            EnvironmentResponse("failed", 0, WorkerDied(worker_id=0, env_ids=[0], phase="step", exit="EXIT(3)"))
        )
        with pytest.raises(WorkerDied):
            manager.step()
        with pytest.raises(UsageError, match=r"every worker has failed; call reset\(\)"):
            manager.step()


@pytest.fixture
def fake_workers(mocker: MockerFixture) -> queue.Queue[EnvironmentResponse]:
    answers: queue.Queue[EnvironmentResponse] = queue.Queue()
    mocker.patch.object(
        SubprocessEnvManager,
        "create_worker",
        side_effect=lambda worker_id, _, factory: FakeWorker(worker_id, answers, factory),
    )
    return answers


def test_a_worker_that_holds_its_answer_stays_in_flight(fake_workers: queue.Queue[EnvironmentResponse]) -> None:
    with SubprocessEnvManager(FakeEnvironment, n_envs=3) as manager:
        manager.step_queue = fake_workers
        manager.set_policy("default", Zeros())
        manager.reset()
        slow = manager.env_workers[1]
        slow.hold = True

        assert [info.worker_id for info in manager.step()] == [0, 2]
        assert [info.worker_id for info in manager.step()] == [0, 2]
        slow.release()
        assert sorted(info.worker_id for info in manager.step()) == [0, 1, 2]
        assert [name for name, _ in slow.sent] == ["reset", "step"]


def test_a_step_that_waits_for_a_fake_ends_when_another_thread_closes_the_manager(
    fake_workers: queue.Queue[EnvironmentResponse], mocker: MockerFixture
) -> None:
    is_waiting, get = threading.Event(), fake_workers.get

    def noticed(block: bool = True, timeout: float | None = None) -> EnvironmentResponse:
        if block:
            is_waiting.set()
        return get(block, timeout)

    mocker.patch.object(fake_workers, "get", side_effect=noticed)
    manager = SubprocessEnvManager(FakeEnvironment, n_envs=1)
    manager.step_queue = fake_workers
    manager.set_policy("default", Zeros())
    manager.reset()
    manager.env_workers[0].hold = True
    thread, raised = begun_in_a_thread(manager.step)
    try:
        assert is_waiting.wait(60.0)
        manager.close()
        thread.join(60.0)
        assert not thread.is_alive()
    finally:
        manager.env_workers[0].release()
        thread.join(60.0)
    assert [type(error) for error in raised] == [ManagerClosed]


def test_workers_that_are_ready_are_served_in_turn(fake_workers: queue.Queue[EnvironmentResponse]) -> None:
    with SubprocessEnvManager(FakeEnvironment, n_envs=3) as manager:
        manager.step_queue = fake_workers
        manager.set_policy("default", Zeros())
        manager.reset()

        served = [info.worker_id for _ in range(9) for info in manager.step(Wait(max_ready=1))]
        assert served == [0, 1, 2] * 3


def test_max_lead_holds_the_fast_workers_back(fake_workers: queue.Queue[EnvironmentResponse]) -> None:
    with SubprocessEnvManager(FakeEnvironment, n_envs=2) as manager:
        manager.step_queue = fake_workers
        manager.set_policy("default", Zeros())
        manager.reset()
        slow = manager.env_workers[1]
        slow.hold = True
        wait = Wait.any(timeout_s=0.0, max_lead=5)
        handed_out = [len(manager.step(wait)) for _ in range(8)]

        assert handed_out == [1, 1, 1, 1, 1, 0, 0, 0]
        slow.release()
        assert sorted(info.worker_id for _ in range(2) for info in manager.step(wait)) == [0, 1]


def test_a_worker_that_is_held_back_while_it_is_replaced_gets_one_action(
    fake_workers: queue.Queue[EnvironmentResponse],
) -> None:
    restarts = RestartPolicy(max_restarts=1)
    with SubprocessEnvManager(FakeEnvironment, n_envs=2, restarts=restarts) as manager:
        manager.step_queue = fake_workers
        manager.set_policy("default", Zeros())
        manager.reset()
        manager.env_workers[1].hold = True
        wait = Wait.any(timeout_s=0.0, max_lead=1)
        assert [info.worker_id for info in manager.step(wait)] == [0]
        assert manager.step(wait) == [], "worker 0 is held back"
        manager.env_workers[0].fail(WorkerDied(worker_id=0, env_ids=[0], phase="idle", exit="SIGKILL"))
        assert [bool(info.lost) for info in manager.step(wait)] == [True]
        manager.env_workers[1].release()
        assert sorted(info.worker_id for _ in range(2) for info in manager.step(wait)) == [0, 1]
        assert [name for name, _ in manager.env_workers[0].sent] == ["reset", "step"]


def test_recv_holds_back_workers_that_are_too_far_ahead(fake_workers: queue.Queue[EnvironmentResponse]) -> None:
    with SubprocessEnvManager(FakeEnvironment, n_envs=2) as manager:
        manager.step_queue = fake_workers
        manager.reset()
        manager.recv(Wait.all())
        wait = Wait.any(max_lead=2)
        for _ in range(2):
            manager.send(np.zeros(1, np.int64), [0])
            assert manager.recv(wait).env_ids.tolist() == [0]
        manager.send(np.zeros(1, np.int64), [0])
        with pytest.raises(UsageError, match="send actions to the environments of worker 1"):
            manager.recv(wait)
        manager.send(np.zeros(1, np.int64), [1])
        assert sorted(manager.recv(wait).env_ids.tolist() + manager.recv(wait).env_ids.tolist()) == [0, 1]


class Singly(ResponseSource):
    """Responses of fakes, which never come more than one at a time."""

    def __init__(self, responses: queue.Queue[EnvironmentResponse]) -> None:
        self._responses = responses

    def take(self) -> list[EnvironmentResponse]:
        return []

    def get(self, n_wanted: int, deadline: float) -> list[EnvironmentResponse]:
        return [self._responses.get_nowait()]


def n_calls_of_a_round_with_max_lead(n_workers: int, responses: Any, use: str) -> int:
    """How many Python functions one round of all workers calls."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    with SubprocessEnvManager(FakeEnvironment, n_envs=n_workers) as manager:
        manager.step_queue = responses
        manager.set_policy("default", Zeros())
        manager.reset()
        actions, env_ids = np.zeros(n_workers, np.int64), np.arange(n_workers)
        all_of_them = Wait(min_ready=Wait.ALL, max_lead=2)
        any_of_them = Wait.any(max_lead=2)
        if use != "step":
            manager.recv(Wait.all())
        sys.setprofile(note)
        try:
            if use == "step":
                assert len(manager.step(all_of_them)) == n_workers
            else:
                manager.send(actions, env_ids)
                n_received = 0
                while n_received < n_workers:
                    n_received += len(manager.recv(all_of_them if use == "recv all" else any_of_them))
        finally:
            sys.setprofile(None)
    return count


@pytest.mark.parametrize("singly", [False, True], ids=["at once", "singly"])
@pytest.mark.parametrize("use", ["recv all", "recv any", "step"])
def test_with_max_lead_twice_the_workers_cost_about_twice_the_calls(
    fake_workers: queue.Queue[EnvironmentResponse], use: str, singly: bool
) -> None:
    source: Any = Singly(fake_workers) if singly else fake_workers
    few, many = (n_calls_of_a_round_with_max_lead(n_workers, source, use) for n_workers in (32, 128))

    assert many < 4.4 * few


def test_exceptions_of_fake_environments_come_out_as_those_of_real_ones(
    fake_workers: queue.Queue[EnvironmentResponse],
) -> None:
    with SubprocessEnvManager(lambda: FakeEnvironment([Raise(KeyError("k"))]), n_envs=1) as manager:
        manager.step_queue = fake_workers
        manager.set_policy("default", Zeros())
        manager.reset()
        with pytest.raises(EnvRaised, match="KeyError"):
            manager.step()


def commands(*of: EnvironmentCommand) -> list[Any]:
    return [*of, EnvironmentCommand("close")]


def run_worker(mocker: MockerFixture, factory: Any, *of: EnvironmentCommand) -> tuple[Any, Any]:
    conn, step_queue = mocker.Mock(spec=["recv", "send"]), mocker.Mock(spec=["put"])
    conn.recv.side_effect = commands(*of)
    worker(conn, step_queue, cloudpickle.dumps(factory), 4)
    return conn.send, step_queue.put


def sent(mock: Any) -> list[EnvironmentResponse]:
    return [call.args[0] for call in mock.call_args_list]


def test_the_worker_loop_puts_steps_on_the_queue_and_other_answers_on_the_connection(mocker: MockerFixture) -> None:
    send, put = run_worker(
        mocker,
        EchoEnvironment,
        EnvironmentCommand("reset"),
        EnvironmentCommand("step", {"default": np.array([7])}),
        EnvironmentCommand("call", ("who", ["you"], [0])),
    )

    assert [answer.name for answer in sent(send)] == ["reset", "call"]
    assert sent(send)[1] == EnvironmentResponse("call", 4, ["you: env 4"])
    (answer,) = sent(put)
    assert (answer.name, answer.worker_id) == ("step", 4)
    assert answer.payload["default"].obs.tolist() == [[4, 0, 1, 7, 0]]


def test_the_worker_loop_answers_a_failed_step_on_the_queue_and_goes_on(mocker: MockerFixture) -> None:
    step = EnvironmentCommand("step", {"default": np.array([0])})
    send, put = run_worker(
        mocker,
        lambda: FakeEnvironment([Raise(SystemExit(2)), Step()]),
        EnvironmentCommand("reset"),
        step,
        step,
        EnvironmentCommand("call", ("nothing_here", [], [0])),
    )

    assert [answer.name for answer in sent(put)] == ["failed", "step"]
    failure = sent(put)[0].payload
    assert (type(failure), failure.type_name, failure.phase) == (EnvRaised, "SystemExit", "step")
    assert [answer.name for answer in sent(send)] == ["reset", "failed"]


def test_the_worker_loop_answers_its_first_command_with_the_factorys_exception(mocker: MockerFixture) -> None:
    def factory() -> None:
        raise OSError("no display")

    send, put = run_worker(mocker, factory, EnvironmentCommand("start"))

    assert not put.called
    assert "no display" in str(sent(send)[0].payload)


def test_the_worker_loop_ends_when_nobody_is_there_and_closes_its_environment(mocker: MockerFixture) -> None:
    close = mocker.patch.object(FakeEnvironment, "close")
    conn = mocker.Mock(spec=["recv", "send"])
    conn.recv.side_effect = EOFError
    worker(conn, mocker.Mock(spec=["put"]), cloudpickle.dumps(FakeEnvironment), 0)

    close.assert_called_once_with()


@pytest.mark.parametrize("use", ["step", "recv"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_fakes_play_tasks_which_are_drawn_in_the_order_of_workers_whatever_that_of_responses(
    mocker: MockerFixture, use: str, prefetch: bool
) -> None:
    def played(arrived: queue.Queue[EnvironmentResponse]) -> list[tuple[int, int, int]]:
        def factory(context: EnvContext) -> EchoEnvironment:
            return EchoEnvironment(context, episode_length=4 - context.env_id - context.env_id // 2)

        create = mocker.patch.object(SubprocessEnvManager, "create_worker")
        create.side_effect = lambda worker_id, _, env_factory: FakeWorker(worker_id, arrived, env_factory)
        with SubprocessEnvManager(factory, 4) as manager:
            manager.step_queue = arrived
            manager.set_policy("default", Zeros())
            manager.reset(tasks=[{"task": task} for task in range(30)], prefetch=prefetch and None)
            while not manager.tasks.done:
                if use == "step":
                    manager.step("all")
                else:
                    batch = manager.recv("all")
                    manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
            return [(result.index, result.env_id, result.length) for result in manager.tasks.results]

    assert played(queue.Queue()) == played(queue.LifoQueue())
