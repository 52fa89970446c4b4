"""Options of trainers take numbers of NumPy, and keep numbers of Python."""

from __future__ import annotations

import re
from typing import Any

import attrs
import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import ArraySpec, BehaviorSpec, ConfigError
from envmanager.structuring import structure
from envmanager.training.algorithms.dqn import DQNOptions
from envmanager.training.algorithms.ppo import PPOOptions
from envmanager.training.algorithms.sac import SACOptions
from envmanager.training.algorithms.trainers import check_tables, make_trainer

FIELDS = [
    pytest.param(cls, field.name, id=f"{cls.__name__}.{field.name}")
    for cls in (PPOOptions, DQNOptions, SACOptions)
    for field in attrs.fields(cls)
    if re.match("int", str(field.type))
]


@pytest.mark.parametrize(("cls", "name"), FIELDS)
def test_a_whole_number_of_numpy_is_kept_as_an_int(cls: Any, name: str) -> None:
    given = {name: np.int64(3_000_000 if name == "capacity" else 3)}

    for options in (cls(**given), structure(cls, given)):
        assert type(getattr(options, name)) is int


@pytest.mark.parametrize("cls", [PPOOptions, DQNOptions, SACOptions])
@pytest.mark.parametrize("sizes", [np.array([8, 8]), [np.int64(8), np.int64(8)], (np.int64(8), 8)])
def test_sizes_of_layers_are_kept_as_ints(cls: Any, sizes: Any) -> None:
    for options in (cls(hidden=sizes), structure(cls, {"hidden": sizes})):
        assert [type(size) for size in options.hidden] == [int, int]


def test_sizes_that_are_no_numbers_are_named_with_their_place() -> None:
    with pytest.raises(ConfigError, match=r"hidden\[1\] should be a whole number, but is str '64'"):
        structure(PPOOptions, {"hidden": [64, "64"]}, where="trainers.default")


def test_a_trainer_takes_integers_of_numpy() -> None:
    spec = BehaviorSpec(ArraySpec((4,)), ArraySpec((2,), minimum=-1.0, maximum=1.0))
    for kind in ("ppo", "sac"):
        make_trainer("default", spec, {"kind": kind, "hidden": np.array([8])}, seed=np.int64(3), device="cpu").close()
    check_tables({"default": {"kind": "dqn", "apart": np.int64(2), "learner_timeout_s": np.int64(9)}})
