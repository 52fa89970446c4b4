"""``envmanager evaluate``: whole episodes, as many as wanted, by the policies of a training run."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from envmanager import (
    AgentSteps,
    ArraySpec,
    BehaviorSpec,
    Environment,
    RandomPolicy,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    UsageError,
)
from envmanager.cli.app import run_command_line
from envmanager.training.evaluation import Evaluation, evaluate, shares
from envmanager_tests.envs import Duel
from envmanager_tests.training.puzzles import PUZZLE, SMALL_PPO, SPEAKERS, trained

END_S = 300


@pytest.fixture
def run(tmp_path: Path) -> Path:
    trained(tmp_path / "run", "CartPole-v1", {"default": SMALL_PPO})
    return tmp_path / "run"


def told(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    assert run_command_line(["evaluate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_it_says_returns_and_lengths_of_as_many_episodes_as_wanted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = told(capsys, run, "--episodes", 7)["behaviors"]["default"]

    assert figures["episodes"] == len(figures["returns"]) == 7
    assert figures["returns"] == figures["lengths"]  # CartPole gives 1 for each step
    assert figures["return"]["min"] == min(figures["returns"])
    assert figures["return"]["mean"] == pytest.approx(sum(figures["returns"]) / 7)
    assert run_command_line(["evaluate", str(run), "--episodes", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    mean = f"{figures['return']['mean']:.4g}"
    assert re.fullmatch(rf"CartPole-v1: checkpoint {run}/checkpoints/0+201, 3 environments, manager simple", lines[0])
    assert re.fullmatch(rf"return +{re.escape(mean)} ± .*, from .* to .*, 7 episodes", lines[1])
    assert re.fullmatch(rf"length +{re.escape(mean)} ± .*, from .* to .* agent steps", lines[2])


def test_the_same_seed_gives_the_same_episodes_whatever_runs_them(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again, other = (told(capsys, run, "--episodes", 6, "--seed", seed)["behaviors"] for seed in (1, 1, 2))
    processes = told(capsys, run, "--episodes", 6, "--seed", 1, "--manager", "subprocess")

    assert first == again == processes["behaviors"]
    assert first != other


def test_with_fewer_episodes_than_environments_each_plays_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, run, "--episodes", 2)["n_envs"] == 2


def test_the_data_is_written_too(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"

    assert told(capsys, run, "--episodes", 2, "--out", out) == json.loads(out.read_text())


@pytest.mark.usefixtures("speakers")
def test_every_behavior_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, SPEAKERS, {"*": SMALL_PPO})

    behaviors = told(capsys, tmp_path, "--episodes", 4)["behaviors"]
    assert {name: own["lengths"] for name, own in behaviors.items()} == {"speaker": [25] * 4, "listener": [25] * 4}
    assert run_command_line(["evaluate", str(tmp_path), "--episodes", "1"]) == 0
    assert "1 episode of 'listener'" in capsys.readouterr().out


def test_it_plays_in_another_environment_that_looks_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, lambda: gymnasium.make("CartPole-v1"), {"*": SMALL_PPO})

    assert run_command_line(["evaluate", str(tmp_path)]) == 2
    assert "its environment was given as an object or a function" in capsys.readouterr().err
    assert told(capsys, tmp_path, "--episodes", 3, "--env", "CartPole-v1")["env"] == "CartPole-v1"
    assert run_command_line(["evaluate", str(tmp_path), "--env", "Acrobot-v1"]) == 2
    assert "does not fit" in capsys.readouterr().err


def test_observations_and_actions_may_be_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, PUZZLE, {"*": SMALL_PPO})

    assert told(capsys, tmp_path, "--episodes", 4, "--n-envs", 2)["behaviors"]["default"]["lengths"] == [4] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--checkpoint", "best"], "there is no checkpoint 'best'"),
        (["--checkpoint", "9" * 5000], "there is no checkpoint '999"),
        (["--episodes", "3", "--n-envs", "4"], "--n-envs 4 is more than --episodes 3"),
        (["--manager", "sinple"], "did you mean simple"),
        (["--env", "CartPole-v7"], "Gymnasium knows no environment 'CartPole-v7'"),
        (["--out", "/no/such/folder/file.json"], "there is no directory /no/such/folder"),
    ],
    ids=range(6),
)
def test_mistakes_are_named(run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert run_command_line(["evaluate", str(run), *arguments]) == 2
    assert words in capsys.readouterr().err


TALKS = """
import os
import gymnasium

class Talks(gymnasium.Wrapper):
    def reset(self, **given):
        print("new episode", flush=True)
        os.write(1, b"from native code\\n")
        return super().reset(**given)

def make(): return Talks(gymnasium.make("CartPole-v1"))
"""


@pytest.mark.parametrize("kind", ["simple", "subprocess"])
def test_what_environments_print_is_not_in_the_json_but_kept(
    run: Path, kind: str, write_module: Callable[[str, str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    write_module("talks", TALKS)
    arguments = [run, "--episodes", 2, "--env", "talks:make", "--manager", kind]
    assert run_command_line(["evaluate", *map(str, arguments), "--json"]) == 0
    out, err = capfd.readouterr()
    assert len(json.loads(out)["results"]) == 2

    log = run / "logs" / "evaluate" / "worker-0-0.log"
    printed = log.read_text() if kind == "subprocess" else err
    assert printed.count("new episode\n") == printed.count("from native code\n") >= 1

    assert run_command_line(["evaluate", *map(str, arguments)]) == 0
    assert f"output      {log.parent}.2\n" in capfd.readouterr().out or kind == "simple"


def test_nothing_in_the_folder_changes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    told(capsys, run, "--episodes", 2)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_ctrl_c_ends_it(run: Path) -> None:
    command = "import sys; from envmanager.cli import main; sys.exit(main())"
    arguments = ["evaluate", str(run), "--episodes", "1000000"]
    with subprocess.Popen([sys.executable, "-c", command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "CartPole-v1: checkpoint" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 130


# In Python.


def test_each_environment_plays_its_share() -> None:
    assert shares(7, 3) == [3, 2, 2]
    assert shares(2, 2) == [1, 1]
    with SimpleEnvManager(Duel, n_envs=3) as manager:
        policies = {behavior: RandomPolicy(spec) for behavior, spec in manager.behavior_specs.items()}
        evaluation = evaluate(manager, policies, episodes_per_env=shares(7, 3))
    assert Counter(evaluation.lengths_of["hero"]) == {5: 3, 6: 2, 7: 2}
    assert Counter(evaluation.lengths_of["target"]) == {5: 6, 6: 4, 7: 4}
    assert [len(own) for own in evaluation.returns_of.values()] == [7, 14]
    assert evaluation.n_episodes == 7


@pytest.mark.parametrize("episodes", [0, [0, 0], [1, -1], [1, 2, 3]])
def test_episodes_that_cannot_be_dealt_are_refused(episodes: Any) -> None:
    with SimpleEnvManager(Duel, n_envs=2) as manager, pytest.raises(UsageError, match="must be a number, or 2 of them"):
        evaluate(manager, {}, episodes_per_env=episodes)


def test_environments_without_a_share_are_waited_for_by_nobody() -> None:
    with SimpleEnvManager(Duel, n_envs=3) as manager:
        policies = {behavior: RandomPolicy(spec) for behavior, spec in manager.behavior_specs.items()}
        evaluation = evaluate(manager, policies, episodes_per_env=shares(2, 3))
    assert evaluation.lengths_of["hero"] == [5, 6]
    assert evaluation.n_episodes == 2


def mortal(context: Any) -> Any:
    return Fragile(context, for_ever=True) if context.env_id == 1 else gymnasium.make("CartPole-v1")


@pytest.mark.timeout(60)
def test_nobody_waits_for_the_episodes_of_a_worker_that_is_dropped() -> None:
    restarts = RestartPolicy(max_restarts=0, then="drop")
    with SubprocessEnvManager(mortal, n_envs=2, seed=3, restarts=restarts) as manager:
        policies = {"default": RandomPolicy(manager.behavior_specs["default"])}
        evaluation = evaluate(manager, policies, episodes_per_env=2)
    assert (evaluation.n_episodes, len(evaluation.returns), evaluation.lost) == (2, 2, 2)


class Fragile(gymnasium.Wrapper):  # type: ignore[misc]
    """Ends its process in its third step, once or in every generation."""

    def __init__(self, context: Any, *, for_ever: bool = False) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._n_left = 3 if for_ever or context.generation == 0 else -1

    def step(self, action: Any) -> Any:
        self._n_left -= 1
        if self._n_left == 0:
            os._exit(3)
        return super().step(action)


def fragile(context: Any) -> Any:
    return Fragile(context)


def test_an_episode_that_was_lost_counts_neither_as_return_nor_as_length() -> None:
    with SubprocessEnvManager(fragile, n_envs=1, seed=3) as manager:
        policies = {"default": RandomPolicy(manager.behavior_specs["default"])}
        evaluation = evaluate(manager, policies, episodes_per_env=2)
        assert manager.stats().restarts == 1
    assert evaluation.lengths_of["default"] == evaluation.returns_of["default"]
    assert (evaluation.n_episodes, evaluation.lost) == (2, 1)


def test_episodes_lost_in_an_environment_that_has_all_of_its_own_are_not_counted() -> None:
    restarts = RestartPolicy(max_restarts=1000, backoff_s=0)
    with SubprocessEnvManager(brittle, n_envs=2, seed=3, wait="all", restarts=restarts) as manager:
        policies = {"default": RandomPolicy(manager.behavior_specs["default"])}
        evaluation = evaluate(manager, policies, episodes_per_env=[1, 0])
        assert manager.stats().workers[1].restarts > 0
    assert (evaluation.n_episodes, evaluation.lost) == (1, 0)


def brittle(context: Any) -> Any:
    return Fragile(context, for_ever=True) if context.env_id == 1 else gymnasium.make("CartPole-v1")


def test_episodes_that_were_lost_are_played_again(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = ["--episodes", 4, "--manager", "subprocess", "--n-envs", 2]

    with_kills = told(capsys, run, *options, "--env", f"{__name__}:fragile")
    restarts = [record.getMessage() for record in caplog.records if "restart 1" in record.getMessage()]
    assert len(restarts) == 2
    assert all(line.startswith("evaluation: worker ") for line in restarts)
    assert (with_kills["lost"], with_kills["complete"]) == (0, True)
    assert with_kills["behaviors"] == told(capsys, run, *options)["behaviors"]


def test_it_takes_plain_as_other_commands_do(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["evaluate", str(run), "--episodes", "1", "--plain"]) == 0
    assert "1 episode" in capsys.readouterr().out


# Agents that come and go.


class Scripted(Environment):
    """Agents by a list of steps, each ``{agent: whether its episode ends}``, over and over again."""

    behavior_specs: ClassVar[Any] = {
        "default": BehaviorSpec(ArraySpec((1,), np.float32, -1, 1), ArraySpec((), np.int64, 0, 1))
    }
    max_agents: ClassVar[Any] = {"default": 9}

    def __init__(self, script: Iterable[dict[int, bool]]) -> None:
        self._script = iter(script)

    def reset(self, *, seeds: Any, options: Any) -> Any:
        agents = np.array([*next(self._script)])
        return {"default": AgentSteps.first(agent_id=agents, obs=np.zeros((len(agents), 1), np.float32))}

    def step(self, actions: Any) -> Any:
        ends = next(self._script)
        agents, ended = np.array([*ends], np.int64), np.array([*ends.values()], np.bool_)
        n, none = len(agents), np.zeros(len(agents), np.bool_)
        final = np.zeros((int(ended.sum()), 1), np.float32) if ended.any() else None
        return {
            "default": AgentSteps.stepped(
                agent_id=agents,
                obs=np.zeros((n, 1), np.float32),
                reward=np.ones(n, np.float32),
                terminated=ended,
                truncated=none,
                final_obs=final,
                acting=~(ended & np.array([agent >= GOES for agent in ends], np.bool_)),
            )
        }

    def close(self) -> None:
        pass


GOES = 100
"""Agents with this number and above are gone after their episode; others begin another one in the same step."""


def lengths_in(script: Iterable[dict[int, bool]], n_episodes: int) -> list[int]:
    return evaluated(script, n_episodes).lengths


def evaluated(script: Iterable[dict[int, bool]], n_episodes: int) -> Evaluation:
    with SimpleEnvManager(lambda: Scripted(script)) as manager:
        policies = {"default": RandomPolicy(manager.behavior_specs["default"])}
        evaluation = evaluate(manager, policies, episodes_per_env=n_episodes)
    assert (evaluation.n_episodes, evaluation.lost) == (n_episodes, 0)
    return evaluation


def with_new_ids(lengths: Iterable[int]) -> Iterator[dict[int, bool]]:
    """One agent after the other, each for one episode."""
    yield {GOES: False}
    for agent, length in enumerate(lengths, GOES):
        for _ in range(length - 1):
            yield {agent: False}
        yield {agent: True, agent + 1: False}


def test_episodes_of_agents_that_get_new_ids_are_counted_together() -> None:
    assert lengths_in(with_new_ids(itertools.count(3)), 4) == [3, 4, 5, 6]


def test_a_new_agent_may_come_steps_after_the_one_before_has_gone() -> None:
    steps = [{GOES: False}, {GOES: True}, {}, {}, {GOES + 1: False}, {GOES + 1: False}, {GOES + 1: True}, {}]
    assert lengths_in(steps, 2) == [1, 2]


def test_short_episodes_of_agents_with_new_ids_count_no_more_than_long_ones() -> None:
    """One seat has episodes of 2 steps, the other of 7."""

    def script() -> Iterator[dict[int, bool]]:
        short, long = GOES, GOES + 1
        yield {short: False, long: False}
        for now in itertools.count(1):
            step = {short: now % 2 == 0, long: now % 7 == 0}
            for agent, ends in list(step.items()):
                if ends:
                    new = max(*step, short, long) + 1
                    step[new] = False
                    short, long = (new, long) if agent == short else (short, new)
            yield step

    assert Counter(lengths_in(script(), 3)) == {2: 3, 7: 3}


def test_an_agent_that_was_there_once_is_waited_for_no_more() -> None:
    def script() -> Iterator[dict[int, bool]]:
        yield {0: False, GOES: False}
        yield {0: False, GOES: False}
        yield {0: True, GOES: True}
        for now in itertools.count(1):
            yield {0: now % 5 == 0}

    assert Counter(lengths_in(script(), 3)) == {2: 2, 5: 2}


def test_an_agent_that_vanishes_in_the_middle_of_an_episode_is_waited_for_no_more() -> None:
    def script() -> Iterator[dict[int, bool]]:
        yield {0: False, 1: False}
        yield {0: False, 1: False}
        for now in itertools.count(1):
            yield {0: now % 5 == 0}

    assert lengths_in(script(), 2) == [6, 5]


def test_an_agent_without_rows_between_its_decisions_is_waited_for() -> None:
    """As in Unity, where an agent asks for decisions now and then."""

    def script() -> Iterator[dict[int, bool]]:
        yield {0: False, 1: False}
        for now in itertools.count(1):
            yield {0: now % 12 == 0} | ({1: now % 16 == 0} if now % 4 == 0 else {})

    assert Counter(evaluated(script(), 2).returns) == {12: 2, 4: 2}


def test_an_agent_that_joins_late_has_its_episodes_too() -> None:
    def script() -> Iterator[dict[int, bool]]:
        yield {0: False}
        for now in itertools.count(1):
            yield {0: now % 3 == 0} | ({1: now % 3 == 0} if now > 3 else {})

    assert Counter(lengths_in(script(), 2)) == {3: 3, 2: 1}


def dies_once_with_new_ids(context: Any) -> Environment:
    def script() -> Iterator[dict[int, bool]]:
        first = GOES + 50 * context.generation
        yield {first: False, first + 1: False}
        yield {first: False, first + 1: False}
        if context.generation == 0:
            os._exit(3)
        for agent in range(first, first + 1000, 2):
            yield {agent: True, agent + 1: True, agent + 2: False, agent + 3: False}
            yield {agent + 2: False, agent + 3: False}

    return Scripted(script())


def test_agents_of_a_replacement_take_the_seats_of_those_that_were_lost() -> None:
    with SubprocessEnvManager(dies_once_with_new_ids, n_envs=2, n_workers=1) as manager:
        policies = {"default": RandomPolicy(manager.behavior_specs["default"])}
        evaluation = evaluate(manager, policies, episodes_per_env=3)
    assert evaluation.lengths == [2] * 3 * 2 * 2
    assert (evaluation.n_episodes, evaluation.lost) == (6, 2)


def test_a_crowd_in_which_agents_come_and_go_all_the_time_has_an_end() -> None:
    """An agent comes in every step and lives for five."""

    def script() -> Iterator[dict[int, bool]]:
        for now in itertools.count():
            yield {agent: agent == now - 5 + GOES for agent in range(GOES + max(0, now - 5), GOES + now + 1)}

    lengths = lengths_in(script(), 3)
    assert set(lengths) == {5}
    assert 3 <= len(lengths) <= 3 * 6
