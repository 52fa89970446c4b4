"""The command line in this process: options, config files, exit codes and what is printed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import typer

import envmanager
from envmanager import cli
from envmanager.cli import app as app_module
from envmanager.cli.app import app, run_command_line
from envmanager.cli.plan import Plan, RunOptions
from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import ActionInfo, AgentSteps
from envmanager.environment import EnvContext, Environment
from envmanager.errors import UsageError
from envmanager.options import RestartPolicy
from envmanager.registry import ManagerOptions

HERE = __name__
CART_POLE = ["--env", "CartPole-v1", "--manager", "simple"]


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


class Faulty(gymnasium.Env):
    """Raises in its third step."""

    faulty_step = 3
    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.n_steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.n_steps += 1
        if self.n_steps == self.faulty_step:
            raise ValueError("the robot fell over")
        return np.zeros(1, np.float32), 1.0, False, False, {}


class FaultyAt(Faulty):
    """Raises in the step that it is told."""

    def __init__(self, step):
        self.faulty_step = step


class OfTexts(Faulty):
    action_space = gymnasium.spaces.Text(5)


class Growing(Environment):
    """A second behavior appears in the third step, and wants actions from then on."""

    def __init__(self):
        self.n_behaviors = 1
        self.n_steps = 0

    @property
    def behavior_specs(self):
        spec = BehaviorSpec(ArraySpec((1,)), ArraySpec((), np.int64, 0, 1))
        return {f"behavior {k}": spec for k in range(self.n_behaviors)}

    def reset(self, *, seeds, options):
        return self.steps()

    def step(self, actions):
        assert sorted(actions) == sorted(self.behavior_specs)
        self.n_steps += 1
        self.n_behaviors = 2 if self.n_steps >= 3 else 1
        return self.steps()

    def steps(self):
        flag, obs = np.zeros(1, bool), np.zeros((1, 1), np.float32)
        ids = enumerate(self.behavior_specs)
        return {name: AgentSteps(np.array([k]), obs, np.ones(1, np.float32), flag, flag) for k, name in ids}

    def close(self):
        pass


class Healing(Faulty):
    """Raises in its third step, until its worker has been replaced."""

    def __init__(self, context: EnvContext):
        self.heals = context.generation > 0

    def step(self, action):
        self.n_steps += 1
        if self.n_steps == 3 and not self.heals:
            raise ValueError("the robot fell over")
        return np.zeros(1, np.float32), 1.0, self.n_steps == 5, False, {}


class AlwaysLeft:
    def __init__(self, behavior, spec):
        assert behavior == "default"
        self.dtype = spec.action.dtype

    def get_action(self, steps):
        return ActionInfo(np.zeros(len(steps), self.dtype))


def no_policy(behavior, spec):
    return 3


NOT_CALLABLE = 3


def run(capsys, *arguments):
    exit_code = run_command_line(["run", *map(str, arguments)])
    captured = capsys.readouterr()
    return exit_code, captured.out, captured.err


def test_a_run_takes_all_its_steps_and_says_how_it_went(capsys, tmp_path):
    exit_code, out, err = run(capsys, *CART_POLE, "--n-envs", 4, "--steps", 400, "--seed", 3)

    assert (exit_code, err) == (0, "")
    assert "CartPole-v1: 4 environments, manager simple, seed 3" in out
    assert "400 of 400" in out
    assert "all steps taken" in out


def test_the_summary_as_json_has_every_environments_returns(capsys, tmp_path):
    exit_code, _, _ = run(capsys, *CART_POLE, "--n-envs", 3, "--steps", 300, "--seed", 3, "--out", tmp_path / "a.json")

    summary = json.loads((tmp_path / "a.json").read_text())
    returns = summary["episode_returns"]
    assert exit_code == 0
    assert (summary["ended"], summary["env_steps"], summary["n_envs"], summary["seed"]) == ("done", 300, 3, 3)
    assert sorted(returns) == ["0", "1", "2"]
    assert summary["episodes"] == sum(map(len, returns.values())) > 0
    assert summary["return"]["max"] == max(max(values) for values in returns.values())
    assert [worker["env_ids"] for worker in summary["workers"]] == [[0, 1, 2]]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


class Echoes(Faulty):
    """Prints the options of its resets, and ends each episode in its second step."""

    def reset(self, *, seed=None, options=None):
        print("began with", options)
        return super().reset(seed=seed)

    def step(self, action):
        self.n_steps += 1
        return np.zeros(1, np.float32), 1.0, self.n_steps == 2, False, {}


def test_episodes_begin_with_the_options_of_the_flag_or_the_config(capsys, tmp_path):
    arguments = ["--env", f"{HERE}:Echoes", "--manager", "simple", "--steps", 4]
    (tmp_path / "a.yaml").write_text("run: {options: {level: 2}}\n")

    out = run(capsys, *arguments, "--options", "{level: 3, goal: [1, 2]}")[1]
    assert out.count("began with {'level': 3, 'goal': [1, 2]}") == 3
    assert "began with {'level': 2}" in run(capsys, tmp_path / "a.yaml", *arguments)[1]
    exit_code, _, err = run(capsys, *arguments, "--options", "level=3")
    assert (exit_code, err) == (2, "Error: --options takes a mapping such as '{level: 3}', not str 'level=3'.\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "a.yaml", "--transport", "pipe"], "no --transport, but --set manager.transport=VALUE"),
        (["train", "a.yaml", "--keep", "9"], "no --keep, but --set training.keep=VALUE"),
        (["run", "--keep", "9"], "No such option: --keep"),
        (["evaluate", "a", "--transport", "pipe"], "No such option: --transport"),
    ],
)
def test_an_option_that_only_a_config_has_is_named_with_its_path(capsys, arguments, told):
    assert run_command_line(arguments) == 2
    assert told in capsys.readouterr().err


def test_a_trace_is_written_and_the_verdict_is_said(capsys, tmp_path):
    exit_code, out, _ = run(
        capsys, *CART_POLE, "--steps", 1000, "--trace", tmp_path / "t.json", "--out", tmp_path / "a.json"
    )

    drawn = [event["name"] for event in json.loads((tmp_path / "t.json").read_text()) if event["tid"] == 1]
    verdict = json.loads((tmp_path / "a.json").read_text())["verdict"]
    assert exit_code == 0
    assert drawn.count("step") == 1000
    assert verdict
    assert f"verdict     {verdict}" in out
    assert str(tmp_path / "t.json") in out


def test_the_same_seed_gives_the_same_episodes(capsys, tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        run(capsys, *CART_POLE, "--steps", 300, "--seed", seed, "--out", tmp_path / f"{name}.json")

    a, b, c = (json.loads((tmp_path / f"{name}.json").read_text())["episode_returns"] for name in "abc")
    assert a == b != c


def test_a_summary_that_cannot_be_written_is_one_line_and_exit_code_3(capsys, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    exit_code, out, err = run(capsys, *CART_POLE, "--steps", 10, "--out", tmp_path / "a.json")

    assert exit_code == 3
    assert "all steps taken" in out
    assert " ".join(err.split()) == f"Error: {tmp_path / 'a.json'} cannot be written: No space left on device."
    assert list(tmp_path.iterdir()) == []


def test_output_that_cannot_be_printed_is_one_line_and_exit_code_3(capsys, monkeypatch):
    with contextlib.suppress(OSError), open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        exit_code, _, err = run(capsys, *CART_POLE, "--steps", 10, "--plain")
    assert exit_code == 3
    assert " ".join(err.split()) == "Error: what the command prints cannot be written: No space left on device."


def test_numbers_that_json_cannot_say_are_null(capsys, tmp_path):
    run(capsys, *CART_POLE, "--steps", 1, "--out", tmp_path / "a.json")

    text = (tmp_path / "a.json").read_text()
    assert json.loads(text)["return"] == {"mean": None, "min": None, "max": None}
    assert "NaN" not in text


def test_flags_come_before_the_config_file(capsys, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text('[manager]\nkind = "simple"\nenv = "CartPole-v1"\nn_envs = 2\n[run]\nsteps = 100\nseed = 5\n')

    exit_code, out, _ = run(capsys, config, "--n-envs", 4)

    assert exit_code == 0
    assert "4 environments, manager simple, seed 5" in out
    assert "100 of 100" in out


def test_a_policy_of_ones_own_acts(capsys, tmp_path):
    exit_code, _, _ = run(
        capsys, *CART_POLE, "--steps", 200, "--policy", f"{HERE}:AlwaysLeft", "--out", tmp_path / "a.json"
    )

    returns = json.loads((tmp_path / "a.json").read_text())["episode_returns"]["0"]
    assert exit_code == 0
    assert max(returns) <= 11  # pushed only to the left, the pole falls at once


def test_behaviors_that_appear_later_get_a_policy_too(capsys):
    exit_code, out, err = run(capsys, "--env", f"{HERE}:Growing", "--manager", "simple", "--steps", 10)

    assert (exit_code, err) == (0, "")
    assert "10 of 10" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--manager", "simple"], "There is no environment: pass --env"),
        ([*CART_POLE, "--n-envs", 0], 'manager.n_envs must be a whole number of at least 1, or "auto", not 0'),
        ([*CART_POLE, "--steps", 0], "run.steps must be a whole number of at least 1, not 0"),
        ([*CART_POLE, "--wait", "soon"], 'manager.wait should be "any", "all", a number of workers'),
        (["--env", "CartPole-v1", "--manager", "simpel"], "did you mean simple?"),
        (["--env", "Nothing-v0", "--manager", "simple"], "Gymnasium knows no environment 'Nothing-v0'"),
        ([*CART_POLE, "--policy", "nothing"], "policy 'nothing' names no callable: it should be module:name"),
        ([*CART_POLE, "--policy", "nothing:there"], "policy 'nothing:there' cannot be found"),
        ([*CART_POLE, "--policy", f"{HERE}:NOT_CALLABLE"], "is int 3, not a callable with a name and a spec"),
        ([*CART_POLE, "--policy", f"{HERE}:no_policy"], "made int 3 for 'default', which has no get_action"),
        ([*CART_POLE, "--workers", "9" * 5000], "manager.n_workers"),
        ([*CART_POLE, "--local-envs", "9" * 5000], "manager.local_envs"),
        (["nowhere.toml"], "There is no config file nowhere.toml."),
        (["--env", f"{HERE}:OfTexts", "--manager", "simple"], "RandomPolicy cannot draw actions"),
    ],
)
def test_a_mistake_in_the_call_is_one_message_and_exit_code_2(capsys, arguments, message):
    exit_code, _, err = run(capsys, *arguments)

    assert exit_code == 2
    assert message in err
    assert err.startswith("Error: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["run", "--n-envs", "zero"], ["n_envs", "auto", "'zero'"]),
        (["run", "--n-envs=zero"], ["n_envs", "auto", "'zero'"]),
        (["evaluate", "runs/a", "--episodes", "0"], ["--episodes", "1", "'0'"]),
        (["run", "--n-evns", "3"], ["--n-evns", "--n-envs", "envmanager run --help"]),
        (["run", "--env"], ["--env"]),
        (["train"], ["CONFIG", "envmanager train --help"]),
        (["no-such-command"], ["no-such-command", "envmanager --help"]),
        (["run", "a.toml", "b.toml"], ["b.toml"]),
        (["run", "CartPole-v1"], ["--env CartPole-v1"]),
    ],
)
def test_words_that_make_no_call_are_one_line_and_exit_code_2(capsys, monkeypatch, words, parts):
    monkeypatch.setattr(sys, "argv", ["envmanager"])  # which is its name in what it prints
    exit_code = run_command_line(words)

    (line,) = capsys.readouterr().err.splitlines()
    assert exit_code == 2
    assert line.startswith("Error: ")
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("words", [[], ["godot"]])
def test_commands_are_listed_when_none_is_named(capsys, words):
    assert run_command_line(words) == 2

    captured = capsys.readouterr()
    assert "Commands" in captured.out + captured.err
    assert "Error" not in captured.err


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("missing/a.json", "there is no directory"),
        (".", "is a directory; name a file"),
        ("a.csv", "let its name end in .json"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(capsys, tmp_path, out, message):
    exit_code, out, err = run(capsys, *CART_POLE, "--out", tmp_path / out)

    assert (exit_code, out) == (2, "")
    assert message in err


def test_an_output_in_a_directory_without_permission_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere

    with pytest.raises(UsageError, match="nothing can be written in"):
        Plan.parse({"env": "CartPole-v1"}, {}, out=tmp_path / "a.json")


def test_an_environment_that_raises_ends_the_run_with_its_traceback_and_what_was_done(capsys, tmp_path):
    out_file = tmp_path / "a.json"
    exit_code, out, err = run(capsys, "--env", f"{HERE}:Faulty", "--manager", "simple", "--out", out_file)

    summary = json.loads(out_file.read_text())
    assert exit_code == 1
    assert "stopped by an error" in out
    assert "ValueError: the robot fell over" in err
    assert err.count("Traceback") == 1
    assert (summary["ended"], summary["env_steps"]) == ("failed", 2)


class FailsFirst(Healing):
    """Raises in the first reset of the first of its kind."""

    n_resets = 0

    def reset(self, *, seed=None, options=None):
        FailsFirst.n_resets += 1
        if FailsFirst.n_resets == 1:
            raise ValueError("no battery")
        return super().reset(seed=seed, options=options)


def test_no_episode_is_said_to_be_lost_when_a_reset_fails(capsys, tmp_path):
    (tmp_path / "a.toml").write_text(HEALING.replace("Healing", "FailsFirst"))

    exit_code, _, err = run(capsys, tmp_path / "a.toml")

    assert exit_code == 0
    assert err.splitlines()[:2] == [
        "Warning: worker 0 raised ValueError in reset: no battery; restart 1 (at most 2 in 60 s)",
        "Note: no episode had begun; --verbose shows the evidence.",
    ]


HEALING = f"""
[manager]
kind = "simple"
env = "{HERE}:Healing"
restarts = {{ max_restarts = 2, backoff_s = 0.0, on_exception = "restart" }}
[run]
steps = 12
"""


def test_restarts_in_a_config_file_are_obeyed_and_what_they_cost_is_shown(capsys, tmp_path):
    (tmp_path / "a.toml").write_text(HEALING)

    exit_code, out, err = run(capsys, tmp_path / "a.toml", "--out", tmp_path / "a.json")

    summary = json.loads((tmp_path / "a.json").read_text())
    assert exit_code == 0
    assert "12 of 12" in out
    assert [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("lost ")] == [
        "1 episode, 1 worker step"
    ]
    assert err.splitlines() == [
        "Warning: worker 0 raised ValueError in step: the robot fell over; restart 1 (at most 2 in 60 s)",
        "Note: its episode is lost, the others go on; --verbose shows the evidence.",
    ]
    assert (summary["restarts"], summary["steps_lost"], summary["episodes_lost"]) == (1, 1, 1)
    assert summary["episode_returns"] == {"0": [5.0, 5.0]}
    assert [(worker["restarts"], worker["dropped"]) for worker in summary["workers"]] == [(1, False)]


def failing(capsys, *arguments):
    where = ["--env", f"{HERE}:Faulty", "--manager", "simple", "--set", "manager.restarts.on_exception=restart"]
    return run(capsys, *where, *arguments)


def test_each_failure_is_one_line_and_the_hint_comes_once(capsys):
    exit_code, _, err = failing(capsys, "--steps", 21, "--restarts", 10, "--set", "manager.restarts.backoff_s=0")

    lines = err.splitlines()
    assert exit_code == 0
    assert len(lines) == 11
    assert [line for line in lines if line.startswith("Note: ")] == [lines[1]]
    assert all("restart" in line and "raised ValueError" in line for line in [lines[0], *lines[2:]])


def test_the_hint_says_that_a_kept_episode_goes_on(capsys):
    _, _, err = failing(capsys, "--steps", 5, "--keep-episodes")

    notes = [line for line in err.splitlines() if line.startswith("Note: ")]
    assert notes[:1] == [
        "Note: its episode goes on in the next one, if it can be repeated; --verbose shows the evidence."
    ]


def test_verbose_shows_the_evidence_of_each_failure(capsys):
    level = logging.getLogger("envmanager").level
    exit_code, _, err = failing(capsys, "--steps", 5, "--verbose")

    assert exit_code == 0
    assert err.count("Traceback (most recent call last)") == err.count("; restart ") == 2
    assert "--verbose" not in err
    assert logging.getLogger("envmanager").level == level


def test_a_run_lets_environments_fail_as_often_as_other_commands_and_a_config_has_its_own_number(capsys, tmp_path):
    (tmp_path / "a.yaml").write_text("manager: {restarts: {max_restarts: 2, backoff_s: 0}}")

    for command, number in ((["--set", "manager.restarts.backoff_s=0"], 3), ([tmp_path / "a.yaml"], 2)):
        exit_code, _, err = failing(capsys, *command, "--steps", 21)

        assert exit_code == 1
        assert f"was restarted {number} times within 60 s and failed again" in err
        assert "--restarts N" in err


def test_the_flag_restarts_changes_one_number_of_the_config_files_table(capsys, tmp_path):
    (tmp_path / "a.toml").write_text(HEALING)

    exit_code, _, err = run(capsys, tmp_path / "a.toml", "--restarts", 0)

    assert exit_code == 1
    assert "ValueError: the robot fell over" in err
    assert "Warning" not in err


@pytest.mark.parametrize(
    ("config", "flags", "expected"),
    [("100", [], 100), ("0", [], 0), ("100", ["--restarts", 5], 5), ("{max_restarts: 7}", [], 7), ("{}", [], 3)],
)
def test_a_number_of_restarts_in_a_config_means_what_the_flag_means(
    monkeypatch, capsys, tmp_path, config, flags, expected
):
    plans = []
    monkeypatch.setattr(app_module, "run", lambda plan, *_, **__: plans.append(plan) or 0)
    (tmp_path / "a.yaml").write_text(f"manager: {{env: CartPole-v1, restarts: {config}}}")

    assert run(capsys, tmp_path / "a.yaml", *flags)[0] == 0
    assert plans[0].manager.restarts == RestartPolicy(max_restarts=expected)


@pytest.mark.parametrize(
    ("table", "flags", "message"),
    [
        ("{max_restart: 3}", [], "no option manager.restarts.max_restart; did you mean manager.restarts.max_restarts?"),
        ("{then: drip}", [], "manager.restarts.then "),
        ("many", ["--restarts", 1], "manager.restarts should be a number of restarts or a mapping, but is str 'many'"),
        ("{}", ["--restarts", -1], "manager.restarts.max_restarts must be a whole number of at least 0, not -1"),
    ],
)
def test_a_mistake_in_restarts_is_named_with_its_place(capsys, tmp_path, table, flags, message):
    (tmp_path / "a.yaml").write_text(f"manager: {{env: CartPole-v1, kind: simple, restarts: {table}}}")

    exit_code, _, err = run(capsys, tmp_path / "a.yaml", *flags)

    assert exit_code == 2
    assert message in err


def test_a_seed_below_zero_in_a_config_file_is_refused(capsys, tmp_path):
    (tmp_path / "a.yaml").write_text("run: {seed: -1}")

    exit_code, _, err = run(capsys, tmp_path / "a.yaml")

    assert exit_code == 2
    assert "run.seed must be a whole number of at least 0, not -1" in err


def test_a_run_without_a_seed_says_so(capsys):
    _, out, _ = run(capsys, *CART_POLE, "--steps", 10)

    assert "not seeded" in out


def test_the_version_is_shown(capsys):
    assert run_command_line(["--version"]) == 0
    assert capsys.readouterr().out == f"envmanager {envmanager.__version__}\n"


def test_check_ends_with_0_for_a_sound_environment(capsys):
    assert run_command_line(["check", "--env", "CartPole-v1", "--steps", "50"]) == 0

    out = capsys.readouterr().out
    assert "CartPole-v1: no problems found." in out
    assert out.count("✓") == 9


def test_check_ends_with_1_for_a_faulty_one_and_says_what_is_wrong(capsys):
    assert run_command_line(["check", "--env", f"{HERE}:Faulty"]) == 1

    out = capsys.readouterr().out
    assert "✗    steps      Step 3: it raised ValueError: the robot fell over (" in out
    assert "1 problem found." in out


CHECKED = {"kind": "simple", "n_envs": 1, "env": f"{HERE}:FaultyAt", "env_kwargs": {"step": 2}}
TRAINED = {"manager": CHECKED, "training": {"steps": 5}, "trainers": {"default": {"kind": "ppo"}}}


@pytest.mark.parametrize("config", [{"manager": CHECKED}, {"manager": CHECKED, "run": {"steps": 5}}, TRAINED])
def test_check_makes_the_environment_as_a_config_says(capsys, tmp_path, config):
    (tmp_path / "run.json").write_text(json.dumps(config))

    assert run_command_line(["check", str(tmp_path / "run.json")]) == 1
    assert "Step 2: it raised ValueError" in capsys.readouterr().out


def test_check_takes_arguments_and_wrappers_beside_the_environment(capsys):
    wrapper = "manager.wrappers=[{gymnasium.wrappers:TimeLimit: {max_episode_steps: 2}}]"
    words = ["--env", f"{HERE}:FaultyAt", "--set", "manager.env_kwargs={step: 3}", "--set", wrapper, "--steps", "9"]

    assert run_command_line(["check", *words]) == 0
    assert "(4 in 9 steps)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "There is no environment"),
        (["--env", "CartPole-v1", "--set", "manager.kind=godot"], "envmanager godot check CartPole-v1"),
        (["--env", f"{HERE}:FaultyAt", "--set", "manager.env_kwargs={stop: 3}"], "did you mean step?"),
        (["CartPole-v1"], "--env CartPole-v1"),
    ],
)
def test_check_refuses_what_it_cannot_try(capsys, words, says):
    assert run_command_line(["check", *words]) == 2
    assert says in capsys.readouterr().err


def test_check_refuses_what_is_no_environment(capsys):
    assert run_command_line(["check", "--env", "Nothing-v0"]) == 2
    assert "Gymnasium knows no environment" in capsys.readouterr().err


def test_without_its_libraries_the_command_says_what_to_install(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "envmanager.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)

    assert cli.main() == 1
    assert "pip install 'envmanager[cli]'" in capsys.readouterr().err


def test_modules_of_the_present_directory_are_found(capsys, tmp_path, monkeypatch):
    (tmp_path / "module_of_this_test.py").write_text(
        "import gymnasium\ndef make(): return gymnasium.make('CartPole-v1')\n"
    )
    monkeypatch.chdir(tmp_path)

    exit_code, _, err = run(capsys, "--env", "module_of_this_test:make", "--manager", "simple", "--steps", 10)

    assert (exit_code, err) == (0, "")


class Sized(Faulty):
    """Lives longer the larger it is; its size must be given."""

    def __init__(self, *, size: int):
        self.size = size

    def step(self, action):
        self.n_steps += 1
        return np.zeros(1, np.float32), 1.0, self.n_steps >= self.size, False, {}


def test_options_set_on_the_command_line_come_before_the_config_file(capsys, tmp_path):
    (tmp_path / "a.yaml").write_text(
        f"manager: {{env: '{HERE}:Sized', kind: simple, n_envs: 2}}\nrun: {{steps: 999}}\n"
    )

    exit_code, _, err = run(
        capsys, tmp_path / "a.yaml", "--set", "manager.env_kwargs.size=7", "--set", "manager.env_kwargs={size: 5}",
        "--set", "run.steps=20", "--set", "manager.n_envs=9", "--n-envs", 1, "--out", tmp_path / "a.json",
    )  # fmt: skip

    assert (exit_code, err) == (0, "")
    assert json.loads((tmp_path / "a.json").read_text())["episode_returns"] == {"0": [5.0] * 4}


def test_options_may_be_set_without_a_config_file(capsys):
    exit_code, out, _ = run(capsys, *CART_POLE, "--set", "manager.n_envs=3", "--set", "run.steps=30")

    assert exit_code == 0
    assert "3 environments" in out
    assert "30 of 30" in out


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("manager.n_env=3", "no option manager.n_env; did you mean manager.n_envs?"),
        ("manager.timeouts.stepp_s=3", "did you mean manager.timeouts.step_s?"),
        ("run.stepps=3", "did you mean run.steps?"),
        ("runn.steps=3", "there is no table runn; did you mean run?"),
        ("manager.n_envs=1e1", 'manager.n_envs must be a whole number of at least 1, or "auto", not 10.0'),
        ("manager.wrappers=gymnasium.wrappers:TimeAwareObservation", "manager.wrappers must be a list"),
        ("manager.env_kwargs={sise: 3}", "takes no argument 'sise'"),
    ],
)
def test_a_mistake_in_what_is_set_is_named(capsys, assignment, message):
    exit_code, _, err = run(capsys, *CART_POLE, "--set", assignment)

    assert exit_code == 2
    assert message in err


def test_the_config_of_a_training_is_told_to_use_train(capsys, tmp_path):
    (tmp_path / "a.yaml").write_text("manager: {env: CartPole-v1}\ntrainers: {default: {kind: ppo}}\n")

    exit_code, _, err = run(capsys, tmp_path / "a.yaml")

    assert exit_code == 2
    assert f"Use: envmanager train {tmp_path / 'a.yaml'}" in err


def commands():
    """Every command, with the words that call it."""

    def below(command, words):
        for name, inner in getattr(command, "commands", {}).items():
            yield from below(inner, (*words, name))
        if not hasattr(command, "commands"):
            yield pytest.param(words, command, id=" ".join(words))

    return list(below(typer.main.get_command(app), ()))


@pytest.mark.parametrize(("words", "command"), commands())
def test_every_help_says_what_holds_when_an_option_is_not_given(capsys, words, command):
    assert run_command_line([*words, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out
    for parameter in command.params:
        told = (
            parameter.required
            or parameter.default is not None
            or isinstance(parameter.show_default, str)
            or parameter.metavar in ("FILE.json", "FILE.toml", "DIR", "[CONFIG]")  # then nothing is written, or read
            or any(word in (parameter.help or "") for word in ("unset", "else", "Else"))
        )
        assert told, f"envmanager {' '.join(words)}: what does {parameter.name} default to?"


OF_RUN = Plan.parse({"env": "CartPole-v1"}, {}).manager.restarts


@pytest.mark.parametrize(
    ("words", "option", "default"),
    [
        (["run"], "--steps", RunOptions().steps),
        (["run"], "--n-envs", ManagerOptions().n_envs),
        (["run"], "--manager", ManagerOptions().kind),
        (["run"], "--restarts", OF_RUN.max_restarts),
        (["train"], "--manager", ManagerOptions().kind),
        (["train"], "--restarts", RestartPolicy().max_restarts),
    ],
)
def test_the_defaults_that_a_help_tells_are_those_of_the_options(words, option, default):
    command = typer.main.get_command(app).commands[words[0]]
    (parameter,) = [each for each in command.params if option in each.opts]
    assert parameter.show_default == str(default)


def test_the_shell_completes_commands_and_options(tmp_path):
    script = "import sys; from envmanager.cli import main; sys.argv[0] = 'envmanager'; sys.exit(main())"
    for words, expected in (("envmanager tr", "train"), ("envmanager train --ste", "--steps")):
        environ = {
            **os.environ, "_ENVMANAGER_COMPLETE": "complete_bash", "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }  # fmt: skip
        done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120)
        assert expected in done.stdout.split(), done.stderr
