"""Environments of TRL, whose methods are an agent's tools, played by the workers of a manager.

::

    GRPOTrainer ── reset(**row) ──▶ an instance of supervised(MyEnv, pool) ── pool.begin(row) ──▶ MyEnv.reset(**row)
                ── a tool call ───▶ ── (name, args, kwargs) is an action ── episode.step ──────▶ MyEnv.name(…)

The trainer's calls are synchronous and come from any thread, so a thread runs the event loop of the pool. It ends when
the manager is closed.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from envmanager.errors import LostEpisode, ManagerClosed, UsageError
from envmanager.kernel.pool import Episode, Pool
from envmanager.tasks import Task

T = TypeVar("T")
_logger = logging.getLogger("envmanager")
_ATTRIBUTE = "__getattribute__"
_CALL = "a call of an environment for TRL"


class ToolEnvironment:
    """An environment for a manager whose episodes are those of an environment of TRL.

    Options of an episode are the arguments of its ``reset``. An action is ``(name, args, kwargs)`` of a method to call,
    and the observation is ``(True, what it has returned)``, or ``(False, the exception)``, because an exception of a
    tool is an answer for the agent. One of ``failures`` means that the environment is broken: it is replaced.
    """

    def __init__(self, env: Any, failures: tuple[type[BaseException], ...] = (ConnectionError,)) -> None:
        self.env = env
        self._failures = failures

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        """Begin an episode. The observation is what the environment's ``reset`` returns."""
        observation = self.env.reset(**(options or {}))
        return _first(observation) if inspect.isawaitable(observation) else (observation, {})

    def step(self, action: Any) -> Any:
        """Call a method, and return its result as an observation."""
        name, args, kwargs = action
        try:
            method = getattr(self.env, name)
            if inspect.iscoroutinefunction(method):
                return self._awaited(method, args, kwargs)
            result = method(*args, **kwargs)
        except self._failures:
            raise
        except Exception as error:
            result = error
        return _answer(result)

    def close(self) -> Any:
        """Close the environment, if it has a method ``close``."""
        return getattr(self.env, "close", lambda: None)()

    async def _awaited(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return _answer(await method(*args, **kwargs))
        except self._failures:
            raise
        except Exception as error:
            return _answer(error)


async def _first(observation: Any) -> Any:
    return await observation, {}


def _answer(result: Any) -> Any:
    return (not isinstance(result, Exception), result), 0.0, False, False, {}


class _Portal:
    """A thread with the event loop in which the episodes of a pool run, for calls from other threads."""

    def __init__(self, pool: Pool, attempts: int) -> None:
        self.pool, self.attempts = pool, attempts
        self._players: set[_Player] = set()
        """Players that have an environment, or wait for one."""
        self._lock = threading.RLock()
        """Lock held while the thread starts, while it gets something to do, and while it begins to end. The collector
        may find an instance while its thread holds the lock."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_trainer_checked = False
        """Whether the reward functions of the trainer that resets the instances were looked at."""
        self._end: ManagerClosed | UsageError | None = None
        """Error that says why the thread has ended, if it has."""

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop. Return its future."""
        try:
            self.pool.require_usable()  # a fork has no such thread
            with self._lock:
                if self._loop is None:
                    is_running = threading.Event()
                    threading.Thread(target=self._run, args=(is_running,), name="envmanager-trl", daemon=True).start()
                    is_running.wait()
                if self._end is None:
                    return asyncio.run_coroutine_threadsafe(coroutine, self._loop)  # type: ignore[arg-type]
            raise self._end.with_traceback(None)
        except (ManagerClosed, UsageError):
            coroutine.close()
            raise

    def result_of(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop. Return its result. It is cancelled if this call is interrupted."""
        future = self.start(coroutine)
        try:
            return future.result()
        except CancelledError as error:  # at the end of the loop
            raise ManagerClosed(_CALL) from error
        except BaseException:
            future.cancel()
            raise

    def _run(self, is_running: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            is_running.set()
            try:
                await self.pool.until_over()
            except (ManagerClosed, UsageError) as error:
                with self._lock:
                    self._end = error
            await asyncio.sleep(0)  # what was started becomes a task, which is cancelled now

        asyncio.run(serve())

    async def begin(self, player: _Player, task: Task) -> Any:
        """Begin an episode of a player, whose former one ends. Return its first observation, or None if it was lost."""
        await self.leave(player)
        self._players = {each for each in self._players if each.lost is None}
        if len(self._players) >= self.pool.n_envs:
            raise UsageError(
                f"the trainer plays more episodes at once than the pool has environments ({self.pool.n_envs}), and "
                "gives none back: make the manager with more (n_envs=…), at least one for each rollout of a batch."
            )
        self._players.add(player)
        lost = None
        for _ in range(self.attempts):
            episode = self.pool.begin(task)
            try:
                await episode.__aenter__()
            except LostEpisode as error:
                lost = error
            except BaseException:
                self._players.discard(player)
                raise
            else:
                player.episode = episode
                return episode.obs
        _logger.warning("An episode was lost %s times before it began, the last time: %s", self.attempts, lost)
        player.lost = lost
        return None

    async def ask(self, player: _Player, action: Any) -> Any:
        """Call a method in a player's environment. Return its result, or raise what it raised."""
        if player.lost is not None:
            raise player.lost.with_traceback(None)
        if player.episode is None:
            raise UsageError("the environment has no episode: call reset() first.")
        try:
            (is_result, result), *_ = await player.episode.step(action)
        except LostEpisode as error:
            player.lost = error
            raise
        if is_result:
            return result
        raise result

    async def leave(self, player: _Player) -> None:
        """End the episode of a player, whose environment is free then."""
        episode, player.episode, player.lost = player.episode, None, None
        self._players.discard(player)
        if episode is not None:
            await episode.__aexit__(None, None, None)


class _Player:
    """The episode of an instance, which ends if the instance is garbage-collected."""

    def __init__(self) -> None:
        self.episode: Episode | None = None
        self.lost: LostEpisode | None = None
        """Error that says why the episode was lost, if it was, until the next one begins."""


class _Supervised:
    """The base class of the classes that ``supervised`` returns. Without a public method, for each would be a tool."""

    _portal: _Portal
    _reset: inspect.Signature

    def __init__(self) -> None:
        self._player = _Player()
        weakref.finalize(self, _leave, self._portal, self._player)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._player.episode is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._portal.result_of(self._portal.ask(self._player, (_ATTRIBUTE, (name,), {})))


def _leave(portal: _Portal, player: _Player) -> None:
    if player.episode is not None:
        with suppress(ManagerClosed, UsageError):
            portal.start(portal.leave(player))


def supervised(env_class: type, pool: Pool, *, attempts: int = 3) -> type:
    """Return a class for TRL's ``environment_factory`` whose instances play in the environments of a pool.

    It has the public methods of ``env_class``, with their signatures and docstrings: ``reset``, ``get_reward`` if there
    is one, and tools. Each call is made in a worker of the manager, whose environments are
    ``ToolEnvironment(env_class())``. Other attributes are those of the environment, until the next ``reset``.

    An episode that is lost ends no training: its tools raise LostEpisode, whose text the agent receives, and its
    ``get_reward`` returns None. It counts for nothing if every other reward function is wrapped in ``unless_lost``; the
    first ``reset`` warns of those that are not. A ``reset`` whose worker fails begins in others, up to ``attempts``
    times. An instance holds its environment until its next ``reset``, or its end.
    """
    portal = _Portal(pool, attempts)
    methods: dict[str, Any] = {
        "__doc__": env_class.__doc__,
        "__module__": env_class.__module__,
        "__qualname__": env_class.__qualname__,
        "_portal": portal,
    }
    for name, method in inspect.getmembers(env_class, inspect.isfunction):
        if name == "reset":
            methods[name] = _resetting(method)
        elif not name.startswith("_") and name != "close":
            methods[name] = _calling(name, method)
    if "reset" not in methods:
        raise UsageError(f"{env_class.__name__} has no method reset: it is no environment for TRL.")
    return type(env_class.__name__, (_Supervised,), methods)


def unless_lost(reward_func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function for TRL, or coroutine function, whose reward is None for each rollout that was lost.

    TRL leaves a rollout out only if all functions return None; otherwise the lost reward counts as 0.
    """

    def masked(rewards: Sequence[Any], environments: Sequence[Any] | None) -> list[Any]:
        if environments is None:
            return list(rewards)
        lost = [isinstance(each, _Supervised) and each._player.lost is not None for each in environments]
        return [None if is_lost else reward for reward, is_lost in zip(rewards, lost, strict=True)]

    @functools.wraps(reward_func)
    async def awaited(*args: Any, **kwargs: Any) -> list[Any]:
        return masked(await reward_func(*args, **kwargs), kwargs.get("environments"))

    @functools.wraps(reward_func)
    def called(*args: Any, **kwargs: Any) -> list[Any]:
        return masked(reward_func(*args, **kwargs), kwargs.get("environments"))

    is_async = any(inspect.iscoroutinefunction(each) for each in (reward_func, type(reward_func).__call__))
    wrapped: Any = awaited if is_async else called
    wrapped.skips_lost = True
    return wrapped  # type: ignore[no-any-return]


def _check_trainer() -> None:
    """Warn of reward functions of the trainer that calls this that are not wrapped in ``unless_lost``."""
    frame = sys._getframe()
    while frame is not None:
        is_method = frame.f_code.co_varnames[:1] == ("self",)  # to look at its variables keeps them until it returns
        trainer = frame.f_locals.get("self") if is_method else None
        reward_funcs = getattr(trainer, "reward_funcs", None)
        if isinstance(reward_funcs, list):
            own = {each.__module__ for each in type(trainer).__mro__}  # where TRL calls get_reward
            bare = [each for each in reward_funcs if not hasattr(each, "skips_lost") and each.__module__ not in own]
            if bare:
                names = ", ".join(getattr(each, "__name__", type(each).__name__) for each in bare)
                _logger.warning(
                    "The reward functions %s score lost rollouts too: TRL then trains on them, with the reward of the "
                    "environment as 0. Wrap each: GRPOTrainer(reward_funcs=[unless_lost(…)]).",
                    names,
                )
            return
        frame = frame.f_back  # type: ignore[assignment]


def _resetting(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def reset(self: _Supervised, /, **row: Any) -> Any:
        signature.bind(self, **row)  # else it would fail in all workers
        if not self._portal.is_trainer_checked:
            self._portal.is_trainer_checked = True
            _check_trainer()
        return self._portal.result_of(self._portal.begin(self._player, Task(options=row)))

    return reset


def _calling(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    async def ask(self: _Supervised, args: Any, kwargs: Any) -> Any:
        try:
            return await self._portal.ask(self._player, (name, args, kwargs))
        except LostEpisode:
            if name == "get_reward":
                return None
            raise

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(self: _Supervised, /, *args: Any, **kwargs: Any) -> Any:
            return await asyncio.wrap_future(self._portal.start(ask(self, args, kwargs)))

        return awaited

    @functools.wraps(method)
    def call(self: _Supervised, /, *args: Any, **kwargs: Any) -> Any:
        return self._portal.result_of(ask(self, args, kwargs))

    return call
