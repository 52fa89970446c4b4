"""Which answers count, which come late, and how the end of an actor is told; with actors that the test plays itself."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import cloudpickle
import numpy as np
import pytest

from envmanager.data.steps import Begin, CommandName, EnvironmentResponse
from envmanager.errors import EnvRaised, EpisodeNotBegun, NotPlaced, WorkerDied, WorkerTimedOut
from envmanager.hosts.descriptors import wait_for
from envmanager.hosts.hosting import GroupFactory, make_contexts
from envmanager.hosts.life import State, WorkerPlan
from envmanager.hosts.link_host import Resources
from envmanager.observe.events import EventLog, LateReplyDiscarded
from envmanager.observe.timing import WorkerTimes
from envmanager.options import ResetConfig, Timeouts
from envmanager.ray_cluster.actor import EnvActor
from envmanager.ray_cluster.link import ActorConnection, ActorLink, ActorPoller
from envmanager.testing import EchoEnvironment, Raise, faulty

SUITE = "core ray"

_stages: list[Stage] = []
STEP, RESET, CALL = CommandName.STEP, CommandName.RESET, CommandName.CALL


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    while _stages:
        stage = _stages.pop()
        stage.cluster.actors[-1].is_dead = True
        stage.resources.close_s = 0.0
        stage.resources.close()


class ActorDiedError(Exception):
    """As Ray would say it."""


class PlayedActor:
    """Carries a command out when the test says so."""

    def __init__(self, worker_id: int, env_ids: tuple[int, ...], pickled_factory: bytes) -> None:
        self.inside = EnvActor(worker_id, env_ids, pickled_factory)
        self.waiting: list[tuple[Any, Any]] = []
        self.is_dead = self.killed = False

    def obey(self, command: bytes, on_answer: Any) -> None:
        self.waiting.append((lambda: self.inside.obey(command), on_answer))

    def kill(self) -> None:
        self.killed = True

    def go_on(self, n: int | None = None) -> None:
        """Answer the first ``n`` of what was asked, or all."""
        answered, self.waiting = self.waiting[:n], self.waiting[len(self.waiting[:n]) :]
        for act, on_answer in answered:
            future: Future[Any] = Future()
            if self.is_dead:
                future.set_exception(ActorDiedError("its node has died"))
            else:
                future.set_result(act())
            on_answer(future)

    def die(self) -> None:
        self.is_dead = True
        self.go_on()


def soon(seconds: float = 30.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


class PlayedCluster:
    def __init__(self) -> None:
        self.actors: list[PlayedActor] = []

    def make_actor(self, *arguments: Any, node_id: str = "", squeezed: bool = False) -> PlayedActor:
        self.actors.append(PlayedActor(*arguments))
        return self.actors[-1]

    def is_connected(self) -> bool:
        return True

    def shortage(self) -> dict[str, str]:
        missing = "no node has 1 license (no node has any)"
        return {"wanted": "1 CPU", "missing": missing, "cluster": "1 node with 4 CPU"}


class Stage:
    """One worker, its actor, and the poller; ``resources`` are those of another stage, to share its poller."""

    def __init__(
        self,
        env_factory: Any = EchoEnvironment,
        timeouts: Timeouts | None = None,
        *,
        close_s: float = 60.0,
        resources: Resources[ActorLink] | None = None,
    ) -> None:
        self.events = EventLog()
        self.cluster = PlayedCluster()
        self.resources = resources or Resources(close_s, ActorPoller())
        self.queue: Any = self.resources.poller
        worker_id = len(self.queue.links)
        contexts = make_contexts((0,), worker_id=0, generation=0, seed=None, log_dir=None)
        pickled = cloudpickle.dumps(GroupFactory([env_factory], contexts, False, False))
        make_actor: Any = partial(self.cluster.make_actor, worker_id, (0,), pickled)
        self.worker = ActorLink(
            WorkerPlan(worker_id=worker_id, env_ids=(0,), generation=0, timeouts=timeouts or Timeouts(close_s=close_s)),
            ActorConnection(make_actor, self.queue),
            self.cluster,  # type: ignore[arg-type]
            self.events,
            WorkerTimes(),
        )
        self.resources.watch(self.worker)
        self.worker.send(CommandName.START)
        _stages.append(self)

    @property
    def actor(self) -> PlayedActor:
        return self.cluster.actors[-1]

    def started(self) -> Stage:
        self.actor.go_on()
        assert self.worker.recv().name is CommandName.START
        return self

    def ready(self) -> Stage:
        self.started()
        self.worker.send(RESET, None)
        self.actor.go_on()
        assert self.worker.recv().name is RESET
        return self

    def step(self, action: int = 5) -> None:
        self.worker.send(STEP, {"default": np.array([action])})

    def taken(self) -> list[EnvironmentResponse]:
        return list(self.queue.take())


def test_a_step_comes_out_of_the_queue_and_every_other_response_out_of_recv() -> None:
    stage = Stage().ready()
    stage.step(7)
    assert stage.taken() == []
    stage.actor.go_on()

    (response,) = stage.taken()
    assert (response.name, response.payload["default"].obs[0, 3]) == (STEP, 7)
    stage.worker.send(CALL, ("who", ["you"], [0]))
    stage.actor.go_on()
    assert stage.worker.recv().payload == ["you: env 0"]


def test_a_call_behind_a_step_in_flight_leaves_the_step_in_the_queue() -> None:
    stage = Stage().ready()
    stage.step(7)
    stage.worker.send(CALL, ("who", ["you"], [0]))
    stage.actor.go_on()

    assert stage.worker.recv().payload == ["you: env 0"]
    assert [each.name for each in stage.taken()] == [STEP]


def test_an_answer_that_nobody_waits_for_any_more_is_discarded_and_counted() -> None:
    stage = Stage(timeouts=Timeouts(call_s=0.01)).ready()
    stage.worker.send(CALL, ("who", ["you"], [0]))
    failed = stage.worker.recv()
    assert isinstance(failed.payload, WorkerTimedOut)
    assert stage.actor.killed
    stage.actor.go_on()

    assert stage.taken() == []
    assert stage.events.count(LateReplyDiscarded) == 1


def test_an_exception_of_the_environment_is_a_failure_and_the_worker_lives() -> None:
    stage = Stage(faulty(Raise(ValueError("gear 7 broke")))).ready()
    stage.step()
    stage.actor.go_on()

    (response,) = stage.taken()
    assert isinstance(response.payload, EnvRaised)
    assert isinstance(response.payload.__cause__, ValueError)
    assert stage.worker.state is State.RUNNING


@pytest.mark.parametrize("during", ["step", "idle"])
def test_a_death_comes_out_of_the_queue_once(during: str) -> None:
    stage = Stage().ready()
    if during == "step":
        stage.step()
    else:
        assert stage.taken() == []  # asks whether it lives
    stage.actor.die()

    (response,) = stage.queue.get(1, soon())
    assert isinstance(response.payload, WorkerDied)
    assert (response.payload.phase, response.payload.exit) == (during, "NODE_DIED")
    assert stage.actor.killed
    assert stage.taken() == []


def test_a_death_that_a_call_has_raised_does_not_come_out_of_the_queue_too() -> None:
    stage = Stage().ready()
    stage.step()
    stage.worker.send(CALL, ("who", ["you"], [0]))
    stage.actor.die()

    failed = stage.worker.recv()
    assert isinstance(failed.payload, WorkerDied)
    assert failed.payload.phase == "call"
    assert stage.taken() == []


def test_a_death_that_an_interrupted_call_has_not_raised_comes_out_of_the_queue() -> None:
    stage = Stage().ready()
    stage.worker.send(CALL, ("who", ["you"], [0]))  # and the trainer is interrupted before recv
    stage.actor.die()

    (response,) = stage.queue.get(1, soon())
    assert isinstance(response.payload, WorkerDied)


def test_a_step_that_is_late_ends_the_actor() -> None:
    stage = Stage(timeouts=Timeouts(step_s=0.01)).ready()
    stage.step()
    (response,) = stage.queue.get(1, soon())

    assert isinstance(response.payload, WorkerTimedOut)
    assert response.payload.phase == "step"
    assert stage.actor.killed
    stage.actor.go_on()
    assert stage.taken() == []


def test_a_worker_for_which_there_is_no_room_says_what_is_missing() -> None:
    stage = Stage(timeouts=Timeouts(start_s=0.01))
    failed = stage.worker.recv().payload

    assert isinstance(failed, NotPlaced)
    assert "1 license" in str(failed)
    assert "1 node with 4 CPU" in str(failed)
    assert stage.actor.killed


def test_a_start_that_hangs_after_it_was_placed_timed_out() -> None:
    stage = Stage(timeouts=Timeouts(start_s=0.05))
    stage.actor.go_on(1)

    assert isinstance(stage.worker.recv().payload, WorkerTimedOut)


def test_what_takes_anothers_place_brings_its_first_observations_out_of_the_queue() -> None:
    stage = Stage()
    stage.worker.begin_again(ResetConfig(seed=3), ())
    stage.actor.go_on()
    assert stage.taken() == []
    stage.actor.go_on()

    (response,) = stage.taken()
    assert response.name is RESET
    assert response.payload["default"].obs.tolist() == [[0, 0, 0, 0, 0]]
    assert stage.worker.state is State.RUNNING


def test_an_actor_takes_the_actions_of_a_begin_in_a_longer_time_and_tells_what_could_not_begin() -> None:
    stage = Stage(timeouts=Timeouts(step_s=100.0, reset_s=1.0)).started()
    stage.worker.send(RESET, [Begin(0, True, actions={"default": np.array([4, 5])})])
    assert soon(190) < stage.worker.asked.deadline < soon(201)
    stage.actor.go_on()
    assert stage.worker.recv().payload["default"].obs.tolist() == [[0, 0, 2, 5, 0]]
    stage.worker.send(CommandName.BEGIN, [Begin(0, True, task=3, actions={"default": np.ones(30, np.int64)})])
    stage.worker.send(CommandName.STEP_ROWS, (np.zeros(0, np.int64), {}))
    assert soon(3090) < stage.worker.awaited.deadline < soon(3101)
    stage.actor.go_on()

    (response,) = stage.taken()
    assert response.not_begun is not None
    error = response.not_begun[0]
    assert isinstance(error, EpisodeNotBegun)
    assert (error.task, error.step, not response.payload) == (3, 7, True)


class Two:
    """Two workers of one poller, each with a step in flight, and a thread that waits for both."""

    def __init__(self) -> None:
        self.first = Stage().ready()
        self.queue = self.first.queue
        self.second = Stage(resources=self.first.resources).ready()
        for stage in (self.first, self.second):
            stage.step()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[Callable[[], list[str]]]:
        """Brings a function: the names of the responses, once the wait is over."""
        is_about_to_sleep, epoll = threading.Event(), self.queue.epoll

        def poll(*arguments: Any) -> Any:
            is_about_to_sleep.set()
            return epoll.poll(*arguments)

        self.queue.epoll = Mock(wraps=epoll, poll=poll)
        with ThreadPoolExecutor(1) as pool:
            wait = pool.submit(self.queue.get, 2, soon())
            is_about_to_sleep.wait()
            yield lambda: sorted(each.name for each in wait.result())


def test_who_waits_for_two_steps_is_woken_by_the_second() -> None:
    two = Two()
    with two.waiting() as responses:
        two.first.actor.go_on()
        assert not wait_for([two.queue.answers_fd], 0)
        two.second.actor.go_on()
        assert responses() == [STEP, STEP]


def test_who_waits_for_two_steps_is_woken_by_a_death_at_once() -> None:
    two = Two()
    with two.waiting() as responses:
        two.first.actor.die()
        assert responses() == [CommandName.FAILED]


@pytest.mark.timeout(60)
def test_who_waits_for_two_steps_gets_those_that_came_before_he_slept() -> None:
    two = Two()
    two.first.actor.go_on()
    assert [each.name for each in two.queue.get(2, math.inf)] == [STEP]
    two.second.actor.go_on()  # rings no bell, because two were wanted
    assert [each.name for each in two.queue.get(1, math.inf)] == [STEP]


class Closing(EchoEnvironment):
    """Counts how often it is closed."""

    n_closed = 0

    def close(self) -> None:
        Closing.n_closed += 1


def test_closing_waits_for_the_environments_and_ends_the_actor() -> None:
    stage, Closing.n_closed = Stage(Closing).ready(), 0
    closing = stage.actor.obey
    stage.actor.obey = lambda *arguments: (closing(*arguments), stage.actor.go_on())  # type: ignore[method-assign]
    stage.queue.wake()
    stage.resources.close()

    assert stage.actor.killed
    assert Closing.n_closed == 1


def test_retired_workers_end_when_they_have_closed_or_are_late() -> None:
    prompt, slow = Stage().ready(), Stage(close_s=0.01).ready()
    prompt.resources.retire(prompt.worker)
    slow.resources.retire(slow.worker)
    prompt.actor.go_on()

    assert list(prompt.queue.get(1, soon(0.01))) == []
    assert prompt.actor.killed
    assert list(slow.queue.get(1, soon(0.1))) == []
    assert slow.actor.killed


@pytest.mark.parametrize(("n_agents", "kind"), [(1, bytes), (4000, tuple)])
def test_large_observations_travel_as_an_array_and_small_ones_as_bytes(n_agents: int, kind: type) -> None:
    stage = Stage(lambda context: EchoEnvironment(context, n_agents=n_agents)).ready()
    stage.worker.send(STEP, {"default": np.arange(n_agents)})
    ((act, on_answer),) = stage.actor.waiting
    future: Future[Any] = Future()
    future.set_result(act())
    on_answer(future)

    assert type(future.result()) is kind
    (response,) = stage.taken()
    assert response.payload["default"].obs[:, 3].tolist() == list(range(n_agents))


def test_an_actor_that_has_no_limit_is_never_late() -> None:
    stage = Stage(timeouts=Timeouts(start_s=math.inf, reset_s=math.inf, step_s=math.inf)).ready()
    stage.step()
    assert list(stage.queue.get(1, soon(0.01))) == []
    stage.actor.go_on()
    assert [each.name for each in stage.queue.get(1, soon())] == [STEP]


def test_closing_does_not_wait_for_what_was_never_placed() -> None:
    stage = Stage(close_s=600)
    stage.resources.close()
    assert stage.actor.killed


def test_an_actor_that_its_node_took_along_before_it_ran_is_asked_for_again() -> None:
    stage = Stage()
    stage.actor.die()
    assert stage.taken() == []
    assert len(stage.cluster.actors) == 2

    assert stage.started().worker.state is State.RUNNING


def test_the_end_of_an_actor_that_was_replaced_is_not_told_of_the_next_one() -> None:
    stage = Stage(timeouts=Timeouts(step_s=0.01))
    stage.actor.die()
    assert stage.taken() == []
    stage.ready().step()
    (response,) = stage.queue.get(1, soon())

    assert isinstance(response.payload, WorkerTimedOut)
    assert "node" not in str(response.payload)
    assert stage.worker.process.exit_name() == "KILLED"
