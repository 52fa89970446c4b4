"""EnvPool's pools as the environments of a worker, beside the same pool alone."""

import itertools
import logging
import os
import signal

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    BadAction,
    EnvContext,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    UsageError,
    Wait,
    make_manager,
)
from envmanager.interop import as_vector_env

envpool = pytest.importorskip("envpool", reason="EnvPool is not installed: make test-envpool")
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")

N = 6
KINDS = {
    "simple": (SimpleEnvManager, {}),
    "simple-views": (SimpleEnvManager, {"zero_copy": True}),
    "worker": (SubprocessEnvManager, {"n_workers": 1}),
    "worker-views": (SubprocessEnvManager, {"n_workers": 1, "zero_copy": True}),
}


def action_of(env_id, nth):
    """The nth action of an environment, whatever the others do."""
    return (7 * env_id + 3 * nth + nth // 5) % 2


def cartpoles(env_type="gymnasium"):
    def make(context: EnvContext):
        return envpool.make("CartPole-v1", env_type=env_type, num_envs=context.n_envs, seed=7, num_threads=1)

    return make


def rows_alone(n_steps):
    """Per environment, what happens: ("step", obs, reward, terminated, truncated) and ("first", obs)."""
    pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=N, seed=7, num_threads=1)
    pool.reset()
    rows, counts, has_ended = [[] for _ in range(N)], [0] * N, [False] * N
    for _ in range(n_steps):
        taken = pool.step(np.array([action_of(env_id, counts[env_id]) for env_id in range(N)]))
        for env_id, (obs, reward, terminated, truncated) in enumerate(zip(*taken[:4], strict=True)):
            if has_ended[env_id]:  # the step in which the pool ignores the action
                rows[env_id].append(("first", obs.tolist()))
                has_ended[env_id] = False
                continue
            counts[env_id] += 1
            rows[env_id].append(("step", obs.tolist(), float(reward), bool(terminated), bool(truncated)))
            has_ended[env_id] = bool(terminated or truncated)
    return rows


def rows_hosted(manager, n_steps):
    manager.reset()
    batch, rows = manager.recv(Wait.all()), [[] for _ in range(N)]
    for nth in range(n_steps):
        manager.send(np.array([action_of(env_id, nth) for env_id in range(N)]), np.arange(N))
        batch = manager.recv(Wait.all())
        ended = np.flatnonzero(batch.terminated | batch.truncated).tolist()
        for env_id in range(N):
            flags = float(batch.reward[env_id]), bool(batch.terminated[env_id]), bool(batch.truncated[env_id])
            if env_id in ended:
                rows[env_id].append(("step", batch.final_obs[ended.index(env_id)].tolist(), *flags))
                rows[env_id].append(("first", batch.obs[env_id].tolist()))
            else:
                rows[env_id].append(("step", batch.obs[env_id].tolist(), *flags))
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("env_type", ["gymnasium", "dm"])
def test_a_hosted_pool_has_the_rows_of_the_pool_alone_over_5000_steps(env_type, kind):
    manager_class, options = KINDS[kind]
    alone = rows_alone(5_600)

    with manager_class(cartpoles(env_type), N, **options) as manager:
        hosted = rows_hosted(manager, 5_000)

    ends_at = [[nth for nth, row in enumerate(rows) if row[0] == "first"] for rows in hosted]
    assert all(len(ends) > 50 for ends in ends_at)
    for env_id in range(N):
        assert hosted[env_id] == alone[env_id][: len(hosted[env_id])]


def test_frames_of_atari_are_those_of_the_pool_alone():
    def make(context: EnvContext):
        return envpool.make("Pong-v5", env_type="gymnasium", num_envs=context.n_envs, seed=3)

    alone = make(EnvContext(0, 0, n_envs=4))
    obs, _ = alone.reset()
    with SimpleEnvManager(make, 4) as manager:
        manager.reset()
        assert np.array_equal(manager.recv().obs, obs)
        for nth in range(300):
            actions = (np.arange(4) + nth) % 6
            obs, reward, *_ = alone.step(actions)
            manager.send(actions, np.arange(4))
            batch = manager.recv()
            assert np.array_equal(batch.obs, obs)
            assert np.array_equal(batch.reward, reward)


def test_a_pool_whose_worker_is_killed_loses_its_rows_and_no_others():
    def make(context: EnvContext):
        return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=context.n_envs, seed=context.seed)

    restarts = RestartPolicy(max_restarts=3, backoff_s=0.0)
    with SubprocessEnvManager(make, 8, n_workers=2, seed=5, restarts=restarts) as manager:
        manager.reset()
        batch = manager.recv(Wait.all())
        last = batch.obs.copy()
        manager.send(np.zeros(8, np.int64), np.arange(8))
        manager.recv(Wait.all())
        os.kill(manager.stats().workers[0].pid, signal.SIGKILL)
        seen_lost, lengths = set(), np.zeros(8, int)
        env_ids = np.arange(8)
        while not seen_lost or lengths[4:].min() < 40:
            manager.send(np.full(len(env_ids), 1), env_ids)
            batch = manager.recv()
            env_ids = batch.env_ids
            seen_lost |= set(env_ids[batch.lost].tolist())
            lengths[env_ids] += 1
            assert not batch.reward[batch.lost].any()
        assert seen_lost == {0, 1, 2, 3}
        assert manager.stats().restarts == 1
        assert last.shape == (8, 4)


def test_the_managers_seed_reaches_the_pools_and_repeats_the_run():
    config = {"kind": "subprocess", "env": {"vector": "envpool:CartPole-v1"}, "n_envs": 4, "n_workers": 2}

    def first_observations(seed):
        with make_manager({**config, "seed": seed}) as manager:
            manager.reset()
            return manager.recv(Wait.all()).obs.tolist()

    assert first_observations(3) == first_observations(3) != first_observations(4)


def test_a_second_seed_is_said_to_have_no_effect(caplog):
    with SimpleEnvManager(cartpoles(), N) as manager, caplog.at_level(logging.WARNING, "envmanager"):
        manager.reset(seed=1)
        assert not caplog.records
        manager.reset(seed=2)

    assert "cannot seed its environments again" in caplog.text


def test_infos_of_the_step_and_of_the_restart_are_per_row():
    with SimpleEnvManager(cartpoles(), N, infos=True) as manager:
        manager.reset()
        batch = manager.recv()
        while batch.final_obs is None:
            manager.send(np.zeros(N, np.int64), np.arange(N))
            batch = manager.recv()
        ended = np.flatnonzero(batch.terminated)
        assert [info["env_id"] for info in batch.info] == list(range(N))
        assert [info["env_id"] for info in batch.reset_info] == ended.tolist()
        assert {info["elapsed_step"] for info in batch.reset_info} == {0}


def asynchronous(batch_size, **options):
    def make(context: EnvContext):
        own = {"seed": 7, **options}
        return envpool.make(
            "CartPole-v1", env_type="gymnasium", num_envs=context.n_envs, batch_size=batch_size, num_threads=2, **own
        )

    return make


def add_rows(rows, batch):
    """Add the rows of a batch to those of each environment, but for lost ones."""
    ended = np.flatnonzero(batch.terminated | batch.truncated).tolist()
    for row, env_id in enumerate(batch.env_ids.tolist()):
        flags = float(batch.reward[row]), bool(batch.terminated[row]), bool(batch.truncated[row])
        if batch.lost[row]:
            continue
        if row in ended:
            rows[env_id].append(("step", batch.final_obs[ended.index(row)].tolist(), *flags))
            rows[env_id].append(("first", batch.obs[row].tolist()))
        else:
            rows[env_id].append(("step", batch.obs[row].tolist(), *flags))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_rows_of_an_asynchronous_pool_come_as_they_are_ready_and_are_those_of_the_pool_alone(kind, batch_size):
    manager_class, options = KINDS[kind]
    alone = rows_alone(1_000)

    with manager_class(asynchronous(batch_size), N, **options) as manager:
        manager.reset()
        batch = manager.recv()
        assert len(batch) == N
        rows, counts, sizes = [[] for _ in range(N)], np.zeros(N, int), set()
        for _ in range(700 * N // batch_size):
            env_ids = batch.env_ids[::-1]
            actions = np.array([action_of(env_id, counts[env_id]) for env_id in env_ids.tolist()])
            counts[env_ids] += 1
            manager.send(actions, env_ids)
            batch = manager.recv()
            sizes.add(len(batch))
            add_rows(rows, batch)
            if counts.max() >= 900:
                break

    assert max(sizes) <= batch_size
    for env_id in range(N):
        assert len(rows[env_id]) > 200
        assert rows[env_id] == alone[env_id][: len(rows[env_id])]


def test_a_reset_in_the_middle_of_asynchronous_steps_leaves_no_row_behind():
    with SimpleEnvManager(asynchronous(2), N) as manager:
        for nth in range(50):
            manager.reset()
            batch = manager.recv()
            assert len(batch) == N
            assert (np.abs(batch.obs) <= 0.05).all(), "a first observation of CartPole"
            for _ in range(nth):
                manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
                batch = manager.recv()


def test_whole_steps_of_an_asynchronous_pool_have_the_transitions_of_the_pool_alone():
    alone = rows_alone(2_000)

    class ByCount:
        counts = np.zeros(N, int)

        def get_action(self, steps):
            env_ids = steps.env_id
            actions = np.array([action_of(env_id, self.counts[env_id]) for env_id in env_ids.tolist()])
            self.counts[env_ids] += 1
            return ActionInfo(actions)

    rows = [[] for _ in range(N)]
    with SubprocessEnvManager(asynchronous(2), N, n_workers=1) as manager:
        manager.reset()
        manager.set_policy("default", ByCount())
        for _ in range(1_500):
            for info in manager.step():
                taken = info.transitions()
                for env_id, obs, reward, terminated, truncated in zip(
                    (taken.agent_id >> 32).tolist(),
                    taken.next_obs.tolist(),
                    taken.reward.tolist(),
                    taken.terminated.tolist(),
                    taken.truncated.tolist(),
                    strict=True,
                ):
                    rows[env_id].append(("step", obs, reward, terminated, truncated))
    for env_id in range(N):
        steps_alone = [row for row in alone[env_id] if row[0] == "step"]
        assert len(rows[env_id]) > 1_000
        assert rows[env_id] == steps_alone[: len(rows[env_id])]


@pytest.mark.parametrize("batch_size", [2, 3])
def test_an_asynchronous_pool_whose_worker_is_killed_loses_its_rows_and_no_others(batch_size):
    restarts = RestartPolicy(max_restarts=3, backoff_s=0.0)
    alone = rows_alone(2_000)  # every pool has seed 7, so env 6 + k of the second worker is env k of the pool alone
    with SubprocessEnvManager(asynchronous(batch_size), 2 * N, n_workers=2, restarts=restarts) as manager:
        manager.reset()
        batch = manager.recv(Wait.all())
        rows, counts, seen_lost = [[] for _ in range(2 * N)], np.zeros(2 * N, int), set()
        for nth in itertools.count():  # until the new worker, which takes a while to start, has taken its steps
            env_ids = batch.env_ids
            actions = [action_of(env_id % N, counts[env_id]) for env_id in env_ids.tolist()]
            counts[env_ids] += 1
            manager.send(np.array(actions), env_ids)
            if nth == 200:
                os.kill(manager.stats().workers[0].pid, signal.SIGKILL)
            batch = manager.recv()
            lost = batch.env_ids[batch.lost].tolist()
            seen_lost |= set(lost)
            if lost:
                assert sorted(lost) == list(range(N))
                for env_id in lost:  # the new generation begins as the first did
                    rows[env_id], counts[env_id] = [], 0
            add_rows(rows, batch)
            if seen_lost and counts.min() > 300:
                break
        assert seen_lost == set(range(N))
        assert manager.stats().restarts == 1
    for env_id in range(2 * N):
        assert len(rows[env_id]) > 100
        n_rows = min(len(rows[env_id]), len(alone[env_id % N]))
        assert rows[env_id][:n_rows] == alone[env_id % N][:n_rows]


def test_actions_that_would_make_an_asynchronous_pool_wait_for_ever_are_refused_before_anything_is_sent():
    with SimpleEnvManager(asynchronous(3), N) as manager:
        manager.reset()
        manager.recv()
        with pytest.raises(BadAction, match="2 environments of worker 0 would step, but it returns 3 at a time"):
            manager.send(np.zeros(2, np.int64), [0, 1])
        manager.send(np.zeros(N, np.int64), np.arange(N))
        batch = manager.recv()
        waiting = sorted(set(range(N)) - set(batch.env_ids.tolist()))
        with pytest.raises(BadAction, match=f"env {waiting[0]} is still waiting: worker 0 has responded without it"):
            manager.send(np.zeros(N, np.int64), np.arange(N))
        manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
        assert len(manager.recv()) <= 3


def test_an_asynchronous_pool_with_a_last_batch_that_is_not_full_is_refused():
    with pytest.raises(UsageError, match="take a batch_size that divides num_envs"):
        SimpleEnvManager(asynchronous(4), N)


def test_a_bridge_that_steps_all_environments_says_that_an_asynchronous_pool_does_not():
    with SimpleEnvManager(asynchronous(3), N) as manager:
        envs = as_vector_env(manager)
        envs.reset()
        with pytest.raises(UsageError, match="returns some of its environments first"):
            envs.step(np.zeros(N, np.int64))


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ("envpool:Pnog-v5", "EnvPool has no environment 'Pnog-v5'; did you mean Pong-v5?"),
        (3, "names an id such as ALE/Pong-v5, not int 3"),
    ],
)
def test_an_id_without_a_pool_is_refused(env, says):
    with pytest.raises(UsageError) as error:
        make_manager({"kind": "simple", "env": {"vector": env}, "n_envs": 2})
    assert says in str(error.value)
