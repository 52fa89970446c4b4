"""Environments whose methods are tools, as TRL's trainers use them, played by the workers of a manager."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from envmanager import AsyncioEnvManager, LostEpisode, ManagerClosed, RestartPolicy, Timeouts, UsageError
from envmanager.interop.trl import ToolEnvironment, supervised, unless_lost
from envmanager.kernel.pool import Pool

SUITE = "waiting"

ALWAYS = RestartPolicy(max_restarts=10_000, on_exception="restart", backoff_s=0)


class Calculator:
    """A calculator as an agent's tool."""

    def __init__(self):
        self.total = 0
        self.history: list[int] = []

    def reset(self, start: int = 0, fails: str = "", **row) -> str | None:
        """Begin a calculation."""
        if fails:
            raise ValueError(fails)
        self.total, self.history = start, []
        return f"It shows {start}."

    def add(self, number: int, *, times: int = 1) -> str:
        """Add a number.

        Args:
            number: The number to add.
            times: How often.
        """
        self.total += number * times
        self.history.append(number)
        return str(self.total)

    async def think(self, seconds: float) -> str:
        """Think before the answer.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return f"still {self.total}"

    def divide(self, number: int) -> float:
        """Divide by a number.

        Args:
            number: The number to divide by.
        """
        return self.total / number

    def lose_power(self) -> None:
        """End the session."""
        raise ConnectionError("the session has ended")

    def hang(self) -> None:
        """Take for ever."""
        time.sleep(1.0)

    def get_reward(self) -> float:
        return float(self.total)

    def close(self) -> None:
        """Release what it has."""

    def _private(self) -> None:
        pass


@contextmanager
def calculators(n_envs: int = 2, **options) -> Iterator[tuple[AsyncioEnvManager, type]]:
    options = {"restarts": ALWAYS, **options}
    with AsyncioEnvManager(lambda: ToolEnvironment(Calculator()), n_envs, **options) as manager:
        yield manager, supervised(Calculator, manager.pool())


def tools_of(cls: type) -> dict[str, object]:
    """What TRL takes for tools."""
    members = inspect.getmembers(cls, predicate=inspect.isfunction)
    return {name: member for name, member in members if not name.startswith("_")}


def test_the_class_has_the_methods_signatures_and_docstrings_of_the_environment() -> None:
    with calculators() as (_, cls):
        theirs, ours = tools_of(Calculator), tools_of(cls)
        del theirs["close"]
        assert [*ours] == [*theirs]
        for name, method in theirs.items():
            assert inspect.signature(ours[name]) == inspect.signature(method)
            assert inspect.getdoc(ours[name]) == inspect.getdoc(method)
            assert ours[name].__annotations__ == method.__annotations__
            assert ours[name].__name__ == name
            assert inspect.iscoroutinefunction(ours[name]) == inspect.iscoroutinefunction(method)
        assert (cls.__name__, cls.__doc__) == ("Calculator", "A calculator as an agent's tool.")
        assert "get_reward" in ours


def test_rows_tools_rewards_and_attributes_are_those_of_the_environment() -> None:
    with calculators() as (_, cls):
        first, second = cls(), cls()
        assert first.reset(start=5, prompt=[{"role": "user"}]) == "It shows 5."
        assert second.reset() == "It shows 0."
        assert (first.add(2), second.add(3, times=4), first.add(number=1)) == ("7", "12", "8")
        assert asyncio.run(second.think(0.0)) == "still 12"
        assert (first.get_reward(), second.get_reward()) == (8.0, 12.0)
        assert (first.history, second.total) == ([2, 1], 12)
        with pytest.raises(AttributeError, match="memory"):
            _ = first.memory
        assert first.reset(start=1) == "It shows 1."
        assert first.history == []


def test_an_exception_of_a_tool_is_its_answer_and_the_environment_goes_on() -> None:
    with calculators() as (manager, cls):
        env = cls()
        with pytest.raises(UsageError, match="reset"):
            env.add(1)
        env.reset(start=6)
        with pytest.raises(ZeroDivisionError):
            env.divide(0)
        with pytest.raises(TypeError):
            env.add()
        assert env.divide(3) == 2.0
        assert manager.stats().restarts == 0
        with pytest.raises(TypeError, match="column"):
            supervised(_Strict, manager.pool())().reset(column=1)
        assert manager.stats().restarts == 0


class _Strict:
    def reset(self) -> None:
        pass


def test_a_session_that_ends_is_a_lost_episode_without_a_reward() -> None:
    with calculators(1) as (manager, cls):
        env = cls()
        env.reset()
        with pytest.raises(LostEpisode, match="the session has ended"):
            env.lose_power()
        with pytest.raises(LostEpisode, match="the session has ended"):
            env.add(1)
        assert env.get_reward() is None
        assert env.reset(start=3) == "It shows 3."
        assert env.get_reward() == 3.0
        assert manager.stats().restarts == 1


def brief(completions, **row):
    """Prefer short answers."""
    return [1.0 / len(completion) for completion in completions]


async def judged(completions, **row):
    return [2.0 for _ in completions]


class Judge:
    async def __call__(self, completions, **row):
        return [3.0 for _ in completions]


def test_a_wrapped_reward_function_has_no_reward_for_lost_rollouts_alone() -> None:
    with calculators(3) as (_, cls):
        envs = [cls() for _ in range(3)]
        for env in envs:
            env.reset()
        with pytest.raises(LostEpisode):
            envs[1].lose_power()
        given = {"completions": ["a", "bb", "cccc"], "environments": [*envs]}
        wrapped = unless_lost(brief)
        assert wrapped(**given) == [1.0, None, 0.25]
        assert (wrapped.__name__, wrapped.__doc__) == ("brief", "Prefer short answers.")
        assert wrapped(completions=["a", "bb"]) == [1.0, 0.5]
        assert inspect.iscoroutinefunction(unless_lost(judged))
        assert asyncio.run(unless_lost(judged)(**given)) == [2.0, None, 2.0]
        assert asyncio.run(unless_lost(Judge())(**given)) == [3.0, None, 3.0]
        envs[1].reset()
        assert wrapped(**given) == [1.0, 0.5, 0.25]


class Trainer:
    """Resets as a trainer of TRL does."""

    def __init__(self, reward_funcs, env) -> None:
        self.reward_funcs, self.env = [*reward_funcs, self.get_reward], env

    def get_reward(self, environments, **row):
        return [env.get_reward() for env in environments]

    def batch(self) -> None:
        for _ in range(2):
            self.env.reset()


def test_reward_functions_that_would_score_lost_rollouts_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    Trainer.get_reward.__module__ = Trainer.__module__ = "trl.trainer"
    for reward_funcs, n_warned in (([unless_lost(brief), brief, judged], 1), ([unless_lost(brief)], 0)):
        caplog.clear()
        with calculators(1) as (_, cls), caplog.at_level(logging.WARNING):
            Trainer(reward_funcs, cls()).batch()
        assert len(caplog.records) == n_warned
        assert not n_warned or caplog.records[0].args == ("brief, judged",)


def test_a_tool_that_hangs_is_a_lost_episode_by_the_deadline_and_holds_up_no_other() -> None:
    with calculators(2, timeouts=Timeouts(step_s=0.2)) as (_, cls), ThreadPoolExecutor(1) as beside:
        slow, fast = cls(), cls()
        slow.reset()
        fast.reset()
        hangs = beside.submit(slow.hang)
        assert fast.add(1) == "1"
        with pytest.raises(LostEpisode, match=r"0\.2 s"):
            hangs.result()
        assert slow.reset(start=2) == "It shows 2."


def test_a_row_with_which_no_episode_begins_ends_no_training() -> None:
    with calculators(2) as (manager, cls):
        env = cls()
        for _ in range(2):
            assert env.reset(fails="no such level") is None
            with pytest.raises(LostEpisode, match="no such level"):
                env.add(1)
            assert env.get_reward() is None
        assert env.reset(start=1) == "It shows 1."
        assert manager.stats().restarts == 6


def test_instances_that_are_gone_give_their_environments_back_and_too_many_are_refused() -> None:
    with calculators(3) as (_, cls):
        for _ in range(5):
            envs = [cls() for _ in range(4)]
            for env in envs[:3]:
                env.reset()
            with pytest.raises(UsageError, match="more episodes at once than the pool has environments"):
                envs[3].reset()
            for env in envs[:3]:
                env.reset()
            del env, envs
            gc.collect()


def test_an_instance_may_be_garbage_collected_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    start = asyncio.run_coroutine_threadsafe

    def collecting(*args):
        gc.collect()
        return start(*args)

    with calculators(2) as (_, cls):
        env, other = cls(), cls()
        other.reset()
        other.itself = other
        del other
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", collecting)
        thread = threading.Thread(target=env.reset, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        assert cls().reset() == "It shows 0."  # in the environment that was given back


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no fork")
def test_a_fork_is_told_that_the_environments_belong_to_another_process() -> None:
    with calculators(2) as (_, cls):
        env = cls()
        env.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a process with threads
            pid = os.fork()
        if not pid:
            code = 1
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(30)
                for call in (env.reset, lambda: env.add(1), env.get_reward, cls().reset):
                    with pytest.raises(UsageError, match="forked"):
                        call()
                del env, call
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert env.add(1) == "1"


def test_a_pool_that_coroutines_use_serves_no_trainer_and_says_so() -> None:
    async def use(pool: Pool) -> None:
        async with pool.begin():
            waiting = asyncio.create_task(pool.until_over())
            await asyncio.sleep(0)
            env = supervised(Calculator, pool)()
            for _ in range(2):
                with pytest.raises(UsageError, match="in use in another event loop"):
                    await asyncio.to_thread(env.reset)
            waiting.cancel()

    with calculators(2) as (manager, _):
        asyncio.run(use(manager.pool()))


def test_closing_the_manager_ends_the_thread_and_all_calls() -> None:
    before = threading.active_count()
    with calculators(2) as (manager, cls), ThreadPoolExecutor(1) as beside:
        env = cls()
        env.reset()
        thinks = beside.submit(asyncio.run, cls.think(env, 3600))
        manager.close()
        assert isinstance(thinks.exception(), ManagerClosed | asyncio.CancelledError)
        for call in (env.reset, lambda: env.add(1), env.get_reward, cls().reset):
            with pytest.raises(ManagerClosed):
                call()
    for thread in threading.enumerate():
        if thread.name.startswith("envmanager-"):
            thread.join(60)
    assert threading.active_count() <= before


def test_a_thousand_rollouts_of_64_at_once_survive_sessions_that_end() -> None:
    n_dead = 0

    def rollout(cls: type, env: object, k: int) -> float | None:
        assert env.reset(start=k, prompt="add") == f"It shows {k}."
        try:
            for number in range(3):
                assert env.add(number) == str(k + sum(range(number + 1)))
                if k % 100 == 37:
                    env.lose_power()
        except LostEpisode:
            pass
        return env.get_reward()

    with calculators(64) as (manager, cls), ThreadPoolExecutor(64) as threads:
        instances = [cls() for _ in range(64)]
        rewards: list[float | None] = []
        for batch in range(0, 1000, 64):
            ks = range(batch, min(batch + 64, 1000))
            rewards += threads.map(rollout, [cls] * 64, instances, ks)
        n_dead = rewards.count(None)
        assert rewards == [None if k % 100 == 37 else k + 3 for k in range(1000)]
        assert (n_dead, manager.stats().restarts) == (10, 10)
        for env in instances:  # each has an environment, so none was leaked
            env.reset()


def test_what_has_no_reset_is_no_environment() -> None:
    with calculators() as (manager, _), pytest.raises(UsageError, match="no method reset"):
        supervised(ThreadPoolExecutor, manager.pool())
