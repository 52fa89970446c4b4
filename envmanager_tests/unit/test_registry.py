"""From a config to a manager: what is accepted, and what is said about the rest."""

from __future__ import annotations

import math
from importlib.metadata import EntryPoint

import pytest

from envmanager import importing, registry
from envmanager.errors import ConfigError, MissingExtra, UsageError
from envmanager.options import Timeouts, Wait
from envmanager.registry import ManagerOptions, known_kinds, make_manager, structure
from envmanager.simple_env_manager import SimpleEnvManager

RECORDING = f"{__name__}:Recording"


class Recording:
    """A manager kind that keeps what it was made with."""

    def __init__(self, env_factory, n_envs=1, **options):
        self.env_factory, self.n_envs, self.options = env_factory, n_envs, options


class Sparse:
    """A manager kind with few options."""

    def __init__(self, env_factory, n_envs=1, *, wait=None):
        self.wait = wait


class FakeDistribution:
    def __init__(self, name):
        self.name = name


def add_kind(monkeypatch, name, value, *, distribution="other-package"):
    entry_point = EntryPoint(name, value, registry.ENTRY_POINT_GROUP)._for(FakeDistribution(distribution))

    def entry_points(*, group, name=None):
        assert group == registry.ENTRY_POINT_GROUP
        return [entry_point] if name in (None, entry_point.name) else []

    monkeypatch.setattr(importing, "entry_points", entry_points)


def complaint(config, cls=ManagerOptions, **where):
    with pytest.raises(ConfigError) as caught:
        structure(cls, config, **where)
    return str(caught.value)


def test_a_mapping_becomes_options_with_nested_objects():
    options = structure(ManagerOptions, {"n_envs": 4, "wait": {"min_ready": 2}, "timeouts": {"step_s": math.inf}})

    assert options == ManagerOptions(n_envs=4, wait=Wait(min_ready=2), timeouts=Timeouts(step_s=math.inf))


@pytest.mark.parametrize(
    ("given", "wait"),
    [("any", Wait.any()), ("all", Wait.all()), (3, Wait(min_ready=3)), (Wait(max_lead=2), Wait(max_lead=2))],
)
def test_wait_can_be_a_word_a_number_or_an_object(given, wait):
    assert structure(ManagerOptions, {"wait": given}).wait == wait


def test_timeouts_can_be_an_object():
    assert structure(ManagerOptions, {"timeouts": Timeouts(step_s=3)}).timeouts == Timeouts(step_s=3)


@pytest.mark.parametrize(
    ("config", "named", "nearest"),
    [
        ({"n_env": 4}, "option n_env;", "mean n_envs?"),
        ({"timeouts": {"stepp_s": 1}}, "option timeouts.stepp_s;", "mean timeouts.step_s?"),
        ({"wait": {"min_redy": 1}}, "option wait.min_redy;", "mean wait.min_ready?"),
    ],
)
def test_an_unknown_key_is_named_with_its_path_and_the_nearest_known_one(config, named, nearest):
    text = complaint(config)

    assert named in text
    assert nearest in text


def test_a_key_like_no_other_is_answered_with_the_known_ones():
    text = complaint({"zzz": 1})

    assert "did you mean" not in text
    assert "n_envs" in text


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"n_envs": "8"}, "n_envs must be a whole number of at least 1, or \"auto\", not '8'"),
        ({"n_envs": True}, 'n_envs must be a whole number of at least 1, or "auto", not True'),
        ({"zero_copy": "no"}, "zero_copy should be true or false, but is str 'no'"),
        ({"zero_copy": 1}, "zero_copy should be true or false, but is int 1"),
        ({"timeouts": {"step_s": "5"}}, "timeouts.step_s should be a number, but is str '5'"),
        ({"timeouts": 5}, "timeouts should be a mapping, but is int 5"),
        ({"wait": "soon"}, 'wait should be "any", "all", a number of workers or a mapping, but is str \'soon\''),
        ({"wait": True}, "wait should be"),
        ({"log_dir": 5}, "log_dir should be text, but is int 5"),
        ([], "A config should be a mapping of option names, but is a list"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_what_was_expected(config, text):
    assert text in complaint(config)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"n_envs": 0}, 'n_envs must be a whole number of at least 1, or "auto", not 0'),
        ({"timeouts": {"step_s": -1}}, "timeouts.step_s must be a number of seconds above 0"),
        ({"worker_env": {"OMP_NUM_THREADS": 1}}, "texts to texts, but the value of 'OMP_NUM_THREADS' is int"),
        ({"worker_env": 3}, "worker_env must be a mapping of texts to texts, not int"),
        ({"start_method": "frok"}, "start_method must be 'forkserver' or 'spawn', not 'frok'. Leave it out for"),
        ({"start_method": "fork"}, "start_method must be 'forkserver' or 'spawn', not 'fork'. Leave it out for"),
        ({"n_envs": 2, "n_workers": 3}, "n_workers=3 is more than n_envs=2"),
        ({"wait": {"min_ready": 3, "max_ready": 1}}, "wait.max_ready=1 is below min_ready=3"),
    ],
)
def test_what_the_options_themselves_refuse_is_a_config_error_with_the_path(config, text):
    assert text in complaint(config)


def test_all_mistakes_are_named_at_once():
    text = complaint({"n_env": 1, "seed": "x", "timeouts": {"stepp_s": 1}})

    assert len(text.splitlines()) == 3


def test_the_place_of_the_config_goes_before_its_keys():
    assert "option manager.n_env;" in complaint({"n_env": 1}, where="manager")


def test_the_cause_of_a_config_error_is_kept():
    with pytest.raises(ConfigError) as caught:
        structure(ManagerOptions, {"n_envs": "8"})

    assert caught.value.__cause__ is not None


def test_an_unknown_kind_is_answered_with_the_known_ones_and_the_nearest():
    with pytest.raises(
        ConfigError,
        match=r"no manager kind 'subproces'; did you mean subprocess\? Known kinds: asyncio, auto, godot, ray, ",
    ):
        make_manager({"kind": "subproces", "env": "CartPole-v1"})


def test_both_kinds_of_this_library_are_known():
    assert set(known_kinds()) >= {"simple", "subprocess"}


def test_the_environment_is_the_configs_or_the_argument():
    with make_manager({"kind": "simple", "env": "CartPole-v1"}) as from_config:
        assert from_config.n_envs == 1
    with make_manager({"kind": "simple", "n_envs": 2}, "CartPole-v1") as from_argument:
        assert isinstance(from_argument, SimpleEnvManager)
        assert from_argument.n_envs == 2


def test_no_environment_and_two_are_refused():
    with pytest.raises(UsageError, match="neither is given"):
        make_manager({"kind": "simple"})
    with pytest.raises(UsageError, match="both are given"):
        make_manager({"kind": "simple", "env": "CartPole-v1"}, "CartPole-v1")


def test_the_simple_kind_takes_options_about_processes():
    config = {"kind": "simple", "env": "CartPole-v1", "n_envs": 2, "n_workers": 2, "start_method": "spawn"}

    with make_manager({**config, "worker_env": {"A": "1"}, "timeouts": {"step_s": 9}, "log_dir": "logs"}) as manager:
        assert manager.n_envs == 2


def test_another_packages_kind_is_found_by_its_entry_point(monkeypatch):
    add_kind(monkeypatch, "recording", RECORDING)

    manager = make_manager(ManagerOptions(kind="recording", n_envs=3, infos=True, wait="all"), "CartPole-v1")

    assert "recording" in known_kinds()
    assert (manager.env_factory, manager.n_envs) == ("CartPole-v1", 3)
    assert (manager.options["infos"], manager.options["wait"]) == (True, Wait.all())


def test_a_kind_gets_no_option_that_it_does_not_have(monkeypatch):
    add_kind(monkeypatch, "sparse", f"{__name__}:Sparse")

    assert make_manager({"kind": "sparse", "env": "x", "n_envs": 2, "n_workers": 2, "wait": 2}).wait == Wait(
        min_ready=2
    )
    with pytest.raises(ConfigError, match="kind 'sparse' has no option zero_copy; it was set to True"):
        make_manager({"kind": "sparse", "env": "x", "zero_copy": True})


@pytest.mark.parametrize(
    ("distribution", "value", "command"),
    [
        ("envmanager", "a_missing_library.managers:M [cluster]", "pip install 'envmanager[cluster]'"),
        ("other-package", "a_missing_library.managers:M [cluster]", "pip install 'other-package[cluster]'"),
        ("other-package", "a_missing_library.managers:M", "pip install a_missing_library"),
    ],
)
def test_a_known_kind_whose_library_is_missing_says_what_to_install(monkeypatch, distribution, value, command):
    add_kind(monkeypatch, "cluster", value, distribution=distribution)

    with pytest.raises(MissingExtra) as caught:
        make_manager({"kind": "cluster", "env": "x"})

    assert str(caught.value).endswith(command)
    assert isinstance(caught.value.__cause__, ImportError)
