"""Options: what exists is valid."""

import math
import os

import numpy as np
import pytest

from envmanager.errors import UsageError
from envmanager.options import ResetConfig, Timeouts, Wait
from envmanager.registry import ManagerOptions


@pytest.mark.parametrize("text", ["any", Wait.any(), "1", 1])
def test_ways_to_wait_for_anything(text):
    assert Wait.parse(text) == Wait(min_ready=1)


def test_ways_to_wait_for_everything_and_for_some():
    assert Wait.parse("all") == Wait.all()
    assert Wait.parse(3).min_ready == Wait.parse("3").min_ready == Wait.parse(np.int64(3)).min_ready == 3


@pytest.mark.parametrize(
    "text", ["some", "0", 0, -1, None, [], "1.5", 2.7, True, math.inf, math.nan, b"any", np.array([1, 2])]
)
def test_other_words_for_waiting_are_refused(text):
    with pytest.raises(UsageError, match=r"wait must be|min_ready must be"):
        Wait.parse(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"min_ready": 0},
        {"min_ready": True},
        {"min_ready": 2.0},
        {"max_ready": 0},
        {"min_ready": 3, "max_ready": 2},
        {"timeout_s": -1},
        {"timeout_s": math.nan},
        {"timeout_s": "1"},
        {"max_lead": 0},
    ],
)
def test_a_wait_that_makes_no_sense_cannot_be_made(fields):
    with pytest.raises(UsageError):
        Wait(**fields)


def test_all_may_be_handed_out_in_portions():
    assert Wait(min_ready=Wait.ALL, max_ready=2).max_ready == 2


def test_no_time_at_all_is_a_timeout():
    assert Wait.any(timeout_s=0).timeout_s == 0


@pytest.mark.parametrize("value", [0, -1, math.nan, None, "60", True, 10**400])
@pytest.mark.parametrize("name", ["start_s", "reset_s", "step_s", "call_s", "close_s"])
def test_a_timeout_is_a_number_of_seconds(name, value):
    with pytest.raises(UsageError, match=f"{name} must be a number of seconds above 0"):
        Timeouts(**{name: value})


def test_a_timeout_may_be_unlimited():
    assert Timeouts(step_s=math.inf).step_s == math.inf


def test_the_time_to_close_is_finite():
    with pytest.raises(UsageError, match="close_s must be a number of seconds above 0 and finite"):
        Timeouts(close_s=math.inf)

    assert Timeouts(close_s=1e7).close_s == 1e7


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, ResetConfig()),
        ({}, ResetConfig()),
        ({"seed": 3}, ResetConfig(seed=3)),
        ({"seed": np.int64(3)}, ResetConfig(seed=3)),
        ({"seed": [1, 2], "options": {"level": 1}}, ResetConfig([1, 2], {"level": 1})),
        ({"seed": np.array([1, 2])}, ResetConfig([1, 2])),
        ({"seed": np.array(3)}, ResetConfig(3)),
        ({"seed": (np.int64(1), None)}, ResetConfig([1, None])),
        ({"seed": range(2)}, ResetConfig([0, 1])),
        (ResetConfig(seed=4), ResetConfig(seed=4)),
    ],
)
def test_what_a_reset_may_ask_for(config, expected):
    assert ResetConfig.of(config, n_envs=2) == expected


@pytest.mark.parametrize("seeds", [np.array([1, 2]), [np.int64(1), np.uint8(2)]])
def test_numpy_seeds_are_kept_as_ints(seeds):
    assert [type(seed) for seed in ResetConfig(seeds).seed] == [int, int]
    assert type(ResetConfig(seeds[0]).seed) is int


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (3, "takes a mapping"),
        ({"sead": 3}, "not 'sead'"),
        ({1: 2, "x": 1}, "not 1, 'x'"),
        ({"seed": np.array([1, 2, 3])}, "3 seeds for 2 environments"),
        ({"seed": np.array([[1], [2]])}, "from 0 up"),
        ({"seed": np.array([1.0, 2.0])}, "from 0 up"),
        ({"seed": np.True_}, "from 0 up"),
        ({"seed": "12"}, "from 0 up"),
        ({"seed": [1, 2, 3]}, "3 seeds for 2 environments"),
        ({"seed": -1}, "from 0 up"),
        ({"seed": [1, -1]}, "from 0 up"),
        ({"seed": 1.5}, "from 0 up"),
        ({"seed": True}, "from 0 up"),
        ({"options": [1]}, "must be a mapping"),
    ],
)
def test_what_a_reset_must_not_ask_for(config, message):
    with pytest.raises(UsageError, match=message):
        ResetConfig.of(config, n_envs=2)


@pytest.mark.parametrize(
    "fields",
    [
        {"n_envs": 0},
        {"n_envs": 2, "n_workers": 3},
        {"n_workers": 0},
        {"start_method": "clone"},
        {"zero_copy": 1},
        {"infos": "yes"},
        {"seed": -1},
        {"wait": "some"},
    ],
)
def test_a_manager_s_options_are_checked_at_birth(fields):
    with pytest.raises(UsageError):
        ManagerOptions(**fields)


@pytest.mark.parametrize("log_dir", [3, b"logs", "", __file__])
def test_a_log_directory_that_cannot_be_one_is_refused(log_dir):
    with pytest.raises(UsageError, match="log_dir"):
        ManagerOptions(log_dir=log_dir)


def test_a_log_directory_may_be_a_path_and_need_not_exist(tmp_path):
    assert ManagerOptions(log_dir=tmp_path / "logs").log_dir == str(tmp_path / "logs")
    assert ManagerOptions(log_dir=tmp_path).log_dir == str(tmp_path)


@pytest.mark.parametrize("trace", [3, b"run.json", "", "/", "/nowhere/run.json"])
def test_a_trace_that_cannot_be_written_is_refused(trace):
    with pytest.raises(UsageError, match="trace"):
        ManagerOptions(trace=trace)


def test_a_trace_may_be_a_path_and_need_not_exist(tmp_path):
    assert ManagerOptions(trace=tmp_path / "run.json").trace == str(tmp_path / "run.json")
    assert ManagerOptions(trace="run.json").trace == "run.json"


@pytest.mark.parametrize(
    ("worker_env", "message"),
    [
        ("TOKEN=s3cret", "not str"),
        ({"TOKEN": b"s3cret"}, "the value of 'TOKEN' is bytes"),
        ({7: "s3cret"}, "7 is not a text"),
    ],
)
def test_worker_env_is_refused_without_showing_its_values(worker_env, message):
    with pytest.raises(UsageError, match=f"worker_env must be a mapping of texts to texts, .*{message}") as caught:
        ManagerOptions(worker_env=worker_env)

    assert "s3cret" not in str(caught.value)


def test_options_do_not_show_the_values_of_worker_env():
    options = ManagerOptions(worker_env={"TOKEN": "s3cret"})

    assert "s3cret" not in repr(options)
    assert options.worker_env == {"TOKEN": "s3cret"}


def test_the_environment_of_this_process_may_be_that_of_the_workers():
    assert ManagerOptions(worker_env=os.environ).worker_env == os.environ


def test_a_manager_s_way_to_wait_may_be_a_word():
    assert ManagerOptions(wait="all").wait == Wait.all()
