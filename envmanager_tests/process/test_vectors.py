"""Vector environments hosted by managers: bit for bit as alone, no row mixed up, faults that take only their worker."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from envmanager import (
    ActionInfo,
    BadAction,
    EnvContext,
    EnvManager,
    EnvManagerError,
    EnvRaised,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Timeouts,
    Wait,
    WorkerDied,
    WorkerTimedOut,
)
from envmanager_tests.envs import EchoGym

SUITE = "vectors portable"

ALL = Wait.all()
MODES = list(AutoresetMode)
N_STEPS = 1_200
N_ROWS = 3

# Bit for bit as alone.

Row = tuple[bytes, float, bool, bool, bytes | None]
"""Observation, reward, terminated, truncated, final observation."""


def pong(mode: AutoresetMode, num_envs: int) -> VectorEnv:  # type: ignore[type-arg]
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv(
        "pong",
        num_envs,
        num_threads=1,
        img_height=12,
        img_width=12,
        frameskip=1,
        max_num_frames_per_episode=400,
        autoreset_mode=mode,
    )


class Limited(gymnasium.Wrapper):  # type: ignore[type-arg, misc]
    """CartPole that also ends after 20 steps, so that rows end in the same step."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1", max_episode_steps=20))


def cartpole(mode: AutoresetMode, num_envs: int) -> VectorEnv:  # type: ignore[type-arg]
    return SyncVectorEnv([Limited] * num_envs, autoreset_mode=mode)


SEEDS = [3, 1, 1_000_000]


def actions_of(row: int) -> Iterator[int]:
    """Yield the actions of one row, whatever steps the others take."""
    generator = np.random.default_rng(row)
    while True:
        yield from generator.integers(0, 2, 1000).tolist()


@functools.cache
def rows_alone(make: Any, mode: AutoresetMode) -> list[list[Row]]:
    """Return each row's first observation and steps in a vector alone, as the manager's users would describe them.

    In NEXT_STEP mode the step after an end ignores its action: its observation is the first of the next episode, and
    belongs to the step that ended. So a row that ended has taken a step less than the others.
    """
    vector_env, policies = make(mode, N_ROWS), [actions_of(row) for row in range(N_ROWS)]
    is_ale = not isinstance(vector_env, SyncVectorEnv)
    obs, _ = vector_env.reset(seed=np.array(SEEDS) if is_ale else SEEDS)
    rows: list[list[Row]] = [[(one.tobytes(), 0.0, False, False, None)] for one in obs]
    ended = np.zeros(N_ROWS, bool)
    while min(map(len, rows)) <= N_STEPS + 1:
        ignored = ended if mode is AutoresetMode.NEXT_STEP else np.zeros(N_ROWS, bool)
        action = [0 if ignored[row] else next(policies[row]) for row in range(N_ROWS)]
        obs, reward, terminated, truncated, infos = vector_env.step(np.array(action))
        obs, last, ended = obs.copy(), obs.copy(), terminated | truncated
        if ended.any() and mode is AutoresetMode.SAME_STEP:
            last[ended] = np.stack(list(infos["final_obs"][ended]))
        elif ended.any() and mode is AutoresetMode.DISABLED:
            obs = np.array(vector_env.reset(options={"reset_mask": ended.copy()})[0])
        for row in range(N_ROWS):
            if ignored[row]:
                _, *others, final = rows[row][-1]
                rows[row][-1] = (obs[row].tobytes(), *others, final)  # type: ignore[assignment]
                continue
            final = last[row].tobytes() if ended[row] else None
            flags = bool(terminated[row]), bool(truncated[row])
            rows[row].append((obs[row].tobytes(), float(reward[row]), *flags, final))
    vector_env.close()
    return [each[: N_STEPS + 1] for each in rows]


def rows_hosted(manager: EnvManager) -> tuple[list[list[Row]], int]:
    """Return each row's first observation and steps in a manager, and in how many steps several rows ended."""
    policies, n_together = [actions_of(row) for row in range(N_ROWS)], 0
    rows: list[list[Row]] = [[] for _ in range(N_ROWS)]
    with manager:
        manager.reset(seed=SEEDS)
        batch = manager.recv(ALL)
        for _ in range(N_STEPS + 1):
            final = iter([] if batch.final_obs is None else batch.final_obs)
            flags = zip(batch.terminated.tolist(), batch.truncated.tolist(), strict=True)
            n_together += int((batch.terminated | batch.truncated).sum()) > 1
            for env_id, obs, reward, ends in zip(batch.env_ids, batch.obs, batch.reward, flags, strict=True):
                last = next(final).tobytes() if any(ends) else None
                rows[env_id].append((obs.tobytes(), float(reward), *ends, last))
            manager.send(np.array([next(policies[env_id]) for env_id in batch.env_ids]), batch.env_ids)
            batch = manager.recv(ALL)
    return rows, n_together


@pytest.mark.parametrize(
    "make_manager",
    [
        SimpleEnvManager,
        functools.partial(SubprocessEnvManager, n_workers=2),
        functools.partial(SubprocessEnvManager, n_workers=2, zero_copy=True),
    ],
    ids=["simple", "copied", "zero-copy"],
)
@pytest.mark.parametrize(
    ("make_vector", "mode"),
    [
        (pong, AutoresetMode.NEXT_STEP),
        (pong, AutoresetMode.SAME_STEP),
        *((cartpole, mode) for mode in AutoresetMode),
    ],
    ids=lambda value: getattr(value, "__name__", None) or value.value,
)
def test_rows_are_bit_for_bit_those_of_the_vector_alone(
    make_vector: Any, mode: AutoresetMode, make_manager: Any
) -> None:
    def make(context: EnvContext) -> Any:
        return make_vector(mode, context.n_envs)

    expected = rows_alone(make_vector, mode)
    assert all(any(row[4] is not None for row in rows) for rows in expected), "no episode ended"
    rows, n_together = rows_hosted(make_manager(make, N_ROWS))
    assert n_together > 0, "no two rows ended in the same step"
    for got, wanted in zip(rows, expected, strict=True):
        differing = [step for step, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1]]
        assert not differing, f"{len(differing)} steps differ, the first is {differing[0]}"


# Faults.


class Faulty(EchoGym):
    """An EchoGym with observations of its own, since Gymnasium's SAME_STEP keeps them over a reset without a copy.

    Its step does something worse when the action is 13.
    """

    def __init__(self, context: EnvContext, fault: str) -> None:
        super().__init__(context)
        self._fault = fault

    def step(self, action: Any) -> Any:
        if action == 13 and self._fault == "raises":
            raise ValueError("gear 7 broke")
        if action == 13 and self._fault == "dies":
            os._exit(3)
        if action == 13 and self._fault == "hangs":
            threading.Event().wait()
        obs, *others = super().step(action)
        return obs.copy(), *others


def echo_vector(context: EnvContext, fault: str = "", mode: AutoresetMode = AutoresetMode.SAME_STEP) -> Any:
    """Return a vector of EchoGyms with the env_ids of its worker, which are one after the other."""

    def of(env_id: int) -> Callable[[], Any]:
        own = EnvContext(env_id, context.worker_id, context.generation)
        return lambda: Faulty(own, fault)

    return SyncVectorEnv([of(context.env_id + row) for row in range(context.n_envs)], copy=False, autoreset_mode=mode)


def check_rows(batch: Any, given: np.ndarray, n_steps: np.ndarray) -> None:
    ended, last = batch.terminated, batch.obs.copy()
    if ended.any():
        last[ended] = batch.final_obs
    ids = batch.env_ids
    n_steps[ids] += 1
    assert (last[:, 0] == ids).all()
    assert (last[:, 2] == n_steps[ids]).all()
    assert (last[:, 3] == given[ids]).all()
    assert (batch.reward == given[ids] % 1000).all()
    assert (batch.obs[:, 4] == last[:, 4] + ended).all()


FAULTS = {"raises": EnvRaised, "dies": WorkerDied, "hangs": WorkerTimedOut}


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copied", "zero-copy"])
@pytest.mark.parametrize("restarts", [False, True], ids=["given up", "restarted"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_row_takes_only_the_rows_of_its_worker(fault: str, restarts: bool, zero_copy: bool) -> None:
    given, n_steps = np.zeros(6, np.int64), np.zeros(6, np.int64)

    def make(context: EnvContext) -> Any:
        return echo_vector(context, fault)

    options: dict[str, Any] = {
        "restarts": RestartPolicy(on_exception="restart") if restarts else RestartPolicy(max_restarts=0),
        "timeouts": Timeouts(step_s=2.0),
        "zero_copy": zero_copy,
    }
    with SubprocessEnvManager(make, 6, n_workers=2, **options) as manager:
        manager.reset()
        batch = manager.recv(ALL)

        def round_of(env_ids: Any, first: int) -> Any:
            given[env_ids] = first + np.arange(len(env_ids))
            manager.send(given[env_ids], env_ids)
            return manager.recv(ALL)

        for number in range(1, 20):
            batch = round_of(np.random.default_rng(number).permutation(6), 100 * number)
            check_rows(batch, given, n_steps)
        given[:] = [3000, 13, 3002, 3003, 3004, 3005]
        manager.send(given, range(6))
        lost: set[int] = set()
        errors: list[EnvManagerError] = []
        while len(lost) < 3 or n_steps[3] < 20:
            try:
                batch = manager.recv()
            except EnvManagerError as error:
                errors.append(error)
                lost = {0, 1, 2}
                continue
            if batch.lost is not None and batch.lost.any():
                assert restarts
                lost |= set(batch.env_ids[batch.lost].tolist())
                continue
            check_rows(batch, given, n_steps)
        assert lost == {0, 1, 2}
        assert [type(error) for error in errors] == ([] if restarts else [FAULTS[fault]])
        assert all(error.worker_id == 0 for error in errors)
        n_steps[:3] = 0
        alive = np.arange(6) if restarts else np.arange(3, 6)
        for number in range(40, 60):
            batch = round_of(alive, 100 * number)
            assert sorted(batch.env_ids.tolist()) == alive.tolist()
            check_rows(batch, given, n_steps)
        if not restarts:
            manager.reset()  # which begins again with a new worker, where the old one is gone
            assert sorted(manager.recv(ALL).env_ids.tolist()) == list(range(6))


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copied", "zero-copy"])
@pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])
@pytest.mark.parametrize("n_workers", [0, 1, 3])
def test_hundreds_of_steps_show_no_mix_up(mode: AutoresetMode, n_workers: int, zero_copy: bool) -> None:
    given, n_steps = np.zeros(6, np.int64), np.zeros(6, np.int64)
    generator = np.random.default_rng(0)

    def make(context: EnvContext) -> Any:
        return echo_vector(context, mode=mode)

    if n_workers:
        manager: EnvManager = SubprocessEnvManager(make, 6, n_workers=n_workers, zero_copy=zero_copy)
    else:
        manager = SimpleEnvManager(make, 6, zero_copy=zero_copy)
    with manager:
        manager.reset()
        batch = manager.recv(ALL)
        bounds = np.linspace(0, 6, max(n_workers, 1) + 1).astype(int)
        workers = [np.arange(*pair) for pair in pairwise(bounds.tolist())]
        for number in range(250):  # some workers, with their rows in any order
            chosen = generator.permutation(len(workers))[: generator.integers(1, len(workers) + 1)]
            env_ids = generator.permutation(np.concatenate([workers[worker] for worker in chosen]))
            given[env_ids] = 10 * number + np.arange(len(env_ids))
            manager.send(given[env_ids], env_ids)
            batch = manager.recv(ALL)
            assert sorted(batch.env_ids.tolist()) == sorted(env_ids.tolist())
            check_rows(batch, given, n_steps)
        assert n_steps.min() > 70


# Vectors that begin the next episode a step late.


def action_of(env_id: int, nth: int) -> int:
    """The nth action of an environment, whatever the others do."""
    return (7 * env_id + 3 * nth + nth // 5) % 2


def cartpoles_alone(n: int, n_steps: int) -> list[list[Any]]:
    """Per row of Gymnasium's own vector, what happens: ("step", obs, reward, terminated, truncated), ("first", obs)."""
    vector = CartPoleVectorEnv(num_envs=n)
    vector.reset(seed=11)
    rows: list[list[Any]] = [[] for _ in range(n)]
    counts, has_ended = [0] * n, [False] * n
    for _ in range(n_steps):
        taken = vector.step(np.array([action_of(env_id, counts[env_id]) for env_id in range(n)]))
        for env_id, (obs, reward, terminated, truncated) in enumerate(zip(*taken[:4], strict=True)):
            if has_ended[env_id]:  # the step in which the vector ignores the action
                rows[env_id].append(("first", obs.tolist()))
                has_ended[env_id] = False
                continue
            counts[env_id] += 1
            rows[env_id].append(("step", obs.tolist(), float(reward), bool(terminated), bool(truncated)))
            has_ended[env_id] = bool(terminated or truncated)
    return rows


def late_cartpoles(context: EnvContext) -> Any:
    return CartPoleVectorEnv(num_envs=context.n_envs)


LATE: dict[str, tuple[Any, dict[str, Any]]] = {
    "simple": (SimpleEnvManager, {}),
    "simple-views": (SimpleEnvManager, {"zero_copy": True}),
    "worker": (SubprocessEnvManager, {"n_workers": 1}),
    "worker-views": (SubprocessEnvManager, {"n_workers": 1, "zero_copy": True}),
}


@pytest.mark.parametrize("kind", LATE)
def test_a_row_that_restarts_a_step_late_comes_once_with_its_last_and_its_first_observation(kind: str) -> None:
    manager_class, options = LATE[kind]
    n, alone = 5, cartpoles_alone(5, 1_800)
    rows: list[list[Any]] = [[] for _ in range(n)]
    counts, sizes = np.zeros(n, int), set()

    with manager_class(late_cartpoles, n, **options) as manager:
        manager.reset(seed=[11, 0, 0, 0, 0])
        batch = manager.recv()
        for _ in range(1_500):
            env_ids = batch.env_ids[::-1]
            actions = [action_of(env_id, counts[env_id]) for env_id in env_ids.tolist()]
            counts[env_ids] += 1
            manager.send(np.array(actions), env_ids)
            batch = manager.recv()
            sizes.add(len(batch))
            ended = np.flatnonzero(batch.terminated | batch.truncated).tolist()
            for row, env_id in enumerate(batch.env_ids.tolist()):
                flags = float(batch.reward[row]), bool(batch.terminated[row]), bool(batch.truncated[row])
                if row in ended:
                    rows[env_id].append(("step", batch.final_obs[ended.index(row)].tolist(), *flags))
                    rows[env_id].append(("first", batch.obs[row].tolist()))
                else:
                    rows[env_id].append(("step", batch.obs[row].tolist(), *flags))

    assert min(sizes) < n - 1, "several ended in one step"
    for env_id in range(n):
        assert rows[env_id] == alone[env_id][: len(rows[env_id])]


@pytest.mark.parametrize("kind", LATE)
def test_steps_with_policies_of_a_vector_that_restarts_late_have_its_transitions(kind: str) -> None:
    manager_class, options = LATE[kind]
    n, alone, counts = 2, cartpoles_alone(2, 700), np.zeros(2, int)

    class ByCount:
        def get_action(self, steps: Any) -> ActionInfo:
            actions = [action_of(env_id, counts[env_id]) for env_id in steps.env_id.tolist()]
            counts[steps.env_id] += 1
            return ActionInfo(np.array(actions))

    rows: list[list[Any]] = [[] for _ in range(n)]
    with manager_class(late_cartpoles, n, **options) as manager:
        manager.reset(seed=[11, 0])
        manager.set_policy("default", ByCount())
        for _ in range(500):
            for info in manager.step():
                taken = info.transitions()
                for row, env_id in enumerate((taken.agent_id >> 32).tolist()):
                    flags = float(taken.reward[row]), bool(taken.terminated[row]), bool(taken.truncated[row])
                    rows[env_id].append(("step", taken.next_obs[row].tolist(), *flags))
    for env_id in range(n):
        steps_alone = [row for row in alone[env_id] if row[0] == "step"]
        assert len(rows[env_id]) > 430
        assert rows[env_id] == steps_alone[: len(rows[env_id])]


def test_actions_for_some_of_the_rows_that_are_not_in_flight_are_refused_before_anything_is_sent() -> None:
    with SimpleEnvManager(late_cartpoles, 3) as manager:
        manager.reset(seed=1)
        manager.recv()
        with pytest.raises(BadAction, match="2 environments of worker 0 would step, but it returns 3"):
            manager.send(np.zeros(2, np.int64), [0, 1])
        manager.send(np.zeros(3, np.int64), [0, 1, 2])
        assert len(manager.recv()) == 3
