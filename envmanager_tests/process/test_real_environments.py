"""Real environments of every kind: the same seed gives the same episodes, however they are run."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import gymnasium
import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    EnvContext,
    EnvManager,
    RandomPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Wait,
)
from envmanager.data.trees import leaves
from envmanager_tests.envs import CountsSteps

N_ENVS = 4


def pong() -> Any:
    import ale_py
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1)
    return FrameStackObservation(AtariPreprocessing(env), 4)


class DictAndTuple(gymnasium.Env):  # type: ignore[misc]
    observation_space = gymnasium.spaces.Dict(
        camera=gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8),
        joints=gymnasium.spaces.Tuple([gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(5)]),
    )
    action_space = gymnasium.spaces.Dict(
        move=gymnasium.spaces.Box(-1, 1, (2,)), jump=gymnasium.spaces.Discrete(2, start=3)
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(3, 9))
        return self._obs(np.zeros(2, np.float32)), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self._left -= 1
        return self._obs(action["move"]), float(action["jump"]), self._left == 0, False, {}

    def _obs(self, move: Any) -> Any:
        camera = self.np_random.integers(0, 256, (8, 8, 3), np.uint8)
        return {"camera": camera, "joints": (np.float32(move), int(self.np_random.integers(5)))}


class Tells(gymnasium.Env):  # type: ignore[misc]
    """Observations that are no arrays: a text, and a graph."""

    observation_space = gymnasium.spaces.Dict(
        text=gymnasium.spaces.Text(20),
        graph=gymnasium.spaces.Graph(gymnasium.spaces.Box(0, 1, (2,)), gymnasium.spaces.Discrete(3)),
    )
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._n_steps = 0
        return self._obs("hello"), {}

    def step(self, action: Any) -> Any:
        self._n_steps += 1
        return self._obs(f"step {self._n_steps} {action}"), 1.0, self._n_steps == 5, False, {}

    def _obs(self, text: str) -> Any:
        nodes = self.np_random.random((self._n_steps + 1, 2), np.float32)
        return {"text": text, "graph": gymnasium.spaces.GraphInstance(nodes, None, None)}


def vector_of_the_worker(context: EnvContext) -> Any:
    return gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * context.n_envs)


def speaker_and_listener() -> Any:
    from mpe2 import simple_speaker_listener_v4

    return simple_speaker_listener_v4.parallel_env(max_cycles=12)


def tag() -> Any:
    from mpe2 import simple_tag_v3

    return simple_tag_v3.parallel_env(max_cycles=12)


class Catch:
    """A dm_env environment of 5 steps, made where dm_env is."""

    def __new__(cls, context: EnvContext) -> Any:
        import dm_env
        from dm_env import specs

        class Falling(dm_env.Environment):  # type: ignore[misc]
            def __init__(self) -> None:
                self._generator = np.random.default_rng(context.seed)
                self._row = 0

            def reset(self) -> Any:
                self._row = 0
                return dm_env.restart(self._observation())

            def step(self, action: Any) -> Any:
                self._row += 1
                if self._row == 5:
                    return dm_env.termination(float(action), self._observation())
                return dm_env.transition(0.0, self._observation())

            def _observation(self) -> Any:
                return {"ball": np.array([self._row, self._generator.random()])}

            def observation_spec(self) -> Any:
                return {"ball": specs.BoundedArray((2,), float, 0, 9)}

            def action_spec(self) -> Any:
                return specs.DiscreteArray(3)

        return Falling()


FACTORIES: dict[str, Any] = {
    "CartPole-v1": "CartPole-v1",
    "Pendulum-v1": "Pendulum-v1",
    "FrozenLake-v1": "FrozenLake-v1",
    "Blackjack-v1": "Blackjack-v1",
    "Dict and Tuple": DictAndTuple,
    "Text and Graph": Tells,
    "Pong": pong,
    "VectorEnv": vector_of_the_worker,
    "speaker and listener": speaker_and_listener,
    "tag": tag,
    "dm_env": Catch,
}


HEAVY = ("Pong", "speaker and listener", "tag", "dm_env")
"""Their libraries take long to import, so one layout has to do."""
LAYOUTS = [(2, Wait.all(), True), (4, Wait.any(), False), (3, Wait(min_ready=2), False)]
"""The number of workers, the wait, and whether without copies."""


def stream(manager: EnvManager, name: str, n_steps: int, wait: Wait) -> dict[int, list[Any]]:
    """What every agent saw, in order: at least ``n_steps`` steps of each environment."""
    seen: dict[int, list[Any]] = defaultdict(list)
    with manager:
        for behavior, spec in manager.behavior_specs.items():
            manager.set_policy(behavior, RandomPolicy(spec, seed=5))
        for info in manager.reset(None if name == "dm_env" else {"seed": 11}):
            record(info.current, seen)
        counts = dict.fromkeys(range(N_ENVS), 0)
        while min(counts.values()) < n_steps:
            for info in manager.step(wait):
                record(info.current, seen)
                for env_id in {int(e) for steps in info.current.values() for e in steps.env_id}:
                    counts[env_id] += 1
    return seen


def record(current: Any, seen: dict[int, list[Any]]) -> None:
    for steps in current.values():
        final = iter(range(len(steps)))
        for row, agent_id in enumerate(steps.agent_id.tolist()):
            last = [leaf[next_final] for next_final in [next(final)] for leaf in leaves(steps.final_obs)] if (
                steps.ended[row]
            ) else []  # fmt: skip
            obs = [leaf[row] for leaf in leaves(steps.obs)]
            flags = (steps.reward[row].item(), bool(steps.terminated[row]), bool(steps.truncated[row]))
            seen[agent_id].append((plain(obs), plain(last), flags))


def plain(values: list[Any]) -> list[Any]:
    return [value.copy().tobytes() if isinstance(value, np.ndarray | np.generic) else repr(value) for value in values]


@pytest.mark.filterwarnings("ignore:.*cannot be seeded:UserWarning")
@pytest.mark.parametrize("name", FACTORIES)
def test_the_same_seed_gives_the_same_episodes_under_every_manager_and_wait(name: str) -> None:
    factory = FACTORIES[name]
    n_steps = 15 if name == "Pong" else 50
    expected = stream(SimpleEnvManager(factory, N_ENVS, seed=1), name, n_steps, Wait.any())
    assert any(flags[1] or flags[2] for rows in expected.values() for _, _, flags in rows) or name in (
        "Pong",
        "Pendulum-v1",
    ), "no episode ended: the test shows little"
    for n_workers, wait, zero_copy in LAYOUTS[:1] if name in HEAVY else LAYOUTS:
        manager = SubprocessEnvManager(factory, N_ENVS, n_workers=n_workers, zero_copy=zero_copy, seed=1)
        got = stream(manager, name, n_steps, wait)
        assert got.keys() == expected.keys()
        for agent_id, rows in got.items():
            n_common = min(len(rows), len(expected[agent_id]))
            assert n_common > 0
            assert rows[:n_common] == expected[agent_id][:n_common]


def test_infos_come_only_when_asked_for() -> None:
    class WithInfo(gymnasium.Wrapper):  # type: ignore[misc]
        def step(self, action: Any) -> Any:
            *rest, _ = super().step(action)
            return *rest, {"note": int(action)}

    def make() -> Any:
        return WithInfo(gymnasium.make("CartPole-v1"))

    for infos in (True, False):
        with SubprocessEnvManager(make, 2, n_workers=1, infos=infos) as manager:
            manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"]))
            manager.reset()
            collected = [info.current["default"] for _ in range(100) for info in manager.step(Wait.all())]
        assert all((steps.info is not None) == infos for steps in collected)
        if infos:
            assert {"note"} <= {key for steps in collected for row in steps.info or [] for key in row}
            ended = [steps for steps in collected if steps.ended.any()]
            assert ended
            assert all(len(steps.reset_info or []) == steps.ended.sum() for steps in ended)


def test_an_environment_that_needs_an_action_of_every_agent_refuses_to_step_without_all_policies() -> None:
    from envmanager import UsageError

    with SubprocessEnvManager(speaker_and_listener, 1) as manager:
        (first, second) = manager.behavior_specs
        manager.set_policy(first, RandomPolicy(manager.behavior_specs[first]))
        manager.reset()
        with pytest.raises(UsageError, match=second):
            manager.step()
        manager.set_policy(second, RandomPolicy(manager.behavior_specs[second]))
        assert len(manager.step(Wait.all())) == 1


def test_a_policy_is_called_once_per_behavior_for_all_ready_workers() -> None:
    class Counting:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def get_action(self, steps: AgentSteps) -> ActionInfo:
            self.sizes.append(len(steps))
            return ActionInfo(np.zeros(len(steps), np.int64))

    policy = Counting()
    with SubprocessEnvManager("CartPole-v1", 6, n_workers=3) as manager:
        manager.set_policy("default", policy)
        manager.reset()
        manager.step(Wait.all())
        manager.step(Wait.all())
    assert policy.sizes == [6, 6]


def test_large_observations_travel_and_full_batches_are_views_with_zero_copy() -> None:
    class Big(gymnasium.Env):  # type: ignore[misc]
        observation_space = gymnasium.spaces.Box(0, 255, (512, 1024), np.uint8)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self._n_steps = 0
            return np.zeros((512, 1024), np.uint8), {}

        def step(self, action: Any) -> Any:
            self._n_steps += 1
            return np.full((512, 1024), self._n_steps, np.uint8), 0.0, False, False, {}

    for zero_copy in (False, True):
        with SubprocessEnvManager(Big, 4, n_workers=2, zero_copy=zero_copy) as manager:
            manager.reset()
            batch = manager.recv(Wait.all())
            for n in range(1, 8):
                manager.send(np.zeros(4, np.int64), batch.env_ids)
                batch = manager.recv(Wait.all())
                assert (batch.obs == n).all()
                assert batch.is_view == zero_copy
            kept = batch.copy()
        assert (kept.obs == 7).all()


@pytest.mark.parametrize("kind", [SimpleEnvManager, SubprocessEnvManager])
def test_with_zero_copy_what_one_worker_answers_is_a_view_that_holds_until_the_next_recv(kind: Any) -> None:
    with kind(CountsSteps, 3, n_workers=1, zero_copy=True) as manager:
        manager.reset()
        batch = manager.recv()
        n_steps = np.zeros(3, np.int64)
        for env_ids in ([0, 1, 2], [0, 1, 2], [2, 0], [1], [0, 1, 2], [2], [0, 1, 2]):
            manager.send(np.zeros(len(env_ids), np.int64), env_ids)
            assert (batch.obs[:, 0] == n_steps[batch.env_ids]).all(), "written over while its steps are in flight"
            batch = manager.recv()
            n_steps[env_ids] += 1
            assert batch.is_view
            assert sorted(batch.env_ids.tolist()) == sorted(env_ids)
            assert (batch.obs[:, 0] == n_steps[batch.env_ids]).all()
