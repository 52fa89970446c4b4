"""A trainer that does anything at all with a manager, and compares every row it gets with what the environments say.

::

    hypothesis ── rules ──▶ RandomUse ── send, recv, step, reset, call ──▶ manager, with a random RestartPolicy
                               │  Books: what each environment showed last, and the action it was given
                               └── every row that is handed out

The rule: an environment tells who it is (its number, generation, episode and step) and what it was asked; faults are
asked for by actions, so that whatever goes wrong was drawn by hypothesis and can be made smaller by it.
"""

from __future__ import annotations

import enum
import itertools
import logging
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import gymnasium
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from envmanager import (
    ActionInfo,
    AgentSteps,
    AsyncioEnvManager,
    BadAction,
    EnvContext,
    EnvManager,
    RestartPolicy,
    SimpleEnvManager,
    StepInfo,
    SubprocessEnvManager,
    UsageError,
    Wait,
    WorkerError,
)
from envmanager_tests.interrupting import interrupted

_logger = logging.getLogger("envmanager")


class Ask(enum.IntEnum):
    """What an action asks of its environment, besides a step."""

    NOTHING = 0
    TAKE_TIME = 1
    TERMINATE = 2
    TRUNCATE = 3
    RAISE = 4
    DIE = 5


N_ASKS = len(Ask)
HARMLESS = (Ask.NOTHING, Ask.TAKE_TIME, Ask.TERMINATE, Ask.TRUNCATE)


class Tells(gymnasium.Env):  # type: ignore[misc]
    """Shows ``[env_id, generation, episode, step, action]``; the action is a number and what it asks for."""

    observation_space = gymnasium.spaces.Box(-(2**62), 2**62, (5,), np.int64)
    action_space = gymnasium.spaces.Box(0, 2**62, (), np.int64)

    def __init__(self, context: EnvContext) -> None:
        self._env_id, self._generation = context.env_id, context.generation
        self._episode, self._n_steps = -1, 0
        self._obs = np.zeros(5, np.int64)  # the same array each time: whoever keeps it sees it change

    def _show(self, action: int) -> np.ndarray:
        self._obs[:] = self._env_id, self._generation, self._episode, self._n_steps, action
        return self._obs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options is not None and options["fault_in"] == (self._env_id, self._generation):
            do(options["fault"])
        self._episode += 1
        self._n_steps = 0
        return self._show(-1), {}

    def step(self, action: Any) -> Any:
        ask = Ask(int(action) % N_ASKS)
        do(ask)
        self._n_steps += 1
        return self._show(int(action)), float(action % 1000), ask is Ask.TERMINATE, ask is Ask.TRUNCATE, {}

    def obey(self, ask: int) -> tuple[int, int]:
        do(Ask(ask))
        return self._env_id, self._generation


def do(ask: Ask) -> None:
    if ask is Ask.TAKE_TIME:
        time.sleep(0.001)
    elif ask is Ask.RAISE:
        raise ValueError("asked for")
    elif ask is Ask.DIE:
        os._exit(3)


@attrs.frozen
class Layout:
    """Where the environments run."""

    workers: tuple[tuple[int, ...], ...]
    """The environments of each worker."""
    has_share: bool
    make: Callable[..., EnvManager]

    @property
    def n_envs(self) -> int:
        return sum(map(len, self.workers))

    def may_die(self, env_id: int) -> bool:
        """Whether the process of this environment is not the tests' own."""
        return self.make is SubprocessEnvManager and not (self.has_share and env_id in self.workers[-1])

    def options(self) -> dict[str, Any]:
        if self.make is not SubprocessEnvManager:
            return {}
        return {"n_workers": len(self.workers) - self.has_share, "local_envs": self.has_share * len(self.workers[-1])}


@st.composite
def layouts(draw: Any) -> Layout:
    if draw(st.booleans()):
        n_envs = draw(st.integers(1, 4))
        if draw(st.booleans()):
            return Layout(tuple((env_id,) for env_id in range(n_envs)), False, AsyncioEnvManager)
        return Layout((tuple(range(n_envs)),), False, SimpleEnvManager)
    sizes = sorted(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)), reverse=True)  # as they are dealt
    n_share = draw(st.sampled_from([0, 0, 1, 2]))
    bounds = np.cumsum([0, *sizes, *([n_share] if n_share else [])]).tolist()
    workers = tuple(tuple(range(start, stop)) for start, stop in itertools.pairwise(bounds))
    return Layout(workers, bool(n_share), SubprocessEnvManager)


policies = st.builds(
    RestartPolicy,
    max_restarts=st.sampled_from([0, 1, 100]),
    backoff_s=st.just(0.0),
    recycle_after_steps=st.sampled_from([None, 1, 3]),
    on_exception=st.sampled_from(["raise", "restart"]),
    then=st.sampled_from(["raise", "drop"]),
)

MOST_ENVS = 8
places = st.integers(0, MOST_ENVS - 1)
waits = st.sampled_from(
    [Wait.any(), Wait.all(), Wait(min_ready=2), Wait(max_ready=1), Wait(min_ready=1, timeout_s=0.0)]
)


@attrs.frozen
class Row:
    """One environment's row of whatever was handed out."""

    obs: tuple[int, ...]
    reward: float
    terminated: bool
    truncated: bool
    final_obs: tuple[int, ...] | None
    lost: bool


def rows_of(steps: Any, env_ids: np.ndarray, lost: np.ndarray) -> dict[int, Row]:
    """The rows of a Batch or of AgentSteps, by environment."""
    ended = steps.terminated | steps.truncated
    place = np.cumsum(ended) - 1
    assert len(set(env_ids.tolist())) == len(env_ids), f"an environment twice: {env_ids}"
    return {
        env_id: Row(
            tuple(steps.obs[row].tolist()),
            float(steps.reward[row]),
            bool(steps.terminated[row]),
            bool(steps.truncated[row]),
            tuple(steps.final_obs[place[row]].tolist()) if ended[row] else None,
            bool(lost[row]),
        )
        for row, env_id in enumerate(env_ids.tolist())
    }


class Books:
    """What each environment showed last, and what it was asked."""

    def __init__(self, layout: Layout, policy: RestartPolicy) -> None:
        self.layout = layout
        self.policy = policy
        self.shown: dict[int, tuple[int, ...]] = {}
        self.asked: dict[int, int] = {}
        """The actions in flight."""
        self.worker_of = {env_id: number for number, own in enumerate(layout.workers) for env_id in own}
        self.was_moved = False
        """Whether a worker was moved, and so may be recycled."""

    @property
    def busy(self) -> set[int]:
        """The workers that owe a response."""
        return {self.worker_of[env_id] for env_id in self.asked}

    def idle_envs(self, out: set[int]) -> set[int]:
        """The environments that may be sent something."""
        busy = self.busy
        return {env_id for env_id, number in self.worker_of.items() if number not in busy | out}

    def forget(self, workers: set[int]) -> None:
        """These workers owe nothing: they are out."""
        for number in workers:
            for env_id in self.layout.workers[number]:
                self.asked.pop(env_id, None)

    def begin(self, rows: dict[int, Row]) -> None:
        """The first observations after a reset."""
        self.asked.clear()
        for env_id, row in rows.items():
            assert (row.obs[0], row.obs[3:]) == (env_id, (0, -1)), f"not a first observation: {row}"
            assert row.reward == 0
            assert (row.terminated, row.truncated, row.lost) == (False, False, False)
            before = self.shown.get(env_id)
            assert before is None or row.obs[1:3] > before[1:3], f"no new episode: {before} then {row}"
            self.shown[env_id] = row.obs

    def check(self, rows: dict[int, Row], *, is_recycled: bool = False) -> None:
        """Whatever was handed out later; with ``is_recycled`` of a worker whose replacement was planned."""
        for worker in {self.worker_of[env_id] for env_id in rows}:
            own = self.layout.workers[worker]
            came = {env_id for env_id in own if env_id in rows}
            asked = {env_id for env_id in own if env_id in self.asked}
            is_new = any(rows[env_id].obs[1] > self.shown[env_id][1] for env_id in came)
            assert came == (set(own) if is_new else asked), f"worker {worker} was asked {asked} and answered {came}"
        for env_id, row in rows.items():
            if row.lost and is_recycled and self.shown[env_id][3] == 0:
                self._check_new(env_id, row)
            elif row.lost:
                self._check_lost(env_id, row)
            else:
                self._check_step(env_id, row)
            self.shown[env_id] = row.obs
            self.asked.pop(env_id, None)

    def _check_lost(self, env_id: int, row: Row) -> None:
        before = self.shown[env_id]
        assert (row.reward, row.terminated, row.truncated) == (0.0, False, True), row
        assert row.final_obs == before, f"it saw {before} last: {row}"
        self._check_first(env_id, row)

    def _check_new(self, env_id: int, row: Row) -> None:
        """No step was taken of its episode, so none is lost."""
        assert self.policy.recycle_after_steps is not None or self.was_moved
        assert (row.reward, row.terminated, row.truncated, row.final_obs) == (0.0, False, False, None), row
        self._check_first(env_id, row)

    def _check_first(self, env_id: int, row: Row) -> None:
        assert row.obs == (env_id, row.obs[1], 0, 0, -1), row
        assert row.obs[1] > self.shown[env_id][1], "not a new generation"

    def _check_step(self, env_id: int, row: Row) -> None:
        _, generation, episode, n_steps, _ = self.shown[env_id]
        action = self.asked[env_id]
        ask = Ask(action % N_ASKS)
        stepped = (env_id, generation, episode, n_steps + 1, action)
        assert row.reward == action % 1000, row
        if ask in (Ask.TERMINATE, Ask.TRUNCATE):
            assert row.obs == (env_id, generation, episode + 1, 0, -1), row
            assert (row.terminated, row.truncated) == (ask is Ask.TERMINATE, ask is Ask.TRUNCATE), row
            assert row.final_obs == stepped, (stepped, row)
        else:
            assert (row.obs, row.terminated, row.truncated) == (stepped, False, False), (stepped, row)


def repeated(call: Callable[[], Any], nth: int | None) -> None:
    """Make a call; with ``nth`` it is interrupted there, and made again if it was."""
    if nth is None or interrupted(call, nth):
        call()


T = TypeVar("T")


def taken(call: Callable[[], T], nth: int | None) -> T:
    """What a call returns that is ``repeated``. Nothing is called after it: what came would be lost there."""
    made: Any = None

    def take() -> None:
        nonlocal made
        made = call()

    repeated(take, nth)
    return made  # type: ignore[no-any-return]


class Mode(enum.Enum):
    """How the manager is used since the last reset."""

    UNUSABLE = enum.auto()
    SEND_RECV = enum.auto()
    STEP = enum.auto()


class RandomUse(RuleBasedStateMachine):
    """See the module."""

    manager: EnvManager

    def __init__(self) -> None:
        super().__init__()
        self._level = _logger.level
        _logger.setLevel(logging.CRITICAL)  # every fault is a warning or two

    @initialize(layout=layouts(), policy=policies, zero_copy=st.booleans())
    def start(self, layout: Layout, policy: RestartPolicy, zero_copy: bool) -> None:
        self.layout, self.mode = layout, Mode.UNUSABLE
        self.books = Books(layout, policy)
        self.number = 0
        self.asks: list[Ask] = []
        self.idle_deaths: set[int] = set()
        """Workers that died in a call while they owed nothing: their replacement is handed out unasked."""
        self.has_faults = False
        """Whether a fault was asked for since the last reset that went well, which may strike in the next one."""
        own = {} if layout.make is AsyncioEnvManager else {"zero_copy": zero_copy}
        self.manager = layout.make(Tells, layout.n_envs, restarts=policy, **own, **layout.options())
        self.manager.set_policy("default", self)
        self._reset(Mode.SEND_RECV, {})

    def teardown(self) -> None:
        try:
            if hasattr(self, "manager"):
                with self.manager:
                    self._settle()
        finally:
            _logger.setLevel(self._level)

    def _settle(self) -> None:
        """Whoever owes a response gives it, or is out."""
        for _ in range(20):
            self._note_who_is_out()
            if self.mode is Mode.SEND_RECV and (self.books.busy or self.idle_deaths):
                self._receive(Wait.all())
            elif self.mode is Mode.STEP and self.books.busy:
                self.asks = []
                self._step(Wait.all())
        if self.mode is Mode.SEND_RECV:
            assert not self.books.busy, "somebody never answered"

    # What goes wrong, and who is out after it.

    def _note_who_is_out(self) -> set[int]:
        out = {worker.worker_id for worker in self.manager.stats().workers if worker.failed or worker.dropped}
        self.books.forget(out)
        self.idle_deaths -= out
        return out

    @property
    def _all_are_dropped(self) -> bool:
        return all(worker.dropped for worker in self.manager.stats().workers)

    def _allowed(self, env_id: int, ask: Ask) -> Ask:
        """What is asked of an environment: none in the tests' own process is asked to die."""
        if ask is Ask.DIE and not self.layout.may_die(env_id):
            ask = Ask.RAISE
        self.has_faults |= ask not in HARMLESS
        return ask

    def _actions(self, asks: list[Ask]) -> np.ndarray:
        numbers = range(self.number + 1, self.number + 1 + len(asks))
        self.number += len(asks)
        return np.array([number * N_ASKS + ask for number, ask in zip(numbers, asks, strict=True)], np.int64)

    # Reset.

    def _reset(self, mode: Mode, options: dict[str, Any], nth: int | None = None) -> None:
        self.mode = Mode.UNUSABLE
        infos: list[StepInfo] = []

        def reset() -> None:
            infos.extend(self.manager.reset({"options": options} if options else None))

        try:
            was_interrupted = reset() if nth is None else interrupted(reset, nth)
        except WorkerError:
            assert self.has_faults or self._all_are_dropped, "nothing that could fail was asked for"
            return
        if was_interrupted:
            return
        steps = [info.current["default"] for info in infos]
        self.books.begin({env_id: row for each in steps for env_id, row in self._rows(each).items()})
        self._note_who_is_out()
        self.idle_deaths.clear()
        self.has_faults = False
        self.mode = mode
        if mode is Mode.SEND_RECV:
            batch = self.manager.recv(Wait.all())
            first = rows_of(batch, batch.env_ids, batch.lost)
            assert {env_id: row.obs for env_id, row in first.items()} == {
                env_id: obs for env_id, obs in self.books.shown.items() if env_id in first
            }

    def _rows(self, steps: AgentSteps, *, lost: bool = False) -> dict[int, Row]:
        return rows_of(steps, steps.env_id, np.full(len(steps), lost))

    @rule(mode=st.sampled_from([Mode.SEND_RECV, Mode.STEP]), nth=st.none() | st.integers(1, 400))
    def reset(self, mode: Mode, nth: int | None) -> None:
        self._reset(mode, {}, nth)

    @rule(mode=st.sampled_from([Mode.SEND_RECV, Mode.STEP]), place=places, fault=st.sampled_from([Ask.RAISE, Ask.DIE]))
    def reset_with_a_fault(self, mode: Mode, place: int, fault: Ask) -> None:
        env_id = place % self.layout.n_envs
        generation = self.manager.stats().workers[self.books.worker_of[env_id]].generation
        self._reset(mode, {"fault_in": (env_id, generation), "fault": self._allowed(env_id, fault)})

    # Send and recv.

    @rule(
        order=st.permutations(range(MOST_ENVS)),
        chosen=st.lists(st.booleans(), min_size=MOST_ENVS, max_size=MOST_ENVS),
        asks=st.lists(st.sampled_from(Ask), min_size=MOST_ENVS, max_size=MOST_ENVS),
        nth=st.none() | st.integers(1, 150),
    )
    def send(self, order: list[int], chosen: list[bool], asks: list[Ask], nth: int | None) -> None:
        if self.mode is not Mode.SEND_RECV:
            return
        idle = self.books.idle_envs(self._note_who_is_out())
        env_ids = [env_id for env_id in order if env_id in idle and chosen[env_id]]
        actions = self._actions([self._allowed(env_id, asks[env_id]) for env_id in env_ids])
        if self.idle_deaths & {self.books.worker_of[env_id] for env_id in env_ids}:
            nth = None  # such a worker takes one action, which is dropped: asking twice is asking too much
        try:
            repeated(lambda: self.manager.send(actions, env_ids), nth)
        except BadAction:
            if nth is None:  # else it had been sent when it was interrupted
                assert self.idle_deaths  # whose replacement has not been handed out
                return
        self.books.asked.update(zip(env_ids, actions.tolist(), strict=True))

    @rule(place=places, n=st.integers(1, 2))
    def send_to_somebody_who_is_busy(self, place: int, n: int) -> None:
        self._note_who_is_out()
        busy = sorted(self.books.busy)
        if self.mode is not Mode.SEND_RECV or not busy:
            return
        env_ids = self.layout.workers[busy[place % len(busy)]][:n]
        try:
            self.manager.send(self._actions([Ask.NOTHING] * len(env_ids)), env_ids)
        except BadAction:
            return
        raise AssertionError(f"{env_ids} are busy and took another action")

    @rule(wait=waits, nth=st.none() | st.integers(1, 250))
    def recv(self, wait: Wait, nth: int | None) -> None:
        self._note_who_is_out()
        if self.mode is Mode.SEND_RECV and (self.books.busy or self.idle_deaths):
            self._receive(wait, nth)

    def _receive(self, wait: Wait, nth: int | None = None) -> None:
        try:
            batch = taken(lambda: self.manager.recv(wait), nth)
        except WorkerError:
            self._note_who_is_out()
            return
        except UsageError:
            self._note_who_is_out()
            assert not self.books.busy, "somebody owes a response"
            return
        rows = rows_of(batch, batch.env_ids, batch.lost)
        self.books.check(rows)
        self.idle_deaths -= {self.books.worker_of[env_id] for env_id in rows}

    # Step.

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        """The policy: does what the rule has drawn, and nothing more."""
        env_ids = steps.env_id.tolist()
        asks = [self._allowed(env_id, self.asks.pop() if self.asks else Ask.NOTHING) for env_id in env_ids]
        actions = self._actions(asks)
        self.books.asked.update(zip(env_ids, actions.tolist(), strict=True))
        return ActionInfo(actions)

    @rule(wait=waits, asks=st.lists(st.sampled_from(Ask), max_size=3), nth=st.none() | st.integers(1, 300))
    def step(self, wait: Wait, asks: list[Ask], nth: int | None) -> None:
        if self.mode is Mode.STEP:
            self.asks = asks
            self._step(wait, nth)

    def _step(self, wait: Wait, nth: int | None = None) -> None:
        try:
            # A policy that was interrupted is asked again, unless its actions had been sent.
            infos = taken(lambda: self.manager.step(wait), nth)
        except WorkerError:
            self._note_who_is_out()
            return
        except UsageError:
            assert len(self._note_who_is_out()) == len(self.layout.workers), "somebody could have taken a step"
            return
        for info in infos:
            is_recycled = info.lost is not None and info.lost.cause.phase == "recycled"
            rows = self._rows(info.current["default"], lost=info.lost is not None)
            self.books.check(rows, is_recycled=is_recycled)
            assert (info.actions is None) == (info.lost is not None)

    # Calls.

    @rule(chosen=st.lists(places, max_size=3), nth=st.none() | st.integers(1, 60))
    def move(self, chosen: list[int], nth: int | None) -> None:
        self.books.was_moved |= bool(chosen)
        repeated(lambda: self.manager.move(place % len(self.layout.workers) for place in chosen), nth)

    @rule(place=places, ask=st.sampled_from(Ask))
    def call(self, place: int, ask: Ask) -> None:
        env_id = place % self.layout.n_envs
        worker, ask = self.books.worker_of[env_id], self._allowed(env_id, ask)
        try:
            ((said, _),) = self.manager.call("obey", int(ask), env_ids=[env_id])
        except WorkerError:
            if worker not in self.books.busy and ask is Ask.DIE:
                self.idle_deaths.add(worker)
            self._note_who_is_out()
        else:
            assert said == env_id
