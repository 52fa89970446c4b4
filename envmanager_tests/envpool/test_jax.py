"""A vector environment written in JAX: its arrays are handed on in this process, and are NumPy's elsewhere."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from envmanager import EnvContext, RandomPolicy, SimpleEnvManager, SubprocessEnvManager
from envmanager.check import check_environment
from envmanager.data import trees
from envmanager.data.seeding import derive_seed
from envmanager.data.trees import concat_rows, copy_tree, take_rows, with_rows

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-envpool")
jnp = jax.numpy

N, LENGTH = 4, 5


@jax.jit
def advance(obs: Any, actions: Any) -> tuple[Any, Any, Any]:
    """Step rows of ``[row, steps of the episode, last action]``; return final observations, next ones and ends."""
    last = obs.at[:, 1].add(1).at[:, 2].set(actions)
    ended = last[:, 1] >= LENGTH
    return last, jnp.where(ended[:, None], last * jnp.array([1.0, 0.0, 0.0]), last), ended


class JaxVector(gymnasium.vector.VectorEnv):  # type: ignore[misc]
    def __init__(self, n: int, mode: AutoresetMode) -> None:
        self.num_envs = n
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_action_space = gymnasium.spaces.Box(-1, 1, (), np.float32)
        self.metadata = {"autoreset_mode": mode}
        self.obs = jnp.zeros((n, 3))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = jnp.asarray((options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_)))
        first = jnp.zeros((self.num_envs, 3)).at[:, 0].set(jnp.arange(self.num_envs))
        self.obs = jnp.where(mask[:, None], first, self.obs)
        return self.obs, {}

    def step(self, actions: Any) -> Any:
        last, following, ended = advance(self.obs, jnp.asarray(actions))
        is_same_step = self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        self.obs = following if is_same_step else last
        infos = {"final_obs": last} if is_same_step and ended.any() else {}
        return self.obs, last[:, 1], ended, jnp.zeros(self.num_envs, bool), infos


def make(context: EnvContext) -> JaxVector:
    return JaxVector(context.n_envs, AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_arrays_of_jax_are_handed_on_with_the_ends_of_episodes(mode: AutoresetMode) -> None:
    with SimpleEnvManager(lambda: JaxVector(N, mode), N) as manager:
        manager.reset()
        batch = manager.recv()
        age, n_ends = np.zeros(N), 0
        for step in range(24):
            manager.send(jnp.full(N, 0.25 * (step % 3)), batch.env_ids)
            batch = manager.recv()
            assert isinstance(batch.obs, jax.Array)
            assert isinstance(batch.reward, np.ndarray)
            age = np.where(batch.terminated, 0, age + 1)
            assert batch.obs[:, :2].tolist() == [[k, age[k]] for k in range(N)]
            if batch.terminated.any():
                assert isinstance(batch.final_obs, jax.Array)
                assert batch.final_obs[:, :2].tolist() == [[k, LENGTH] for k in range(N)]
                n_ends += 1
        assert n_ends == 4


def test_worker_processes_send_arrays_of_numpy() -> None:
    with SubprocessEnvManager(make, 2 * N, n_workers=2, wait="all") as manager:
        manager.reset()
        batch = manager.recv()
        for _ in range(6):
            manager.send(jnp.full(2 * N, 0.5), batch.env_ids)
            batch = manager.recv()
        assert isinstance(batch.obs, np.ndarray)
        assert batch.obs[:, 1].tolist() == [1.0] * 2 * N


def test_the_functions_on_rows_keep_the_library() -> None:
    tree = (jnp.arange(6.0).reshape(3, 2), np.arange(3))
    changed = with_rows(tree, np.array([2, 0]), (jnp.zeros((2, 2)), np.array([7, 8])))
    assert changed[0].tolist() == [[0.0, 0.0], [2.0, 3.0], [0.0, 0.0]]
    assert all(isinstance(each[0], jax.Array) for each in (changed, copy_tree(tree), take_rows(tree, slice(0))))
    assert concat_rows([tree, changed])[0].shape == (6, 2)


# The example of the page about vectors.


DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def example(monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(DOCS / "examples")
    return importlib.import_module("jax_vector")


def test_a_functional_environment_in_a_manager_has_the_episodes_of_its_functions_alone(example: Any) -> None:
    n, n_ends = 3, 0
    of_rows = jax.random.split(jax.random.key(derive_seed(5, 0)), (2, n))
    keys, (states, first) = list(of_rows[0]), zip(*map(example.reset, of_rows[1]), strict=True)
    states, step = list(states), jax.jit(example.step)
    with SimpleEnvManager(example.make, n) as manager:
        manager.reset(seed=5)
        batch = manager.recv()
        assert np.allclose(batch.obs, np.stack(first))
        for nth in range(80):
            actions = (np.arange(n) + nth // 20) % 2
            manager.send(actions, batch.env_ids)
            batch = manager.recv()
            finals = [] if batch.final_obs is None else batch.final_obs.tolist()
            for row in range(n):
                keys[row], of_step, of_reset = jax.random.split(keys[row], 3)
                states[row], last, _, has_ended, _ = step(of_step, states[row], actions[row])
                assert batch.terminated[row] == bool(has_ended)
                if has_ended:
                    assert np.allclose(finals.pop(0), last, atol=1e-5)
                    states[row], _ = example.reset(of_reset)
                    n_ends += 1
                assert np.allclose(batch.obs[row], states[row], atol=1e-5)
    assert n_ends > 3


def test_a_functional_environment_has_no_problems(example: Any) -> None:
    findings = check_environment(example.make, n_steps=100, in_process=True)
    assert [each for each in findings if each.outcome == "problem"] == []


@pytest.mark.usefixtures("example")
def test_what_the_page_shows_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "vectorised-environments.md").read_text("utf-8")
    exec(page.partition('title="points.py"\n')[2].partition("```")[0], {})
    importlib.import_module("jax_vector_costs").measure(4, n_steps=3)

    first, *costs = capsys.readouterr().out.splitlines()
    assert "jax" in first
    assert [line.split()[2] for line in costs] == ["scan", "vector", "manager"]


class Lottery(JaxVector):
    """A JaxVector whose episodes end by chance, another number of them in each step."""

    def __init__(self, n: int, mode: AutoresetMode) -> None:
        super().__init__(n, mode)
        self.random, self.late = np.random.default_rng(0), np.zeros(n, np.bool_)

    def step(self, actions: Any) -> Any:
        ended = (self.random.random(self.num_envs) < 0.3) & ~self.late
        self.late = ended & (self.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP)
        infos = {"final_obs": self.obs} if self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP else {}
        return self.obs, np.zeros(self.num_envs), ended, np.zeros(self.num_envs, bool), infos


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """What JAX has compiled so far."""
    names: list[str] = []

    def listen(name: str, *_: Any, **__: Any) -> None:
        if "backend_compile" in name:
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize(("by_policies", "small_bytes"), [(True, 1 << 20), (False, 1 << 20), (False, 0)])
def test_another_number_of_ends_in_each_step_compiles_only_a_handful(
    mode: AutoresetMode, by_policies: bool, small_bytes: int, compiled: list[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(trees, "SMALL_BYTES", small_bytes)
    n_ends = set()
    with SimpleEnvManager(lambda: Lottery(100, mode), 100) as manager:
        manager.reset()
        if by_policies:
            manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"], 0))
            for _ in range(40):
                (info,) = manager.step()
                n_ends.add(int(info.current["default"].ended.sum()))
                info.transitions()
        else:
            batch = manager.recv()
            for _ in range(40):
                manager.send(np.zeros(len(batch), np.float32), batch.env_ids)
                batch = manager.recv()
                n_ends.add(int(batch.terminated.sum()))
    assert len(n_ends) > 10
    assert len(compiled) < 20
