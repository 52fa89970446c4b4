"""Vectors whose observations are tensors of PyTorch: handed on in this process, arrays of NumPy elsewhere."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from envmanager import (
    ActionInfo,
    BadAction,
    EnvContext,
    EnvRaised,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
)
from envmanager.data.trees import concat_rows, copy_tree, take_rows, with_rows
from envmanager.errors import BadObservation
from envmanager.interop import as_sb3_vec_env, as_vector_env

SUITE = "training"

torch = pytest.importorskip("torch")

N = 4
LENGTH = 5
"""Number of steps of an episode. Row k begins with k of them behind it."""


class OnDevice(torch.Tensor):
    """A tensor that cannot be made an array of NumPy, like one on a GPU."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a tensor on a device to NumPy: call cpu() first")

    def cpu(self) -> Any:
        return super().cpu().as_subclass(torch.Tensor)


class TensorVector(gymnasium.vector.VectorEnv):  # type: ignore[misc]
    """Observations ``[row, steps of the episode, last action]``, in one tensor that is written again in every step."""

    def __init__(self, n: int, mode: AutoresetMode, dtype: torch.dtype = torch.float32) -> None:
        self.num_envs = n
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(100)
        self.metadata = {"autoreset_mode": mode}
        self.obs = torch.zeros((n, 3), dtype=dtype).as_subclass(OnDevice)
        self.ended = torch.zeros(n, dtype=torch.bool)
        self.actions: Any = None

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = torch.as_tensor((options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_)))
        self.obs[:, 0] = torch.arange(self.num_envs)
        first = torch.arange(self.num_envs) if mask.all() and options is None else torch.zeros(self.num_envs)
        self.obs[:, 1] = torch.where(mask, first, self.obs[:, 1])
        self.obs[:, 2] = torch.where(mask, torch.zeros(self.num_envs), self.obs[:, 2])
        return self.obs, {}

    def step(self, actions: Any) -> Any:
        self.actions = actions
        begins = (
            self.ended if self.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP else torch.zeros_like(self.ended)
        )
        self.obs[:, 1] = torch.where(begins, torch.zeros(self.num_envs), self.obs[:, 1] + 1)
        self.obs[:, 2] = torch.where(begins, torch.zeros(self.num_envs), torch.as_tensor(actions).float())
        self.ended = torch.as_tensor(self.obs[:, 1] >= LENGTH).as_subclass(torch.Tensor)
        infos = {}
        ended = self.ended.clone()
        if self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP and ended.any():
            infos["final_obs"] = self.obs.clone()
            self.obs[ended, 1:] = 0
        return self.obs, self.obs[:, 1].clone(), ended, torch.zeros_like(ended), infos


def make(context: EnvContext, mode: AutoresetMode = AutoresetMode.SAME_STEP) -> TensorVector:
    return TensorVector(context.n_envs, mode)


def numbers(tensor: Any) -> list[list[float]]:
    return tensor.as_subclass(torch.Tensor).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("zero_copy", [False, True])
def test_recv_hands_on_the_tensor_and_send_the_actions(zero_copy: bool) -> None:
    vectors: list[TensorVector] = []

    def make_one(context: EnvContext) -> TensorVector:
        vectors.append(make(context))
        return vectors[-1]

    with SimpleEnvManager(make_one, N, zero_copy=zero_copy) as manager:
        manager.reset()
        first = manager.recv()
        assert isinstance(first.obs, OnDevice)
        actions = torch.arange(N).as_subclass(OnDevice)
        manager.send(actions, first.env_ids)
        batch = manager.recv()
        assert isinstance(batch.obs, OnDevice)
        assert numbers(batch.obs) == [[k, k + 1, k] for k in range(N)]
        assert isinstance(vectors[0].actions, OnDevice)
        assert isinstance(batch.reward, np.ndarray)
        assert batch.terminated.tolist() == [False] * N
        if not zero_copy:  # the vector writes into its tensor again, but the trainer's are its own
            assert numbers(first.obs) == [[k, k, 0] for k in range(N)]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP])
def test_the_ends_of_episodes_stay_on_the_device_in_every_autoreset_mode(mode: AutoresetMode) -> None:
    with SimpleEnvManager(lambda: TensorVector(N, mode), N) as manager:
        manager.reset()
        batch = manager.recv()
        age = {k: k for k in range(N)}
        n_ends = 0
        for step in range(40):
            manager.send(torch.full((len(batch),), step % 7), batch.env_ids)
            batch = manager.recv()
            assert isinstance(batch.obs, OnDevice)
            ended = batch.terminated
            for env_id, row, ends in zip(batch.env_ids.tolist(), numbers(batch.obs), ended, strict=True):
                age[env_id] = 0 if ends else age[env_id] + 1
                assert row[:2] == [env_id, age[env_id]]
            if ended.any():
                assert isinstance(batch.final_obs, OnDevice)
                assert [row[:2] for row in numbers(batch.final_obs)] == [[k, LENGTH] for k in batch.env_ids[ended]]
                n_ends += int(ended.sum())
        assert n_ends > 15


def test_policies_see_tensors_and_may_act_with_them() -> None:
    class Policy:
        seen: list[Any] = []

        def get_action(self, steps: Any) -> ActionInfo:
            self.seen.append(steps.obs)
            return ActionInfo(torch.ones(len(steps), dtype=torch.int64).as_subclass(OnDevice))

    policy = Policy()
    with SimpleEnvManager(make, N) as manager:
        manager.reset()
        manager.set_policy("default", policy)
        for _ in range(8):
            (info,) = manager.step()
        assert all(isinstance(obs, OnDevice) for obs in policy.seen)
        transitions = info.transitions("default")
        assert isinstance(transitions.next_obs, OnDevice)
        assert numbers(transitions.obs)[0] == [0, 2, 1]
        assert numbers(transitions.next_obs) == [[0, 3, 1], [1, 4, 1], [2, 5, 1], [3, 1, 1]]


@pytest.mark.parametrize("local_envs", [0, 2])
def test_rows_of_worker_processes_are_arrays_of_numpy(local_envs: int) -> None:
    with SubprocessEnvManager(make, N, n_workers=1, local_envs=local_envs, wait="all") as manager:
        manager.reset()
        batch = manager.recv()
        for _ in range(8):
            manager.send(torch.zeros(N, dtype=torch.int64), batch.env_ids)
            batch = manager.recv()
        assert isinstance(batch.obs, np.ndarray)


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        (torch.zeros(N - 1, dtype=torch.int64), r"4 rows of int64\[\].*"),
        (torch.zeros(N, dtype=torch.float32), r"4 rows of int64\[\].*float32"),
    ],
)
def test_tensors_of_another_shape_or_dtype_are_refused_before_anything_is_sent(actions: Any, text: str) -> None:
    with SimpleEnvManager(make, N) as manager:
        manager.reset()
        batch = manager.recv()
        with pytest.raises(BadAction, match=text):
            manager.send(actions, batch.env_ids)
        manager.send(np.zeros(N, np.int64), batch.env_ids)
        assert len(manager.recv()) == N


def test_observations_of_another_dtype_are_named() -> None:
    with (
        SimpleEnvManager(lambda: TensorVector(N, AutoresetMode.SAME_STEP, torch.float64), N) as manager,
        pytest.raises(BadObservation, match=r"obs.*float32\[4, 3\].*float64"),
    ):
        manager.reset()


def test_a_vector_that_raises_is_replaced_and_its_episodes_are_cut_on_the_device() -> None:
    class Raises(TensorVector):
        def step(self, actions: Any) -> Any:
            if int(torch.as_tensor(actions)[0]) == 99:
                raise ValueError("the simulator diverged")
            return super().step(actions)

    policy = RestartPolicy(on_exception="restart", backoff_s=0.0)
    with SimpleEnvManager(lambda: Raises(N, AutoresetMode.SAME_STEP), N, restarts=policy) as manager:
        manager.reset()
        batch = manager.recv()
        manager.send(torch.full((N,), 99), batch.env_ids)
        batch = manager.recv()
        assert batch.lost.all()
        assert isinstance(batch.obs, OnDevice)
        assert numbers(batch.final_obs) == [[k, k, 0] for k in range(N)]
    with SimpleEnvManager(lambda: Raises(N, AutoresetMode.SAME_STEP), N) as manager:
        manager.reset()
        manager.send(torch.full((N,), 99), manager.recv().env_ids)
        with pytest.raises(EnvRaised, match="diverged"):
            manager.recv()


def test_check_values_reads_the_values() -> None:
    class Nan(TensorVector):
        def step(self, actions: Any) -> Any:
            obs, *rest = super().step(actions)
            obs[1, 1] = torch.nan
            return obs, *rest

    with SimpleEnvManager(lambda: Nan(N, AutoresetMode.SAME_STEP), N, check_values=True) as manager:
        manager.reset()
        manager.send(torch.zeros(N, dtype=torch.int64), manager.recv().env_ids)
        with pytest.raises(BadObservation, match="finite"):
            manager.recv()


def test_bridges_convert_where_their_libraries_need_numpy() -> None:
    with SimpleEnvManager(make, N) as manager:
        envs = as_vector_env(manager, autoreset_mode="SameStep")
        envs.reset(seed=1)
        for _ in range(8):
            envs.step(np.zeros(N, np.int64))
    with SimpleEnvManager(make, N) as manager:
        vec_env = as_sb3_vec_env(manager)
        vec_env.reset()
        for _ in range(8):
            obs, *_ = vec_env.step(np.zeros(N, np.int64))
        assert isinstance(obs, np.ndarray)


def test_the_functions_on_rows_keep_the_library() -> None:
    tree = {"a": torch.arange(6.0).reshape(3, 2), "b": np.arange(3)}
    rows = np.array([2, 0])
    taken = take_rows(tree, rows)
    assert taken["a"].tolist() == [[4.0, 5.0], [0.0, 1.0]]
    changed = with_rows(tree, rows, {"b": np.array([7, 8]), "a": torch.zeros(2, 2)})
    assert changed["a"].tolist() == [[0.0, 0.0], [2.0, 3.0], [0.0, 0.0]]
    assert changed["b"].tolist() == [8, 1, 7]
    assert tree["a"][0].tolist() == [0.0, 1.0]
    assert concat_rows([tree, taken])["a"].shape == (5, 2)
    assert take_rows(tree, slice(0))["a"].shape == (0, 2)
    copied = copy_tree(tree)
    copied["a"][:] = 0
    assert tree["a"][0].tolist() == [0.0, 1.0]
