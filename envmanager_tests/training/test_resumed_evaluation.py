"""An evaluation that is killed and goes on gives the table of the one that was not."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from envmanager import ActionInfo, RestartPolicy, SimpleEnvManager, SubprocessEnvManager, Task, UsageError
from envmanager.cli.app import run_command_line
from envmanager.errors import NotWritten
from envmanager.training import evaluation
from envmanager.training.evaluation import Evaluation, evaluate

KEPT = RestartPolicy(10_000, backoff_s=0.0, on_exception="restart", keep_episodes=True)
MODULE = "envmanager_tests.training.test_resumed_evaluation"


class Walk(gymnasium.Env[Any, Any]):
    """A walk by chance, which ends far from 0. The option ``fails`` makes its first step raise."""

    observation_space = gymnasium.spaces.Box(-100.0, 100.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.n, self.at, self.fails = 0, float(self.np_random.random()), bool(options and options["fails"])
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        if self.fails:
            raise ValueError("no such level")
        self.n, self.at = self.n + 1, self.at + float(self.np_random.normal())
        return self.seen(), self.at * float(action), self.n >= 30 or abs(self.at) > 3, False, {}

    def seen(self) -> Any:
        return np.array([self.at, self.n], np.float32)


class Another(Walk):
    pass


class Upwards:
    source = "upwards, in each run"

    def get_action(self, steps: Any) -> ActionInfo:
        return ActionInfo((steps.obs[:, 0] > 0).astype(np.int64))


class Downwards(Upwards):
    source = "another"


class Dies(Upwards):
    """Kills its process after so many actions."""

    def __init__(self, n: int) -> None:
        self.left = n

    def get_action(self, steps: Any) -> ActionInfo:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().get_action(steps)


class Stops(Upwards):
    """Raises after so many actions."""

    def __init__(self, n: int) -> None:
        self.left = n

    def get_action(self, steps: Any) -> ActionInfo:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().get_action(steps)


def tasks_of(n: int) -> list[Task]:
    return [Task(options={"fails": number % 7 == 3}, id=f"level {number}") for number in range(n)]


def manager_of(workers: int, **options: Any) -> Any:
    given = {"seed": 3, "wait": "all", "restarts": KEPT, **options}
    if not workers:
        return SimpleEnvManager(Walk, 4, **given)
    return SubprocessEnvManager(Walk, 4, n_workers=workers, **given)


def play(manager: Any, policy: Any, tasks: Any, file: Path | None) -> Evaluation:
    return evaluate(manager, {"default": policy}, tasks=tasks, resume=file)


def table_of(result: Evaluation, folder: Path) -> str:
    result.to_csv(folder / "table.csv")
    return (folder / "table.csv").read_text()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written before each step."""
    monkeypatch.setattr(evaluation, "_WRITTEN_EVERY_S", 0.0)
    monkeypatch.setattr(evaluation, "_MOST_OFTEN", 0)


def killed(workers: int, n_tasks: int, file: Path, n: int) -> int:
    """Play in a process that is killed after ``n`` actions, unless the evaluation ends before. Return its exit code."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", MODULE, str(workers), str(n_tasks), str(file), str(n)]
    return subprocess.run(command, env=environ, capture_output=True).returncode


@pytest.mark.parametrize("workers", [0, 2])
def test_the_table_of_an_evaluation_that_was_killed_is_that_of_the_one_that_was_not(
    workers: int, tmp_path: Path
) -> None:
    tasks, file = tasks_of(60), tmp_path / "evaluation"
    with manager_of(workers) as manager:
        expected = table_of(play(manager, Upwards(), tasks, None), tmp_path)
    for n in (5, 40, 13):
        assert killed(workers, 60, file, n) == -signal.SIGKILL
    with manager_of(workers) as manager:
        found = table_of(play(manager, Upwards(), tasks, file), tmp_path)
    assert found == expected
    assert sorted(int(row["task"]) for row in csv.DictReader(found.splitlines())) == list(range(60))


@pytest.mark.usefixtures("always")
def test_what_was_played_is_not_played_again_and_a_whole_evaluation_is_over_at_once(tmp_path: Path) -> None:
    tasks, file, policy = [Task(seed=seed) for seed in range(20)], tmp_path / "evaluation", Dies(10**9)
    with manager_of(0) as manager:
        expected = play(manager, policy, tasks, None)
        n_whole = 10**9 - policy.left
    with manager_of(0) as manager, pytest.raises(KeyboardInterrupt):
        play(manager, Stops(n_whole // 2), tasks, file)
    rest, nothing = Dies(10**9), Dies(10**9)
    for again in (rest, nothing):
        with manager_of(0) as manager:
            found = play(manager, again, tasks, file)
            assert table_of(found, tmp_path) == table_of(expected, tmp_path)
    assert n_whole // 2 <= 10**9 - rest.left <= n_whole // 2 + 2
    assert nothing.left == 10**9


@pytest.mark.usefixtures("always")
def test_with_steps_in_flight_each_task_is_once_in_the_table(tmp_path: Path) -> None:
    tasks, file = [Task(seed=seed) for seed in range(40)], tmp_path / "evaluation"
    for n in (30, 30, 10**9):
        with manager_of(4, wait="any") as manager:
            try:
                result = play(manager, Stops(n), tasks, file)
            except KeyboardInterrupt:
                continue
    with manager_of(0) as manager:
        expected = play(manager, Upwards(), tasks, None)
    assert [each.index for each in result.results] == list(range(40))
    assert result.returns == expected.returns


def begun(file: Path, manager: Any, tasks: Any = (1, 2, 3, 4, 5)) -> None:
    with pytest.raises(KeyboardInterrupt):
        play(manager, Stops(4), tasks, file)


def test_the_file_of_another_evaluation_is_refused_and_stays(tmp_path: Path) -> None:
    file = tmp_path / "evaluation"
    with manager_of(0) as manager:
        begun(file, manager)
    before = file.read_bytes()
    with manager_of(0) as manager:
        with pytest.raises(UsageError, match="with other tasks: name another file"):
            play(manager, Stops(4), [1, 2, 3, 4, 6], file)
        with pytest.raises(UsageError, match="with other policies"):
            play(manager, Downwards(), [1, 2, 3, 4, 5], file)
        with pytest.raises(UsageError, match="with other tasks"):
            evaluate(manager, {"default": Stops(4)}, tasks=[1, 2, 3, 4, 5], config={"seed": 5}, resume=file)
    for env, n, why in (("CartPole-v1", 4, "with other environments"), (Walk, 2, "4 environments, and this manager")):
        with SimpleEnvManager(env, n, restarts=KEPT) as manager, pytest.raises(UsageError, match=why):
            play(manager, Stops(4), [1, 2, 3, 4, 5], file)
    assert file.read_bytes() == before


def others(whole: bytes) -> Iterator[bytes]:
    yield b""
    yield b"run,task\n"
    yield whole[: len(whole) // 2]
    for place in range(40, len(whole) - 100, len(whole) // 20):
        yield whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


def test_a_damaged_file_is_refused_or_goes_on_to_the_same_table(tmp_path: Path) -> None:
    file, refused = tmp_path / "evaluation", 0
    with manager_of(0) as manager:
        begun(file, manager)
        expected = play(manager, Upwards(), [1, 2, 3, 4, 5], None)
    whole = file.read_bytes()
    for content in others(whole):
        file.write_bytes(content)
        with manager_of(0) as manager:
            try:
                assert play(manager, Stops(10**9), [1, 2, 3, 4, 5], file).returns == expected.returns
            except UsageError:
                assert file.read_bytes() == content
                refused += 1
    assert refused > 15


def test_what_cannot_go_on_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    file = tmp_path / "evaluation"
    with SimpleEnvManager(Walk, 2) as manager, pytest.raises(UsageError, match="keep_episodes=True"):
        play(manager, Upwards(), [1, 2], file)
    with manager_of(0) as manager:
        with pytest.raises(UsageError, match="pass tasks"):
            evaluate(manager, {"default": Upwards()}, episodes_per_env=2, resume=file)
        with pytest.raises(UsageError, match="no place"):
            play(manager, Upwards(), [Task(options={"fails": object()})], file)
        with pytest.raises(NotWritten):
            play(manager, Upwards(), [1, 2], tmp_path / "none" / "evaluation")
    assert not os.listdir(tmp_path)


def test_the_command_goes_on_and_several_runs_have_a_file_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun

    for name in ("a", "b"):
        manager = {"kind": "simple", "env": f"{MODULE}:Walk", "n_envs": 2}
        training = {"steps": 64, "evaluation_episodes": 0, "device": "cpu", "seed": ord(name)}
        trainers = {"*": {"kind": "ppo", "rollout": 64, "minibatch": 64, "epochs": 1, "hidden": [8]}}
        tables = {"manager": manager, "training": training, "trainers": trainers}
        TrainingRun(TrainingPlan.parse(tables, tmp_path / name), Report()).go()
    runs, file, out = [str(tmp_path / name) for name in ("a", "b")], tmp_path / "evaluation", tmp_path / "table.csv"
    command = ["evaluate", *runs, "--seeds", "0:30", "--out", str(out)]
    assert run_command_line(command) == 0
    expected = out.read_text()

    for _ in range(2):
        assert run_command_line([*command, "--resume", str(file)]) == 0
        assert out.read_text() == expected
    assert sorted(path.name for path in tmp_path.glob("evaluation*")) == ["evaluation", "evaluation.2"]
    assert run_command_line(["evaluate", runs[1], "--seeds", "0:30", "--resume", str(file)]) == 2
    assert "other policies" in capsys.readouterr().err
    assert run_command_line([*command, "--resume", str(file), "--env", f"{MODULE}:Another"]) == 2
    assert "other environments" in capsys.readouterr().err


if __name__ == "__main__":
    evaluation._WRITTEN_EVERY_S, evaluation._MOST_OFTEN = 0.0, 0
    workers, n_tasks, file, n = sys.argv[1:]
    with manager_of(int(workers)) as manager:
        dies = Dies(int(n))
        play(manager, dies, tasks_of(int(n_tasks)), Path(file))
