"""Policies of a training run that was saved, without its environment."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from envmanager import ActionInfo, AgentSteps, RandomPolicy, SimpleEnvManager, UsageError
from envmanager.data.trees import leaves, map_tree, take_rows
from envmanager.training import load_policy
from envmanager.training.policies.saved import SavedTraining, with_n_envs
from envmanager.training.runs import checkpoints
from envmanager.training.trainer import Trainer
from envmanager_tests.training.puzzles import PUZZLE, SMALL_DQN, SMALL_PPO, SPEAKERS, Puzzle, rewrite, trained

CART_POLE = "CartPole-v1"
NORMALIZED = {**SMALL_PPO, "normalize_observations": True}


def seen(env: str, n: int = 40) -> dict[str, AgentSteps]:
    """What agents see after ``n`` random steps in three environments."""
    with SimpleEnvManager(env, n_envs=3, seed=5) as manager:
        for behavior, spec in manager.behavior_specs.items():
            manager.set_policy(behavior, RandomPolicy(spec))
        manager.reset()
        for _ in range(n):
            (info,) = manager.step()
        return {behavior: steps.copy() for behavior, steps in info.current.items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    trained(tmp_path / "run", CART_POLE, {"default": SMALL_PPO})
    return tmp_path / "run"


@pytest.fixture
def nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an environment was made")

    monkeypatch.setattr(gymnasium, "make", refuse)
    monkeypatch.setattr(Puzzle, "__init__", refuse)


@pytest.mark.parametrize(
    ("env", "trainer"),
    [
        (CART_POLE, SMALL_PPO),
        (CART_POLE, NORMALIZED),
        (CART_POLE, SMALL_DQN),
        (CART_POLE, {**SMALL_DQN, "apart": 100}),
        ("Pendulum-v1", NORMALIZED),
        (PUZZLE, SMALL_PPO),
    ],
    ids=str,
)
def test_a_saved_policy_acts_as_the_one_that_was_trained(
    tmp_path: Path, env: str, trainer: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    steps = seen(env)["default"]
    run = trained(tmp_path, env, {"default": trainer})
    own = run.trainers["default"].greedy_policy().get_action(steps).action
    request.getfixturevalue("nothing_is_made")

    policy = load_policy(tmp_path)

    assert policy.spec == run.manager.behavior_specs["default"]  # type: ignore[union-attr]
    assert policy.n_steps == run.controller.n_steps  # type: ignore[union-attr]
    for acted in (policy.get_action(steps).action, policy(steps.obs)):
        for got, wanted in zip(leaves(acted), leaves(own), strict=True):
            np.testing.assert_array_equal(got, wanted)
            assert got.dtype == wanted.dtype


@pytest.mark.parametrize("env", [CART_POLE, "Pendulum-v1", PUZZLE, "FrozenLake-v1"])
def test_one_observation_gives_one_action_that_the_environment_accepts(tmp_path: Path, env: str) -> None:
    pytest.importorskip("pygame")
    trained(tmp_path, env, {"default": SMALL_PPO})
    policy = load_policy(tmp_path)
    made = Puzzle() if env == PUZZLE else gymnasium.make(env)
    obs, _ = made.reset(seed=3)

    for _ in range(5):
        action = policy(obs)
        assert made.action_space.contains(action)
        obs, *_ = made.step(action)
    batch = policy(map_tree(lambda leaf: np.stack([leaf] * 4), obs))
    for of_one, of_several in zip(leaves(policy(obs)), leaves(batch), strict=True):
        assert of_several.shape == (4, *np.shape(of_one))
        np.testing.assert_allclose(of_several[2], of_one, rtol=1e-5)
    made.close()


def test_no_observations_give_no_actions(run: Path) -> None:
    assert load_policy(run)(np.zeros((0, 4), np.float32)).shape == (0,)


def test_lists_and_other_dtypes_are_taken_where_every_value_fits(run: Path) -> None:
    policy = load_policy(run)
    obs = np.array([0.5, -1, 0.25, 2], np.float32)

    assert policy(obs.tolist()) == policy(obs.astype(np.float64)) == policy(torch.from_numpy(obs)) == policy(obs)


@pytest.mark.parametrize(
    ("obs", "words"),
    [
        (np.zeros(3, np.float32), r"obs should be float32\[4\] or float32\[n, 4\], but is float32\[3\]"),
        (np.zeros((2, 2, 4), np.float32), r"float32\[2, 2, 4\]"),
        ({"camera": np.zeros(4)}, "but is a dict with keys"),
        (["a", "b", "c", "d"], "but is"),
        ([[1, 2], [3]], "cannot be made an array"),
        (None, "but is None"),
    ],
    ids=str,
)
def test_what_is_no_observation_is_refused(run: Path, obs: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_policy(run)(obs)


def test_a_tree_that_is_one_observation_in_part_and_a_batch_in_part_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, PUZZLE, {"*": SMALL_PPO})
    policy, obs = load_policy(tmp_path), Puzzle.observation_space.sample()
    obs["body"] = take_rows(obs["body"], None)  # a first axis

    with pytest.raises(UsageError, match="neither one observation nor a batch"):
        policy(obs)
    with pytest.raises(UsageError, match=r"a dict with keys \['body', 'camera', 'place'\]"):
        policy({"camera": obs["camera"]})


@pytest.mark.usefixtures("speakers")
def test_of_several_behaviors_one_has_to_be_named(tmp_path: Path) -> None:
    run = trained(tmp_path, SPEAKERS, {"speaker": SMALL_PPO, "listener": {**SMALL_PPO, "frozen": True}})
    steps = seen(SPEAKERS, n=7)

    with pytest.raises(UsageError, match=r"several behaviors: say which one .* of 'speaker', 'listener'"):
        load_policy(tmp_path)
    with pytest.raises(UsageError, match=r"'speakr', which is not known; did you mean speaker"):
        load_policy(tmp_path, behavior="speakr")
    for behavior in ("speaker", "listener"):
        policy = load_policy(tmp_path, behavior=behavior)
        own = run.trainers[behavior].greedy_policy().get_action(steps[behavior]).action
        np.testing.assert_array_equal(policy(steps[behavior].obs), own)


# Which checkpoint.


def copied(checkpoint: Path, name: str, n_steps: int) -> Path:
    """Another checkpoint beside this one."""
    other = checkpoint.with_name(name)
    shutil.copytree(checkpoint, other)
    rewrite(other / "state.json", '"n_steps": 201', f'"n_steps": {n_steps}')
    return other


@pytest.fixture
def several(run: Path) -> Path:
    """A run with the checkpoints of 100 steps, twice, and of 201, the latest."""
    latest = checkpoints.latest(run / "checkpoints")
    copied(latest, "000000000100", 100)
    copied(latest, "000000000100-2", 102)
    return run


@pytest.mark.parametrize(
    ("where", "checkpoint", "n_steps"),
    [
        (".", "latest", 201),
        ("checkpoints", "latest", 201),
        (".", 201, 201),
        (".", 100, 102),
        (".", "100", 102),
        (".", "000000000100", 100),
        ("checkpoints", "000000000100-2", 102),
        ("checkpoints/000000000100", "latest", 100),
    ],
)
def test_a_checkpoint_is_found_by_its_steps_by_its_name_and_by_its_folder(
    several: Path, where: str, checkpoint: str | int, n_steps: int
) -> None:
    assert load_policy(several / where, checkpoint=checkpoint).n_steps == n_steps
    assert load_policy(str(several / where), checkpoint=checkpoint).n_steps == n_steps


def test_the_best_is_what_a_link_or_a_file_says(several: Path) -> None:
    best = several / "checkpoints" / "best"

    best.symlink_to("000000000100")
    assert load_policy(several, checkpoint="best").n_steps == 100
    assert load_policy(best).n_steps == 100
    best.unlink()
    best.write_text("000000000100-2\n17.5\n")
    assert load_policy(several, checkpoint="best").n_steps == 102


@pytest.mark.parametrize("checkpoint", ["best", 7, "7", "nothing", -1])
def test_a_checkpoint_that_there_is_not_is_refused_with_those_that_there_are(
    several: Path, checkpoint: str | int
) -> None:
    with pytest.raises(UsageError, match=r"There is: 000000000100, 000000000100-2, 000000000201"):
        load_policy(several, checkpoint=checkpoint)


def test_one_checkpoint_and_the_name_of_another_contradict_each_other(several: Path) -> None:
    with pytest.raises(UsageError, match="is one checkpoint"):
        load_policy(several / "checkpoints" / "000000000100", checkpoint=201)


@pytest.mark.parametrize("make", [lambda _: None, Path.mkdir, Path.touch], ids=["nothing", "a folder", "a file"])
def test_where_there_is_no_training_that_is_said(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path / "run")
    with pytest.raises(UsageError, match=r"there is no checkpoint in .*run: name the folder"):
        load_policy(tmp_path / "run")


def test_a_name_that_no_file_can_have_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        load_policy(tmp_path / ("x" * 300))


def test_a_checkpoint_that_is_damaged_is_refused(run: Path) -> None:
    for file in (run / "checkpoints").glob("*/*default*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UsageError, match="cannot be read"):
        load_policy(run)


def test_a_checkpoint_that_is_replaced_while_it_is_read_gives_way_to_the_newer_one(
    several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = several / "checkpoints" / "latest"
    newest, load = latest.read_text(), checkpoints.load
    latest.write_text("removed")

    def load_late(path: Path) -> checkpoints.Checkpoint:
        latest.write_text(newest)
        return load(path)

    monkeypatch.setattr(checkpoints, "load", load_late)
    assert load_policy(several).n_steps == 201


# What a checkpoint says.


def test_options_that_json_cannot_hold_are_said_to_be_missing(tmp_path: Path) -> None:
    trained(tmp_path, CART_POLE, {"default": {**SMALL_PPO, "hidden": {16}}})
    with pytest.raises(UsageError, match=r"options of its trainers were given as objects"):
        load_policy(tmp_path)


def test_only_what_acts_is_read_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, CART_POLE, {"default": SMALL_DQN})
    read: list[str] = []
    take = checkpoints.ArrayFile.__getitem__

    def noted(file: checkpoints.ArrayFile, name: str) -> np.ndarray:
        read.append(name)
        return take(file, name)

    monkeypatch.setattr(checkpoints.ArrayFile, "__getitem__", noted)
    load_policy(tmp_path)
    assert read
    assert {name.partition(".")[0] for name in read} == {"model"}


def test_a_training_of_what_no_text_names_acts_but_does_not_know_its_environment(tmp_path: Path) -> None:
    trained(tmp_path, lambda: gymnasium.make(CART_POLE), {"default": SMALL_PPO})

    assert load_policy(tmp_path)(np.zeros(4, np.float32)) in (0, 1)
    with pytest.raises(UsageError, match="its environment was given as an object or a function"):
        SavedTraining.open(tmp_path).manager_options()
    assert SavedTraining.open(tmp_path).manager_options(env=CART_POLE).env == CART_POLE


def test_the_managers_options_are_those_of_the_training_but_for_what_may_be_secret(tmp_path: Path) -> None:
    own = {"n_envs": 6, "n_workers": 3, "local_envs": 2, "wait": {"max_lead": 4}, "worker_env": {"TOKEN": "s3cret"}}
    trained(tmp_path, CART_POLE, {"default": SMALL_PPO}, **own, timeouts={"step_s": 7}, restarts={"max_restarts": 1})
    training = SavedTraining.open(tmp_path)

    options = training.manager_options()
    assert (options.kind, options.env, options.n_envs, options.n_workers) == ("simple", CART_POLE, 6, 3)
    assert (options.wait.max_lead, options.timeouts.step_s, options.restarts.max_restarts) == (4, 7, 1)
    assert options.worker_env is None
    assert "s3cret" not in (training.path / "state.json").read_text()
    fewer = with_n_envs(training.manager_options(kind="subprocess"), 2)
    assert (fewer.kind, fewer.n_envs, fewer.n_workers, fewer.local_envs) == ("subprocess", 2, 1, 1)
    assert with_n_envs(options, 1).local_envs == 0


def test_policies_that_do_not_fit_an_environment_are_refused(run: Path) -> None:
    with (
        SimpleEnvManager("Acrobot-v1") as manager,
        pytest.raises(
            UsageError, match=r"trained with observation float32\[4\].*now there is observation float32\[6\]"
        ),
    ):
        SavedTraining.open(run).policies_for(manager.behavior_specs)


# Trainers of other packages.


class Stubborn(Trainer):
    """Learns which action it was told to take, and takes it."""

    def __init__(self, behavior: str, spec: Any, options: Any, *, seed: int, device: str) -> None:
        self.behavior = behavior
        self.policy = RandomPolicy(spec)
        self._action = options["action"]
        self._learned = 0

    def add(self, info: Any) -> int:
        return len(info.transitions(self.behavior).reward)

    def is_ready(self) -> bool:
        return False

    def update(self, progress: float) -> dict[str, float]:
        return {}

    def greedy_policy(self) -> Any:
        trainer = self

        class Greedy:
            def get_action(self, steps: AgentSteps) -> ActionInfo:
                return ActionInfo(np.full(len(steps), trainer._learned))

        return Greedy()

    def state(self) -> Any:
        return {"action": np.array([self._action])}, {}

    def restore(self, arrays: Any, facts: Any) -> None:
        self._learned = int(arrays["action"][0])


@pytest.fixture
def of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer ``stubborn`` is an entry point."""
    point = importlib.metadata.EntryPoint("stubborn", f"{__name__}:Stubborn", "envmanager.trainers")
    points = importlib.metadata.EntryPoints([point])
    monkeypatch.setattr("envmanager.importing.entry_points", lambda **which: points.select(**which))


@pytest.mark.usefixtures("of_another_package")
def test_a_trainer_of_another_package_acts_by_its_own_restore_and_greedy_policy(tmp_path: Path) -> None:
    trained(tmp_path, CART_POLE, {"default": {"kind": "stubborn", "action": 1}})
    policy = load_policy(tmp_path)

    assert policy(np.zeros((3, 4), np.float32)).tolist() == [1, 1, 1]
    with pytest.raises(UsageError, match=r"Stubborn has no greedy_module"):
        policy.module()
