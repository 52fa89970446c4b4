"""Large observations of environments in this process are lent to the trainer, not copied, and stay what they were."""

from __future__ import annotations

import itertools

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envmanager import RestartPolicy, SimpleEnvManager
from envmanager.data.specs import ArraySpec
from envmanager.data.steps import ActionInfo, AgentSteps, RowBuffer, only_agents
from envmanager.hosts.local_worker import LentBuffers

N_BYTES = 1 << 16


class Large(gymnasium.Env):
    """Shows the number of its step, beginning with 1 at a reset, 65,536 times; episodes last 5 steps."""

    action_space = gymnasium.spaces.Discrete(3)
    observation_space = gymnasium.spaces.Box(0, 255, (N_BYTES,), np.uint8)

    def __init__(self) -> None:
        self.n_steps = 0

    def seen(self):
        self.n_steps += 1
        return np.full(N_BYTES, self.n_steps % 256, np.uint8)

    def reset(self, *, seed=None, options=None):
        return self.seen(), {}

    def step(self, action):
        if action == 2:
            raise ValueError("asked to")
        return self.seen(), 1.0, self.n_steps % 5 == 0, False, {}


class LargeInPart(Large):
    """The same as a dict, beside a small leaf."""

    observation_space = gymnasium.spaces.Dict(
        {"image": Large.observation_space, "n": gymnasium.spaces.Box(0, 1e9, (1,), np.float32)}
    )

    def seen(self):
        image = super().seen()
        return {"image": image, "n": np.array([self.n_steps], np.float32)}


def first_bytes(obs):
    image = obs["image"] if isinstance(obs, dict) else obs
    return image[:, 0].tolist()


KEPT = {
    "the batch": lambda batch: batch,
    "its observations": lambda batch: batch.obs,
    "one row": lambda batch: batch.obs[1:2],
    "a view of a view": lambda batch: batch.obs[:, ::2][:, 3:].T.T,
    "the same bytes as another dtype": lambda batch: batch.obs.view(np.int8),
    "a memoryview": lambda batch: memoryview(batch.obs),
}


def obs_of(kept):
    if isinstance(kept, memoryview):
        return np.asarray(kept)
    return getattr(kept, "obs", kept)


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_what_a_trainer_keeps_of_a_batch_stays_what_it_was(keep):
    with SimpleEnvManager(Large, 2) as manager:
        manager.reset()
        kept, seen = [], []
        for _ in range(12):
            batch = manager.recv()
            kept.append(keep(batch))
            seen.append(obs_of(kept[-1]).copy())
            manager.send(np.zeros(2, np.int64), batch.env_ids)
            del batch
        manager.recv()

        for each, what_it_was in zip(kept, seen, strict=True):
            assert np.array_equal(obs_of(each), what_it_was)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=10, max_size=40), st.sampled_from([Large, LargeInPart]))
def test_batches_kept_for_random_times_stay_what_they_were(times, make):
    kept = []
    with SimpleEnvManager(make, 2) as manager:
        manager.reset()
        for now, n_rounds in enumerate(times):
            batch = manager.recv()
            kept.append((now + n_rounds, batch, first_bytes(batch.obs)))
            manager.send(np.zeros(2, np.int64), batch.env_ids)
            kept = [each for each in kept if each[0] > now]
            for _, other, seen in kept:
                assert first_bytes(other.obs) == seen
            if n_rounds == 6:
                manager.reset()


def test_arrays_that_came_back_are_written_again():
    with SimpleEnvManager(Large, 2) as manager:
        manager.reset()
        places = set()
        for _ in range(50):
            batch = manager.recv()
            places.add(batch.obs.ctypes.data)
            manager.send(np.zeros(2, np.int64), batch.env_ids)

    assert len(places) <= 3


def test_a_batch_in_the_trainers_own_arrays_is_no_view():
    with SimpleEnvManager(Large, 2) as manager:
        manager.reset()

        assert not manager.recv().is_view


def test_arrays_that_a_trainer_has_changed_are_handed_out_as_new():
    with SimpleEnvManager(LargeInPart, 2) as manager:
        manager.reset()
        for _ in range(8):
            batch = manager.recv()
            assert batch.obs.keys() == {"image", "n"}
            assert batch.obs["image"].shape == (2, N_BYTES)
            assert batch.obs["image"].flags.writeable
            env_ids = batch.env_ids
            batch.obs["image"] //= 2
            batch.obs["image"].flags.writeable = False
            del batch.obs["n"], batch
            manager.send(np.zeros(2, np.int64), env_ids)


def test_a_step_that_raises_leaves_what_was_handed_out_and_the_episode_ends_with_it():
    with SimpleEnvManager(Large, 2, restarts=RestartPolicy(backoff_s=0, on_exception="restart")) as manager:
        manager.reset()
        manager.send(np.zeros(2, np.int64), [0, 1])
        batch = manager.recv()
        seen = first_bytes(batch.obs)

        manager.send(np.array([0, 2]), [0, 1])
        cut = manager.recv()

        assert first_bytes(batch.obs) == seen == [2, 2]
        assert cut.lost.all()
        assert cut.final_obs[:, 0].tolist() == [2, 2]
        assert first_bytes(cut.obs) == [1, 1]


def test_steps_of_some_environments_are_the_trainers_own_too():
    with SimpleEnvManager(Large, 2) as manager:
        manager.reset()
        manager.recv()
        manager.send([0], [1])
        one = manager.recv()
        manager.send([0], [1])
        another = manager.recv()

        assert (first_bytes(one.obs), first_bytes(another.obs)) == ([2], [3])


class Keeper:
    def __init__(self) -> None:
        self.kept: list[AgentSteps] = []

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        self.kept.append(steps)
        return ActionInfo(np.zeros(len(steps), np.int64))


def test_step_infos_and_what_policies_saw_stay_what_they_were():
    policy = Keeper()
    with SimpleEnvManager(Large, 2) as manager:
        manager.set_policy("default", policy)
        infos = manager.reset()
        for _ in range(9):
            infos += manager.step()

    shown = [first_bytes(info.current["default"].obs)[0] for info in infos]
    assert shown == [1, 2, 3, 4, 6, 7, 8, 9, 11, 12]
    assert [first_bytes(steps.obs)[0] for steps in policy.kept] == shown[:-1]
    for before, info in itertools.pairwise(infos):
        assert info.previous["default"] is before.current["default"]


def test_steps_that_were_written_elsewhere_are_copied():
    rows = LentBuffers(lambda: RowBuffer.empty(ArraySpec((2,), np.float32), only_agents([0])))
    rows.next()
    elsewhere = RowBuffer.empty(ArraySpec((2,), np.float32), only_agents([0])).steps

    own = rows.delivered({"default": elsewhere})["default"]

    assert not np.shares_memory(own.obs, elsewhere.obs)


def test_small_observations_are_copied():
    with SimpleEnvManager("CartPole-v1", 2) as manager:
        assert not manager.env_workers[0].lends


def test_dates_and_other_dtypes_without_a_buffer_can_be_lent():
    rows = LentBuffers(lambda: RowBuffer.empty(ArraySpec((2,), np.dtype("M8[s]")), only_agents([0])))
    buffer = rows.next()
    buffer.steps.obs[:] = np.datetime64("2020-01-01")

    lent = rows.delivered({"default": buffer.steps})["default"]

    assert lent.obs.dtype == buffer.steps.obs.dtype
    assert np.shares_memory(lent.obs, buffer.steps.obs)
    assert rows.next() is not buffer
