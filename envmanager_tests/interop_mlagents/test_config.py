"""Mistakes in ML-Agents' own config files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mlagents")

from mlagents.plugins.trainer_type import get_default_trainer_types
from mlagents.trainers.exception import TrainerConfigError
from mlagents.trainers.settings import RunOptions

from envmanager.interop.mlagents import config_errors


def behavior(**settings):
    return {"behaviors": {"Corridor": {"trainer_type": "ppo", **settings}}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (behavior(hyperparameters={"batch_sizes": 64}), "The option batch_sizes was specified"),
        (behavior(trainer_type="pppo"), "Invalid trainer type pppo"),
        (behavior(time_horizn=3), "The option time_horizn was specified"),
        (behavior(time_horizon="abc"), "invalid literal for int"),
        (behavior(reward_signals={"extrinsic": {"gama": 1}}), "The option gama was specified"),
        (
            {"environment_parameters": {"hint": {"sampler_type": "unifrm", "sampler_parameters": {}}}},
            "'unifrm' @ config.environment_parameters",
        ),
    ],
    ids=["hyperparameter", "trainer", "setting", "type", "reward signal", "sampler"],
)
def test_a_mistake_is_ml_agents_own_error_with_its_place(config, said):
    get_default_trainer_types()

    with pytest.raises(TrainerConfigError) as caught, config_errors():
        RunOptions.from_dict(config)

    place = "config.environment_parameters" if "unifrm" in said else "config.behaviors['Corridor']"
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith(f" @ {place}")
    assert "\n" not in str(caught.value)


def test_every_mistake_has_a_line():
    get_default_trainer_types()
    config = behavior(time_horizn=3)
    config["behaviors"]["Other"] = {"trainer_type": "nothing"}

    with pytest.raises(TrainerConfigError) as caught, config_errors():
        RunOptions.from_dict(config)

    assert [line.rpartition(" @ ")[2] for line in str(caught.value).splitlines()] == [
        "config.behaviors['Corridor']",
        "config.behaviors['Other']",
    ]


def test_a_config_without_mistakes_is_read_and_other_errors_come_as_they_are():
    get_default_trainer_types()
    with config_errors():
        assert RunOptions.from_dict(behavior(time_horizon=3)).behaviors["Corridor"].time_horizon == 3
    with pytest.raises(KeyError), config_errors():
        raise KeyError("mine")


def test_the_script_of_the_documentation_says_what_is_wrong_with_its_config(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "mlagents.md").read_text("utf-8")
    (script,) = re.findall(r'```python title="train_with_mlagents.py"\n(.*?)```', page, re.S)
    (tmp_path / "train_with_mlagents.py").write_text(script, "utf-8")
    (tmp_path / "game.py").write_text("make_env = None")
    (tmp_path / "config.yaml").write_text("behaviors: {Corridor: {trainer_type: ppo, time_horizn: 3}}", "utf-8")
    command = [sys.executable, "-W", "ignore", "train_with_mlagents.py", "config.yaml", "--run-id=first"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environ)

    assert ended.returncode == 1
    assert "cattrs" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(
        "mlagents.trainers.exception.TrainerConfigError: The option time_horizn was specified"
    )
