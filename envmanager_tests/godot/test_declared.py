"""The tables of a config that a scene's declaration becomes, and which of both counts. No engine is needed."""

from __future__ import annotations

from typing import Any

import pytest

from envmanager.errors import ConfigError
from envmanager.godot.declared import Declaration, parse

HERO = {"node": "Chase/Hero", "file": "res://hero.tres", "fields": {"trainer": "sac", "gamma": 0.9, "learns": False}}


def told(*parameters: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    if parameters:
        fields["parameters"] = list(parameters)
    return {"training": {"node": "Chase/Arena", "file": "res://chase.tscn", "fields": fields}}


def of_training(*parameters: dict[str, Any] | None, **fields: Any) -> Declaration:
    return parse(told(*parameters, **fields), ("hero", "target"))


def test_the_fields_of_a_behavior_are_options_of_its_trainer() -> None:
    hero = {**HERO, "fields": {**HERO["fields"], "more": {"tau": 0.1, "gamma": 0.8}}}  # type: ignore[dict-item]

    assert parse({"behaviors": {"hero": hero}}, ("hero",)).tables["trainers"] == {
        "hero": {"kind": "sac", "gamma": 0.8, "frozen": True, "tau": 0.1}
    }


def test_the_fields_of_the_training_are_options_of_two_tables() -> None:
    found = of_training(
        steps=5, random_seed=3, environments=8, engines=2, ticks_per_action=6, wait="all", infos=True, round_steps=10,
        round_learners=["hero", "hero, target"], more={"keep": 7}, manager={"engine": {"isolate": True}},
    )  # fmt: skip

    assert found.tables["training"] == {
        "steps": 5, "seed": 3, "keep": 7, "rounds": {"steps": 10, "train": [["hero"], ["hero", "target"]]}
    }  # fmt: skip
    engine = {"ticks_per_action": 6, "isolate": True}
    assert found.tables["manager"] == {"n_envs": 8, "n_workers": 2, "wait": "all", "infos": True, "engine": engine}


def test_parameters_become_samplers_and_lessons_and_constants_stay_in_the_game() -> None:
    found = of_training(
        {"name": "wind", "sampler": "uniform", "minimum": 1.0},
        {"name": "hail", "sampler": "multi_range_uniform", "values": [0, 1, 5, 7]},
        {"name": "snow", "value": 4.0},
        {
            "name": "rain",
            "lessons": [
                {"value": 0.5, "name": "wet", "measure": "progress", "threshold": 0.1},
                {"sampler": "choice", "values": [1, 2], "behavior": "hero"},
            ],
        },
    )

    assert found.tables["training"]["parameters"] == {
        "wind": {"sampler": "uniform", "min": 1.0, "max": 1.0},
        "hail": {"sampler": "multi_range_uniform", "ranges": [[0, 1], [5, 7]]},
        "rain": {
            "lessons": [
                {"value": 0.5, "name": "wet", "until": {"measure": "progress", "threshold": 0.1}},
                {"value": {"sampler": "choice", "values": [1, 2]}},
            ]
        },
    }


@pytest.mark.parametrize("parameters", [[{"value": 1.0}], [{"name": "a"}, {"name": "a"}], [None]])
def test_parameters_without_names_of_their_own_are_refused_with_their_node(parameters: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"res://chase.tscn \(node Chase/Arena\): each needs a name"):
        of_training(*parameters)


class TestUnderAConfig:
    @pytest.fixture
    def found(self) -> Declaration:
        return parse({"behaviors": {"hero": HERO}, **told(steps=5, ticks_per_action=6)}, ("hero", "target"))

    def test_the_config_wins_key_by_key(self, found: Declaration) -> None:
        tables = found.under(
            {
                "manager": {"n_envs": 4, "engine": {"isolate": True}},
                "training": {"seed": 1, "steps": 9},
                "trainers": {"hero": {"gamma": 0.5}},
            }
        )

        assert tables["manager"] == {"n_envs": 4, "engine": {"ticks_per_action": 6, "isolate": True}}
        assert tables["training"] == {"seed": 1, "steps": 9}
        assert tables["trainers"] == {"hero": {"kind": "sac", "gamma": 0.5, "frozen": True}}

    def test_without_trainers_every_behavior_gets_one(self, found: Declaration) -> None:
        assert found.under({})["trainers"] == {
            "hero": {"kind": "sac", "gamma": 0.9, "frozen": True},
            "target": {"kind": "ppo"},
        }

    def test_a_trainer_for_all_counts_for_each_behavior_that_has_none(self, found: Declaration) -> None:
        trainers = found.under({"trainers": {"*": {"kind": "sac", "gamma": 0.1}}})["trainers"]

        assert trainers["hero"] == {"kind": "sac", "gamma": 0.1, "frozen": True}
        assert trainers["*"] == {"kind": "sac", "gamma": 0.1}
        assert "target" not in trainers

    def test_another_kind_of_trainer_leaves_out_the_options_of_the_first(self, found: Declaration) -> None:
        trainers = found.under({"trainers": {"hero": {"kind": "ppo", "rollout": 8}}})["trainers"]

        assert trainers["hero"] == {"kind": "ppo", "rollout": 8, "frozen": True}

    def test_nothing_in_the_config_is_changed(self, found: Declaration) -> None:
        config: dict[str, dict[str, Any]] = {"manager": {"engine": {"isolate": True}}, "trainers": {"hero": {}}}
        found.under(config)

        assert config == {"manager": {"engine": {"isolate": True}}, "trainers": {"hero": {}}}


class TestErrors:
    def said(self, text: str, config: dict[str, Any]) -> str:
        fields: dict[str, Any] = {"steps": 5, "ticks_per_action": 0, "round_learners": ["hero"]}
        fields["manager"] = {"engine": {"isolat": True}}
        found = parse({"behaviors": {"hero": HERO}, **told(**fields)}, ("hero", "target"))
        with pytest.raises(ConfigError) as raised, found.located(found.under(config)):
            raise ConfigError(text)
        return str(raised.value)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("trainers.hero.gamma must be 1.", "gamma of res://hero.tres (node Chase/Hero) must be 1."),
            ("trainers.hero.kind is 'sac'", "trainer of res://hero.tres (node Chase/Hero) is 'sac'"),
            ("training.steps must be 3", "steps of res://chase.tscn (node Chase/Arena) must be 3"),
            ("trainers.heroes.gamma is no option", "trainers.heroes.gamma is no option"),
            ("engine.ticks_per_action must be 3", "ticks_per_action of res://chase.tscn (node Chase/Arena) must be 3"),
            ("no option engine.isolat.", "no option engine.isolat of res://chase.tscn (node Chase/Arena)."),
            ("the engine ended", "the engine ended"),
            ("training.rounds.steps must be 3", "rounds.steps of res://chase.tscn (node Chase/Arena) must be 3"),
            (
                "There is no option trainers.hero.gamma.",
                "There is no option gamma of res://hero.tres (node Chase/Hero).",
            ),
        ],
    )
    def test_a_value_of_the_scene_is_named_by_its_file_and_node(self, text: str, says: str) -> None:
        assert self.said(text, {}) == says

    def test_a_value_of_the_config_is_named_as_ever(self) -> None:
        assert self.said("trainers.hero.gamma must be 1.", {"trainers": {"hero": {"gamma": 2}}}) == (
            "trainers.hero.gamma must be 1."
        )
