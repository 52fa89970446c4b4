"""Environments that are coroutines: what they may be, what is handed on, and what else a manager does with them."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envmanager import (
    ActionInfo,
    AsyncioEnvManager,
    BadAction,
    BadObservation,
    EnvRaised,
    RestartPolicy,
    SimpleEnvManager,
    Timeouts,
    UsageError,
    Wait,
    make_manager,
)
from envmanager.observe.events import Failed
from envmanager.testing.fault_checks import returns_within, until

ALL = Wait.all()


class Breaks:
    """Raises in its step."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "begun", {}

    async def step(self, action: Any) -> Any:
        try:
            raise KeyError("no page")
        except KeyError as error:
            raise {"value": ValueError, "connection": ConnectionError}[action]("the browser has ended") from error


@pytest.mark.parametrize("action", ["value", "connection"])
def test_what_is_kept_of_an_error_keeps_no_environment_that_was_replaced(action: str) -> None:
    made: list[weakref.ref[Breaks]] = []

    def make() -> Breaks:
        env = Breaks()
        made.append(weakref.ref(env))
        return env

    restarts = RestartPolicy(max_restarts=100, on_exception="restart", backoff_s=0)
    with AsyncioEnvManager(make, 1, restarts=restarts) as manager:
        manager.reset()
        manager.recv(ALL)
        for _ in range(5):
            manager.send([action], [0])
            assert manager.recv(ALL).lost.all()
        until(lambda: gc.collect() >= 0 and [each() is None for each in made] == [True] * 5 + [False])
        if action == "value":
            (error, *_) = [event.error for event in manager.events if isinstance(event, Failed)]
            assert "in step" in str(error.remote_traceback)
            assert isinstance(error.__cause__, ValueError)


class Talk:
    """A conversation of three turns. Observes all messages so far, in a list that it goes on to fill."""

    observation_space: Any = None
    action_space: Any = None

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.resets: list[Any] = []
        self.loops: set[Any] = set()
        self.is_closed = False

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(0)
        self.loops.add((asyncio.get_running_loop(), threading.get_ident()))
        self.resets.append((seed, options))
        self._messages = [{"role": "user", "content": f"episode {len(self.resets)}"}]
        return self._messages, {"turn": 0}

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0)
        self.given.append(action)
        self._messages.append({"role": "user", "content": f"you said {action}"})
        n_turns = len(self._messages) - 1
        return self._messages, float(n_turns), n_turns == 3, False, {"turn": n_turns}

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.is_closed = True

    async def ask(self, question: str) -> str:
        await asyncio.sleep(0)
        return f"{question}? {len(self.given)}"


def test_infos_come_unasked_where_observations_are_objects() -> None:
    with AsyncioEnvManager(Talk, 1) as manager:
        manager.reset()
        assert manager.recv(ALL).info == [{"turn": 0}]
        manager.send(["hello"], [0])
        assert manager.recv(ALL).info == [{"turn": 1}]


class Blocking:
    """A synchronous environment without a base class or spaces, which notes the threads that call it."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.threads.add(threading.get_ident())
        return "first", {}

    def step(self, action: Any) -> Any:
        self.threads.add(threading.get_ident())
        return f"after {action}", 1.0, False, False, {}

    def close(self) -> None:
        self.threads.add(threading.get_ident())


def contents(batch: Any) -> list[str]:
    return [messages[-1]["content"] for messages in batch.obs]


def play(manager: Any, actions: list[Any]) -> Any:
    manager.send(actions, range(len(actions)))
    return manager.recv(ALL)


def test_texts_and_lists_are_handed_on_and_arrive_in_arrays_of_objects() -> None:
    made: list[Talk] = []

    def make() -> Talk:
        made.append(Talk())
        return made[-1]

    with AsyncioEnvManager(make, 3, infos=True) as manager:
        manager.reset()
        first = manager.recv(ALL)
        second = play(manager, ["a", "b", "c"])

        assert (first.obs.dtype, first.obs.shape) == (object, (3,))
        assert first.obs[0] == [{"role": "user", "content": "episode 1"}], "a later step has changed it"
        assert contents(second) == ["you said a", "you said b", "you said c"]
        assert second.info == [{"turn": 1}] * 3
    assert sorted(env.given for env in made) == [["a"], ["b"], ["c"]]
    assert all(env.is_closed for env in made)


def test_an_action_is_the_trainers_own_object_but_for_what_it_may_change() -> None:
    made: list[Talk] = []

    def make() -> Talk:
        made.append(Talk())
        return made[-1]

    tool, message = object(), {"role": "assistant", "content": "a"}
    with AsyncioEnvManager(make, 1) as manager:
        manager.reset()
        manager.recv()
        play(manager, [tool])
        play(manager, [[message]])
        message["content"] = "changed"
    assert made[0].given[0] is tool
    assert made[0].given[1] == [{"role": "assistant", "content": "a"}]


def test_an_episode_that_ends_is_followed_by_the_next_in_the_same_step() -> None:
    with AsyncioEnvManager(Talk, 1, infos=True) as manager:
        manager.reset(seed=7, options={"level": 2})
        manager.recv()
        for _ in range(2):
            play(manager, ["x"])
        batch = play(manager, ["end"])

        assert batch.terminated.tolist() == [True]
        assert contents(batch) == ["episode 2"]
        assert batch.final_obs[0][-1] == {"role": "user", "content": "you said end"}
        assert (batch.info, batch.reset_info) == ([{"turn": 3}], [{"turn": 0}])
        (seed, options), again = manager.get_attr("resets")[0]
        assert isinstance(seed, int)
        assert options == {"level": 2}
        assert again == (None, {"level": 2})


def test_declared_spaces_give_arrays_and_those_that_are_not_declared_objects() -> None:
    class Place(Talk):
        observation_space = spaces.Dict({"at": spaces.Box(-9, 9, (2,), np.float32), "name": spaces.Text(9)})

        async def reset(self, **_: Any) -> Any:
            return {"at": np.zeros(2, np.float32), "name": "home"}, {}

        async def step(self, action: Any) -> Any:
            return {"at": np.full(2, len(action), np.float32), "name": action}, 1.0, False, False, {}

    with AsyncioEnvManager(Place, 2) as manager:
        manager.reset()
        manager.recv(ALL)
        batch = play(manager, ["ab", "abc"])
        assert (batch.obs["at"].dtype, batch.obs["at"].tolist()) == (np.float32, [[2.0, 2.0], [3.0, 3.0]])
        assert batch.obs["name"].tolist() == ["ab", "abc"]


def test_actions_of_a_declared_space_are_checked_and_are_its_elements() -> None:
    class Buttons(Talk):
        action_space = spaces.Discrete(3)

    with AsyncioEnvManager(Buttons, 1) as manager:
        manager.reset()
        manager.recv()
        with pytest.raises(BadAction):
            manager.send(np.array([3]), [0])
        play(manager, [2])
        (given,) = manager.get_attr("given")
        assert given == [2]
        assert isinstance(given[0], np.int64)


def test_an_observation_that_breaks_its_space_is_refused() -> None:
    class Wrong(Talk):
        observation_space = spaces.Box(-9, 9, (2,), np.float32)

    with AsyncioEnvManager(Wrong, 1) as manager, pytest.raises(BadObservation, match="float32"):
        manager.reset()


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (("obs", 1.0, False, {}), "a tuple of 5"),
        (None, "a tuple of 5"),
        (("obs", None, False, False, {}), "reward should be a real number"),
        (("obs", 1.0, "no", False, {}), "terminated should be a bool"),
        (("obs", 1.0, False, False, None), "info should be a dict"),
    ],
    ids=str,
)
def test_a_step_that_returns_anything_else_is_named(result: Any, expected: str) -> None:
    class Wrong(Talk):
        async def step(self, action: Any) -> Any:
            return result

    with AsyncioEnvManager(Wrong, 1) as manager:
        manager.reset()
        manager.recv()
        manager.send(["x"], [0])
        with pytest.raises(BadObservation, match=expected):
            manager.recv()


def test_coroutines_share_one_thread_and_others_have_one_each() -> None:
    factories = [Talk, Talk, Blocking, Blocking, lambda: gymnasium.make("CartPole-v1")]
    with AsyncioEnvManager(factories[:4], 4) as manager:
        manager.reset()
        manager.recv(ALL)
        play(manager, ["w", "x", "y", "z"])
        assert manager.call(lambda env: threading.get_ident(), env_ids=[0]) == manager.call(
            lambda env: threading.get_ident(), env_ids=[1]
        )
        loops = manager.get_attr("loops", env_ids=[0, 1])
        threads = manager.get_attr("threads", env_ids=[2, 3])
    assert loops[0] == loops[1]
    assert len(loops[0]) == len(threads[0]) == len(threads[1]) == 1
    assert len({*threads[0], *threads[1], threading.get_ident(), *(thread for _, thread in loops[0])}) == 4
    with AsyncioEnvManager(factories[4], 2) as manager:
        manager.reset(seed=1)
        assert manager.recv(ALL).obs.shape == (2, 4)
        assert play(manager, [0, 1]).obs.shape == (2, 4)


def test_a_wrapper_that_awaits_nothing_itself_works() -> None:
    class Wrapped:
        def __init__(self) -> None:
            self.env = Talk()

        def reset(self, **arguments: Any) -> Any:
            return self.env.reset(**arguments)

        def step(self, action: Any) -> Any:
            return self.env.step(action)

    with AsyncioEnvManager(Wrapped, 2) as manager:
        manager.reset()
        manager.recv(ALL)
        assert contents(play(manager, ["a", "b"])) == ["you said a", "you said b"]


def test_a_method_that_is_a_coroutine_can_be_called_and_returns_its_result() -> None:
    with AsyncioEnvManager(Talk, 2) as manager:
        manager.reset()
        assert manager.call("ask", "how", env_ids=[1, 0]) == ["how? 0", "how? 0"]
        with pytest.raises(EnvRaised, match="missing 1 required") as raised:
            manager.call("ask")
        assert raised.value.phase == "call"


def test_every_task_is_played_once() -> None:
    class Counted(Talk):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            await super().reset(seed=seed, options=options)
            return options, {}

    with AsyncioEnvManager(Counted, 3) as manager:
        manager.reset(tasks=[{"task": number} for number in range(20)])
        first: dict[int, Any] = {}
        while not manager.tasks.done:
            batch = manager.recv()
            first.update(zip(batch.task[batch.first].tolist(), batch.obs[batch.first], strict=True))
            manager.send(["x"] * len(batch), batch.env_ids)
        assert [(result.index, result.length, result.total) for result in manager.tasks.results] == [
            (number, 3, 6.0) for number in range(20)
        ]
        assert all(seen == {"task": number} for number, seen in first.items())


@pytest.mark.parametrize(
    "error",
    [StopIteration("end"), KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError(), GeneratorExit()],
    ids=type,
)
def test_whatever_a_step_raises_is_the_environments_error_and_the_loop_goes_on(error: BaseException) -> None:
    class Raises(Talk):
        async def step(self, action: Any) -> Any:
            if action == "raise":
                raise error
            return await super().step(action)

    with AsyncioEnvManager(Raises, 2, timeouts=Timeouts(step_s=10)) as manager:
        manager.reset()
        manager.recv(ALL)
        manager.send(["raise", "a"], [0, 1])
        with pytest.raises(EnvRaised) as raised:
            manager.recv(ALL)
        assert raised.value.env_ids == (0,)
        assert contents(manager.recv()) == ["you said a"]
        manager.reset()
        manager.recv(ALL)
        assert contents(play(manager, ["b", "c"])) == ["you said b", "you said c"]


@pytest.mark.parametrize("error", [ValueError("left alone"), SystemExit(3)], ids=type)
def test_a_task_of_an_environment_that_raises_stops_nothing(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    class Spawns(Talk):
        async def reset(self, **arguments: Any) -> Any:
            async def fail() -> None:
                raise error

            self._task: Any = asyncio.get_running_loop().create_task(fail())
            del self._task
            return await super().reset(**arguments)

    with caplog.at_level(logging.WARNING, "envmanager"), AsyncioEnvManager(Spawns, 2) as manager:
        manager.reset()
        manager.recv(ALL)
        assert contents(play(manager, ["a", "b"])) == ["you said a", "you said b"]
        gc.collect()
    assert any(type(record.exc_info[1]) is type(error) for record in caplog.records if record.exc_info)


class Entered:
    """Enters a scope in its reset, as clients do, and leaves it in its close. An action cancels its task later."""

    made: list[Entered]

    def __init__(self, tasks: list[Any]) -> None:
        self.tasks = tasks
        self.made.append(self)

    @classmethod
    async def make(cls) -> Entered:
        await asyncio.sleep(0)
        return cls([asyncio.current_task()])

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.tasks.append(asyncio.current_task())
        return "begun", {}

    async def step(self, action: int) -> Any:
        self.tasks.append(asyncio.current_task())
        if action:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(0.01, task.cancel)  # as does a task group that has failed
        return "stepped", 0.0, False, False, {}

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.tasks.append("closed" if asyncio.current_task() is self.tasks[0] else asyncio.current_task())


def test_an_environment_is_made_reset_stepped_and_closed_in_one_task() -> None:
    Entered.made = []
    with AsyncioEnvManager(Entered.make, 2) as manager:
        manager.reset()
        for _ in range(2):
            manager.recv(ALL)
            manager.send([0, 0], [0, 1])
    for env in Entered.made:
        *tasks, end = env.tasks
        assert (len(tasks), len(set(map(id, tasks))), end) == (4, 1, "closed")


def test_an_environment_whose_task_is_cancelled_between_two_steps_is_closed_in_it_and_replaced() -> None:
    Entered.made = []
    restarts = RestartPolicy(max_restarts=100, on_exception="restart", backoff_s=0)
    with AsyncioEnvManager(Entered.make, 1, restarts=restarts) as manager:
        manager.reset()
        manager.recv(ALL)
        manager.send([1], [0])
        manager.recv(ALL)
        until(lambda: Entered.made[0].tasks[-1] == "closed")
        manager.send([0], [0])
        assert manager.recv(ALL).lost.all()
        (error,) = [event.error for event in manager.events if isinstance(event, Failed)]
        assert "was cancelled" in str(error)
        manager.send([0], [0])
        assert not manager.recv(ALL).lost.any()
    assert [env.tasks.count("closed") for env in Entered.made] == [1, 1]


@pytest.mark.skipif(not hasattr(asyncio, "eager_task_factory"), reason="comes with Python 3.12")
def test_an_environment_may_make_the_tasks_of_its_loop_eager() -> None:
    class Eager(Talk):
        async def reset(self, **arguments: Any) -> Any:
            asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
            return await super().reset(**arguments)

        async def step(self, action: Any) -> Any:
            return [{"content": f"you said {action}"}], 0.0, False, False, {}  # at once

    with AsyncioEnvManager(Eager, 2, timeouts=Timeouts(step_s=10)) as manager:
        manager.reset()
        manager.recv(ALL)
        for _ in range(2):
            assert contents(play(manager, ["a", "b"])) == ["you said a", "you said b"]
        assert manager.stats().restarts == 0


def test_a_task_that_an_environment_leaves_behind_ends_with_the_manager() -> None:
    ends: list[str] = []

    class Listens(Talk):
        async def reset(self, **arguments: Any) -> Any:
            async def listen() -> None:
                try:
                    await asyncio.sleep(600)
                finally:
                    ends.append("listener")

            self.listener = asyncio.get_running_loop().create_task(listen())
            return await super().reset(**arguments)

    with AsyncioEnvManager(Listens, 2) as manager:
        manager.reset()
    assert ends == ["listener"] * 2


@pytest.mark.parametrize("n_workers", [1, 2])
def test_fewer_workers_than_environments_do_not_exist(n_workers: int) -> None:
    with pytest.raises(UsageError, match=f"n_workers={n_workers} does not exist"):
        AsyncioEnvManager(Talk, 3, n_workers=n_workers)


def test_a_config_names_the_kind_and_the_environment(write_module: Callable[[str, str], None]) -> None:
    write_module(
        "talks",
        """
class Talk:
    def __init__(self, word="hi"):
        self.word = word

    async def reset(self, *, seed=None, options=None):
        return self.word, {}

    async def step(self, action):
        return action + self.word, 1.0, False, False, {}
""",
    )
    config = {"kind": "asyncio", "env": "talks:Talk", "env_kwargs": {"word": "ho"}, "n_envs": 2, "n_workers": "auto"}
    with make_manager(config) as manager:
        assert isinstance(manager, AsyncioEnvManager)
        assert manager.n_workers == 2
        manager.reset()
        assert manager.recv(ALL).obs.tolist() == ["ho", "ho"]
        assert play(manager, ["a", "b"]).obs.tolist() == ["aho", "bho"]


def test_other_kinds_say_which_kind_runs_coroutines() -> None:
    with pytest.raises(UsageError, match="kind: asyncio"):
        SimpleEnvManager(Talk, 1)


def test_one_environment_for_two_workers_is_refused() -> None:
    one = Talk()
    with pytest.raises(UsageError, match="same environment"):
        AsyncioEnvManager(lambda: one, 2)


def test_a_manager_without_references_closes_its_environments() -> None:
    made: list[Talk] = []

    def make() -> Talk:
        made.append(Talk())
        return made[-1]

    manager = AsyncioEnvManager(make, 2)
    manager.reset()
    manager.recv(ALL)
    manager.send(["a"], [0])
    reference = weakref.ref(manager)
    del manager
    assert reference() is None
    assert all(env.is_closed for env in made)


def test_a_call_waits_for_the_step_that_is_in_flight() -> None:
    class Slow(Talk):
        async def step(self, action: Any) -> Any:
            await asyncio.sleep(0.2)
            return await super().step(action)

    with AsyncioEnvManager(Slow, 1) as manager:
        manager.reset()
        manager.recv()
        manager.send(["a"], [0])
        assert manager.call("ask", "how many") == ["how many? 1"]
        assert contents(manager.recv()) == ["you said a"]


def test_a_thousand_environments_wait_side_by_side() -> None:
    class Sleeps(Talk):
        async def step(self, action: Any) -> Any:
            await asyncio.sleep(0.5)
            return await super().step(action)

    with AsyncioEnvManager(Sleeps, 1000) as manager:
        manager.reset()
        manager.recv(ALL)
        with returns_within(2):
            batch = play(manager, [str(number) for number in range(1000)])
        assert contents(batch) == [f"you said {number}" for number in range(1000)]


def test_the_policy_of_step_gets_what_environments_return_and_they_get_its_actions() -> None:
    class Answers:
        def get_action(self, steps: Any) -> Any:
            return ActionInfo(np.array([f"to {len(messages)}" for messages in steps.obs], object))

    with AsyncioEnvManager(Talk, 2, restarts=RestartPolicy()) as manager:
        manager.set_policy("default", Answers())
        manager.reset()
        episodes = manager.episodes
        for _ in range(5):
            infos = manager.step(ALL)
        assert episodes.count == 2
        assert all(info.transitions().reward.tolist() == [2.0] for info in infos)
        assert [given for env in manager.get_attr("given") for given in env[:3]] == ["to 1", "to 2", "to 3"] * 2
