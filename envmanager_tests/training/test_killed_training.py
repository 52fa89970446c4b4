"""A training that is killed and resumed is the training that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import attrs
import gymnasium
import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import UsageError
from envmanager.cli.app import run_command_line
from envmanager.training.algorithms.ppo import PPO as PPOTrainer
from envmanager.training.runs.figures import EpisodeEnd
from envmanager.training.runs.plan import TrainingOptions, TrainingPlan, seconds_of
from envmanager.training.runs.run import Report, TrainingRun
from envmanager_tests.training.killable import PPO, SLOPE, Slope, digests, plan_of


def killed(name: str, workers: int, folder: Path, n_episodes: int, **of_manager: Any) -> None:
    """Train, or train on, until the process kills itself at the end of an episode."""
    command = [sys.executable, "-m", "envmanager_tests.training.killable", name, str(workers), str(folder)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command += [str(n_episodes), json.dumps(of_manager)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("name", "workers"),
    [("ppo", 4), ("dqn", 0), ("sac", 1), ("apart", 4), ("sac apart", 0), ("lessons", 4), ("rounds", 0), ("two", 4)],
)
def test_weights_and_episodes_are_those_of_the_training_that_was_not_killed(
    name: str, workers: int, tmp_path: Path
) -> None:
    TrainingRun(plan_of(name, workers, tmp_path / "one"), Report()).go()
    killed(name, workers, tmp_path / "other", {"sac": 3, "sac apart": 3, "rounds": 110}.get(name, 60))
    TrainingRun(plan_of(name, workers, tmp_path / "other", resume=True), Report()).go()

    weights, episodes = digests(tmp_path / "one")
    assert digests(tmp_path / "other") == (weights, episodes)


COMMAND = """
import os, signal, sys
from envmanager.cli import train
from envmanager.cli.app import run_command_line

class Display(train.TrainDisplay):
    def {moment}(self, *_):
        os.kill(os.getpid(), signal.{name})

train.TrainDisplay = Display
sys.exit(run_command_line(sys.argv[1:]))
"""


def command_of(folder: Path, **training: Any) -> list[str]:
    """Return a command that trains, to which a folder is to be added."""
    config = folder / "config.json"
    manager = {"env": SLOPE, "kind": "simple", "n_envs": 4, "wait": "all"}
    tables = {"manager": manager, "training": {"device": "cpu", "seed": 7, **training}, "trainers": {"*": PPO}}
    config.write_text(json.dumps(tables))
    return ["train", str(config), "--plain", "--resume", "auto", "--dir"]


def signalled(command: list[str], moment: str, name: str) -> subprocess.CompletedProcess[str]:
    """Run a command that sends itself a signal at each moment of its display."""
    script, environ = COMMAND.format(moment=moment, name=name), {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", script, *command], env=environ, capture_output=True, text=True)


def test_a_kill_in_the_evaluation_at_the_end_loses_neither_it_nor_the_best_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, run = command_of(tmp_path, steps=256, evaluation_episodes=5), tmp_path / "run"
    assert signalled([*command, str(run)], "evaluating", "SIGKILL").returncode == -signal.SIGKILL

    assert run_command_line([*command, str(run)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluation")]
    assert (run / "checkpoints" / "best").exists()
    assert run_command_line([*command, str(run)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert run_command_line([*command, str(tmp_path / "other")]) == 0
    assert told == [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluation")] != []


class KillsWorkers(Report):
    """Kills all workers at the end of some episodes, after which an environment takes a step without an action."""

    n = 0

    def started(self, run: Any) -> None:
        self.manager = run.manager

    def episode_ended(self, end: EpisodeEnd) -> None:
        self.n += 1
        for worker in self.manager.stats().workers if self.n in (5, 12, 30) else ():
            os.kill(worker.pid, signal.SIGKILL)


@pytest.mark.parametrize("name", ["two", "rounds"])
def test_workers_that_are_killed_at_the_ends_of_episodes_of_several_behaviors_change_nothing(
    name: str, tmp_path: Path
) -> None:
    TrainingRun(plan_of(name, 2, tmp_path / "one"), Report()).go()
    of_manager = {"restarts": {"max_restarts": 9, "backoff_s": 0}}
    result = TrainingRun(plan_of(name, 2, tmp_path / "other", of_manager=of_manager), KillsWorkers()).go()

    assert result.stats.restarts == 6
    assert digests(tmp_path / "other") == digests(tmp_path / "one")


KEPT = {"restarts": {"keep_episodes": True}}


@pytest.mark.parametrize(
    ("kept", "source"), [(KEPT, "recording"), ({}, "order")], ids=["kept and replayed", "begun anew and in order"]
)
def test_an_asynchronous_training_goes_on_and_its_recorded_parts_are_replayed_as_one(
    kept: dict[str, Any], source: str, tmp_path: Path
) -> None:
    path, one, other = str(tmp_path / "run.emrec"), tmp_path / "one", tmp_path / "other"
    for n_episodes in (60, 40):
        killed("lessons", 2, one, n_episodes, wait="any", record=path, **kept)
    of_manager = {"wait": "any", "record": path, **kept}
    TrainingRun(plan_of("lessons", 2, one, of_manager=of_manager, resume=True), Report()).go()

    of_manager = {"wait": "any", **kept, source: path, **({"kind": "replay"} if source == "recording" else {})}
    ended = [""]
    while ended[-1] != "done":
        plan = plan_of("lessons", 2, other, of_manager=of_manager, resume="auto")
        ended.append(TrainingRun(plan, Report()).go().ended)
    assert "stopped" in ended
    assert digests(other)[0] == digests(one)[0]
    assert len(digests(other)[1]) == len(digests(one)[1])
    assert sorted(each.name for each in tmp_path.glob("run*")) == ["run.2.emrec", "run.3.emrec", "run.emrec"]


def test_a_replay_that_stands_between_two_parts_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "run.emrec")
    TrainingRun(plan_of("ppo", 0, tmp_path / "one", of_manager={"record": path}), Report()).go()
    for source in ({"kind": "replay", "recording": path}, {"order": path}):
        folder = tmp_path / source.get("kind", "ordered")
        assert TrainingRun(plan_of("ppo", 0, folder, of_manager=source), Stops()).go().ended == "stopped"
        with pytest.raises(UsageError, match="where no part of the recording begins"):
            TrainingRun(plan_of("ppo", 0, folder, of_manager=source, resume=True), Report()).go()


def test_views_of_shared_memory_change_nothing(tmp_path: Path) -> None:
    TrainingRun(plan_of("dqn", 2, tmp_path / "one"), Report()).go()
    killed("dqn", 2, tmp_path / "other", 60, zero_copy=True)
    TrainingRun(plan_of("dqn", 2, tmp_path / "other", of_manager={"zero_copy": True}, resume=True), Report()).go()

    assert digests(tmp_path / "other") == digests(tmp_path / "one")


def test_more_workers_go_on_with_the_same_episodes(tmp_path: Path) -> None:
    TrainingRun(plan_of("ppo", 0, tmp_path / "one"), Report()).go()
    killed("ppo", 0, tmp_path / "other", 60)
    TrainingRun(plan_of("ppo", 2, tmp_path / "other", resume=True), Report()).go()

    (weights, episodes), (of_other, others) = digests(tmp_path / "one"), digests(tmp_path / "other")
    assert of_other == weights
    assert [row[1:] for row in others] == [row[1:] for row in episodes]  # a worker's steps are counted together


class Stops(Report):
    """Stops the training at its first update, as a signal would."""

    def updated(self, run: Any, update: Any) -> None:
        run.stop()


def test_a_training_that_was_stopped_goes_on_as_if_it_was_not(tmp_path: Path) -> None:
    TrainingRun(plan_of("dqn", 0, tmp_path / "one"), Report()).go()
    assert TrainingRun(plan_of("dqn", 0, tmp_path / "other"), Stops()).go().ended == "stopped"
    for _ in range(3):
        assert TrainingRun(plan_of("dqn", 0, tmp_path / "other", resume=True), Stops()).go().ended == "stopped"
    TrainingRun(plan_of("dqn", 0, tmp_path / "other", resume=True), Report()).go()

    assert digests(tmp_path / "other") == digests(tmp_path / "one")


def test_an_update_that_is_stopped_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops_in_the_update(own: Any, batch: Any) -> Any:
        if len(steps) == 4:
            run.stop()
        steps.append(own.version)
        return step(own, batch)

    TrainingRun(plan_of("ppo", 0, tmp_path / "one"), Report()).go()
    steps: list[int] = []
    run, step = TrainingRun(plan_of("ppo", 0, tmp_path / "other"), Report()), PPOTrainer._step
    with monkeypatch.context() as patched:
        patched.setattr(PPOTrainer, "_step", stops_in_the_update)
        assert run.go().ended == "stopped"
    assert len(steps) == 5
    assert run.trainers["default"].version == steps[-1]
    TrainingRun(plan_of("ppo", 0, tmp_path / "other", resume=True), Report()).go()

    assert digests(tmp_path / "other") == digests(tmp_path / "one")


class Vectored(gymnasium.vector.VectorEnv):  # type: ignore[misc]
    """Two environments that are seeded only once, together."""

    num_envs = 2
    single_observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    single_action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.vector.utils.batch_space(single_observation_space, 2)
    action_space = gymnasium.vector.utils.batch_space(single_action_space, 2)
    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    n = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros((2, 2), np.float32), {}

    def step(self, actions: Any) -> Any:
        self.n += 1
        zeros, no = np.zeros((2, 2), np.float32), np.zeros(2, np.bool_)
        return zeros, np.zeros(2), no, no, {}


def test_where_episodes_cannot_be_repeated_a_sentence_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def plan(**more: Any) -> TrainingPlan:
        manager = {"kind": "simple", "env": Vectored, "n_envs": 2, "wait": "all"}
        training = {"steps": 100, "evaluation_episodes": 0, "device": "cpu"}
        return TrainingPlan.parse({"manager": manager, "training": training, "trainers": {"*": PPO}}, tmp_path, **more)

    with caplog.at_level("INFO", "envmanager"):
        TrainingRun(plan(), Stops()).go()
    said = [record.message for record in caplog.records if "anew" in record.message]
    further = plan(resume=True)
    further = attrs.evolve(further, training=attrs.evolve(further.training, steps=200))
    assert TrainingRun(further, Report()).go().ended == "done"

    assert said


def test_only_what_a_user_says_is_not_kept(tmp_path: Path) -> None:
    def keeps(**manager: Any) -> Any:
        tables = {"manager": {"env": SLOPE, **manager}, "trainers": {"*": PPO}}
        return TrainingPlan.parse(tables, tmp_path).manager.restarts.keep_episodes

    assert keeps() == "if_possible"
    assert keeps(restarts=5) == "if_possible"
    assert keeps(restarts={"keep_episodes": False}) is False
    assert keeps(restarts={"keep_episodes": True}) is True
    assert keeps(record="x.emrec") is False
    assert keeps(zero_copy=True) == "if_possible"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("10m", 600.0), ("1.5 h", 5400.0), ("10", None), ("m", None)]
)
def test_times_are_read(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("every", [0, -1, "10 days", "", "0s", 1.5, True])
def test_what_is_neither_steps_nor_time_is_refused(every: Any) -> None:
    with pytest.raises(UsageError, match="a time such as 10m"):
        TrainingOptions(checkpoint_every=every)


class Saves(Report):
    """Counts checkpoints."""

    n = 0

    def saved(self, path: Path) -> None:
        self.n += 1


def test_checkpoints_come_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def later() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr("envmanager.training.runs.run.time.monotonic", later)
    plan, counted = plan_of("ppo", 0, tmp_path), Saves()
    training = {"steps": 400, "evaluation_episodes": 0, "device": "cpu", "checkpoint_every": "1m"}
    tables = {"manager": {"env": SLOPE, "kind": "simple", "n_envs": 4}, "training": training, "trainers": {"*": PPO}}
    TrainingRun(TrainingPlan.parse(tables, plan.directory), counted).go()

    assert 2 <= counted.n <= 20


def test_one_command_in_a_loop_reaches_the_end_through_signals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, codes = tmp_path / "run", list[int]()
    command = [*command_of(tmp_path, steps=512, evaluation_episodes=0), str(run), "--checkpoint-every", "10m"]
    while not codes or codes[-1] == 128 + signal.SIGTERM:
        done = signalled(command, "updated", "SIGTERM")
        codes.append(done.returncode)
        assert len(codes) < 9, done.stderr

    assert codes[-1] == 0, done.stderr
    assert len(codes) >= 3
    assert run_command_line(command) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert not (tmp_path / "run.1").exists()


class Calls(Slope):
    """Sends a SIGTERM to the trainer and hangs, once: in its n-th step, or in its construction with n = 0."""

    def __init__(self, n: int, trainer: str) -> None:
        self._left, self._trainer = n, Path(trainer)
        if not n:
            self._call()

    def step(self, action: Any) -> Any:
        self._left -= 1
        if not self._left:
            self._call()
        return super().step(action)

    def _call(self) -> None:
        try:
            pid = int(self._trainer.read_text())
            self._trainer.unlink()
        except FileNotFoundError:  # one in another worker, which steps at the same time, or a run before has called
            return
        os.kill(pid, signal.SIGTERM)
        threading.Event().wait()


OWN_PID = """
import os, pathlib, sys
from envmanager.cli.app import run_command_line
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
sys.exit(run_command_line(sys.argv[2:]))
"""


@pytest.mark.parametrize("n", [0, 100], ids=["while starting", "in a step"])
def test_a_signal_ends_a_training_whose_workers_hang(n: int, tmp_path: Path) -> None:
    trainer, config, runs = tmp_path / "trainer", tmp_path / "config.json", (tmp_path / "one", tmp_path / "other")
    manager = {"env": f"{__name__}:Calls", "env_kwargs": {"n": n, "trainer": str(trainer)}, "n_envs": 4, "wait": "all"}
    manager |= {"kind": "subprocess", "n_workers": 2, "timeouts": {"start_s": 1000, "step_s": 1000, "close_s": 1000}}
    training = {"steps": 800, "evaluation_episodes": 0, "device": "cpu", "seed": 7}
    tables = {"manager": manager, "training": training, "trainers": {"*": PPO}}
    config.write_text(json.dumps(tables))
    TrainingRun(TrainingPlan.parse(tables, runs[0]), Report()).go()
    command = [sys.executable, "-c", OWN_PID, str(trainer), "train", str(config), "--dir", str(runs[1]), "--plain"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert not trainer.exists()
    TrainingRun(TrainingPlan.parse(tables, runs[1], resume="auto"), Report()).go()

    assert digests(runs[1]) == digests(runs[0])


def test_without_a_checkpoint_auto_begins_and_renames_what_was_left(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "episodes.csv").write_text("")
    plan = plan_of("ppo", 0, tmp_path / "run", resume="auto")
    TrainingRun(plan, Stops()).go()

    assert (plan.resume, plan.force) == (False, "auto")
    assert (tmp_path / "run.1" / "episodes.csv").exists()
    assert plan_of("ppo", 0, tmp_path / "run", resume="auto").resume is True


def test_auto_begins_nothing_where_another_training_has_just_ended(tmp_path: Path) -> None:
    later = plan_of("ppo", 0, tmp_path / "run", resume="auto")
    TrainingRun(plan_of("ppo", 0, tmp_path / "run", resume="auto"), Stops()).go()

    with pytest.raises(UsageError, match="has a checkpoint now: repeat the command"):
        TrainingRun(later, Report()).go()
    assert not (tmp_path / "run.1").exists()
