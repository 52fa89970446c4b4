"""`--set`: paths, values, and what has no place."""

from __future__ import annotations

from typing import Any

import pytest

from envmanager.cli.config_files import override
from envmanager.errors import ConfigError

TABLES: dict[str, Any] = {
    "manager": {"env": "CartPole-v1", "wait": "all", "timeouts": {"step_s": 5}},
    "training": {},
    "trainers": {"default": {"kind": "ppo", "gamma": 0.9}, "team.red": {"kind": "dqn"}},
}


@pytest.mark.parametrize(
    ("text", "table", "expected"),
    [
        ("manager.n_envs=16", "manager", {**TABLES["manager"], "n_envs": 16}),
        ("manager.wait=any", "manager", {**TABLES["manager"], "wait": "any"}),
        ("manager.timeouts.step_s=.5", "manager", {**TABLES["manager"], "timeouts": {"step_s": 0.5}}),
        ("manager.restarts.then=drop", "manager", {**TABLES["manager"], "restarts": {"then": "drop"}}),
        ("manager.env_kwargs={size: [1, 2]}", "manager", {**TABLES["manager"], "env_kwargs": {"size": [1, 2]}}),
        (
            "manager.wrappers=[gymnasium.wrappers:TimeAwareObservation, {a.b:C: {x: 1}}]",
            "manager",
            {**TABLES["manager"], "wrappers": ["gymnasium.wrappers:TimeAwareObservation", {"a.b:C": {"x": 1}}]},
        ),
        ("manager.env=module:Env-v0", "manager", {**TABLES["manager"], "env": "module:Env-v0"}),
        ("manager.seed=", "manager", {**TABLES["manager"], "seed": None}),
        ("training.steps=200", "training", {"steps": 200}),
        (
            "trainers.default.learning_rate=3e-4",
            "trainers",
            {**TABLES["trainers"], "default": {"kind": "ppo", "gamma": 0.9, "learning_rate": 3e-4}},
        ),
        (
            'trainers."team.red".gamma=0.5',
            "trainers",
            {**TABLES["trainers"], "team.red": {"kind": "dqn", "gamma": 0.5}},
        ),
        ("trainers.*={kind: ppo}", "trainers", {**TABLES["trainers"], "*": {"kind": "ppo"}}),
        ("manager.env_kwargs.text='a=b'", "manager", {**TABLES["manager"], "env_kwargs": {"text": "a=b"}}),
    ],
)
def test_a_value_is_put_where_its_path_says(text: str, table: str, expected: Any) -> None:
    assert override(TABLES, [text]) == {**TABLES, table: expected}


def test_the_tables_that_were_given_stay_as_they_were() -> None:
    override(TABLES, ["manager.timeouts.step_s=7", "manager.restarts.then=drop"])
    assert TABLES["manager"] == {"env": "CartPole-v1", "wait": "all", "timeouts": {"step_s": 5}}


def test_the_later_one_wins() -> None:
    assert override(TABLES, ["training.steps=1", "training.steps=2"])["training"] == {"steps": 2}
    assert override(TABLES, ["manager.timeouts.step_s=1", "manager.timeouts={}"])["manager"]["timeouts"] == {}


def test_a_new_trainer_begins_with_its_kind() -> None:
    changed = override(TABLES, ["trainers.blue.kind=ppo", "trainers.blue.gamma=1"])
    assert changed["trainers"]["blue"] == {"kind": "ppo", "gamma": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("manger.n_envs=1", r"no table manger; did you mean manager\? Known tables: manager, training, trainers"),
        ("n_envs=4", r"no table n_envs; did you mean manager\.n_envs\? Known tables: manager, training, trainers"),
        ("evaluate_evry=4", r"no table evaluate_evry; did you mean training\.evaluate_every\?"),
        ("manager.n_envs", r"should be TABLE\.NAME=VALUE"),
        ("manager=3", r"should be TABLE\.NAME=VALUE"),
        ("=3", r"should be TABLE\.NAME=VALUE"),
        ("manager..n_envs=3", r"should be TABLE\.NAME=VALUE"),
        ('manager."n_envs=3', r"should be TABLE\.NAME=VALUE"),
        ("manager.wait.max_lead=3", r"manager\.wait is str 'all', not a table, so nothing .* Set manager\.wait itself"),
        ("trainers.defualt.gamma=1", r"no trainers\.defualt; did you mean trainers\.default\?"),
        ("trainers.zzz.gamma=1", r"no trainers\.zzz\. It has: default, team\.red\. A new one begins with its kind"),
        ("manager.env_kwargs={a: ", r"the value in --set .* is not valid YAML"),
    ],
)
def test_what_has_no_place_is_refused_with_the_nearest(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(TABLES, [text])


def test_each_trainer_there_is_is_named_once_though_its_kind_is_set_too() -> None:
    kinds = ["trainers.default.kind=dqn", "trainers.blue.kind=ppo"]
    with pytest.raises(ConfigError, match=r"It has: default, team\.red, blue\. A new one"):
        override(TABLES, [*kinds, "trainers.zzz.gamma=1"])
