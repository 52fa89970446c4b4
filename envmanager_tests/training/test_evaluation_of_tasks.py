"""Evaluations on tasks: the same episodes for any number of environments, in the order of the tasks."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Task,
    UsageError,
    WorkerError,
)
from envmanager.testing import Die, EchoEnvironment
from envmanager.training.evaluation import Evaluation, evaluate


class Leaning:
    """Pushes the cart where the pole leans, which depends on nothing but the row."""

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo((steps.obs[:, 2] > 0).astype(np.int64))


class Ones:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.ones(len(steps), np.int64))


@pytest.mark.parametrize("seeded", [True, False], ids=["seeds of the tasks", "seeds of the manager"])
def test_tasks_give_the_same_episodes_with_any_number_of_environments_and_any_wait(seeded: bool) -> None:
    tasks: list[Any] = list(range(100, 140)) if seeded else [{}] * 40
    found = []
    for n_envs, wait in ((1, "any"), (4, "any"), (4, "all"), (16, "all")):
        with SimpleEnvManager("CartPole-v1", n_envs, seed=3, wait=wait) as manager:
            found.append(evaluate(manager, {"default": Leaning()}, tasks=tasks))
    with SubprocessEnvManager("CartPole-v1", 5, n_workers=2, seed=3) as manager:
        found.append(evaluate(manager, {"default": Leaning()}, tasks=tasks))
    assert len(set(found[0].returns)) > 5
    assert found[0].n_episodes == 40
    for evaluation in found[1:]:
        assert evaluation.returns_of == found[0].returns_of
        assert evaluation.lengths_of == found[0].lengths_of


def test_a_lost_task_is_in_the_table_and_has_no_return(tmp_path: Path) -> None:
    tasks = [Task(id="easy"), Task(seed=7, options={"fault": Die(3)}, id="deadly"), Task(options={"task": 5})]
    restarts = RestartPolicy(backoff_s=0)
    with SubprocessEnvManager(EchoEnvironment, 2, restarts=restarts) as manager:
        evaluation = evaluate(manager, {"default": Ones()}, tasks=tasks)
    assert (evaluation.n_episodes, evaluation.lost, len(evaluation.returns)) == (2, 1, 2)
    assert isinstance(evaluation.results[1].error, WorkerError)
    assert len(repr(evaluation)) < 80
    assert "2 episodes" in repr(evaluation)
    assert "1 lost" in repr(evaluation)
    evaluation.to_csv(tmp_path / "results.csv")
    with open(tmp_path / "results.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["task"], row["id"], row["attempts"]) for row in rows] == [
        ("0", "easy", "1"),
        ("1", "deadly", "3"),
        ("2", "", "1"),
    ]
    assert [float(row["return"]) for row in rows if row["return"]] == evaluation.returns
    assert (rows[1]["return"], rows[1]["seed"]) == ("", "7")
    assert "died" in rows[1]["error"]
    assert rows[2]["options"] == '{"task": 5}'


def test_an_evaluation_without_returns_has_a_repr() -> None:
    assert "no return" in repr(Evaluation.of([], ["default"], lost=3))


def test_tasks_and_a_number_of_episodes_exclude_each_other() -> None:
    with SimpleEnvManager(EchoEnvironment, 2) as manager:
        for given in ({}, {"tasks": [1], "episodes_per_env": 1}):
            with pytest.raises(UsageError, match="episodes_per_env"):
                evaluate(manager, {"default": Ones()}, **given)


def test_tasks_that_never_end_are_refused_and_an_iterator_that_ends_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envmanager.training.evaluation.MOST_TASKS", 10)
    with SimpleEnvManager(EchoEnvironment, 2) as manager:
        for endless in (itertools.count(), itertools.repeat({})):
            with pytest.raises(UsageError, match=r"itertools\.islice"):
                evaluate(manager, {"default": Ones()}, tasks=endless)
        for none in (3, object()):
            with pytest.raises(UsageError, match="iterable of tasks"):
                evaluate(manager, {"default": Ones()}, tasks=none)  # type: ignore[arg-type]
        for tasks in (itertools.islice(itertools.count(), 10), range(12)):
            n = 10 if tasks != range(12) else 12
            assert evaluate(manager, {"default": Ones()}, tasks=tasks).n_episodes == n  # type: ignore[arg-type]
