"""The Stable-Baselines3 bridge against its own DummyVecEnv, and where it must differ."""

import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

from envmanager import RestartPolicy, SimpleEnvManager, SubprocessEnvManager
from envmanager.errors import BadAction, EnvRaised, ManagerClosed, MissingExtra, RestartsExhausted, UsageError
from envmanager.interop import as_sb3_vec_env
from envmanager_tests.interop.envs import (
    DIE,
    END,
    GO_ON,
    RAISE,
    TRUNCATE,
    Arm,
    Obedient,
    Tupled,
    cart_pole,
    frozen_lake,
)

SUITE = "training"

pytest.importorskip("stable_baselines3")

from stable_baselines3 import A2C, PPO
from stable_baselines3.common.envs import IdentityEnvMultiBinary
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecMonitor, VecNormalize

PAGE = Path(__file__).parents[2] / "docs" / "interop.md"


def obedient(n_envs=3, *, n_workers=None, restarts=None, infos=True):
    restarts = RestartPolicy(backoff_s=0) if restarts is None else restarts
    return as_sb3_vec_env(SubprocessEnvManager(Obedient, n_envs, n_workers=n_workers, restarts=restarts, infos=infos))


def plain(obs):
    return dict(obs) if isinstance(obs, dict) else obs  # DummyVecEnv's is an OrderedDict, SubprocVecEnv's is not


def monitored():
    return Monitor(cart_pole())


@pytest.mark.parametrize("factory", [cart_pole, Arm, Tupled], ids=lambda factory: factory.__name__)
def test_every_step_is_that_of_dummy_vec_env(make_manager, factory):
    ours, theirs = as_sb3_vec_env(make_manager(factory, infos=True)), DummyVecEnv([factory] * 3)
    theirs.action_space.seed(5)
    assert ours.seed(3) == theirs.seed(3)
    assert data_equivalence(ours.reset(), plain(theirs.reset()))
    assert ours.reset_infos == theirs.reset_infos

    n_ended = 0
    while n_ended < 12:
        actions = [theirs.action_space.sample() for _ in range(3)]
        ours.step_async(actions)
        obs, rewards, dones, infos = ours.step_wait()
        their_obs, their_rewards, their_dones, their_infos = theirs.step(actions)
        assert data_equivalence(obs, plain(their_obs))
        assert data_equivalence((rewards, dones), (their_rewards, their_dones))
        assert [info.keys() for info in infos] == [info.keys() for info in their_infos]
        for info, their_info in zip(infos, their_infos, strict=True):
            np.testing.assert_equal(info, their_info)
        assert ours.reset_infos == theirs.reset_infos
        n_ended += np.count_nonzero(dones)
    assert data_equivalence(ours.reset(), plain(theirs.reset()))  # goes on with the randomness there is


def test_spaces_and_metadata_are_those_of_dummy_vec_env(make_manager):
    ours, theirs = as_sb3_vec_env(make_manager(Arm)), DummyVecEnv([Arm] * 3)

    for name in ("num_envs", "observation_space", "action_space", "render_mode", "metadata"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_what_ended_is_told_without_infos_too(make_manager):
    vec_env = as_sb3_vec_env(make_manager(Obedient))
    vec_env.reset()

    obs, rewards, dones, infos = vec_env.step([TRUNCATE, END, GO_ON])
    assert obs.tolist() == [[0, 0, 1, 0], [1, 0, 1, 0], [2, 0, 0, 1]]
    assert (rewards.tolist(), dones.tolist()) == ([0.5] * 3, [True, True, False])
    assert [info["TimeLimit.truncated"] for info in infos] == [True, False, False]
    assert [info["terminal_observation"].tolist() for info in infos[:2]] == [[0, 0, 0, 1], [1, 0, 0, 1]]
    assert infos[2].keys() == {"TimeLimit.truncated"}


def test_what_was_handed_out_stays_as_it_is(make_manager):
    vec_env = as_sb3_vec_env(make_manager(Obedient, zero_copy=True))
    handed_out = [vec_env.reset(), *(vec_env.step([GO_ON] * 3)[0] for _ in range(6))]

    assert [obs[0, 3] for obs in handed_out] == [0, 1, 2, 3, 4, 5, 6]


def test_seeds_and_options_are_for_one_reset_but_options_for_its_later_episodes_too(make_manager):
    vec_env = as_sb3_vec_env(make_manager(Obedient))
    vec_env.seed(4)
    vec_env.set_options({"level": 2})
    vec_env.reset()
    assert vec_env.get_attr("np_random_seed") == [4, 5, 6]
    assert vec_env.get_attr("options") == [{"level": 2}] * 3
    vec_env.step([END] * 3)
    assert vec_env.get_attr("options") == [{"level": 2}] * 3
    vec_env.reset()
    assert vec_env.get_attr("options") == [None] * 3
    vec_env.set_options([{"level": 3}] * 3)
    vec_env.reset()
    assert vec_env.get_attr("options") == [{"level": 3}] * 3

    with pytest.raises(UsageError, match="the same options"):
        vec_env.set_options([{"level": 1}, {"level": 1}, {"level": 2}])


def test_environments_are_called_and_asked_through_it(make_manager):
    vec_env = as_sb3_vec_env(make_manager(Obedient))

    assert vec_env.env_method("add", 10, indices=[0, -1]) == [10, 12]
    assert vec_env.env_method("add", 10, times=2, indices=1) == [21]
    assert vec_env.get_attr("env_id", indices=range(2)) == [0, 1]
    vec_env.set_attr("level", 3, indices=1)
    vec_env.set_attr("count", 4)
    assert vec_env.get_attr("level", 1) == [3]
    assert vec_env.get_attr("count") == [4, 4, 4]
    assert vec_env.has_attr("count")
    assert not vec_env.has_attr("level")  # not all have it
    with pytest.raises(AttributeError, match="level"):
        vec_env.get_attr("level")


def test_the_environments_themselves_are_missing_with_advice():
    vec_env = as_sb3_vec_env(SimpleEnvManager(Obedient))

    assert not hasattr(vec_env, "envs")
    with pytest.raises(AttributeError, match=r"ManagerVecEnv has no envs: .*env_method"):
        VecMonitor(vec_env).envs  # noqa: B018


def test_the_terminal_observation_of_a_discrete_is_an_int(make_manager):
    ours, theirs = as_sb3_vec_env(make_manager(frozen_lake)), DummyVecEnv([frozen_lake] * 3)
    theirs.action_space.seed(5)
    n_ended = 0
    ours.seed(1), theirs.seed(1)
    ours.reset(), theirs.reset()
    while n_ended < 3:
        actions = [theirs.action_space.sample() for _ in range(3)]
        (*_, dones, infos), (*_, their_infos) = ours.step(actions), theirs.step(actions)
        for row in np.flatnonzero(dones):
            n_ended += 1
            assert data_equivalence(infos[row]["terminal_observation"], their_infos[row]["terminal_observation"])


def test_images_are_rendered_and_tiled(make_manager):
    vec_env = as_sb3_vec_env(make_manager(Obedient, 4))
    vec_env.reset()
    vec_env.step([GO_ON] * 4)

    assert [image[0, 0, 0] for image in vec_env.get_images()] == [1] * 4
    assert vec_env.render().shape == (4, 6, 3)


def test_environments_that_render_no_images_give_none(make_manager):
    vec_env = as_sb3_vec_env(make_manager(cart_pole))

    with pytest.warns(UserWarning, match="rgb_array"):
        assert vec_env.get_images() == [None] * 3


def test_wrappers_are_known_by_class_and_subclass(make_manager):
    class Tighter(TimeLimit):
        pass

    def tighter():
        return Tighter(gymnasium.make("CartPole-v1").unwrapped, 3)

    vec_env = as_sb3_vec_env(make_manager([cart_pole, monitored, tighter]))

    assert vec_env.env_is_wrapped(TimeLimit) == [True, True, True]
    assert vec_env.env_is_wrapped(Tighter) == [False, False, True]
    assert vec_env.env_is_wrapped(Monitor) == [False, True, False]
    assert vec_env.env_is_wrapped(Monitor, indices=1) == [True]
    assert vec_env.env_is_wrapped(RecordEpisodeStatistics) == [False] * 3


def test_wrappers_of_stable_baselines3_go_around_it(make_manager):
    def wrapped(vec_env):
        return VecFrameStack(VecNormalize(VecMonitor(vec_env)), 2)

    ours, theirs = wrapped(as_sb3_vec_env(make_manager(cart_pole))), wrapped(DummyVecEnv([cart_pole] * 3))
    ours.seed(1), theirs.seed(1)
    np.testing.assert_array_equal(ours.reset(), theirs.reset())
    for step in range(40):
        (*results, infos), (*their_results, their_infos) = (each.step(np.full(3, step % 2)) for each in (ours, theirs))
        assert data_equivalence(tuple(results), tuple(their_results))
        assert [info.get("episode", {}).get("r") for info in infos] == [
            info.get("episode", {}).get("r") for info in their_infos
        ]


def test_a_reset_discards_the_step_under_way(make_manager):
    vec_env = as_sb3_vec_env(make_manager(Obedient))
    vec_env.reset()
    with pytest.raises(UsageError, match="no step is pending"):
        vec_env.step_wait()
    vec_env.step_async([GO_ON] * 3)
    with pytest.raises(UsageError, match="a step is pending"):
        vec_env.step_async([GO_ON] * 3)

    vec_env.reset()
    assert vec_env.step([GO_ON] * 3)[0][:, 3].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "last",
    [(0, np.array([1, 2])), (0, np.array([1, 2, 3]), np.array([1, 0])), ("up", np.array([1, 2]), np.array([1, 0])), 7],
    ids=["too few", "too long", "a word", "no tuple"],
)
def test_tuples_of_actions_that_do_not_fit_are_refused_before_anything_is_sent(make_manager, last):
    vec_env = as_sb3_vec_env(make_manager(Tupled))
    vec_env.reset()
    action = (0, np.array([1, 2]), np.array([1, 0]))
    with pytest.raises(BadAction):
        vec_env.step_async([action, action, last])
    assert vec_env.step([action] * 3)[1].tolist() == [0, 0, 0]


def test_errors_are_raised_and_a_reset_heals(make_manager):
    vec_env = as_sb3_vec_env(make_manager(Obedient))
    vec_env.reset()

    with pytest.raises(BadAction):
        vec_env.step([GO_ON] * 2)
    with pytest.raises(EnvRaised, match="as told"):
        vec_env.step([GO_ON, RAISE, GO_ON])
    vec_env.reset()
    vec_env.step([GO_ON] * 3)
    vec_env.close()
    vec_env.close()
    with pytest.raises(ManagerClosed):
        vec_env.reset()


@pytest.mark.parametrize("infos", [False, True])
def test_a_lost_step_is_a_truncated_one_without_reward_and_says_so(infos):
    vec_env = obedient(infos=infos)
    vec_env.reset()
    vec_env.step([GO_ON] * 3)

    obs, rewards, dones, told = vec_env.step([GO_ON, DIE, GO_ON])
    assert obs.tolist() == [[0, 0, 0, 2], [1, 1, 0, 0], [2, 0, 0, 2]]  # env 1 is of generation 1
    assert (rewards.tolist(), dones.tolist()) == ([0.5, 0.0, 0.5], [False, True, False])
    assert (told[1]["lost"], told[1]["TimeLimit.truncated"]) == (True, True)
    assert told[1]["terminal_observation"].tolist() == [1, 0, 0, 1]  # what was last handed out
    assert "lost" not in told[0]
    assert vec_env.reset_infos[1] == ({"episode_number": 0} if infos else {})
    assert vec_env.step([GO_ON] * 3)[0].tolist() == [[0, 0, 0, 3], [1, 1, 0, 1], [2, 0, 0, 3]]
    vec_env.close()


def test_a_worker_cuts_the_episodes_of_all_its_environments():
    vec_env = obedient(4, n_workers=2)
    vec_env.reset()

    _, _, dones, infos = vec_env.step([GO_ON, GO_ON, DIE, GO_ON])
    assert dones.tolist() == ["lost" in info for info in infos] == [False, False, True, True]
    vec_env.close()


def test_an_environment_that_was_recycled_is_truncated_once_and_marked():
    vec_env = obedient(2, n_workers=2, restarts=RestartPolicy(recycle_after_steps=2))
    vec_env.reset()
    vec_env.step([GO_ON, GO_ON])

    obs, rewards, dones, infos = vec_env.step([END, GO_ON])
    assert (obs[0].tolist(), rewards[0], dones.tolist()) == ([0, 0, 1, 0], 0.5, [True, False])
    assert "lost" not in infos[0]
    obs, rewards, dones, infos = vec_env.step([GO_ON, GO_ON])
    assert (obs.tolist(), rewards.tolist()) == ([[0, 1, 0, 0], [1, 0, 0, 3]], [0, 0.5])
    assert (dones.tolist(), infos[0]["lost"], infos[0]["TimeLimit.truncated"]) == ([True, False], True, True)
    assert infos[0]["terminal_observation"].tolist() == [0, 0, 1, 0], (
        "the first observation of the episode that was cut"
    )
    obs, _, dones, infos = vec_env.step([GO_ON, GO_ON])
    assert (obs.tolist(), dones.tolist()) == ([[0, 1, 0, 1], [1, 0, 0, 4]], [False, False])
    assert "lost" not in infos[0]
    vec_env.close()


def test_past_the_budget_of_restarts_the_step_raises():
    vec_env = obedient(restarts=RestartPolicy(max_restarts=1, backoff_s=0))
    vec_env.reset()
    vec_env.step([DIE, GO_ON, GO_ON])

    with pytest.raises(RestartsExhausted):
        vec_env.step([DIE, GO_ON, GO_ON])
    vec_env.close()


@pytest.mark.load
def test_ppo_learns_the_same_through_it_as_through_dummy_vec_env():
    def weights(vec_env):
        model = PPO("MlpPolicy", vec_env, n_steps=32, batch_size=32, n_epochs=2, seed=1, device="cpu")
        model.learn(200)
        return [parameter.detach().numpy() for parameter in model.policy.parameters()]

    vec_env = as_sb3_vec_env(SimpleEnvManager(cart_pole, n_envs=3))
    for ours, theirs in zip(weights(vec_env), weights(DummyVecEnv([cart_pole] * 3)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_evaluate_policy_sees_the_monitor():
    vec_env = as_sb3_vec_env(SimpleEnvManager(monitored, n_envs=2, infos=True))
    model = PPO("MlpPolicy", vec_env, n_steps=8, batch_size=16, seed=1, device="cpu")

    returns, lengths = evaluate_policy(model, vec_env, n_eval_episodes=4, return_episode_rewards=True)
    assert returns == lengths


@pytest.mark.load
def test_the_script_of_the_page_runs(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    script = text.partition('```python title="train_with_sb3.py"\n')[2].partition("```")[0]
    (tmp_path / "train_with_sb3.py").write_text(script, encoding="utf-8")

    subprocess.run([sys.executable, "train_with_sb3.py"], cwd=tmp_path, check=True, capture_output=True, timeout=500)


def test_without_stable_baselines3_the_error_says_what_to_install(monkeypatch):
    manager = SimpleEnvManager(Obedient)
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)

    with pytest.raises(MissingExtra, match="pip install stable_baselines3"):
        as_sb3_vec_env(manager)


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_on_policy_algorithms_train_on_multi_binary_actions(algorithm):
    env = as_sb3_vec_env(SimpleEnvManager(lambda: IdentityEnvMultiBinary(4), 2))
    batch = {"batch_size": 16} if algorithm is PPO else {}
    algorithm("MlpPolicy", env, n_steps=8, device="cpu", **batch).learn(32)
    env.close()


def test_vec_monitor_s_info_keywords_get_the_last_values_of_an_episode_that_was_lost():
    vec_env = VecMonitor(obedient(2), info_keywords=("count",))
    vec_env.reset()
    vec_env.step([GO_ON, END])
    assert [info["episode"]["count"] for info in vec_env.step([DIE, END])[3]] == [1, 1]
    infos = vec_env.step([DIE, GO_ON])[3]
    assert infos[0]["episode"]["count"] == 1
    assert "episode" not in infos[1]
    vec_env.close()


@pytest.mark.parametrize("factory", [cart_pole, Arm, Tupled], ids=lambda factory: factory.__name__)
def test_another_goes_on_from_each_step_with_the_same_steps(make_manager, factory):
    keeps = {"restarts": RestartPolicy(keep_episodes=True), "infos": False}
    ours, other = as_sb3_vec_env(make_manager(factory, **keeps)), as_sb3_vec_env(make_manager(factory, **keeps))
    ours.action_space.seed(5)
    ours.seed(3)
    obs = ours.reset()
    for _ in range(30):
        assert data_equivalence(other.reset(VecMonitor(ours).state()), obs)
        actions = [ours.action_space.sample() for _ in range(3)]
        obs, *results = ours.step(actions)
        assert data_equivalence(other.step(actions), (obs, *results))

    ours.seed(7)
    state = ours.state()
    assert data_equivalence(ours.reset(), (other.reset(state), other.reset())[1])


def test_a_state_is_refused_within_a_step(make_manager):
    ours = as_sb3_vec_env(make_manager(cart_pole, restarts=RestartPolicy(keep_episodes=True)))
    ours.reset()
    ours.step_async([0, 1, 0])
    with pytest.raises(UsageError, match="a step is pending"):
        ours.state()
    ours.step_wait()
    ours.reset(ours.state())
