"""Options are suggested for the names that other libraries give them; nothing is suggested rather than the wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from envmanager.adapters.other_names import other_names
from envmanager.cli.config_files import load_config
from envmanager.errors import ConfigError
from envmanager.importing import nearest
from envmanager.registry import ManagerOptions
from envmanager.structuring import structure
from envmanager.training.runs.plan import TrainingOptions

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
MLAGENTS = """
behaviors:
  Ball:
    trainer_type: ppo
    hyperparameters: {batch_size: 64, buffer_size: 12000}
"""
THE_SAME = {"gamma", "learning_rate", "ppo", "sac", "extrinsic", "linear", "behaviors", "NAME"}
THE_SAME |= {"uniform", "mean", "name", "value", "measure", "reward", "progress", "behavior", "threshold"}
NO_OPTIONS = {
    "run_id",
    "results",
    "resume",
    "force",
    "onnx",
    "env_settings",
    "gravity",
    "gaussian",
    "multirangeuniform",
}
"""Flags, files, tables and values on the page."""
NOT_HERE = {"sampler_parameters", "seed", "Elo", "signal_smoothing", "require_reset", "true", "curriculum"}
"""What the page says not to exist here, or whose value has another form."""


def names_on_the_page(section: str) -> set[str]:
    """The names of options in the first column of a section's table."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## From {section}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    words = [word for row in rows for cell in re.findall(r"`([^`]*)`", row) for word in re.findall(r"[\w-]{3,}", cell)]
    return {word.removeprefix("--").replace("-", "_") for word in words if not word.isdecimal()}


def test_a_config_of_mlagents_is_recognised(tmp_path):
    (tmp_path / "ball.yaml").write_text(MLAGENTS)

    for tables in (("manager", "run"), ("manager", "training", "trainers")):
        with pytest.raises(ConfigError, match=r"looks like a config of ML-Agents.*docs/coming-from\.md"):
            load_config(tmp_path / "ball.yaml", tables)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("trainer_type", "kind"),
        ("num_envs", "n_envs"),
        ("total_timesteps", "training.steps"),
        ("max_steps", "training.steps"),
        ("keep_checkpoints", "training.keep"),
        ("self_play", "training.rounds"),
        ("n_steps", "rollout"),
        ("num_layers", "hidden"),
        ("policy_kwargs", "hidden"),
        ("beta", "entropy_coefficient"),
        ("lambd", "gae_lambda"),
    ],
)
def test_a_name_of_another_library_is_suggested_as_it_is_called_here(name, here):
    options = ["kind", "n_envs", "rollout", "hidden", "entropy_coefficient", "gae_lambda"]

    place = here if "." in here else f"there.{here}"
    assert f"here it is {place} " in str(other_names(name, "there", options))


def test_every_option_of_mlagents_on_the_page_is_known():
    options = ["kind", "rollout", "minibatch", "epochs", "anneal", "entropy_coefficient", "clip", "gae_lambda"]
    options += ["hidden", "normalize_observations", "gamma"]
    options += ["sampler", "min", "max", "std", "ranges", "until", "episodes"]
    names = names_on_the_page("ML-Agents") - THE_SAME - NO_OPTIONS - NOT_HERE

    assert len(names) > 12
    assert {name for name in names if other_names(name, "trainers.Ball", options) is None} == set()


def test_a_name_that_means_another_option_of_this_kind_is_that():
    assert "trainers.x.capacity" in str(other_names("buffer_size", "trainers.x", ["capacity", "batch"]))
    assert "trainers.x.batch " in str(other_names("batch_size", "trainers.x", ["capacity", "batch"]))
    assert other_names("clip_range", "trainers.x", ["capacity", "batch"]) is None


@pytest.mark.parametrize(
    ("cls", "name", "said"),
    [
        (ManagerOptions, "num_envs", "no option x.num_envs: here it is x.n_envs "),
        (ManagerOptions, "n_env", "no option x.n_env; did you mean x.n_envs?"),
        (TrainingOptions, "total_timesteps", "no option x.total_timesteps: here it is x.steps "),
        (TrainingOptions, "frame_stack", r"no option x.frame_stack\. Known"),
    ],
)
def test_a_config_with_such_a_name_says_so(cls, name, said):
    with pytest.raises(ConfigError, match=said):
        structure(cls, {name: 1}, where="x")


@pytest.mark.parametrize("name", ["policy_path", "init_path", "threaded", "summary_freq", "vec_env_cls"])
def test_nothing_is_suggested_rather_than_the_wrong(name):
    options = ["rollout", "minibatch", "policy_gain", "reward_scale", "normalize_rewards", "max_grad_norm", "n_envs"]

    assert nearest(name, options) == "."


@pytest.mark.parametrize(("name", "known"), [("dir", "directory"), ("cvs", "csv"), ("stpes", "steps")])
def test_a_short_name_that_is_cut_or_has_two_letters_swapped_is_recognised(name, known):
    assert nearest(name, ["rollout", known]) == f"; did you mean {known}?"


@pytest.mark.parametrize(
    ("name", "known"), [("PPO", "ppo"), ("cartpole-V1", "CartPole-v1"), ("Learning_Rate", "learning_rate")]
)
def test_a_name_in_another_case_is_recognised(name, known):
    assert nearest(name, ["rollout", known]) == f"; did you mean {known}?"
