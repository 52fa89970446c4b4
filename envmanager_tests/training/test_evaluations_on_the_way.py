"""Evaluations on the way: the training does not notice, and the best checkpoint is kept."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import ConfigError, RestartPolicy, SimpleEnvManager, UsageError, Wait
from envmanager.data.seeding import task_seed
from envmanager.registry import ManagerOptions
from envmanager.training.algorithms.trainers import make_trainer
from envmanager.training.evaluation import Evaluation, Evaluator, evaluation_seed, options_for
from envmanager.training.policies.saved import find
from envmanager.training.runs import checkpoints, figures
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun

CARTPOLE: dict[str, Any] = {"kind": "simple", "env": "CartPole-v1", "n_envs": 4, "wait": "all"}
PPO: dict[str, Any] = {"kind": "ppo", "rollout": 64, "epochs": 2, "minibatch": 32}
DQN: dict[str, Any] = {"kind": "dqn", "capacity": 2000, "learning_starts": 64, "train_every": 16, "hidden": [16]}
OPTIONS: dict[str, Any] = {"steps": 512, "evaluation_episodes": 4, "device": "cpu"}


class Noted(Report):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.evaluations: list[tuple[int, float, bool]] = []
        self.saved_at: list[str] = []
        self.when_evaluated: Callable[[TrainingRun], Any] = lambda run: None

    def saved(self, path: Path) -> None:
        self.saved_at.append(path.name)

    def evaluated(self, run: TrainingRun, evaluation: Evaluation, is_best: bool) -> None:
        assert run.controller is not None
        self.evaluations.append((run.controller.n_steps, evaluation.mean, is_best))
        self.when_evaluated(run)


def run_of(
    directory: Path, *, manager: dict[str, Any] | None = None, trainer: Any = PPO, resume: bool = False, **training: Any
) -> tuple[TrainingRun, Noted]:
    tables = {
        "manager": {**CARTPOLE, **(manager or {})},
        "training": {**OPTIONS, **training},
        "trainers": {"*": trainer},
    }
    report = Noted()
    return TrainingRun(TrainingPlan.parse(tables, directory, resume=resume), report), report


def weights_of(run: TrainingRun) -> dict[str, np.ndarray]:
    return {f"{name}.{key}": array for name, own in run.trainers.items() for key, array in own.state()[0].items()}


@pytest.mark.parametrize("trainer", [PPO, DQN], ids=["ppo", "dqn"])
def test_a_training_that_is_evaluated_learns_bit_for_bit_what_it_learns_without(tmp_path: Path, trainer: Any) -> None:
    alone, _ = run_of(tmp_path / "alone", trainer=trainer, evaluation_episodes=0)
    watched, report = run_of(tmp_path / "watched", trainer=trainer, evaluate_every=128)
    alone.go()
    watched.go()

    assert [steps for steps, _, _ in report.evaluations] == [128, 256, 384]
    expected, found = weights_of(alone), weights_of(watched)
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(array, found[name], err_msg=name)
    read = [figures.read_episodes(tmp_path / name / figures.EPISODES) for name in ("alone", "watched")]
    told = [[(end.steps, end.agent_id, end.total, end.length) for end in ends] for ends in read]
    assert told[0] == told[1], "episodes of evaluations are none of the training's"


def test_evaluations_of_a_training_that_was_resumed_are_those_it_would_have_had(tmp_path: Path) -> None:
    trainer = {**PPO, "anneal": False}  # else it would learn otherwise, because it knows how long it has
    whole, told = run_of(tmp_path / "whole", trainer=trainer, evaluate_every=128)
    whole.go()
    first, told_first = run_of(tmp_path / "parts", trainer=trainer, evaluate_every=128, steps=256)
    first.go()
    second, told_second = run_of(tmp_path / "parts", trainer=trainer, evaluate_every=128, resume=True)
    second.go()

    assert told.evaluations[0] == told_first.evaluations[0]
    assert [steps for steps, _, _ in told_first.evaluations + told_second.evaluations] == [128, 384]
    assert [steps for steps, _, _ in told.evaluations] == [128, 256, 384]


def test_the_same_policy_brings_the_same_each_time() -> None:
    options = ManagerOptions(**{**CARTPOLE, "wait": Wait.all(), "seed": 3})
    with SimpleEnvManager("CartPole-v1", 4) as manager:
        trainer = make_trainer("default", manager.behavior_specs["default"], PPO, seed=0, device="cpu")
        with Evaluator(options, manager, n_episodes=4, seed=3) as evaluator:
            results = [evaluator.evaluate({"default": trainer}, lambda: False) for _ in range(3)]
    assert results[0] == results[1] == results[2]
    assert results[0] is not None
    assert len(results[0].returns) == 4
    assert results[0].lengths == results[0].returns


# The best.


class Stairs(gymnasium.Env):  # type: ignore[misc]
    """Its episodes bring what the list says, one evaluation after the other, whatever is done."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    BRINGS: tuple[float, ...] = ()
    n_resets = 0

    def __init__(self) -> None:
        self._worth = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None and seed == Stairs.seed_of_evaluations:
            self._worth = Stairs.BRINGS[min(Stairs.n_resets, len(Stairs.BRINGS) - 1)]
            Stairs.n_resets += 1
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), self._worth, True, False, {}

    seed_of_evaluations: int | None = None


@pytest.fixture
def brings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """``brings(1, 5, 3)``: a manager's table; the first evaluation brings 1, the next 5, all others 3."""

    def table(*returns: float) -> dict[str, Any]:
        monkeypatch.setattr(Stairs, "seed_of_evaluations", task_seed(evaluation_seed(0), 0))
        monkeypatch.setattr(Stairs, "BRINGS", returns)
        monkeypatch.setattr(Stairs, "n_resets", 0)
        return {"env": Stairs, "n_envs": 1}

    return table


def test_the_best_is_kept_whatever_comes_after_it(tmp_path: Path, brings: Any) -> None:
    run, report = run_of(
        tmp_path,
        manager=brings(1, 5, 3),
        steps=640,
        evaluate_every=64,
        checkpoint_every=64,
        keep=2,
        evaluation_episodes=1,
    )
    run.go()

    assert [(mean, is_best) for _, mean, is_best in report.evaluations[:4]] == [
        (1.0, True),
        (5.0, True),
        (3.0, False),
        (3.0, False),
    ]
    best = find(tmp_path, "best")
    assert best.name == "000000000128"
    assert checkpoints.best_mean(tmp_path / "checkpoints", run._id) == 5.0
    assert checkpoints.load(best).training.n_steps == 128
    there = [path.name for path in checkpoints.written(tmp_path / "checkpoints")]
    assert there == ["000000000128", "000000000576", "000000000640"]


def test_the_best_at_the_end_is_the_last_checkpoint(tmp_path: Path, brings: Any) -> None:
    run, _ = run_of(tmp_path, manager=brings(1, 2, 9), steps=192, evaluate_every=64, keep=1, evaluation_episodes=1)
    run.go()

    there = [path.name for path in checkpoints.written(tmp_path / "checkpoints")]
    assert there == ["000000000192"], "nothing is kept that is neither the best nor the last"
    assert (tmp_path / "checkpoints" / "best").read_text().startswith("000000000192\n9.0\n")
    assert find(tmp_path, "best") == checkpoints.latest(tmp_path / "checkpoints")


def test_what_was_best_before_a_training_was_resumed_still_is_until_something_better_comes(
    tmp_path: Path, brings: Any
) -> None:
    options = {"evaluate_every": 64, "keep": 1, "evaluation_episodes": 1}
    run_of(tmp_path, manager=brings(7, 2), steps=192, **options)[0].go()
    run, report = run_of(tmp_path, manager=brings(3, 6), steps=384, resume=True, **options)
    run.go()
    assert not any(is_best for _, _, is_best in report.evaluations)
    assert find(tmp_path, "best").name == "000000000064"

    run, report = run_of(tmp_path, manager=brings(8), steps=576, resume=True, **options)
    run.go()
    assert report.evaluations[0] == (448, 8.0, True)
    assert find(tmp_path, "best").name == "000000000448"
    assert not (tmp_path / "checkpoints" / "000000000064").exists()


def test_a_training_that_begins_anew_has_no_best_of_before(tmp_path: Path, brings: Any) -> None:
    tables = {"evaluate_every": 64, "evaluation_episodes": 1, "steps": 128}
    run_of(tmp_path, manager=brings(7), **tables)[0].go()
    run, _ = run_of(tmp_path, manager=brings(1), **tables)
    run.plan = TrainingPlan(run.plan.manager, run.plan.training, run.plan.trainers, tmp_path, force=True)
    run.go()

    assert checkpoints.best_mean(tmp_path / "checkpoints", run._id) == 1.0


def test_an_evaluation_at_the_end_alone_makes_a_best_too(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path)
    result = run.go()

    assert result.evaluation is not None
    assert find(tmp_path, "best").name == "000000000512"
    assert checkpoints.best_mean(tmp_path / "checkpoints", run._id) == result.evaluation.mean


def test_without_an_evaluation_there_is_no_best(tmp_path: Path) -> None:
    run_of(tmp_path, evaluation_episodes=0)[0].go()

    with pytest.raises(UsageError, match="no evaluation has been made"):
        find(tmp_path, "best")


def test_a_best_that_cannot_be_marked_leaves_both_that_were_before(
    tmp_path: Path, brings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mark(path: Path, mean: float) -> None:
        if mean == 5.0:
            raise OSError(28, "No space left on device")
        real(path, mean)

    real = checkpoints.mark_best
    monkeypatch.setattr(checkpoints, "mark_best", mark)
    run, _ = run_of(tmp_path, manager=brings(1, 5), evaluate_every=64, evaluation_episodes=1, keep=1)
    with pytest.raises(OSError, match="No space"):
        run.go()

    assert checkpoints.load(find(tmp_path, "best")).training.n_steps == 64
    assert checkpoints.load_latest(tmp_path / "checkpoints").training.n_steps == 64


def dies_once(context: Any) -> Any:
    """An environment whose episodes are one step and worth 1. Its first process ends in its first step."""

    class OneStep(gymnasium.Env):  # type: ignore[misc]
        observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            if context.generation == 0:
                os._exit(3)
            return np.zeros(1, np.float32), 1.0, True, False, {}

    return OneStep()


def test_an_episode_of_an_evaluation_that_was_lost_is_played_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = {"kind": "subprocess", "env": dies_once, "n_envs": 2}
    run, report = run_of(tmp_path, manager=manager, evaluate_every=64, evaluation_episodes=1, steps=128)
    result = run.go()

    assert report.evaluations == [(64, 1.0, True)]
    assert (tmp_path / "checkpoints" / "best").read_text().startswith("000000000064\n1.0\n")
    assert result.evaluation is not None
    assert result.to_json()["evaluation"]["lost"] == result.evaluation.lost == 0
    assert result.to_json()["evaluation"]["complete"] is True
    lines = [record.getMessage() for record in caplog.records if "restart 1" in record.getMessage()]
    assert [line.startswith("evaluation: worker 0 ") for line in lines] == [False, False, True]


def of_seeds(deadly: frozenset[int]) -> Any:
    """An environment whose episodes are one step and worth 1. Its process is killed in an episode with such a seed."""

    class OfSeeds(gymnasium.Env):  # type: ignore[misc]
        observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self._dies = seed in deadly
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            if self._dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return np.zeros(1, np.float32), 1.0, True, False, {}

    return OfSeeds


def test_an_evaluation_that_has_lost_a_task_is_incomplete_and_never_the_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deadly = task_seed(evaluation_seed(0), 2)
    manager = {"kind": "subprocess", "env": of_seeds(frozenset({deadly})), "n_envs": 2}
    manager["restarts"] = {"backoff_s": 0, "max_restarts": 100}
    run, report = run_of(tmp_path, manager=manager, evaluate_every=64, evaluation_episodes=5, steps=128)
    result = run.go()

    assert report.evaluations == [(64, 1.0, False)]
    assert result.evaluation is not None
    assert (result.evaluation.n_episodes, result.evaluation.lost, result.evaluation.is_complete) == (4, 1, False)
    assert result.to_json()["evaluation"]["complete"] is False
    assert not (tmp_path / "checkpoints" / "best").exists()
    told = [record.getMessage() for record in caplog.records if "tasks were lost" in record.getMessage()]
    assert len(told) == 2
    assert all("1 of 5 tasks were lost" in line and f"task 2 (seed {deadly})" in line for line in told)


def killed_early(context: Any) -> Any:
    """CartPole whose first process is killed in its twelfth step."""

    class KilledEarly(gymnasium.Wrapper):  # type: ignore[misc]
        n_left = 12 if context.generation == 0 else -1

        def step(self, action: Any) -> Any:
            self.n_left -= 1
            if self.n_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(action)

    return KilledEarly(gymnasium.make("CartPole-v1"))


def test_an_evaluation_whose_workers_are_killed_brings_what_it_would_have_brought() -> None:
    found: list[Evaluation] = []
    with SimpleEnvManager("CartPole-v1", 1) as manager:
        trainer = make_trainer("default", manager.behavior_specs["default"], PPO, seed=0, device="cpu")
        for env in ("CartPole-v1", killed_early):
            options = ManagerOptions(env=env, n_envs=3, restarts=RestartPolicy(backoff_s=0))
            with Evaluator(options, manager, n_episodes=10, seed=3) as evaluator:
                for _ in range(2):
                    evaluation = evaluator.evaluate({"default": trainer}, lambda: False)
                    assert evaluation is not None
                    found.append(evaluation)
    assert [max(result.attempts for result in each.results) for each in found] == [1, 1, 2, 1]
    assert [each.is_complete for each in found] == [True] * 4
    assert len(set(found[0].returns)) > 1
    for each in found[1:]:
        assert (each.returns_of, each.lengths_of) == (found[0].returns_of, found[0].lengths_of)


# When, and with what.


def test_a_training_that_is_stopped_while_it_is_evaluated_does_not_wait(tmp_path: Path) -> None:
    run, report = run_of(tmp_path, evaluate_every=64, evaluation_episodes=10**6)
    asked: list[int] = []
    real = Evaluator.evaluate

    def stopping(self: Evaluator, trainers: Any, is_over: Callable[[], bool]) -> Any:
        def look() -> bool:
            asked.append(1)
            if len(asked) == 20:
                run.stop()
            return is_over()

        return real(self, trainers, look)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", stopping)
        result = run.go()
    assert (result.ended, result.evaluation, report.evaluations) == ("stopped", None, [])
    assert len(asked) == 20
    assert checkpoints.load_latest(tmp_path / "checkpoints").training.n_steps == result.n_steps


def test_a_person_who_does_not_want_to_wait_for_the_last_evaluation_has_a_whole_training(tmp_path: Path) -> None:
    run, report = run_of(tmp_path, evaluation_episodes=10**6)
    report.evaluating = lambda n_episodes: run.stop()  # type: ignore[method-assign]
    result = run.go()
    assert (result.ended, result.n_steps, result.evaluation) == ("done", 512, None)


def test_with_rounds_they_come_between_two(tmp_path: Path) -> None:
    rounds = {"steps": 20, "train": [["default"]]}
    run, report = run_of(tmp_path, evaluate_every=50, rounds=rounds, steps=400)
    run.go()

    assert [steps for steps, _, _ in report.evaluations] == [80, 160, 240, 320]


def test_who_is_frozen_is_evaluated_and_stays_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("mpe2")
    tables = {
        "manager": {
            "kind": "subprocess",
            "env": "mpe2.simple_speaker_listener_v4:parallel_env",
            "n_envs": 2,
            "wait": "all",
        },
        "training": {**OPTIONS, "steps": 300, "evaluate_every": 100, "evaluation_episodes": 2},
        "trainers": {"speaker": PPO, "*": {**PPO, "frozen": True}},
    }
    report = Noted()
    run = TrainingRun(TrainingPlan.parse(tables, tmp_path), report)
    result = run.go()

    assert len(report.evaluations) == 2
    assert run.trainers["listener"].version == 0
    assert result.evaluation is not None
    assert {name: len(returns) for name, returns in result.evaluation.returns_of.items()} == {
        "speaker": 2,
        "listener": 2,
    }


def test_one_that_learns_apart_is_evaluated_while_its_weights_stay(tmp_path: Path) -> None:
    run, report = run_of(tmp_path, trainer={**DQN, "apart": 64}, evaluate_every=200, steps=600)
    seen: list[bool] = []
    real = Evaluator.evaluate

    def noting(self: Evaluator, trainers: Any, is_over: Callable[[], bool]) -> Any:
        model = trainers["default"]._model
        trainers["default"].pause()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        result = real(self, trainers, is_over)
        seen.append(all(bool((before[name] == tensor).all()) for name, tensor in model.state_dict().items()))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", noting)
        run.go()
    assert seen == [True] * 3
    assert len(report.evaluations) == 2


def slow_env() -> Any:
    """A class that workers need not import this module for, and with it PyTorch."""

    class Slow(gymnasium.Env):  # type: ignore[misc]
        observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self._n = 0
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            self._n += 1
            time.sleep(0.02)
            return np.zeros(1, np.float32), 1.0, self._n == 20, False, {}

    return Slow


def test_a_long_evaluation_times_nobody_out_whose_step_is_in_flight(tmp_path: Path) -> None:
    """It takes longer than a step may."""
    manager = {
        "kind": "subprocess",
        "env": slow_env(),
        "n_envs": 2,
        "wait": "any",
        "timeouts": {"step_s": 1.0},
        "restarts": {"max_restarts": 0},
    }
    run, report = run_of(tmp_path, manager=manager, evaluate_every=64, steps=160, evaluation_episodes=6)
    result = run.go()

    assert len(report.evaluations) == 2
    assert (result.n_steps >= 160, result.stats.restarts, result.stats.steps_lost) == (True, 0, 0)


def test_it_has_as_many_environments_as_it_has_episodes_at_the_most_and_none_of_the_trainings_files() -> None:
    with SimpleEnvManager("CartPole-v1", 1) as manager:
        options = ManagerOptions(
            env="CartPole-v1", n_envs=16, n_workers=8, local_envs=2, seed=1, log_dir="logs", trace=None, wait=Wait.any()
        )
        own = options_for(options, manager, n_episodes=5)
        assert (own.n_envs, own.n_workers, own.local_envs, own.wait) == (5, 5, 0, Wait.all())
        assert (own.seed, own.log_dir) == (None, "logs/evaluation")
        auto = options_for(ManagerOptions(kind="auto", env="CartPole-v1", n_envs=4), manager, n_episodes=100)
        assert (auto.kind, auto.n_envs) == ("simple", 4), "what the probe chose for the training"
        waiting = ManagerOptions(kind="asyncio", env="CartPole-v1", n_envs=40, n_workers="auto")
        assert options_for(waiting, manager, n_episodes=30).n_workers is None, "each environment is a worker"


def test_a_game_that_is_attached_cannot_be_evaluated_on_the_way() -> None:
    with SimpleEnvManager("CartPole-v1", 1) as manager:
        options = ManagerOptions(kind="godot", env="game", engine={"attach": "127.0.0.1:1234"})
        with pytest.raises(ConfigError, match=r"evaluate_every needs a second game.*engine\.attach"):
            options_for(options, manager, n_episodes=1)
        engine = options_for(ManagerOptions(kind="godot", env="game", engine={"window": True}), manager, n_episodes=1)
        assert engine.engine == {"window": False, "pin": False}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"evaluate_every": 0}, "evaluate_every must be a whole number of at least 1"),
        ({"evaluate_every": 10, "evaluation_episodes": 0}, "evaluate_every needs evaluation_episodes"),
        ({"checkpoint_every": 0}, "checkpoint_every must be a number of agent steps, or a time such as 10m"),
        ({"keep": 0}, "keep must be a whole number of at least 1"),
        ({"evaluate_evry": 10}, "did you mean training.evaluate_every"),
    ],
    ids=str,
)
def test_mistakes_are_named(tmp_path: Path, options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_of(tmp_path, **options)
