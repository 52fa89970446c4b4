"""Whole training runs: they learn, they are saved wholly or not at all, and go on where they were."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import gymnasium
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from envmanager import ConfigError, UsageError
from envmanager.cli.app import run_command_line
from envmanager.training.algorithms.trainers import check_tables, known_kinds, make_trainer
from envmanager.training.runs import checkpoints, figures
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun
from envmanager_tests.envs import Duel

CARTPOLE = {"kind": "simple", "env": "CartPole-v1", "n_envs": 4, "wait": "all"}
SMALL_PPO = {"kind": "ppo", "rollout": 64, "epochs": 2, "minibatch": 32}
SMALL_DQN = {"kind": "dqn", "capacity": 2000, "learning_starts": 64, "train_every": 16, "hidden": [16]}


class Quiet(Report):
    """A report that remembers what was saved."""

    def __init__(self) -> None:
        self.saved_at: list[Path] = []
        self.versions: list[int] = []
        self.at_update: Any = None

    def updated(self, run: Any, update: Any) -> None:
        self.versions.append(update.version)
        if self.at_update is not None:
            self.at_update(run, update)

    def saved(self, path: Path) -> None:
        self.saved_at.append(path)


def training(
    tmp_path: Path,
    trainer: dict[str, Any],
    *,
    env: Any = CARTPOLE["env"],
    resume: bool = False,
    keeps: Any = "if_possible",
    **options: Any,
) -> TrainingRun:
    tables = {
        "manager": {**CARTPOLE, "env": env, "restarts": {"keep_episodes": keeps}},
        "training": {"steps": 400, "evaluation_episodes": 0, "device": "cpu", **options},
        "trainers": {"default": trainer},
    }
    return TrainingRun(TrainingPlan.parse(tables, tmp_path, resume=resume), Quiet())


class Corridor(gymnasium.Env):  # type: ignore[misc]
    """Walk right four times: 1 for each step to the right, and the end; left ends it at once."""

    observation_space = gymnasium.spaces.Discrete(5)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._at = 0
        return 0, {}

    def step(self, action: Any) -> Any:
        self._at += int(action)
        return self._at, float(action), not action or self._at == 4, False, {}


@pytest.mark.parametrize(
    "trainer",
    [
        {"kind": "ppo", "rollout": 128, "epochs": 4, "minibatch": 64, "learning_rate": 3e-3},
        {"kind": "dqn", "learning_starts": 100, "learning_rate": 3e-3, "target_every": 50, "exploration_steps": 1000,
         "hidden": [32]},
        {"kind": "dqn", "learning_starts": 100, "learning_rate": 3e-3, "target_every": 50, "exploration_steps": 1000,
         "hidden": [32], "prioritized": True, "n_step": 3, "double": False, "duelling": False},
        pytest.param(
            {"kind": "dqn", "learning_starts": 100, "learning_rate": 3e-3, "target_every": 50,
             "exploration_steps": 1000, "hidden": [32], "apart": 100},
            marks=pytest.mark.load,
        ),
    ],
    ids=["ppo", "dqn", "dqn with every switch turned", "dqn apart"],
)  # fmt: skip
@pytest.mark.parametrize("wait", [pytest.param("all", marks=pytest.mark.load), "any"])
def test_a_trainer_learns_to_walk_to_the_end(tmp_path: Path, trainer: dict[str, Any], wait: str) -> None:
    tables = {
        "manager": {"kind": "simple", "env": Corridor, "n_envs": 4, "wait": wait},
        "training": {"steps": 3000, "evaluation_episodes": 8, "device": "cpu"},
        "trainers": {"*": trainer},
    }
    result = TrainingRun(TrainingPlan.parse(tables, tmp_path), Quiet()).go()
    assert result.evaluation is not None
    assert result.evaluation.returns == [4.0] * 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(
    "trainer",
    [SMALL_PPO, SMALL_DQN, {**SMALL_DQN, "prioritized": True}, {**SMALL_DQN, "apart": 100}],
    ids=["ppo", "dqn", "dqn prioritized", "dqn apart"],
)
def test_on_a_gpu_it_trains_is_saved_and_goes_on(tmp_path: Path, trainer: dict[str, Any]) -> None:
    training(tmp_path, trainer, device="cuda").go()
    again = training(tmp_path, trainer, device="cuda", resume=True, steps=600)
    result = again.go()
    assert result.n_steps == 600
    assert again.trainers["default"].version > 0


@pytest.mark.parametrize("trainer", [SMALL_PPO, SMALL_DQN], ids=["ppo", "dqn"])
def test_resumed_it_goes_on_with_the_counts_and_the_randomness_it_was_saved_with(
    tmp_path: Path, trainer: dict[str, Any]
) -> None:
    first = training(tmp_path, trainer)
    first.go()
    randomness = torch.get_rng_state()
    torch.rand(3)
    again = training(tmp_path, trainer, resume=True, steps=500)
    seen: list[Any] = []
    again._reports[-1].started = lambda run: seen.extend(  # type: ignore[attr-defined]
        [torch.get_rng_state(), run.controller.n_steps, run.trainers["default"].version]
    )
    again.go()
    assert torch.equal(seen[0], randomness)
    assert seen[1:] == [400, first.trainers["default"].version]
    assert again.trainers["default"].version > seen[2]
    assert checkpoints.load_latest(tmp_path / "checkpoints").training.n_steps == 500


@pytest.mark.parametrize("trainer", [{**SMALL_PPO, "anneal": False}, SMALL_DQN], ids=["ppo", "dqn"])
def test_resumed_with_another_learning_rate_it_learns_at_that(tmp_path: Path, trainer: dict[str, Any]) -> None:
    training(tmp_path, trainer).go()
    again = training(tmp_path, {**trainer, "learning_rate": 0.25}, resume=True, steps=500)
    again.go()
    assert [group["lr"] for group in again.trainers["default"]._optimizer.param_groups] == [0.25]  # type: ignore[attr-defined]


def test_resumed_without_kept_episodes_it_plays_others_than_those_it_began_with(tmp_path: Path) -> None:
    seeds: list[int] = []

    class Noting(Corridor):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if seed is not None:
                seeds.append(seed)
            return super().reset(seed=seed, options=options)

    for steps in (100, 200, 300):
        training(tmp_path, SMALL_PPO, env=Noting, resume=steps > 100, steps=steps, keeps=False).go()

    assert len(seeds) == len(set(seeds)) == 3 * 4


@pytest.mark.parametrize("trainer", [SMALL_PPO, {**SMALL_DQN, "prioritized": True}], ids=["ppo", "dqn"])
def test_a_state_that_was_written_and_read_is_the_same_state(tmp_path: Path, trainer: dict[str, Any]) -> None:
    run = training(tmp_path, trainer)
    run.go()
    arrays, facts = run.trainers["default"].state()
    read = checkpoints.load_latest(tmp_path / "checkpoints")
    other = make_trainer("default", _spec(), trainer, seed=5, device="cpu")
    other.restore(*read.trainers["default"])
    arrays_again, facts_again = other.state()
    assert facts == facts_again == json.loads(json.dumps(facts))
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, arrays_again[name], err_msg=name)


def _spec() -> Any:
    from envmanager import make_manager

    with make_manager({"kind": "simple", "env": "CartPole-v1"}) as manager:
        return manager.behavior_specs["default"]


@pytest.mark.parametrize(("keeps", "n_more"), [(True, 0), (False, 4)])
def test_a_stopped_training_saves_what_is_in_flight_or_else_learns_from_it(
    tmp_path: Path, keeps: bool, n_more: int
) -> None:
    run = training(tmp_path, SMALL_PPO, steps=100_000, keeps=keeps)
    run._reports[-1].at_update = lambda run, update: run.stop() if update.version == 3 else None  # type: ignore[attr-defined]
    result = run.go()
    assert result.ended == "stopped"
    assert result.evaluation is None
    assert result.n_steps == 3 * 64 + n_more
    assert checkpoints.load_latest(tmp_path / "checkpoints").training.n_steps == result.n_steps


@pytest.mark.parametrize(("options", "n_kept"), [({}, 3), ({"keep": 1}, 1), ({"keep": 100}, None)], ids=str)
def test_checkpoints_are_written_on_the_way_and_the_last_are_kept(
    tmp_path: Path, options: dict[str, int], n_kept: int | None
) -> None:
    run = training(tmp_path, SMALL_PPO, checkpoint_every=100, **options)
    run.go()
    saved = run._reports[-1].saved_at  # type: ignore[attr-defined]
    assert len(saved) >= 4
    kept = saved if n_kept is None else saved[-n_kept:]
    assert {path for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()} == set(kept)


def test_a_checkpoint_that_could_not_be_finished_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(n_steps: int) -> None:
        training = checkpoints.TrainingState(n_steps=n_steps)
        generators = {"torch": np.full(3, n_steps)}
        checkpoints.save(tmp_path, checkpoints.Checkpoint(training=training, generators=generators))

    save(1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_flush", full)
    with pytest.raises(OSError, match="No space"):
        save(2)
    assert checkpoints.load_latest(tmp_path).generators["torch"].tolist() == [1, 1, 1]


def test_without_a_checkpoint_nothing_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no checkpoint"):
        training(tmp_path, SMALL_PPO, resume=True).go()


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    training(tmp_path, SMALL_PPO).go()
    with pytest.raises(UsageError, match="does not fit the trainer"):
        training(tmp_path, {**SMALL_PPO, "hidden": [8]}, resume=True, steps=500).go()


@pytest.mark.parametrize(
    ("trainers", "words"),
    [
        ({}, "There is no trainer"),
        ({"default": {"kind": "pppo"}}, "did you mean ppo?"),
        ({"default": {"kind": "ppo", "rolout": 3}}, "did you mean trainers.default.rollout"),
        ({"default": {"kind": "ppo", "epochs": 0}}, "epochs must be a whole number of at least 1"),
        ({"default": {"kind": "ppo", "frozen": "no"}}, "frozen should be true or false"),
        ({"defualt": {"kind": "ppo"}}, "trainer for the behavior 'defualt'"),
        ({"default": "ppo"}, "should be a mapping"),
    ],
    ids=str,
)
def test_mistakes_in_a_config_are_named(tmp_path: Path, trainers: Any, words: str) -> None:
    tables = {"manager": CARTPOLE, "training": {}, "trainers": trainers}
    with pytest.raises(ConfigError, match=words):
        TrainingRun(TrainingPlan.parse(tables, tmp_path), Quiet()).go()


@pytest.mark.parametrize("table", ["manager", "training", "trainers"])
def test_a_list_is_not_taken_for_a_table(tmp_path: Path, table: str) -> None:
    tables = {"manager": CARTPOLE, "training": {}, "trainers": {"*": SMALL_PPO}, table: [1]}
    with pytest.raises(ConfigError, match=table):
        TrainingPlan.parse(tables, tmp_path)


class Turns(Duel):
    """Two targets that act in turn, so that the first steps have no next observation yet."""

    SPECS = {"target": Duel.SPECS["target"]}
    AGENTS = {"target": Duel.AGENTS["target"]}

    def step(self, actions: Any) -> Any:
        return super().step({"hero": actions["target"], **actions})

    def _steps(self, rewards: Any, *, ended: bool) -> Any:
        first_acts = self._in_episode % 2 == 0
        steps = super()._steps(rewards, ended=ended)
        return {"target": attrs.evolve(steps["target"], acting=np.array([first_acts, not first_acts]))}


@pytest.mark.parametrize("learning_starts", [0, 1])
@pytest.mark.parametrize("more", [{}, {"prioritized": True}, {"apart": 100}], ids=str)
def test_an_update_waits_for_the_first_step_whose_next_observation_is_known(
    tmp_path: Path, more: dict[str, Any], learning_starts: int
) -> None:
    trainer = {**SMALL_DQN, "learning_starts": learning_starts, "train_every": 1, "batch": 4, **more}
    tables = {
        "manager": {"kind": "simple", "env": Turns, "n_envs": 1},
        "training": {"steps": 40, "evaluation_episodes": 0, "device": "cpu"},
        "trainers": {"target": trainer},
    }
    assert TrainingRun(TrainingPlan.parse(tables, tmp_path), Quiet()).go().n_steps == 40


@pytest.mark.parametrize(("learning_starts", "first"), [(0, 16), (1, 16), (16, 16), (40, 48), (48, 48), (50, 64)])
@pytest.mark.parametrize("trainer", [SMALL_DQN, {**SMALL_DQN, "kind": "sac"}], ids=["dqn", "sac"])
def test_updates_are_at_multiples_of_train_every_from_learning_starts_on(
    tmp_path: Path, trainer: dict[str, Any], learning_starts: int, first: int
) -> None:
    env = "CartPole-v1" if trainer["kind"] == "dqn" else "Pendulum-v1"
    run = training(tmp_path, {**trainer, "learning_starts": learning_starts, "batch": 4}, env=env, steps=100)
    at: list[int] = []
    run._reports[-1].at_update = lambda run, update: at.append(update.n_steps)  # type: ignore[attr-defined]
    run.go()
    assert at == list(range(first, 101, 16))


def test_every_episode_is_logged_and_a_resumed_training_goes_on_with_the_log(tmp_path: Path) -> None:
    run = training(tmp_path, SMALL_PPO)
    run.go()
    episodes = figures.read_episodes(tmp_path / figures.EPISODES)
    recent = run.controller.episodes.recent  # type: ignore[union-attr]
    assert [(end.env_id, end.total, end.length) for end in episodes] == [
        (end.env_id, end.total, end.length) for end in recent
    ]
    assert all(end.length == end.total for end in episodes), "as CartPole has it"
    assert all(0 < before.steps <= after.steps <= 400 for before, after in itertools.pairwise(episodes))
    training(tmp_path, SMALL_PPO, resume=True, steps=600).go()
    longer = figures.read_episodes(tmp_path / figures.EPISODES)
    assert longer[: len(episodes)] == episodes
    assert 400 < longer[-1].steps <= 600


def test_the_learning_rate_of_dqn_may_fall_to_zero(tmp_path: Path) -> None:
    run = training(tmp_path, {**SMALL_DQN, "anneal": True, "learning_rate": 1.0})
    rates: list[float] = []
    run._reports[-1].at_update = lambda run, update: rates.append(  # type: ignore[attr-defined]
        run.trainers["default"]._optimizer.param_groups[0]["lr"]
    )
    run.go()
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.0, abs=0.05)


class Film(gymnasium.Env):  # type: ignore[misc]
    """A stack of the last four frames, which are noise."""

    observation_space = gymnasium.spaces.Box(0, 255, (4, 36, 36), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._stack = np.repeat(self._frame(), 4, axis=0)
        return self._stack.copy(), {}

    def step(self, action: Any) -> Any:
        self._stack = np.concatenate([self._stack[1:], self._frame()])
        return self._stack.copy(), float(action), self.np_random.random() < 0.1, False, {}

    def _frame(self) -> np.ndarray:
        return self.np_random.integers(0, 256, (1, 36, 36), dtype=np.uint8)


def test_frames_that_are_shared_make_no_difference(tmp_path: Path) -> None:
    weights = []
    for share_frames in (False, True):
        table = {**SMALL_DQN, "hidden": [], "share_frames": share_frames, "convolutions": "small", "n_step": 2}
        tables = {
            "manager": {"kind": "simple", "env": Film, "n_envs": 3, "wait": "all"},
            "training": {"steps": 150, "evaluation_episodes": 0, "device": "cpu"},
            "trainers": {"default": table},
        }
        run = TrainingRun(TrainingPlan.parse(tables, tmp_path / str(share_frames)), Quiet())
        run.go()
        weights.append(run.trainers["default"].state()[0])
    for name, array in weights[0].items():
        if not name.startswith("replay"):
            np.testing.assert_array_equal(array, weights[1][name], err_msg=name)
    tables["training"]["steps"] = 153
    resumed = TrainingRun(TrainingPlan.parse(tables, tmp_path / "True", resume=True), Quiet())
    resumed.go()
    frames = resumed.trainers["default"].state()[0]["replay.obs.0.frames"]
    saved = weights[1]["replay.obs.0.frames"]
    np.testing.assert_array_equal(frames[: len(saved)], saved)


def test_frames_cannot_be_shared_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="stacks of images"):
        training(tmp_path, {**SMALL_DQN, "share_frames": True}).go()


def test_several_behaviors_train_at_once_each_on_its_own_trainer_and_one_may_be_frozen(tmp_path: Path) -> None:
    pytest.importorskip("mpe2")
    tables = {
        "manager": {"env": "mpe2.simple_speaker_listener_v4:parallel_env", "n_envs": 3, "wait": "all"},
        "training": {"steps": 600, "evaluation_episodes": 3, "device": "cpu"},
        "trainers": {"speaker": SMALL_PPO, "*": {**SMALL_PPO, "frozen": True}},
    }
    run = TrainingRun(TrainingPlan.parse(tables, tmp_path), Quiet())
    result = run.go()
    assert {behavior: trainer.version for behavior, trainer in run.trainers.items()} == {"speaker": 9, "listener": 0}
    assert result.n_steps >= 600
    assert result.evaluation is not None
    assert {name: len(returns) for name, returns in result.evaluation.returns_of.items()} == {
        "speaker": 3,
        "listener": 3,
    }


@pytest.mark.parametrize(
    ("kind", "option", "value", "said"),
    [
        ("ppo", "hidden", 64, "hidden should be a list: 'int' object is not iterable"),
        ("dqn", "hidden", None, "hidden should be a list: 'NoneType' object is not iterable"),
        ("ppo", "learning_rate", math.inf, "learning_rate must be a number from 0, and finite, not inf"),
        ("dqn", "learning_rate", math.nan, "learning_rate must be a number from 0, and finite, not nan"),
        ("ppo", "reward_scale", math.inf, "reward_scale must be a finite number, not inf"),
        ("ppo", "log_std_init", math.nan, "log_std_init must be a finite number, not nan"),
        ("sac", "target_entropy", -math.inf, "target_entropy must be a finite number, not -inf"),
        ("dqn", "priority_exponent", -1.0, "priority_exponent must be a number from 0"),
        ("PPO", "rollout", 64, "no such trainer; did you mean ppo"),
    ],
)
def test_an_option_that_no_trainer_can_use_is_refused_with_its_name(
    kind: str, option: str, value: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"trainers\.default\..*{said}"):
        check_tables({"default": {"kind": kind, option: value}})


def test_gradients_need_no_limit() -> None:
    check_tables(
        {"hero": {"kind": "ppo", "max_grad_norm": math.inf}, "target": {"kind": "dqn", "max_grad_norm": math.inf}}
    )


@pytest.mark.parametrize(("option", "value"), [("threads", 0), ("threads", 1.5), ("max_policy_lag", -1), ("seed", -1)])
def test_an_option_of_the_training_that_cannot_be_is_refused_with_its_name(
    tmp_path: Path, option: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"^training\.{option} (must|should) be a whole number"):
        training(tmp_path, SMALL_PPO, **{option: value})


@pytest.mark.parametrize("device", ["gpu", "CPU", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_refused_before_an_environment_is_made(tmp_path: Path, device: str) -> None:
    class Unmade(gymnasium.Env):  # type: ignore[misc]
        def __init__(self) -> None:
            raise AssertionError("it was made")

    with pytest.raises(ConfigError, match=rf"^training\.device is '{device}', which PyTorch .* Devices: auto, cpu"):
        training(tmp_path, SMALL_PPO, env=Unmade, device=device).go()


def test_ppo_and_dqn_are_known() -> None:
    assert {"ppo", "dqn"} <= set(known_kinds())


# The command.

CONFIG = """
manager: {kind: subprocess, env: CartPole-v1, n_envs: 2}
training: {steps: 300, evaluation_episodes: 4}
trainers: {default: {kind: ppo, rollout: 64, epochs: 2, minibatch: 32}}
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from envmanager.cli import main; sys.exit(main())", "train", *arguments]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize("kind", ["simple", "subprocess", pytest.param("auto", marks=pytest.mark.load)])
def test_the_command_trains_with_any_manager_and_writes_how_it_went(
    tmp_path: Path, config: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = [str(config), "--manager", kind, "--out", str(out), "--dir", str(tmp_path / "run"), "--plain"]
    assert run_command_line(["train", *arguments]) == 0
    assert "all steps taken" in capsys.readouterr().out
    summary = json.loads(out.read_text())
    assert summary["n_steps"] >= 300
    assert summary["evaluation"]["episodes"] == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.load)])
def test_a_signal_ends_the_step_saves_and_can_be_resumed(tmp_path: Path, config: Path, number: signal.Signals) -> None:
    arguments = [str(config), "--steps", "100000000", "--dir", str(tmp_path / "run"), "--plain"]
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("time"))
        os.kill(process.pid, number)
        rest = process.stdout.read()
    assert process.returncode == 128 + number
    assert "stopped; resume with --resume" in rest
    saved = checkpoints.load_latest(tmp_path / "run" / "checkpoints").training.n_steps
    more = [str(config), "--steps", str(saved + 64), "--dir", str(tmp_path / "run"), "--resume", "--plain"]
    assert run_command_line(["train", *more]) == 0
    assert checkpoints.load_latest(tmp_path / "run" / "checkpoints").training.n_steps >= saved


def test_a_mistake_in_the_config_ends_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("ppo", "nothing"))
    assert run_command_line(["train", str(path), "--dir", str(tmp_path / "run"), "--plain"]) == 2
    assert "no such trainer" in capsys.readouterr().err


def train(path: Path, *arguments: str) -> int:
    return run_command_line(["train", str(path), "--dir", str(path.parent / "run"), "--plain", *arguments])


def plan_of(run: Path) -> Any:
    plan = checkpoints.load_latest(run / "checkpoints").training.plan
    assert plan is not None
    return plan


def test_options_of_the_command_line_change_any_table(tmp_path: Path, config: Path) -> None:
    settings = [
        "trainers.default.learning_rate=3e-4",
        "trainers.default.hidden=[8, 8]",
        "training.steps=999999",
        "training.evaluation_episodes=0",
        "manager.env_kwargs={max_episode_steps: 9}",
        "manager.wrappers=[gymnasium.wrappers:TimeAwareObservation]",
    ]
    flags = ["--env", "CartPole-v0", "--n-envs", "3", "--workers", "1", "--steps", "100", "--manager", "simple"]
    assert train(config, *flags, *(word for each in settings for word in ("--set", each))) == 0
    plan = plan_of(tmp_path / "run")
    assert plan.trainers["default"] == {**SMALL_PPO, "learning_rate": 3e-4, "hidden": [8, 8]}
    assert {name: plan.manager[name] for name in ("env", "env_kwargs", "wrappers")} == {
        "env": "CartPole-v0",
        "env_kwargs": {"max_episode_steps": 9},
        "wrappers": ["gymnasium.wrappers:TimeAwareObservation"],
    }
    ends = figures.read_episodes(tmp_path / "run" / figures.EPISODES)
    assert max(end.total for end in ends) <= 9


def test_a_flag_says_how_often_workers_are_replaced(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config, "--restarts", "7", "--steps", "64") == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["manager"]["restarts"]["max_restarts"] == 7


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("trainers.default.learning_rat=3e-4", "did you mean trainers.default.learning_rate?"),
        ("trainers.defualt.gamma=1", "no trainers.defualt; did you mean trainers.default?"),
        ("training.rounds.stepps=3", "did you mean training.rounds.steps?"),
        ("trainers.default.kind=pppo", "did you mean ppo?"),
        ("trainers.default.hidden=no", "trainers.default.hidden"),
        ("manager.engine.ticks=3", "manager"),
    ],
)
def test_a_mistake_in_what_is_set_is_found_before_an_environment_is_made(
    tmp_path: Path, config: Path, assignment: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(CONFIG.replace("CartPole-v1", "a_module_that_is_not_there:Env"))
    assert train(config, "--set", assignment) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "run").glob("*")} <= {".training.lock"}


def test_the_config_of_a_run_is_told_to_use_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("manager: {env: CartPole-v1}\nrun: {steps: 10}\n")
    assert train(config) == 2
    assert f"Use: envmanager run {config}" in capsys.readouterr().err


def test_numbers_with_an_exponent_are_numbers_in_a_config(tmp_path: Path, config: Path) -> None:
    config.write_text(CONFIG.replace("epochs: 2", "epochs: 2, learning_rate: 1e-3, clip: .5, gamma: 9.9e-1"))
    assert train(config, "--manager", "simple", "--steps", "64") == 0
    table = plan_of(tmp_path / "run").trainers["default"]
    assert (table["learning_rate"], table["clip"], table["gamma"]) == (0.001, 0.5, 0.99)


@pytest.mark.parametrize("trainer", ["ppo", "dqn"])
def test_trainers_learn_from_vectors_of_tensors(tmp_path: Path, trainer: str) -> None:
    path = tmp_path / "tensors.yaml"
    path.write_text(f"""
manager: {{kind: simple, env: "envmanager_tests.unit.test_foreign_arrays:make", n_envs: 4}}
training: {{steps: 400, evaluation_episodes: 4}}
trainers:
  default: {json.dumps(SMALL_PPO if trainer == "ppo" else SMALL_DQN)}
""")
    assert train(path) == 0
