"""Numbers of NumPy are accepted wherever a number is asked for, and stored as numbers of Python."""

from __future__ import annotations

import json
import pickle
import re

import attrs
import numpy as np
import pytest

from envmanager import RestartPolicy, SimpleEnvManager, SubprocessEnvManager, Timeouts, Wait, derive_seed, make_manager
from envmanager.check.environment import check_environment
from envmanager.cli.plan import RunOptions
from envmanager.errors import UsageError
from envmanager.godot.options import EngineOptions, GodotOptions
from envmanager.options import KindOptions, ProcessOptions
from envmanager.policy import RandomPolicy
from envmanager.ray_cluster.options import ClusterOptions, RayOptions
from envmanager.registry import ManagerOptions
from envmanager.structuring import structure
from envmanager.testing import FakeEnvironment, Raise, Step, faulty
from envmanager.training.evaluation import evaluate
from envmanager.training.learners import Rounds
from envmanager.training.runs.plan import TrainingOptions

NEEDED = {Rounds: {"train": [["a"]]}, Wait: {"max_ready": 9}}
"""Arguments without which an object of the class cannot be made."""
MANAGERS = (KindOptions, ProcessOptions, ManagerOptions, GodotOptions)
OPTIONS = (*MANAGERS, ClusterOptions, Wait, Timeouts, RestartPolicy, EngineOptions, RunOptions, TrainingOptions, Rounds)
WHOLE = r"\b(int|WorkerCount|LocalCount)\b"
NUMBERS = r"\b(int|float|WorkerCount|LocalCount)\b"


def fields_with(pattern: str):
    return [
        pytest.param(cls, field.name, id=f"{cls.__name__}.{field.name}")
        for cls in OPTIONS
        for field in attrs.fields(cls)
        if re.search(pattern, str(field.type)) and "Mapping" not in str(field.type)
    ]


def made(cls, name, value, *, from_config=False):
    arguments = {**NEEDED.get(cls, {}), **({"n_envs": 9} if cls in MANAGERS else {}), name: value}
    return structure(cls, arguments) if from_config else cls(**arguments)


@pytest.mark.parametrize("from_config", [False, True])
@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array], ids=["int64", "uint8", "array"])
@pytest.mark.parametrize(("cls", "name"), fields_with(NUMBERS))
def test_an_option_takes_an_integer_of_numpy_and_keeps_an_int(cls, name, kind, from_config):
    options = made(cls, name, kind(3), from_config=from_config)

    kept = getattr(options, name)
    assert (kept, type(kept)) == (3, int)
    assert json.loads(json.dumps(kept)) == 3
    assert pickle.loads(pickle.dumps(options)) == options == made(cls, name, 3)


@pytest.mark.parametrize("value", [True, np.True_])
@pytest.mark.parametrize(("cls", "name"), fields_with(WHOLE))
def test_a_bool_is_no_whole_number_in_a_config(cls, name, value):
    with pytest.raises(UsageError, match=f"^{name} (must|should) be "):
        made(cls, name, value, from_config=True)


@pytest.mark.parametrize("cls", [Timeouts, RestartPolicy])
def test_seconds_may_be_floats_of_numpy(cls):
    name = "step_s" if cls is Timeouts else "within_s"

    assert type(getattr(cls(**{name: np.float32(2.5)}), name)) is float


def test_the_resources_of_a_cluster_may_be_integers_of_numpy():
    options = RayOptions(n_envs=np.int64(4), envs_per_worker=np.int64(2), resources={"num_cpus": np.int64(2)})

    assert (options.n_envs, options.on_cluster.envs_per_worker, options.on_cluster.amounts) == (4, 2, {"CPU": 2.0})


def test_a_bool_is_no_option_of_a_manager():
    for name in ("n_envs", "n_workers", "seed"):
        with pytest.raises(UsageError, match=f"{name} must be"):
            ManagerOptions(**{name: np.True_})


@pytest.mark.parametrize("make", [SimpleEnvManager, SubprocessEnvManager])
def test_calls_of_a_manager_take_integers_of_numpy(make):
    two, one = np.int64(2), np.int64(1)
    with make(lambda: FakeEnvironment([Step(terminated=True)]), n_envs=two, n_workers=two, seed=one) as manager:
        assert type(manager.n_envs) is int
        manager.reset(seed=two)
        manager.reset(seed=[one, two])
        batch = manager.recv(wait=one)
        manager.send(np.zeros(len(batch), np.int64), list(batch.env_ids))
        assert manager.get_attr("closed", env_ids=[one]) == [False]
        assert manager.get_attr("closed", env_ids=np.array([1, 0], np.uint64)) == [False, False]
        policies = {"default": RandomPolicy(manager.behavior_specs["default"], seed=one)}
        assert evaluate(manager, policies, episodes_per_env=two).n_episodes == 4


def test_functions_take_integers_of_numpy():
    assert derive_seed(np.int64(3), np.int64(1), np.int64(2)) == derive_seed(3, 1, 2)
    assert check_environment(FakeEnvironment, n_steps=np.int64(3), seed=np.int64(1)) is not None
    jams = faulty(Raise(ValueError("jammed")), after=np.int64(1), only_env=np.int64(0), times=np.int64(1))
    SimpleEnvManager(jams, 1).close()
    make_manager({"kind": "simple", "n_envs": np.int64(2), "seed": np.int64(1), "wait": np.int64(1)}, jams).close()
