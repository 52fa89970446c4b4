"""Config files become the tables `manager` and `run`, or an error that names the file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from envmanager.cli.config_files import RUN_TABLES, TRAINING_TABLES, load_config, parse
from envmanager.errors import ConfigError, MissingExtra

TOML = """
[manager]
env = "CartPole-v1"
n_envs = 8
timeouts = { step_s = inf }

[run]
steps = 100
"""
YAML = """
manager:
  env: CartPole-v1
  n_envs: 8
  timeouts: {step_s: .inf}
run:
  steps: 100
"""
JSON = '{"manager": {"env": "CartPole-v1", "n_envs": 8, "timeouts": {"step_s": Infinity}}, "run": {"steps": 100}}'
TABLES = {
    "manager": {"env": "CartPole-v1", "n_envs": 8, "timeouts": {"step_s": float("inf")}},
    "run": {"steps": 100},
}


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML), ("A.TOML", TOML), ("a.json", JSON)]
)
def test_toml_yaml_and_json_give_the_same_tables(tmp_path, name, text):
    assert load_config(write(tmp_path, name, text)) == TABLES


@pytest.mark.parametrize("text", ["", "manager:\n", "# nothing\n"])
def test_tables_that_are_left_out_are_empty(tmp_path, text):
    assert load_config(write(tmp_path, "a.yaml", text)) == {"manager": {}, "run": {}}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.ini", "{}", r"a\.ini is not a config file: its name should end in \.toml, \.yaml, \.yml, \.json"),
        ("a.toml", "[manager", r"a\.toml is not valid TOML"),
        ("a.json", "{", r"a\.json is not valid JSON"),
        ("a.yaml", "manager: [", r"a\.yaml is not valid YAML"),
        ("a.toml", f"n_envs = {'1' * 5000}", r"a\.toml is not valid TOML"),
        ("a.toml", f"n_envs = {'[' * 3000}", r"a\.toml is not valid TOML"),
        ("a.toml", f"manager = {{n_envs = 0x{'f' * 5000}}}", r"a\.toml is not valid TOML"),
        ("a.toml", f"manager = {{n_envs = -0x{'f_' * 1000}f}}", "a number has more than 1,000 digits"),
        ("a.yaml", f"manager: {{n_envs: {'1:' * 1000}1}}", "a number has more than 1,000 digits"),
        ("a.yaml", f"manager: {{n_envs: 0b{'1' * 20_000}}}", "a number has more than 1,000 digits"),
        ("a.json", f'{{"n_envs": {"1" * 5000}}}', "a number has more than 1,000 digits"),
        ("a.json", "[" * 100_000, r"a\.json is not valid JSON"),
        ("a.yaml", f"n_envs: {'1' * 5000}", r"a\.yaml is not valid YAML"),
        ("a.yaml", f"manager: {{n_envs: 0x{'f' * 5000}}}", r"a\.yaml is not valid YAML"),
        ("a.yaml", "[" * 3000, r"a\.yaml is not valid YAML"),
        ("a.yaml", "since: 2024-13-45", r"a\.yaml is not valid YAML"),
        ("a.yaml", "flag: !!bool maybe", r"a\.yaml is not valid YAML"),
        (
            "a.yaml",
            "manager:\n  env: x\n   n_envs: 4\n",
            r"a\.yaml is not valid YAML, line 3, column 10: mapping values",
        ),
        ("a.toml", "[manager]\nenv = \n", r"a\.toml is not valid TOML: .* line 2, column 7"),
        ("a.json", '{"manager":\n  {"env": }}', r"a\.json is not valid JSON: .* line 2 column 11"),
        ("a.yaml", "steps: 4", r"no table steps; did you mean run\.steps\?"),
        ("CartPole-v1", "", r"To name an environment: --env .*CartPole-v1"),
        ("a.yaml", "- 1", "should hold the tables manager and run, but is a list"),
        ("a.toml", "[managre]", r"no table managre; did you mean manager\?"),
        ("a.toml", "n_envs = 3", r"no table n_envs; did you mean manager\.n_envs\? Known tables: manager, run"),
        ("a.toml", "manager = 3", "manager should be a table, but is int 3"),
        (
            "a.yaml",
            "run: {steps: 1}\nmanager:\nrun: {seed: 1}",
            r"line 3, column 1: the key 'run' is in line 1 already",
        ),
        ("a.yaml", "run: {steps: 1,\n  'steps': 2}", r"line 2, column 3: the key 'steps' is in line 1 already"),
        ("a.yaml", "manager: {env_kwargs: {yes: 1, true: 2}}", r"the key 'true' is in line 1 already"),
        ("a.json", '{"run": {"steps": 1, "steps": 2}}', r"a\.json is not valid JSON: the key 'steps' comes twice"),
        ("a.toml", "[run]\nsteps = 1\n[manager]\n[run]\nseed = 1", r"a\.toml is not valid TOML: .*line 4"),
        ("robot.py", "", r"To name an environment: --env robot:NAME"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, name, text, message):
    with pytest.raises(ConfigError, match=message) as raised:
        load_config(write(tmp_path, name, text))
    assert "\n" not in str(raised.value)


def test_a_module_in_the_place_of_a_training_config_is_named_as_a_config_names_it():
    with pytest.raises(ConfigError, match=r"write a config with manager: \{env: games.robot:NAME\}"):
        load_config(Path("games/robot.py"), TRAINING_TABLES)


def test_a_merged_key_may_be_overridden(tmp_path):
    text = "a: &a {x: 1}\nb: &b {<<: *a, x: 2}"
    assert parse(text, "YAML", "it") == {"a": {"x": 1}, "b": {"x": 2}}


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"There is no config file .*nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml")


def test_yaml_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)

    with pytest.raises(MissingExtra, match=r"pip install 'envmanager\[cli\]'"):
        load_config(write(tmp_path, "a.yaml", YAML))


def test_toml_falls_back_on_tomli(tmp_path, monkeypatch):
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"  # they are the same code
    monkeypatch.setitem(sys.modules, "tomli", importlib.import_module(name))
    monkeypatch.setitem(sys.modules, "tomllib", None)

    assert load_config(write(tmp_path, "a.toml", TOML)) == TABLES


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.0e-3", 0.001),
        ("1.0e3", 1000.0),
        ("3e5", 300000.0),
        ("-2E+2", -200.0),
        (".5", 0.5),
        ("+.5e1", 5.0),
        ("5.", 5.0),
        ("16", 16),
        ("1_000", 1000),
        (".inf", float("inf")),
        ("true", True),
        ("yes", True),
        ("off", False),
        ("no", False),
        ("null", None),
        ("'1e-3'", "1e-3"),
        ("1e-3s", "1e-3s"),
        ("e3", "e3"),
        (".", "."),
        ("1.2.3", "1.2.3"),
        ("007e", "007e"),
        ("my.module:Env-v0", "my.module:Env-v0"),
    ],
)
def test_numbers_in_yaml_are_those_that_look_like_numbers(tmp_path, text, value):
    read = load_config(write(tmp_path, "a.yaml", f"manager: {{x: {text}}}\n"))["manager"]["x"]
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("tables", "text", "message"),
    [
        (
            RUN_TABLES,
            "trainers: {}",
            "is the config of a training run: it has the table trainers. Use: envmanager train ",
        ),
        (RUN_TABLES, "training: {}", "Use: envmanager train "),
        (TRAINING_TABLES, "run: {}", "is the config of a run: it has the table run. Use: envmanager run "),
    ],
)
def test_a_config_of_another_command_is_told_which(tmp_path, tables, text, message):
    path = write(tmp_path, "a.yaml", f"manager: {{}}\n{text}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path, tables)
    assert message in str(raised.value)
    assert str(raised.value).endswith(str(path))
