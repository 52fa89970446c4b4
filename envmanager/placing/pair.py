"""A trial of two environments in one process, because a process can hold only one of some simulators.

::

    trainer                                   worker, closed after the trial
    try_two ─── call "play_alone" ──────────▶  Pair: make the first, and play it
            ─── call "play_in_turns" ───────▶  make the second; reset both, and step them in turns
            ◀── whether the first returned the same data as alone ──

If the data differ, another worker plays the first three times alone, and then both. Only an environment that always
returns the same data alone, and other data beside a second one, has trouble. So one that is random has none.
"""

from __future__ import annotations

import faulthandler
import hashlib
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from envmanager.adapters.choosing import build_group, n_envs_of
from envmanager.adapters.factories import call_factory
from envmanager.data.differences import first_difference
from envmanager.data.seeding import derive_seeds
from envmanager.data.specs import ArraySpec, BehaviorSpec, BehaviorSpecs, describe_value
from envmanager.data.steps import ActionInfo, AgentSteps, StepInfo, Steps
from envmanager.data.trees import Tree, as_numpy, is_foreign
from envmanager.environment import EnvContext, Environment
from envmanager.errors import EnvRaised, UsageError, WorkerDied, WorkerError, WorkerTimedOut
from envmanager.kernel.policy_steps import call_policies
from envmanager.options import ProcessOptions, RestartPolicy
from envmanager.policy import Policy, RandomPolicy

if TYPE_CHECKING:
    from envmanager.env_manager import EnvManager

PLAY_S = 0.25
"""Time in seconds after which the first playthrough ends. Later ones take as many steps."""
MAX_STEPS = 50
DATA, INFOS = ("obs", "reward", "terminated", "truncated", "final_obs"), ("info", "reset_info")
"""Fields of AgentSteps that are compared."""
LARGEST = 4096
"""Size in bytes up to which an array is kept for comparisons. A larger one is hashed."""
LEAST_S, TIMES = 5.0, 3
"""Deadline of two environments: so many seconds, and so many times the time in which one was started and played."""


class OnePerProcess(Exception):
    """Error raised when two environments cannot share a process. Its text says what went wrong."""


def try_two(
    manager_class: Callable[..., Any], factories: Sequence[Any], options: ProcessOptions, *, is_apart: bool = True
) -> bool:
    """Try the environments of the first two ``factories`` in one process. Raises OnePerProcess if anything goes wrong.

    ``manager_class`` makes the manager of that process, which is not the trainer's unless ``is_apart`` is false. Then
    there is no deadline. Return whether two were tried. Vectors are not, because a worker holds one vector anyway.
    """
    trouble = "an environment failed when it was tried again: {}"
    alone_s, factory = options.timeouts.reset_s + options.timeouts.step_s, partial(Pair, factories[:2])
    try:
        for n_times in (1, 3):
            began = time.monotonic()
            with probing_manager(manager_class, factory, options, "probe-of-two", call_s=alone_s) as manager:
                is_same_alone = manager.call("play_alone", n_times)[0]
                if not is_same_alone:
                    return is_same_alone is not None
                limit_s = LEAST_S + TIMES * (time.monotonic() - began) if is_apart else math.inf
                trouble = "a process can hold one: with two in it, {}"
                if call_within(limit_s, manager, "play_in_turns"):
                    return True
    except WorkerError as error:
        raise OnePerProcess(trouble.format(_what(error))) from error
    raise OnePerProcess(trouble.format("the first returned something else than alone, for the same seed and actions"))


def _what(error: WorkerError) -> str:
    cause = error.cause.partition("\n")[0]
    if isinstance(error, EnvRaised):
        return f"one raised {error.type_name}: {cause}"
    if isinstance(error, WorkerTimedOut):
        return f"there was no response within {error.timeout_s:.2g} s"
    return f"it ended ({cause})" if isinstance(error, WorkerDied) else f"one broke its spec: {cause}"


def probing_manager(
    manager_class: Callable[..., Any], subject: Any, options: ProcessOptions, log_name: str, **timeouts: float
) -> Any:
    """Return a manager of one worker, in which ``subject`` makes an environment. Any failure of the worker is raised.

    ``options`` are those of the manager that is being planned, but for ``timeouts``. ``log_name``: folder for the
    worker's log, in the folder for logs in ``options``.
    """
    return manager_class(
        subject,
        1,
        start_method=options.start_method,
        transport=options.transport,
        timeouts=attrs.evolve(options.timeouts, **timeouts),
        restarts=RestartPolicy(max_restarts=0),
        seed=options.seed,
        worker_env=options.worker_env,
        log_dir=None if options.log_dir is None else os.path.join(options.log_dir, log_name),
    )


def call_within(limit_s: float, manager: EnvManager, name: str, *args: Any) -> Any:
    """Call the method ``name`` of the Hosted in the only worker of ``manager``. Return the result.

    After ``limit_s`` seconds the worker exits, and WorkerTimedOut is raised. Raises WorkerDied and EnvRaised as well.
    """
    began = time.monotonic()
    try:
        return manager.call("within", limit_s, name, *args)[0]
    except WorkerDied as error:
        if time.monotonic() - began < limit_s:
            raise  # not by ``within``
        raise WorkerTimedOut(
            worker_id=error.worker_id, env_ids=error.env_ids, phase=error.phase, timeout_s=limit_s, output=error.output
        ) from error


class Hosted(Environment):
    """An object in a worker whose methods a trainer calls. It is an Environment only so that a manager can host it."""

    stacks_fd = -1
    """Descriptor to which the stacks of all threads are written at a deadline. If negative, they are discarded."""

    def within(self, limit_s: float, name: str, *args: Any) -> Any:
        """Call the method ``name`` and return its result. If that takes ``limit_s`` seconds, exit this process.

        The watchdog is a thread of Python that needs no GIL, so it ends native code as well.
        """
        method = getattr(self, name)
        if limit_s == math.inf:
            return method(*args)
        if self.stacks_fd < 0:
            self.stacks_fd = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(limit_s, exit=True, file=self.stacks_fd)  # it may be closed since
        try:
            return method(*args)
        finally:
            faulthandler.cancel_dump_traceback_later()

    SPEC = BehaviorSpec(ArraySpec((1,)), ArraySpec((), np.int64))

    @property
    def behavior_specs(self) -> BehaviorSpecs:
        return {"default": self.SPEC}

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        raise NotImplementedError

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        raise NotImplementedError


class Pair(Hosted):
    """Two environments of one process, which are played with the same random actions alone and in turns."""

    def __init__(self, factories: Sequence[Any], context: EnvContext) -> None:
        """Make the environment of the first of ``factories``. A factory may be a name or an EnvRecipe."""
        contexts = context, attrs.evolve(context, env_id=1, slot=context.slot + 1)
        self._to_make = list(zip(factories, contexts, strict=True))
        self._players: list[Player] = []
        self._seeds: tuple[int | None, int | None] = (0, 1)
        self._alone: list[dict[str, Any]] = []
        self._make_next()

    def _make_next(self) -> None:
        factory, context = self._to_make[len(self._players)]
        self._players.append(Player(call_factory(factory, context)))

    def play_alone(self, n_times: int) -> bool | None:
        """Play the first environment. Return whether it returned the same data each time, or None for a vector."""
        if n_envs_of(self._players[0].made) is not None:
            return None
        try:
            self._alone = self._play()
        except UsageError:  # it takes no seed
            self._seeds = None, None
            self._alone = self._play()
        return all(self._is_as_alone() for _ in range(n_times - 1))

    def play_in_turns(self) -> bool:
        """Make the second environment and play with both. Return whether the first returned the same data as alone."""
        self._make_next()
        return self._is_as_alone()

    def _is_as_alone(self) -> bool:
        return first_difference(self._alone, self._play()) is None

    def _play(self) -> list[dict[str, Any]]:
        """Play with the first environment, and with the others in turns. Return the first's data.

        Every episode of the first begins with the seed, because without one it may be another each time. So what it
        returns of an episode that begins without one is left out. The others are reset once more in the middle.
        """
        first, *others = self._players
        n_steps, deadline = len(self._alone) - 1, time.monotonic() + PLAY_S
        played: list[dict[str, Any]] = []
        has_ended = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as one about an environment that cannot be seeded
            for at_step in range(MAX_STEPS + 1 if n_steps < 0 else n_steps + 1):
                steps = first.reset(self._seeds[0], at_step) if has_ended else first.step()
                has_ended = any(each.ended.any() for each in steps.values())
                if has_ended:
                    steps = {name: attrs.evolve(each, obs=None) for name, each in steps.items()}
                played.append(plain_steps(steps))
                for other in others:
                    other.reset(self._seeds[1]) if at_step in (0, n_steps // 2) else other.step()
                if n_steps < 0 and at_step and time.monotonic() > deadline:
                    break
        return played

    def close(self) -> None:
        for player in self._players:
            with suppress(Exception):
                player.group.close()


class Player:
    """An environment or a vector, ``made`` by a user's factory, and the random actions that it gets."""

    def __init__(self, made: Any, *, infos: bool = False) -> None:
        self.made = made
        self.group = build_group([made], range(n_envs_of(made) or 1), infos=infos)
        self._steps: Steps = {}
        self._policies: dict[str, Policy] = {}
        self._action_seed = 0

    def reset(self, seed: int | None, action_seed: int = 0) -> Steps:
        """Reset with ``seed`` (None: without one). ``action_seed`` is the seed of the actions that follow."""
        self._policies, self._action_seed = {}, action_seed
        self._steps = self.group.reset(seeds=derive_seeds(seed, self.group.env_ids), options=None)
        return self._steps

    def step(self) -> Steps:
        """Take a step with random actions."""
        make_policy = partial(ByRow, seed=self._action_seed)
        actions = actions_for(self._steps, self._policies, self.group.behavior_specs, make_policy)
        self._steps = self.group.step(actions)
        return self._steps


def actions_for(
    steps: Steps, policies: dict[str, Policy], specs: BehaviorSpecs, make_policy: Callable[[BehaviorSpec], Policy]
) -> dict[str, Tree]:
    """Return actions for ``steps``, by behavior. Add missing policies to ``policies``, made with ``make_policy``."""
    for behavior, spec in specs.items():
        if behavior not in policies:
            policies[behavior] = make_policy(spec)
    (taken,), _ = call_policies([StepInfo(None, steps, None, 0)], policies, specs)
    return {behavior: info.action for behavior, info in taken.items()}


class ByRow:
    """A random policy whose actions depend on an agent's row, not on its id, because ids can differ between resets."""

    def __init__(self, spec: BehaviorSpec, seed: int) -> None:
        self._policy = RandomPolicy(spec, seed)

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return self._policy.get_action(attrs.evolve(steps, agent_id=np.arange(len(steps))))


def plain_steps(steps: Steps, names: Sequence[str] = DATA) -> dict[str, Any]:
    """Return the fields ``names`` of ``steps`` as plain values, which ``data.differences`` can compare.

    A key is a field's name, after that of its behavior if there are several. The rows of a single agent are returned
    without their first dimension. None replaces what contains itself.
    """
    found: dict[str, Any] = {}
    for behavior, current in steps.items():
        for name in names:
            key = name if len(steps) == 1 else f"{behavior}: {name}"
            try:
                found[key] = _plain(getattr(current, name), is_of_one=len(current) == 1)
            except RecursionError:
                found[key] = None
    return found


def _plain(value: Any, *, is_of_one: bool = False) -> Any:
    """Return a copy of ``value`` that any process can unpickle and compare, because it has no objects of other classes.

    An array of more than ``LARGEST`` bytes becomes a text with its hash, an object of another class its ``repr``, or
    the name of its class if the ``repr`` has an address. ``is_of_one``: whether to return the first row of arrays and
    lists only.
    """
    value = as_numpy(value) if is_foreign(value) else value
    if is_of_one and isinstance(value, np.ndarray | list):
        return _plain(value[0]) if len(value) else None
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        if value.nbytes <= LARGEST:
            return value.copy()
        return f"{describe_value(value)} {hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()}"
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(each, is_of_one=is_of_one) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each, is_of_one=is_of_one) for key, each in value.items()}
    if isinstance(value, Set):
        return sorted(map(repr, value))
    if value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, np.generic):
        return value
    with suppress(Exception):  # of any kind: it is the object's own code
        text = repr(value)
        if " at 0x" not in text:
            return text
    return type(value).__name__
