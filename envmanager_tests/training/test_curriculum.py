"""Environment parameters: samplers, and lessons that end when a measure is reached, in a training too."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import ActionInfo, AgentSteps, EnvContext, SimpleEnvManager, SubprocessEnvManager, TaskResult
from envmanager.cli.app import run_command_line
from envmanager.errors import ConfigError, UsageError
from envmanager.observe.episodes import FinishedEpisode
from envmanager.training.algorithms.trainers import make_trainer
from envmanager.training.controller import TrainerController
from envmanager.training.curriculum import Curriculum, CurriculumState, LessonBegan, LessonState, parse
from envmanager.training.policies.exporting import record
from envmanager.training.policies.playing import FRAMES, PlayedEpisode, play
from envmanager.training.policies.saved import SavedTraining
from envmanager.training.runs.figures import read_episodes
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun
from envmanager_tests.envs import Duel

UNTIL_ONE = {"measure": "reward", "threshold": 1, "episodes": 2}
SAMPLERS = {
    "gravity": {"sampler": "uniform", "min": 7, "max": 12},
    "mass": {"sampler": "normal", "mean": 1, "std": 0.1},
    "map": {"sampler": "choice", "values": ["a", "b", "c"]},
    "wind": {"sampler": "log_uniform", "min": 0.1, "max": 10},
    "slope": {"sampler": "multi_range_uniform", "ranges": [[0, 1], [8, 11]]},
    "size": 3,
}


class Walls(gymnasium.Env[Any, Any]):
    """An environment that logs the options of its resets, and whose process dies after ``dies_after`` steps."""

    observation_space = gymnasium.spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, context: EnvContext, *, log: str = "", dies_after: int = 0) -> None:
        self.log, self.dies_after, self.env_id = log, dies_after, context.env_id
        self.n_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.options, self.left = options, 4
        if self.log:
            with open(os.path.join(self.log, str(self.env_id)), "a") as file:
                file.write(json.dumps(options) + "\n")
        return self._obs(), {}

    def _obs(self) -> Any:
        return np.array([(self.options or {}).get("wall", 0), self.left], np.float32)

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        if self.n_steps == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return self._obs(), 0.25, self.left == 0, False, {"success": self.left == 0, "name": "x"}


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


class Told(Report):
    """Keeps the lessons that began, and whether lessons are in the metrics."""

    def __init__(self) -> None:
        self.began: list[LessonBegan] = []

    def lesson_began(self, run: Any, began: LessonBegan) -> None:
        self.began.append(began)


def draws(curriculum: Curriculum, n: int) -> list[Any]:
    return [curriculum.next_task(0).options for _ in range(n)]


def result(curriculum: Curriculum, total: float, *, of: str = "default", **numbers: float) -> TaskResult:
    """The end of the next task: an episode with this return, and these numbers in its info."""
    episode = FinishedEpisode(of, 0, total, 1)
    episode.numbers = numbers
    return TaskResult(0, curriculum.next_task(0), 0, True, 1, episodes=(episode,))


def test_samples_have_their_distribution() -> None:
    values = draws(Curriculum(SAMPLERS, seed=1), 3000)

    def of(name: str) -> Any:
        return np.array([each[name] for each in values])

    assert of("gravity").min() >= 7
    assert of("gravity").max() <= 12
    assert abs(of("gravity").mean() - 9.5) < 0.15
    assert abs(of("mass").mean() - 1) < 0.01
    assert abs(of("mass").std() - 0.1) < 0.01
    assert min(Counter(of("map").tolist()).values()) > 850
    assert of("wind").min() >= 0.1
    assert of("wind").max() <= 10
    assert abs((of("wind") < 1).mean() - 0.5) < 0.05
    slope = of("slope")
    assert ((slope <= 1) | (slope >= 8)).all()
    assert abs((slope <= 1).mean() - 0.25) < 0.03
    assert (of("size") == 3).all()


def test_the_values_of_a_task_depend_on_the_seed_and_its_number_alone() -> None:
    one, other = Curriculum(SAMPLERS, seed=1), Curriculum(SAMPLERS, seed=1)
    other.restore(CurriculumState(n_tasks=3))

    assert draws(one, 6)[3:] == draws(other, 3)
    assert draws(Curriculum(SAMPLERS, seed=1), 3) != draws(Curriculum(SAMPLERS, seed=2), 3)


def test_a_lesson_ends_when_the_mean_of_its_last_episodes_has_reached_the_threshold() -> None:
    lessons = {"wall": {"lessons": [{"value": 1, "until": UNTIL_ONE}, {"value": 2, "until": UNTIL_ONE}, {"value": 3}]}}
    curriculum = Curriculum(lessons, seed=0)

    for total, lesson in [(9, 1), (-9, 1), (9, 1), (-6, 2), (9, 2), (9, 3)]:
        curriculum.ended(result(curriculum, total))
        assert curriculum.lessons == {"wall": lesson}, total
    assert draws(curriculum, 1) == [{"wall": 3}]


def test_an_episode_counts_only_in_the_lesson_in_which_it_was_drawn() -> None:
    lessons = {"wall": {"lessons": [{"value": 1, "until": UNTIL_ONE}, {"value": 2, "until": UNTIL_ONE}, {"value": 3}]}}
    curriculum = Curriculum(lessons, seed=0)
    early = [result(curriculum, 1) for _ in range(4)]

    for each in early[:3]:
        curriculum.ended(each)
    assert curriculum.lessons == {"wall": 2}

    for each, lesson in [(result(curriculum, 1), 2), (early[3], 2), (result(curriculum, 1), 3)]:
        curriculum.ended(each)
        assert curriculum.lessons == {"wall": lesson}


def test_an_error_while_a_lesson_is_told_leaves_no_parameter_uncounted_and_no_lesson_untold() -> None:
    told = []

    def tell(began: LessonBegan) -> None:
        told.append(began.parameter)
        if len(told) % 2:
            raise OSError("no space left")

    once = {"lessons": [{"value": 1, "until": {**UNTIL_ONE, "episodes": 1}}, {"value": 2}]}
    curriculum = Curriculum({"wall": once, "wind": once, "size": once}, seed=0, on_lesson=tell)
    with pytest.raises(OSError, match="no space"):
        curriculum.ended(result(curriculum, 1))
    assert (curriculum.lessons, told) == ({"wall": 2, "wind": 2, "size": 2}, ["wall"])
    with pytest.raises(OSError, match="no space"):
        curriculum.ended(result(curriculum, 1))
    assert told == ["wall", "wind", "size"]


def test_a_lesson_can_end_by_a_number_in_the_infos_of_one_behavior() -> None:
    until = {"measure": "success", "threshold": 0.5, "episodes": 2, "behavior": "ant"}
    curriculum = Curriculum({"wall": {"lessons": [{"value": 1, "until": until}, {"value": 2}]}}, seed=0)

    for of, success in [("bee", 1), ("bee", 1), ("ant", 0), ("ant", 0)]:
        curriculum.ended(result(curriculum, 0, of=of, success=success))
    curriculum.ended(result(curriculum, 0, of="ant"))  # without the number: it does not count
    assert curriculum.lessons == {"wall": 1}

    curriculum.ended(result(curriculum, 0, of="ant", success=1))
    assert curriculum.lessons == {"wall": 2}


def test_a_lesson_can_end_by_the_progress_of_the_training() -> None:
    until = {"measure": "progress", "threshold": 0.5}
    at = [0.4]
    lessons = {"wall": {"lessons": [{"value": 1, "until": until}, {"value": 2}]}}
    curriculum = Curriculum(lessons, seed=0, progress=lambda: at[0])

    curriculum.ended(result(curriculum, 0))
    assert curriculum.lessons == {"wall": 1}
    at[0] = 0.5
    curriculum.ended(result(curriculum, 0))
    assert curriculum.lessons == {"wall": 2}


def test_a_restored_curriculum_goes_on_in_its_lessons_and_with_what_it_measured() -> None:
    lessons = {"wall": {"lessons": [{"value": 1, "until": UNTIL_ONE}, {"value": 2}]}, **SAMPLERS}
    one, other = Curriculum(lessons, seed=1), Curriculum(lessons, seed=1)
    one.ended(result(one, 1))

    other.restore(one.state())
    other.ended(result(other, 1))
    assert other.lessons == {"wall": 2}

    fewer = Curriculum({"wall": 5}, seed=1)
    fewer.restore(other.state())  # the config has changed
    assert draws(fewer, 1) == [{"wall": 5}]


def test_a_restored_lesson_that_measures_something_else_now_begins_its_measures_anew() -> None:
    def lessons(**until: Any) -> dict[str, Any]:
        return {"wall": {"lessons": [{"value": 1, "until": {**until, "episodes": 2}}, {"value": 2}]}}

    one = Curriculum(lessons(measure="reward", threshold=500), seed=1)
    one.ended(result(one, 200))
    other = Curriculum(lessons(measure="reward", threshold=0.8, behavior="default"), seed=1)
    other.restore(one.state())
    other.ended(result(other, 0))
    assert other.lessons == {"wall": 1}
    other.ended(result(other, 2))
    assert other.lessons == {"wall": 2}


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"sampler": "unifrom", "min": 0, "max": 1}, "g.sampler"),
        ({"sampler": ["uniform"]}, "g.sampler"),
        ({"min": 0, "max": 1}, "g.sampler"),
        ({"sampler": "uniform", "min": 0, "mox": 1}, "g.max"),
        ({"sampler": "uniform", "min": 0}, "g.max"),
        ({"sampler": "uniform", "min": "0", "max": 1}, "g.min"),
        ({"sampler": "uniform", "min": 2, "max": 1}, "g.max"),
        ({"sampler": "log_uniform", "min": 0, "max": 1}, "g.min"),
        ({"sampler": "normal", "mean": 0, "std": -1}, "g.std"),
        ({"sampler": "choice", "values": "abc"}, "g.values"),
        ({"sampler": "choice", "values": []}, "g.values"),
        ({"sampler": "multi_range_uniform", "ranges": [[1, 0]]}, "g.ranges"),
        ({"sampler": "multi_range_uniform", "ranges": [[0, 1], [3]]}, "g.ranges[1]"),
        ({"lessons": [None]}, "g.lessons[0]"),
        ({"lessons": []}, "g.lessons"),
        ({"lessons": 3}, "g.lessons"),
        ({"lessons": [{"value": 1}, {"value": 2}]}, "g.lessons[0].until"),
        ({"lessons": [{"value": 1, "until": UNTIL_ONE}]}, "g.lessons"),
        ({"lessons": [{"value": {"sampler": "uniform", "min": 1}}]}, "g.lessons[0].value.max"),
        (
            {"lessons": [{"value": 1, "until": {**UNTIL_ONE, "episodes": 0}}, {"value": 2}]},
            "g.lessons[0].until.episodes",
        ),
        ({"lessons": [{"value": 1, "until": {"measure": "reward"}}, {"value": 2}]}, "g.lessons[0].until.threshold"),
    ],
)
def test_a_mistake_is_named_by_its_key(table: Any, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse({"size": 3, "g": table}, where="training.parameters")

    assert f"training.parameters.{key}" in str(raised.value)


def test_a_table_without_a_sampler_is_told_of_lessons() -> None:
    with pytest.raises(ConfigError, match=r"training\.parameters\.g\.sampler is missing.*key lessons"):
        parse({"g": {"curriculum": [{"value": 1}]}}, where="training.parameters")


@pytest.mark.parametrize("kind", [SimpleEnvManager, SubprocessEnvManager])
def test_a_curriculum_gives_a_manager_its_tasks(kind: Any) -> None:
    until = {"measure": "success", "threshold": 1, "episodes": 5}
    curriculum = Curriculum({"wall": {"lessons": [{"value": 1, "until": until}, {"value": 2}]}}, seed=0)
    with kind(Walls, n_envs=2, infos=True) as manager:
        manager.reset(tasks=curriculum)
        seen = set()
        while len(manager.tasks.results) < 20:
            batch = manager.recv()
            seen.update(batch.obs[:, 0].tolist())
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)

        assert seen == {1, 2}
        assert all(each.task.options == {"wall": 1 + each.task.id[0]} for each in manager.tasks.results)


THREE_LESSONS = {
    "gravity": {"sampler": "uniform", "min": 7, "max": 12},
    "wall": {
        "lessons": [
            {"value": 1, "until": {"measure": "reward", "threshold": 1, "episodes": 30}},
            {"value": 2, "until": {"measure": "success", "threshold": 1, "episodes": 60}},
            {"name": "last", "value": {"sampler": "uniform", "min": 3, "max": 4}},
        ]
    },
}


def tables(steps: int, parameters: Any = THREE_LESSONS, **manager: Any) -> dict[str, Any]:
    return {
        "manager": {"kind": "simple", "env": Walls, "n_envs": 4, "wait": "all", "infos": True, **manager},
        "training": {"steps": steps, "seed": 3, "parameters": parameters, "evaluation_episodes": 0, "metrics": ["csv"]},
        "trainers": {"default": {"kind": "ppo", "rollout": 64, "minibatch": 32, "epochs": 1}},
    }


def test_a_training_passes_its_lessons_while_workers_die_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    log, told = tmp_path / "log", Told()
    log.mkdir()
    crashing = {
        "kind": "subprocess",
        "n_workers": 2,
        "env_kwargs": {"log": str(log), "dies_after": 61},
        "restarts": {"max_restarts": 1000, "backoff_s": 0},
    }

    first = TrainingRun(TrainingPlan.parse(tables(256, **crashing), tmp_path / "run"), told).go()
    assert first.lessons == {"wall": 2}
    plan = TrainingPlan.parse(tables(1024, **crashing), tmp_path / "run", resume=True)
    second = TrainingRun(plan, told).go()

    assert second.lessons == {"wall": 3}
    assert second.stats.restarts > 3
    assert [each.lesson for each in told.began] == [1, 2]
    # Each reset of an environment had the values of a task in the lesson at the time at which the task was drawn.
    expected = []
    for index in range(1000):
        lesson = sum(each.n_tasks <= index for each in told.began)
        curriculum = Curriculum(THREE_LESSONS, seed=3)
        curriculum.restore(CurriculumState(n_tasks=index, lessons={"wall": LessonState(lesson=lesson)}))
        expected.append(curriculum.next_task(0).options)
    seen = [json.loads(line) for file in log.iterdir() for line in file.read_text().splitlines()]
    assert all(options in expected for options in seen)
    begun = {expected.index(options) for options in seen}
    assert len(seen) > len(begun)  # what was lost was played again
    missing = set(range(max(begun))) - begun
    assert len(missing) <= 2 * 4  # laid ready, but not begun when a run ended
    ended = read_episodes(tmp_path / "run" / "episodes.csv")
    assert {(each.total, each.length) for each in ended} == {(1, 4)}  # first observations are no steps
    figures = (tmp_path / "run" / "metrics.csv").read_text()
    assert {f",curriculum/wall/lesson,{number}\n" in figures for number in (1, 2, 3)} == {True}


@pytest.mark.parametrize("every", [None, 64])
def test_evaluations_play_the_last_lesson(every: int | None, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    until = {"measure": "progress", "threshold": 2}  # never
    parameters = {
        "wall": {"lessons": [{"value": 1, "until": until}, {"value": {"sampler": "uniform", "min": 7, "max": 8}}]},
        "size": 3,
    }
    own = tables(128, parameters, env_kwargs={"log": str(log)})
    own["training"] |= {"evaluation_episodes": 6, "evaluate_every": every}
    own["manager"]["env"] = f"{__name__}:Walls"

    result = TrainingRun(TrainingPlan.parse(own, tmp_path / "run"), Told()).go()

    seen = [json.loads(line) for file in log.iterdir() for line in file.read_text().splitlines()]
    evaluated = [options["wall"] for options in seen if options["wall"] != 1]
    assert result.lessons == {"wall": 1}
    assert all(options["size"] == 3 for options in seen)
    assert all(7 <= wall <= 8 for wall in evaluated)
    n_evaluations = 1 if every is None else 2  # the last one is at the end
    assert len(set(evaluated)) == 6
    assert len(evaluated) == 6 * n_evaluations

    for file in log.iterdir():
        file.unlink()
    out = tmp_path / "table.csv"
    assert run_command_line(["evaluate", str(tmp_path / "run"), "--episodes", "5", "--out", str(out)]) == 0
    evaluated = [json.loads(line)["wall"] for file in log.iterdir() for line in file.read_text().splitlines()]
    with open(out, newline="") as table:
        assert sorted(json.loads(row["options"])["wall"] for row in csv.DictReader(table)) == sorted(evaluated)
    assert all(7 <= wall <= 8 for wall in evaluated)
    assert len(set(evaluated)) == 5


def test_a_training_whose_tasks_end_says_so(tmp_path: Path) -> None:
    own = TrainingPlan.parse(tables(64, {}), tmp_path)
    with SimpleEnvManager(Walls, n_envs=2, infos=True) as manager:
        trainer = make_trainer(
            "default", manager.behavior_specs["default"], own.trainers["default"], seed=0, device="cpu"
        )
        controller = TrainerController(manager, {"default": trainer}, tasks=[{"wall": 1}] * 3)

        with pytest.raises(UsageError, match="12 agent steps"):
            controller.train(100)


def test_the_names_of_mlagents_are_translated() -> None:
    with pytest.raises(ConfigError, match=r"parameters\.g\.max_value: here it is parameters\.g\.max "):
        parse({"g": {"sampler": "uniform", "min": 1, "max_value": 2}})
    with pytest.raises(ConfigError, match=r"completion_criteria: here it is .*until"):
        parse({"g": {"lessons": [{"value": 1, "completion_criteria": {}}]}})


@pytest.mark.parametrize("kind", ["simple", "subprocess"])
def test_each_row_of_a_vector_has_the_values_of_its_own_episode(kind: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()

    def vector(context: EnvContext) -> Any:
        rows = [lambda k=k: Walls(EnvContext(k, 0), log=str(log)) for k in range(context.n_envs)]
        return gymnasium.vector.SyncVectorEnv(rows)

    plan = TrainingPlan.parse(tables(512, env=vector, n_workers=1, kind=kind), tmp_path / "run")
    assert TrainingRun(plan, Told()).go().lessons == {"wall": 3}

    seen = [json.loads(line) for file in log.iterdir() for line in file.read_text().splitlines() if line != "null"]
    assert len({options["gravity"] for options in seen}) == len(seen) > 100
    assert {(each.total, each.length) for each in read_episodes(tmp_path / "run" / "episodes.csv")} == {(1, 4)}


def test_an_environment_without_episodes_on_demand_is_refused(tmp_path: Path) -> None:
    own = {**tables(64, {"wall": 1}, env=Duel), "trainers": {"*": {"kind": "ppo"}}}
    plan = TrainingPlan.parse(own, tmp_path)
    with pytest.raises(ConfigError, match=r"training\.parameters"):
        TrainingRun(plan, Told()).go()


@pytest.mark.parametrize(
    ("until", "more", "key"),
    [
        ({"measure": "rewards", "threshold": 1}, {"infos": False}, "until.measure"),
        ({"measure": "reward", "threshold": 1, "behavior": "nobody"}, {}, "until"),
    ],
)
def test_an_end_that_cannot_come_is_refused(until: Any, more: Any, key: str, tmp_path: Path) -> None:
    parameters = {"wall": {"lessons": [{"value": 1, "until": until}, {"value": 2}]}}
    with pytest.raises(ConfigError) as raised:
        TrainingRun(TrainingPlan.parse(tables(64, parameters, **more), tmp_path), Told()).go()

    assert f"training.parameters.wall.lessons[0].{key}" in str(raised.value)


class Strict(gymnasium.Env):  # type: ignore[misc]
    """Cannot be reset without its parameter, and shows it as its observation."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._level, self._n = options["level"], 0
        return np.full(1, self._level, np.float32), {}

    def step(self, action: Any) -> Any:
        self._n += 1
        return np.full(1, self._level, np.float32), 1.0, self._n == 3, False, {}

    def render(self) -> Any:
        return np.full((32, 32, 3), self._level, np.uint8)


def test_what_is_played_after_a_training_has_the_parameters_of_its_last_lessons(tmp_path: Path) -> None:
    until = {"measure": "progress", "threshold": 0.5}
    plan = TrainingPlan.parse(
        {
            "manager": {"kind": "simple", "env": f"{__name__}:Strict", "n_envs": 2, "wait": "all"},
            "training": {
                "steps": 64,
                "evaluation_episodes": 0,
                "parameters": {"level": {"lessons": [{"value": 3, "until": until}, {"value": 7}]}},
            },
            "trainers": {"*": {"kind": "ppo", "rollout": 32, "epochs": 1, "hidden": [8]}},
        },
        tmp_path / "run",
    )
    TrainingRun(plan, Report()).go()
    saved = SavedTraining.open(tmp_path / "run")
    episodes: list[PlayedEpisode] = []
    play(saved, n_episodes=2, mode=FRAMES, on_episode=episodes.append)
    assert [{int(frame[0, 0, 0]) for frame in episode.frames} for episode in episodes] == [{7}, {7}]
    assert set(record(saved, "default", n=20).ravel().tolist()) == {7.0}
