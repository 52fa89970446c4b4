"""Places in recordings: tasks that lead there, and environments that stand there again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    AsyncioEnvManager,
    EnvManager,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Task,
    UsageError,
    Wait,
)
from envmanager.recording import episodes, position
from envmanager.recording.data import facts
from envmanager_tests.process.test_actions_of_tasks import Leavers, Walk, some_actions
from envmanager_tests.process.test_kept_episodes import Make as MakeChains

Make = Callable[..., EnvManager]


def in_process(env: Any, **options: Any) -> EnvManager:
    return SimpleEnvManager(env, 4, seed=1, **options)


def two_in_each(env: Any, **options: Any) -> EnvManager:
    return SubprocessEnvManager(env, 4, n_workers=2, seed=1, restarts=RestartPolicy(backoff_s=0), **options)


def in_threads(env: Any, **options: Any) -> EnvManager:
    return AsyncioEnvManager(env, 4, seed=1, **options)


KINDS = pytest.mark.parametrize("make", [in_process, two_in_each, in_threads])
TASKS = [Task(seed=k, options={"number": k}, actions=some_actions(k % 4)) for k in range(8)]
FAILS = Task(seed=99, actions=some_actions(30))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run.emrec")


def walked(manager: EnvManager, *, at: int = -1, then: Callable[[], Any] = lambda: None) -> None:
    for number in range(200):
        if not manager.tasks.running and manager.tasks.done:
            return
        batch = manager.recv(Wait.any())
        if number == at:
            then()
        manager.send(some_actions(len(batch), number), batch.env_ids)


def places(path: str, **options: Any) -> dict[tuple[int, int], Task]:
    """Return the position of each environment at each step of its worker at which it plays."""
    n_steps = sum(fact.what == "step" for fact in facts(path))
    found = {}
    for env_id in range(4):
        for step in range(n_steps):
            try:
                found[env_id, step] = position(path, env_id, step, **options)
            except UsageError as error:
                if "plays no episode" not in str(error) and "which took" not in str(error):
                    raise
    return found


def check_places(path: str, found: dict[tuple[int, int], Task]) -> None:
    """Begin at all places. The observation there must be that of the recorded episode, of which none is missing."""
    recorded: dict[tuple[Any, int], Any] = {}
    for episode in episodes(path):
        n_before = 0 if episode.begun_with is None else len(episode.begun_with["default"]["turn"])
        recorded.update({(episode.seed, n_before + step): episode.obs["at"][step] for step in range(episode.length)})
    tasks = [*found.values()]
    with SimpleEnvManager(Walk, 1) as manager:
        manager.reset(tasks=tasks)
        while not manager.tasks.done:
            batch = manager.recv(Wait.all())
            for row in np.flatnonzero(batch.first):
                task = tasks[batch.task[row]]
                n = 0 if task.actions is None else len(task.actions["turn"])
                assert (batch.obs["at"][row] == recorded.pop((task.seed, n))).all()
                assert task.options == {"number": task.seed}
            manager.send(some_actions(len(batch)), batch.env_ids)
    assert not recorded


@KINDS
@pytest.mark.parametrize("prefetch", [False, None])
def test_each_step_of_each_episode_has_a_task_that_leads_there(make: Make, prefetch: bool | None, path: str) -> None:
    with make(Walk, record=path) as manager:
        tasks = [*TASKS[:3], FAILS, *TASKS[3:]]
        manager.reset(tasks=tasks if prefetch is False else iter(tasks), prefetch=prefetch)
        walked(manager)
    check_places(path, places(path))


def test_places_are_found_in_episodes_that_were_cut_or_lost_and_those_that_followed(path: str) -> None:
    def kill() -> None:
        os.kill(manager.call(pid_of, env_ids=[0])[0], signal.SIGKILL)

    with two_in_each(Walk, record=path) as manager:
        manager.reset(tasks=TASKS)
        walked(manager, at=9, then=kill)
        assert manager.stats().restarts
    found = places(path, trust=True)  # it has a call of a function
    assert len({task.seed for task in found.values()}) == 8
    with SimpleEnvManager(Walk, 1) as again:
        again.reset(tasks=[*found.values()])
        assert not again.tasks.n_lost


@pytest.mark.parametrize("tasks", [None, TASKS[:6]])
def test_each_step_of_episodes_that_were_kept_through_deaths_has_a_task_that_leads_there(tasks: Any, path: str) -> None:
    restarts = RestartPolicy(max_restarts=100, backoff_s=0, keep_episodes=True)
    with SubprocessEnvManager(Walk, 4, n_workers=2, seed=1, record=path, restarts=restarts) as manager:
        manager.reset(tasks=tasks)
        for number in range(18):
            batch = manager.recv(Wait.all())
            manager.send(some_actions(len(batch), number), batch.env_ids)
            if number % 5 == 3:
                os.kill(manager.env_workers[number % 2].process.pid, signal.SIGKILL)
        assert manager.stats().restarts
    assert not any(episode.error for episode in episodes(path))
    found = places(path)
    recorded = {tuple(obs) for episode in episodes(path) for obs in episode.obs["at"][: episode.length].tolist()}
    with SimpleEnvManager(Walk, 1) as again:
        again.reset(tasks=[*found.values()])
        led_to = set()
        while not again.tasks.done:
            batch = again.recv(Wait.all())
            led_to.update(map(tuple, batch.obs["at"][batch.first].tolist()))
            again.send(some_actions(len(batch)), batch.env_ids)
    assert recorded <= led_to
    assert len(led_to - recorded) <= 4  # places of actions that were sent last, of which nothing came


def pid_of(env: Any) -> int:
    return os.getpid()


def test_an_episode_that_began_by_itself_has_a_place_in_the_first_episode_alone(path: str) -> None:
    with in_process(Walk, record=path) as manager:
        manager.reset()
        seen = []
        for number in range(30):
            batch = manager.recv(Wait.all())
            seen.append(batch.obs["at"][1].copy())
            manager.send(some_actions(4, number), batch.env_ids)
    with SimpleEnvManager(Walk, 1, episodes="on_demand") as again:
        again.reset()
        again.recv()
        for step in (0, 7, 11):
            again.begin([0], [position(path, 1, step)])
            assert (again.recv().obs["at"][0] == seen[step]).all()
    with pytest.raises(UsageError, match="by itself, after others"):
        position(path, 1, 13)


class Threes:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.full(len(steps), 3))


def test_agents_of_several_behaviors_have_a_place_together(path: str) -> None:
    with two_in_each(Leavers, record=path) as manager:
        manager.set_policy("walker", Threes())
        manager.set_policy("flyer", Threes())
        manager.reset(tasks=[Task(seed=k) for k in range(4)])
        while not manager.tasks.done:
            manager.step(Wait.all())
    task = position(path, 2, 2)
    assert task == Task(seed=2, actions={"walker": np.array([3, 3, 3]), "flyer": np.array([3, 3])})


@pytest.mark.parametrize(
    ("env_id", "step", "text"),
    [(9, 0, "no environment 9"), (0, 5000, "no step 5000 of worker 0"), (3, 0, "env 3 plays no episode")],
)
def test_a_place_that_does_not_exist_is_a_usage_error(env_id: int, step: int, text: str, path: str) -> None:
    with in_process(Walk, record=path) as manager:
        manager.reset(tasks=TASKS[:2])
        walked(manager)
    with pytest.raises(UsageError, match=text):
        position(path, env_id, step)


def test_a_manager_without_a_seed_has_no_places(path: str) -> None:
    with SimpleEnvManager(Walk, 1, record=path) as manager:
        manager.reset()
        manager.send(some_actions(1), manager.recv().env_ids)
    with pytest.raises(UsageError, match="the manager had none"):
        position(path, 0, 0)


class Level:
    """An object of a class in the options."""


def test_objects_of_classes_in_the_options_need_trust(path: str) -> None:
    with in_process(Walk, record=path) as manager:
        manager.reset(tasks=[Task(seed=1, options={"level": Level()})])
        walked(manager)
    with pytest.raises(UsageError, match="trust"):
        position(path, 0, 0)
    assert isinstance(position(path, 0, 0, trust=True).options["level"], Level)


def test_without_observations_there_are_places_all_the_same(path: str) -> None:
    with in_process(Walk, record=path, record_observations=False) as manager:
        manager.reset(tasks=TASKS)
        walked(manager)
    assert len(places(path)) == sum(episode.length for episode in episodes(path))


SCRIPT = """
import sys, time
import gymnasium, numpy as np
from envmanager import SubprocessEnvManager, Task

class Sum(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict({"sum": gymnasium.spaces.Box(-1e12, 1e12, (2,), np.float64)})
    action_space = gymnasium.spaces.Discrete(100)
    metadata = {"render_modes": ["human"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sum, self.n_steps = 0.0, 0
        return self.obs(), {}

    def step(self, action):
        self.sum, self.n_steps = self.sum + action + self.np_random.random(), self.n_steps + 1
        return self.obs(), 1.0, self.n_steps == 9, False, {}

    def obs(self):
        if "clock" in sys.argv and self.n_steps == 5:
            self.sum += time.time()
        return {"sum": np.array([self.n_steps, self.sum])}

    def render(self):
        print("rendered", self.n_steps)

if __name__ == "__main__":
    with SubprocessEnvManager(Sum, 3, n_workers=1, seed=4, record=sys.argv[1]) as manager:
        manager.reset(tasks=[Task(actions=[1] * (k % 3)) for k in range(9)] if "tasks" in sys.argv else None)
        for number in range(25):
            batch = manager.recv("all")
            manager.send(np.full(len(batch), number), batch.env_ids)
"""


def replayed(path: str, *flags: str, given: str = "") -> tuple[int, str, str]:
    command = [Path(sys.executable).with_name("envmanager"), "replay", path, "--live", *flags]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, input=given)
    return shown.returncode, shown.stdout, shown.stderr


@pytest.mark.parametrize(("how", "env", "step"), [("tasks", 1, 6), ("", 2, 14)])
def test_an_environment_stands_there_again_and_goes_on_as_recorded(how: str, env: int, step: int, path: str) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, path, how], check=True)
    where = ["--env", str(env), "--step", str(step), "--trust"]
    code, out, err = replayed(path, *where, "--render", "--debugger", given="p env.n_steps\nc\n")
    assert (code, err) == (0, ""), out
    assert "\nequal\n" in out
    assert "as recorded: all equal" in out
    assert "rendered" in out
    assert "(Pdb) " in out


@pytest.mark.parametrize(
    ("flags", "text"),
    [(["--step", "3"], "--trust"), (["--trust"], "--step"), (["--step", "900", "--trust"], "no step")],
)
def test_live_says_what_is_missing(flags: list[str], text: str, path: str) -> None:
    with in_process(Walk, record=path) as manager:
        manager.reset(tasks=TASKS[:2])
        walked(manager)
    code, _, err = replayed(path, *flags)
    assert code == 2
    assert text in err


def test_an_environment_that_is_elsewhere_is_told_with_the_part_that_differs(path: str) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT.replace('"clock" in sys.argv', "True"), path], check=True)
    code, out, _ = replayed(path, "--step", "2", "--trust")
    assert (code, "\nequal\n" in out, "4 steps later: obs['sum'][0, 1] was" in out) == (1, True, False), out
    assert "3 steps later: obs['sum'][0, 1] was" in out
    code, out, _ = replayed(path, "--step", "6", "--trust")
    assert code == 1
    assert "different: obs['sum'][0, 1] was" in out


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("tasks", [None, [Task(seed=number) for number in range(12)]], ids=["automatic", "tasks"])
def test_what_was_called_amid_an_episode_is_part_of_its_places(path: str, tasks: Any, keeps: bool) -> None:
    options: Any = {"restarts": RestartPolicy(keep_episodes=True)} if keeps else {}
    seen = {}
    with SubprocessEnvManager(MakeChains(), 3, n_workers=1, seed=1, record=path, wait="all", **options) as manager:
        manager.reset(tasks=tasks)
        for step in range(30):
            batch = manager.recv()
            seen.update({(int(env_id), step): obs for env_id, obs in zip(batch.env_ids, batch.obs, strict=True)})
            if step in (0, 3, 4, 11, 20):
                manager.set_attr("level", float(step), [1, 2])
            acting = batch.env_ids if tasks is None else batch.env_ids[batch.task >= 0]
            manager.send((np.arange(len(acting)) + step) % 3, acting)
    n_equal = 0
    with SimpleEnvManager(MakeChains(), 3, episodes="on_demand") as other:
        other.reset()
        other.recv("all")
        for (env_id, step), obs in sorted(seen.items()):
            try:
                here = position(path, env_id, step)
            except UsageError:  # it rests, or has no seed
                continue
            other.begin([env_id], [here])
            assert other.recv().obs[0].tolist() == obs.tolist()
            n_equal += 1
    assert n_equal > (20 if tasks is None and not keeps else 70)
    code, out, err = replayed(path, "--env", "1", "--step", "13", "--trust")
    assert (code, err) == (0, ""), out
