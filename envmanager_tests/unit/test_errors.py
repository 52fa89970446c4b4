"""Errors: they pickle with all their fields, and say what a person needs."""

import inspect
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager import errors
from envmanager.errors import (
    BadAction,
    BadObservation,
    CallStopped,
    ConfigError,
    ConnectionLost,
    EnvManagerError,
    EnvRaised,
    EpisodeNotBegun,
    ImportFailed,
    LostEpisode,
    ManagerClosed,
    MissingExtra,
    NotPlaced,
    NotWritten,
    ProtocolError,
    RestartsExhausted,
    ServerFull,
    StalePolicy,
    UsageError,
    WorkerDied,
    WorkerError,
    WorkerOutOfMemory,
    WorkerTimedOut,
)

WHERE = {"worker_id": 2, "env_ids": [4, 5], "phase": "step"}
EXAMPLES = [
    EnvManagerError("text"),
    WorkerError("text", **WHERE, cause="why"),
    EnvRaised(**WHERE, type_name="KeyError", cause="'x'", remote_traceback="Traceback …\nKeyError: 'x'"),
    BadObservation(**WHERE, path="obs['camera']", expected="uint8[4]", got="uint8[5]"),
    WorkerDied(**WHERE, exit="SIGKILL", output="last words", ticket=7),
    WorkerTimedOut(**WHERE, timeout_s=60, output="", ticket=7),
    RestartsExhausted(
        first=WorkerDied(**WHERE, exit="SIGSEGV"), last=WorkerTimedOut(**WHERE, timeout_s=1), restarts=3, within_s=60
    ),
    WorkerOutOfMemory(**WHERE, exit="SIGKILL", in_use_mb=312.5, killed_by="the kernel", output="last words", ticket=7),
    StalePolicy(lag=4, max_policy_lag=1),
    EpisodeNotBegun(**WHERE, task=3, step=7, failure=BadObservation(**WHERE, path="obs", expected="int64", got="None")),
    BadAction("text"),
    ManagerClosed("step()"),
    CallStopped("the wait was stopped"),
    UsageError("text"),
    ConfigError("text"),
    LostEpisode(WorkerDied(**WHERE, exit="SIGKILL"), task=(1, 2), env_id=4),
    NotWritten("text"),
    ConnectionLost(**WHERE, type_name="ConnectionResetError", cause="by peer"),
    ConnectionLost(**WHERE, type_name="ServerFull", cause="64 of 64 sessions", timeout_s=9, is_charged=True),
    ServerFull("64 of 64 sessions"),
    NotPlaced(worker_id=2, env_ids=[4], timeout_s=9, wanted="1 GPU", missing="no node has a GPU", cluster="8 CPUs"),
    ProtocolError(**WHERE, reason="a frame of kind 9", output="last words", ticket=7),
    MissingExtra("a policy", library="torch", extra="torch"),
    ImportFailed("a policy needs torch, which is installed, but …", library="torch"),
]


def fields_of(error):
    return {key: fields_of(value) if isinstance(value, Exception) else value for key, value in vars(error).items()}


class OfAUser(NotWritten):
    """An OSError with a constructor of its own, whose ``__new__`` therefore leaves ``args`` empty."""

    def __init__(self, *, path):
        super().__init__(f"{path} is full")
        self.path = path


@pytest.mark.parametrize("error", [*EXAMPLES, OfAUser(path="a")], ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_after_pickling(error):
    again = pickle.loads(pickle.dumps(error))

    assert (type(again), str(again), fields_of(again)) == (type(error), str(error), fields_of(error))


def test_every_class_of_the_module_has_an_example_here():
    classes = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, EnvManagerError)}

    assert classes == {type(error) for error in EXAMPLES}


def test_the_docstring_draws_the_whole_tree():
    assert all(type(error).__name__ in errors.__doc__ for error in EXAMPLES)


@given(
    st.integers(0, 99),
    st.lists(st.integers(0, 999), unique=True, min_size=1, max_size=5),
    st.sampled_from(["start", "reset", "step", "call", "idle", "close"]),
    st.text(max_size=20),
)
def test_a_worker_s_death_keeps_its_fields_over_pickling(worker_id, env_ids, phase, output):
    error = WorkerDied(worker_id=worker_id, env_ids=env_ids, phase=phase, exit="EXIT(3)", output=output)

    again = pickle.loads(pickle.dumps(error))

    assert (again.worker_id, again.env_ids, again.phase, again.output) == (worker_id, tuple(env_ids), phase, output)
    assert f"worker {worker_id}" in str(again)


@pytest.mark.parametrize(
    ("env_ids", "where"),
    [
        ([], "worker 1 died"),
        ([7], "worker 1 (env 7)"),
        ([2, 3, 4], "worker 1 (envs 2-4)"),
        ([2, 5], "worker 1 (envs 2, 5)"),
    ],
)
def test_environments_are_named_briefly(env_ids, where):
    assert where in str(WorkerDied(worker_id=1, env_ids=env_ids, phase="step", exit="EXIT(1)"))


def test_what_an_environment_raised_ends_with_its_own_traceback():
    assert str(EXAMPLES[2]).endswith("Traceback …\nKeyError: 'x'")


def test_a_wrong_observation_says_where_and_what():
    text = str(EXAMPLES[3])

    assert "obs['camera'] should be uint8[4], but is uint8[5]" in text
    assert "envs 4-5" in text


def test_a_kill_from_outside_comes_with_a_guess():
    assert "out of memory" in str(EXAMPLES[4])
    assert "out of memory" not in str(WorkerDied(**WHERE, exit="SIGSEGV"))


def test_a_time_out_names_the_option_to_raise():
    assert "Timeouts(step_s=…)" in str(EXAMPLES[5])


def test_giving_up_shows_the_first_failure_in_a_line_and_all_of_the_last():
    first = WorkerDied(**WHERE, exit="SIGSEGV", output="frame of the first")
    last = WorkerDied(**WHERE, exit="EXIT(3)", output="frame of the last")
    text = str(RestartsExhausted(first=first, last=last, restarts=3, within_s=60))

    assert "worker 2 (envs 4-5) was restarted 3 times within 60 s and failed again." in text
    assert "\nFirst: worker 2 died in step (SIGSEGV)\n" in text
    assert f"\nLast: {last}" in text
    assert "frame of the first" not in text


@pytest.mark.parametrize("option", ["--restarts", "restarts.max_restarts", "then: drop"])
def test_giving_up_names_what_would_have_helped_once(option):
    assert str(EXAMPLES[6]).count(option) == 1


def test_a_budget_without_an_end_is_told_without_a_window():
    died = WorkerDied(**WHERE, exit="SIGSEGV")
    text = str(RestartsExhausted(first=died, last=died, restarts=1, within_s=math.inf))

    assert text.startswith("worker 2 (envs 4-5) was restarted once and failed again.")


@pytest.mark.parametrize(
    ("error", "headline"),
    [
        (EXAMPLES[1], "text"),
        (EXAMPLES[2], "worker 2 raised KeyError in step: 'x'"),
        (EXAMPLES[3], "worker 2 broke its spec in step: obs['camera'] should be uint8[4], but is uint8[5]"),
        (EXAMPLES[4], "worker 2 died in step (SIGKILL)"),
        (EXAMPLES[5], "worker 2 did not respond within 60 s in step"),
        (WorkerDied(**{**WHERE, "phase": "start"}, exit="EXIT(3)"), "worker 2 died at start (EXIT(3))"),
        (WorkerDied(**{**WHERE, "phase": "idle"}, exit="EXIT(3)"), "worker 2 died while idle (EXIT(3))"),
        (
            EnvRaised(**WHERE, type_name="KeyError", cause="two\nlines", remote_traceback="Traceback …"),
            "worker 2 raised KeyError in step: two",
        ),
        (EXAMPLES[-7], "worker 2 lost its server in step: ConnectionResetError: by peer"),
        (EXAMPLES[-6], "worker 2 found no server within 9 s in step: ServerFull: 64 of 64 sessions"),
        (EXAMPLES[-3], "worker 2 broke the protocol in step: it sent a frame of kind 9"),
        (EXAMPLES[-4], "worker 2 could not be placed within 9 s: no node has a GPU"),
    ],
)
def test_a_headline_is_one_line_without_the_evidence(error, headline):
    assert error.headline == headline


def test_a_missing_library_comes_with_the_command():
    assert "pip install 'envmanager[torch]'" in str(EXAMPLES[-2])
