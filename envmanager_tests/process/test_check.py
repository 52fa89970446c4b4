"""``check_environment`` of environments that crash, exit or hang: it tries them in workers and says in which call."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from envmanager import EnvRecipe, Timeouts
from envmanager.check import trial
from envmanager.check.environment import Finding, check_environment
from envmanager.errors import UsageError
from envmanager.options import ProcessOptions

N_STEPS = 12


class Sound(gymnasium.Env):
    """Episodes of five steps. The broken ones fail in one place."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    n_resets = n_ever = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_resets += 1
        self.n_steps = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action):
        self.n_steps += 1
        self.n_ever += 1
        return self.np_random.random(2, np.float32), 0.0, self.n_steps >= 5, False, {}


class CrashesInStep(Sound):
    def step(self, action):
        if self.n_ever == 7:
            print("the joint is loose", flush=True)
            ctypes.string_at(0)
        return super().step(action)


class ExitsInStep(Sound):
    def step(self, action):
        if self.n_ever == 7:
            os._exit(3)
        return super().step(action)


class CallsSysExit(Sound):
    def step(self, action):
        if self.n_ever == 7:
            sys.exit("enough")
        return super().step(action)


class HangsInStep(Sound):
    def step(self, action):
        if self.n_ever == 7:
            threading.Event().wait()
        return super().step(action)


class CrashesAtRestart(Sound):
    def reset(self, *, seed=None, options=None):
        if self.n_resets == 2:
            os.abort()
        return super().reset(seed=seed)


class CrashesAfterAStepAtRestart(Sound):
    def reset(self, *, seed=None, options=None):
        first = super().reset(seed=seed)
        self.step(0)
        if self.n_resets == 3:
            os.abort()
        return first


class ExitsInConstructor(Sound):
    def __init__(self):
        print("there is no display", flush=True)
        os._exit(9)


class HangsInConstructor(Sound):
    def __init__(self):
        threading.Event().wait()


class ExitsInReset(Sound):
    def reset(self, *, seed=None, options=None):
        os._exit(4)


class ExitsInClose(Sound):
    def close(self):
        os._exit(5)


class ExitsInTheSecondRound(Sound):
    def step(self, action):
        if self.n_ever == N_STEPS + 3:
            os._exit(6)
        return super().step(action)


class ExitsInTheThirdRound(Sound):
    def step(self, action):
        if self.n_ever == 2 * N_STEPS + 1:
            os._exit(7)
        return super().step(action)


def found(factory, **options) -> dict[str, list[Finding]]:
    """The findings by question."""
    by_question: dict[str, list[Finding]] = {}
    for finding in check_environment(factory, n_steps=N_STEPS, **options):
        by_question.setdefault(finding.question, []).append(finding)
    return by_question


def problem(factory, question, **options) -> Finding:
    (finding,) = [each for each in found(factory, **options)[question] if each.outcome == "problem"]
    return finding


def test_a_crash_in_native_code_names_the_step_and_shows_the_output_and_the_environments_own_frames():
    finding = problem(CrashesInStep, "steps")

    assert finding.text == "Step 8: its process crashed (SIGSEGV)."
    assert "the joint is loose" in finding.evidence
    assert f'File "{__file__}", line' in finding.evidence
    assert "envmanager/check" not in finding.evidence


@pytest.mark.parametrize(
    ("broken", "question", "text"),
    [
        (ExitsInStep, "steps", "Step 8: it ended its process with exit code 3."),
        (CallsSysExit, "steps", "Step 8: it raised SystemExit: enough."),
        (ExitsInReset, "reset", "reset(): it ended its process with exit code 4."),
        (CrashesAtRestart, "episodes", "reset() after an episode's end, in step 10: its process crashed (SIGABRT)."),
        (
            CrashesAfterAStepAtRestart,
            "episodes",
            "reset() after an episode's end, in step 8: its process crashed (SIGABRT).",
        ),
        (ExitsInClose, "close", "close(): it ended its process with exit code 5."),
        (
            ExitsInTheSecondRound,
            "steps",
            "Step 4 after a second reset of the same environment: it ended its process with exit code 6.",
        ),
        (ExitsInTheThirdRound, "steps", "Step 2 with another seed: it ended its process with exit code 7."),
    ],
)
def test_the_call_in_which_the_process_ended_is_named(broken, question, text):
    assert problem(broken, question).text == text


def test_a_call_that_does_not_return_is_ended_at_its_deadline_and_shows_where_it_hung():
    finding = problem(HangsInStep, "steps", timeout_s=0.5)

    assert finding.text == "Step 8: it did not return within 0.5 s, and its process was killed."
    assert f'File "{__file__}", line' in finding.evidence
    assert "--timeout" in finding.advice


def test_without_a_deadline_the_steps_before_decide_how_long_a_step_may_take(monkeypatch):
    monkeypatch.setattr(trial, "LEAST_S", 0.5)
    monkeypatch.setattr(trial, "TIMES", 0)
    findings = found(HangsInStep)

    assert [finding.text for finding in findings["steps"]] == [
        "Step 8: it did not return within 0.5 s, and its process was killed."
    ]
    assert f'File "{__file__}", line' in findings["steps"][0].evidence
    assert [finding.text for finding in findings["seeding"]] == [
        "With the same seed and actions it ends again in step 8.",
        "With another seed it ends in step 8.",
    ]


def test_a_first_step_and_steps_as_slow_as_resets_are_no_hangs(monkeypatch):
    monkeypatch.setattr(trial, "LEAST_S", 0.01)
    monkeypatch.setattr(trial, "TIMES", 2)

    class SlowAtTimes(Sound):
        has_stepped = False

        def reset(self, *, seed=None, options=None):
            threading.Event().wait(0.1)
            return super().reset(seed=seed)

        def step(self, action):
            threading.Event().wait(0.01 if SlowAtTimes.has_stepped else 1.0)
            SlowAtTimes.has_stepped = True
            return super().step(action)

    assert {finding.outcome for each in found(SlowAtTimes).values() for finding in each} == {"ok"}


def test_a_close_that_hangs_is_ended_at_a_deadline_too(monkeypatch):
    monkeypatch.setattr(trial, "LEAST_S", 0.5)
    monkeypatch.setattr(trial, "TIMES", 0)

    class HangsInClose(Sound):
        def close(self):
            threading.Event().wait()

    options = ProcessOptions(timeouts=Timeouts(close_s=0.5))
    assert "close(): it did not return within 0.5 s" in problem(HangsInClose, "close", options=options).text


def test_an_environment_that_closes_its_standard_error_is_tried_like_any_other():
    class ClosesStandardError(Sound):
        def reset(self, *, seed=None, options=None):
            with contextlib.suppress(OSError):
                os.close(2)
            return super().reset(seed=seed)

    assert {finding.outcome for each in found(ClosesStandardError).values() for finding in each} == {"ok"}


def test_an_exit_with_the_code_of_a_deadline_is_no_hang():
    class ExitsWithOne(Sound):
        def step(self, action):
            if self.n_ever == 7:
                os._exit(1)
            return super().step(action)

    assert problem(ExitsWithOne, "steps").text == "Step 8: it ended its process with exit code 1."


def test_findings_are_printed_as_they_come(tmp_path):
    (tmp_path / "patient.py").write_text(
        """
import pathlib, time, gymnasium

class Patient(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("MountainCar-v0"))  # its episodes take 200 steps

    def reset(self, **arguments):
        self.n_resets = getattr(self, "n_resets", 0) + 1
        while self.n_resets == 2 and not pathlib.Path("go_on").exists():
            time.sleep(0.01)
        return super().reset(**arguments)
"""
    )
    words = [str(Path(sys.executable).with_name("envmanager")), "check", "--env", "patient:Patient", "--steps", "3"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as command:
        lines = [command.stdout.readline() for _ in range(5)]
        (tmp_path / "go_on").touch()  # the second reset waits for it

        assert [line.split()[1] for line in lines] == ["constructs", "reset", "steps", "episodes", "arrays"]
        assert "no problems found" in command.stdout.read()


def test_a_constructor_that_ends_the_process_is_the_only_finding_and_comes_with_its_output():
    (finding,) = check_environment(ExitsInConstructor)

    assert finding.text == "It cannot be made: it ended its process with exit code 9."
    assert finding.evidence == "there is no display"


@pytest.mark.parametrize("patience", [{"timeout_s": 0.5}, {"options": ProcessOptions(timeouts=Timeouts(start_s=0.5))}])
def test_a_constructor_that_does_not_return_in_time_comes_with_advice_about_the_time(patience):
    (finding,) = check_environment(HangsInConstructor, **patience)

    assert finding.text == "It cannot be made: it did not return within 0.5 s, and its process was killed."
    assert "--timeout" in finding.advice


def test_a_recipe_whose_module_ends_the_process_is_a_finding_too(tmp_path, monkeypatch):
    (tmp_path / "ends_at_import_too.py").write_text("import os; os._exit(8)")
    monkeypatch.syspath_prepend(tmp_path)

    (finding,) = check_environment(EnvRecipe("ends_at_import_too:Env", env_kwargs={"size": 3}))

    assert "exit code 8" in finding.text


def test_what_can_still_be_tried_after_a_crash_is_tried_in_new_workers():
    findings = found(CrashesInStep)

    assert [finding.outcome for finding in findings["close"]] == ["ok"]
    assert [finding.outcome for finding in findings["episodes"]] == ["ok"]
    assert [finding.text for finding in findings["seeding"]] == [
        "With the same seed and actions it ends again in step 8.",
        "With another seed it ends in step 8.",
    ]


def test_a_crash_that_does_not_follow_from_the_seed_is_told_from_one_that_does(tmp_path):
    note = str(tmp_path / "has_crashed")

    class ExitsOnce(Sound):
        def step(self, action):
            if self.n_ever == 7 and not os.path.exists(note):
                os.mkdir(note)
                os._exit(1)
            return super().step(action)

    seeding = found(ExitsOnce)["seeding"]

    assert seeding[0].text == f"With the same seed and actions it takes {N_STEPS} steps."
    assert "not the cause" in seeding[0].advice


def test_a_crash_after_which_no_other_environment_can_be_made_is_a_problem_all_the_same(tmp_path):
    lock = tmp_path / "lock"

    class LeavesItsLock(ExitsInTheSecondRound):
        def __init__(self):
            super().__init__()
            lock.touch(exist_ok=False)

    problems = [each for each in check_environment(LeavesItsLock, n_steps=N_STEPS) if each.outcome == "problem"]
    assert {each.question for each in problems} >= {"steps", "constructs"}


def test_an_environment_in_a_module_that_ends_the_process_when_it_is_imported_is_a_finding(tmp_path, monkeypatch):
    (tmp_path / "ends_at_import.py").write_text("import os; print('no licence', flush=True); os._exit(8)")
    monkeypatch.syspath_prepend(tmp_path)

    (finding,) = check_environment("ends_at_import:Env")

    assert finding.text == "It cannot be made: it ended its process with exit code 8."
    assert finding.evidence == "no licence"


def test_a_name_that_cannot_be_found_is_the_callers_mistake():
    with pytest.raises(UsageError, match="cannot be found"):
        check_environment("no_such_module_at_all:Env")


def test_the_folder_of_the_output_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    check_environment(Sound, n_steps=1)

    assert list(tmp_path.iterdir()) == []


def test_each_call_is_announced():
    calls = []

    check_environment(Sound, n_steps=2, on_call=calls.append)

    assert [call.partition(" (at most ")[0] for call in calls[:4]] == ["making it", "reset", "step 1", "step 2"]
    assert "two in one process" in calls


def test_a_vector_environment_is_checked_as_a_whole():
    def make():
        return gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")

    findings = check_environment(make, n_steps=200)

    assert {finding.outcome for finding in findings} == {"ok"}, findings


class OfASet(Sound):
    """What it observes in step 3 is where a set has one of its texts."""

    def step(self, action):
        obs, *rest = super().step(action)
        if self.n_steps == 3:
            obs[1] = list({f"wall {k}" for k in range(1000)}).index("wall 0") / 1000
        return obs, *rest


class OfTheClock(Sound):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, 1 + time.perf_counter() % 1 if self.n_steps == 4 else 0.0, *rest


class OfTheModule(Sound):
    def step(self, action):
        *step, _ = super().step(action)
        return *step, {"luck": random.random()}


class ReusesItsWorld(Sound):
    """Where an episode ends, the next begins, as in Gymnasium's BipedalWalker-v3."""

    warmth = 0.0

    def step(self, action):
        obs, *rest = super().step(action)
        self.warmth += 0.001
        return (obs + np.float32(self.warmth) if self.n_steps == 2 else obs), *rest


def repeats(factory, **options) -> list[Finding]:
    findings = found(factory, **options)
    assert [finding.outcome for each in findings.values() for finding in each if finding.outcome == "problem"] == []
    return findings["repeats"]


@pytest.mark.parametrize(
    ("env", "place", "cause"),
    [
        (OfASet, "in another process, with another hash seed, from step 3 on: obs[1] was 0.", "the order of a set"),
        (OfTheClock, "in another process, with another hash seed, from step 4 on: reward was 1.", "the time"),
        (ReusesItsWorld, "after a second reset of the same environment, from step 2 on: obs[0] was 0.", "is reused"),
    ],
)
def test_an_environment_that_is_not_repeatable_is_noted_with_the_step_the_place_and_a_likely_cause(
    env, place, cause, monkeypatch
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (finding,) = repeats(env)

    assert finding.outcome == "note"
    assert place in finding.text
    assert cause in finding.text


def test_infos_that_differ_in_another_process_are_noted_beside_steps_that_do_not():
    (steps, infos) = repeats(OfTheModule)

    assert (steps.outcome, infos.outcome) == ("ok", "note")
    assert "in another process, with another hash seed, from step 1 on: info['luck'] was 0." in infos.text


def test_a_hash_seed_that_is_set_for_all_processes_makes_the_order_of_sets_repeatable():
    options = ProcessOptions(start_method="spawn", worker_env={**os.environ, "PYTHONHASHSEED": "7"})
    assert [finding.outcome for finding in repeats(OfASet, options=options)] == ["ok"]


def test_an_environment_that_cannot_be_made_in_another_process_is_a_problem(tmp_path):
    class OfOneProcess(Sound):
        def __init__(self):
            (tmp_path / "pid").touch()
            if (tmp_path / "pid").read_text() not in ("", str(os.getpid())):
                raise OSError("the licence is taken")
            (tmp_path / "pid").write_text(str(os.getpid()))

    finding = problem(OfOneProcess, "reset")
    assert finding.text.startswith("reset() in another process, with another hash seed: it cannot be made: it raised")
    assert "the licence is taken" in finding.text
