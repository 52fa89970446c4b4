"""A damaged checkpoint is refused with its place and what is wrong in it, or it works: no other error comes out."""

from __future__ import annotations

import copy
import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")

from safetensors.numpy import load_file, save_file

from envmanager.data.specs import zeros
from envmanager.errors import EnvManagerError, UsageError
from envmanager.training import load_policy
from envmanager.training.apart import LearnerFailed
from envmanager.training.checkpoints import restoring
from envmanager.training.run import Report, TrainingPlan, TrainingRun
from envmanager.training.saved import SavedTraining

DUEL = {
    "manager": {"kind": "simple", "env": "envmanager_tests.envs:Duel", "n_envs": 2, "wait": "all", "seed": 3},
    "training": {"steps": 48, "rounds": {"steps": 6, "train": [["hero"], ["target"]]}},
    "trainers": {"*": {"kind": "ppo", "rollout": 16, "epochs": 1, "hidden": [4], "normalize_rewards": True}},
}
CART_POLE = {
    "manager": {"kind": "simple", "env": "CartPole-v1", "n_envs": 2, "wait": "all", "env_kwargs": {}},
    "training": {"steps": 40},
    "trainers": {"default": {"kind": "ppo", "rollout": 32, "epochs": 1, "hidden": [4]}},
}
LEARNS_SOON = {"capacity": 100, "learning_starts": 16, "train_every": 8, "batch": 8, "hidden": [4]}
DQN = {**CART_POLE, "trainers": {"default": {"kind": "dqn", "prioritized": True, **LEARNS_SOON}}}
SAC = {
    "manager": {**CART_POLE["manager"], "env": "Pendulum-v1"},
    "training": {"steps": 40},
    "trainers": {"default": {"kind": "sac", "normalize_observations": True, "normalize_rewards": True, **LEARNS_SOON}},
}
VALUES: dict[str, Any] = {
    "null": None,
    "a number": 7,
    "a negative number": -1,
    "a fraction": 0.5,
    "a text": "text",
    "a list": [],
    "a full list": ["text", 7],
    "a dict": {},
    "a full dict": {"text": 7},
}


class Silent(Report):
    """Says nothing."""


class Damage(NamedTuple):
    """``do(folder)`` damages the checkpoint in a folder."""

    name: str
    do: Callable[[Path], None]


def trained(config: dict[str, Any], directory: Path, *, more_steps: int = 0) -> TrainingRun:
    """A training run that has ended; with ``more_steps`` one that went on with what is in ``directory``."""
    options = {**config["training"], "evaluation_episodes": 0, "device": "cpu"}
    options["steps"] += more_steps
    plan = TrainingPlan.parse({**config, "training": options}, directory, resume=more_steps > 0)
    run = TrainingRun(plan, Silent())
    run.go()
    return run


def checkpoint_in(run: Path) -> Path:
    (state,) = run.glob("checkpoints/*/state.json")
    return state.parent


# What can be damaged.


def json_damages(folder: Path) -> Iterator[Damage]:
    """Each node of its JSON deleted, or replaced by something else."""
    facts = json.loads((folder / "state.json").read_text())
    for path in node_paths(facts):
        where = ".".join(map(str, path)) or "the whole"
        if path:
            yield Damage(f"{where} deleted", lambda folder, path=path: write_json(folder, without(facts, path)))
        for name, value in VALUES.items():
            changed = lambda folder, path=path, value=value: write_json(folder, replaced(facts, path, value))  # noqa: E731
            yield Damage(f"{where} is {name}", changed)


def node_paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    children = node.items() if isinstance(node, dict) else enumerate(node[:2]) if isinstance(node, list) else ()
    for key, child in children:
        yield from node_paths(child, (*path, key))


def replaced(facts: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(facts)
    node_at(changed, path[:-1])[path[-1]] = value
    return changed


def without(facts: Any, path: tuple[Any, ...]) -> Any:
    changed = copy.deepcopy(facts)
    del node_at(changed, path[:-1])[path[-1]]
    return changed


def node_at(node: Any, path: Sequence[Any]) -> Any:
    for key in path:
        node = node[key]
    return node


def write_json(folder: Path, facts: Any) -> None:
    (folder / "state.json").write_text(json.dumps(facts))


def file_damages(folder: Path) -> Iterator[Damage]:
    """Each file cut short, emptied, filled with other bytes, made a folder, or removed."""
    for path in sorted(folder.iterdir()):
        name, content = path.name, path.read_bytes()
        for share in (0, 0.01, 0.5, 0.99):
            cut = content[: int(share * len(content))]
            yield Damage(f"{name} cut to {share:.0%}", lambda folder, name=name, cut=cut: write(folder / name, cut))
        yield Damage(f"{name} of other bytes", lambda folder, name=name: write(folder / name, b"\xff" * 5000))
        yield Damage(f"{name} removed", lambda folder, name=name: (folder / name).unlink())
        yield Damage(f"{name} a folder", lambda folder, name=name: make_folder(folder / name))
    yield Damage("state.json of many brackets", lambda folder: write(folder / "state.json", b"[" * 100_000))


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def array_damages(folder: Path) -> Iterator[Damage]:
    """Each array removed, or of another shape or dtype."""
    changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "flat and longer": lambda array: np.append(array.ravel(), array.ravel()[:1]),
        "one shorter": lambda array: array[:-1],
        "one longer": lambda array: np.concatenate([array, array[-1:]]),
        "of one more axis": lambda array: array[..., None],
        "one number": lambda array: np.resize(array, 1),
        "empty": lambda array: np.zeros(0, array.dtype),
        "of floats": lambda array: array.astype(np.float64),
        "of bytes": lambda array: array.astype(np.uint8),
        "of whole numbers": lambda array: array.astype(np.int64),
        "of flags": lambda array: array.astype(np.bool_),
    }
    for path in sorted(folder.glob("*.safetensors")):
        arrays = load_file(path)
        for name, array in arrays.items():
            where = f"{path.name}: {name}"
            rest = {other: value for other, value in arrays.items() if other != name}
            yield Damage(f"{where} removed", lambda folder, file=path.name, kept=rest: save_file(kept, folder / file))
            for what, change in changes.items():
                with np.errstate(all="ignore"):
                    kept = {**rest, name: np.ascontiguousarray(change(array))}
                if kept[name].shape == array.shape and kept[name].dtype == array.dtype:
                    continue
                yield Damage(
                    f"{where} {what}", lambda folder, file=path.name, kept=kept: save_file(kept, folder / file)
                )
        yield Damage(f"{path.name} without arrays", lambda folder, file=path.name: save_file({}, folder / file))


# What comes of it.


class Outcomes:
    """Calls on copies of one run, each of which was damaged: how many there were, and which raised other errors."""

    def __init__(self, config: dict[str, Any], run: Path) -> None:
        self.config = config
        self.run = run
        self.n_calls = self.n_refused = 0
        self.raw: list[str] = []
        self.unnamed: list[str] = []

    def add(self, damage: Damage, *, resumes: bool) -> None:
        copied = self.run.with_name("damaged")
        shutil.copytree(self.run, copied)
        damage.do(checkpoint_in(copied))
        self.call(damage, "load_policy", copied, self.load)
        self.call(damage, "manager_options", copied, lambda run: SavedTraining.open(run).manager_options())
        if resumes:
            self.call(damage, "resume", copied, lambda run: trained(self.config, run, more_steps=60))
        shutil.rmtree(copied)

    def load(self, run: Path) -> None:
        behavior = "default" if "default" in self.config["trainers"] else "hero"
        policy = load_policy(run, behavior=behavior)
        policy(zeros(policy.spec.observation, 3))

    def call(self, damage: Damage, what: str, run: Path, act: Callable[[Path], Any]) -> None:
        self.n_calls += 1
        try:
            act(run)
        except EnvManagerError as error:
            self.n_refused += 1
            if str(run) not in str(error):
                self.unnamed.append(f"{what}: {damage.name}: {error}")
        except Exception as error:
            self.raw.append(f"{what}: {damage.name}: {type(error).__name__}: {error}")

    def __str__(self) -> str:
        counts = f"{self.n_calls} calls, {self.n_refused} refused, {len(self.unnamed)} without the folder"
        return "\n".join([f"{counts}; {len(self.raw)} other errors", *self.unnamed, *self.raw])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("envmanager")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def run_of(config: dict[str, Any], folder: Path) -> Path:
    run = folder / "run"
    run.mkdir()
    if config is DUEL:
        (run / "control.toml").write_text("frozen = ['target']")  # so that the checkpoint tells of a change
    trained(config, run)
    return run


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(CART_POLE, tmp_path_factory.mktemp("one"))


def all_damages(run: Path) -> list[Damage]:
    folder = checkpoint_in(run)
    return [*json_damages(folder), *file_damages(folder), *array_damages(folder)]


@pytest.mark.parametrize("config", [CART_POLE, DUEL], ids=["CartPole", "Duel"])
def test_a_damaged_checkpoint_is_refused_with_its_folder_or_works(config: dict[str, Any], tmp_path: Path) -> None:
    outcomes = Outcomes(config, run_of(config, tmp_path))
    damages = all_damages(outcomes.run)
    for number, damage in enumerate(random.Random(1).sample(damages, 40)):
        outcomes.add(damage, resumes=number % 3 == 0)
    assert not outcomes.raw + outcomes.unnamed, str(outcomes)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda facts: facts.update(parts=None), "state.json: parts should be a mapping, but is None"),
        (lambda facts: facts["parts"].pop("controller"), "parts.controller should be a mapping, but is None"),
        (lambda facts: facts["parts"]["controller"].pop("n_steps"), "parts.controller.n_steps is missing"),
        (
            lambda facts: facts["parts"]["controller"]["recent_episodes"][0].pop(),
            r"recent_episodes\[0\] should be a list of behavior, agent_id, total, length, but is a list",
        ),
        (
            lambda facts: facts["parts"]["controller"]["specs"]["default"]["action"].update(dtype=None),
            "specs.default should be a spec of observations and actions, but is a dict",
        ),
    ],
)
def test_the_file_the_key_and_what_to_do_are_said(
    one_run: Path, damage: Callable[[Any], None], words: str, tmp_path: Path
) -> None:
    run = shutil.copytree(one_run, tmp_path / "run")
    facts = json.loads((checkpoint_in(run) / "state.json").read_text())
    damage(facts)
    write_json(checkpoint_in(run), facts)
    for act in (load_policy, lambda run: trained(CART_POLE, run, more_steps=20)):
        with pytest.raises(UsageError, match=rf"{checkpoint_in(run)} cannot be read: .*{words}.*write its name into"):
            act(run)


def test_arrays_of_the_optimizer_that_are_of_another_shape_are_refused(one_run: Path, tmp_path: Path) -> None:
    """PyTorch's fused step writes beyond the end of the smaller one."""
    run = shutil.copytree(one_run, tmp_path / "run")
    file = checkpoint_in(run) / "trainer-default.safetensors"
    arrays = load_file(file)
    save_file({**arrays, "optimizer.0.exp_avg": arrays["optimizer.0.exp_avg"][:1]}, file)
    with pytest.raises(UsageError, match=r"optimizer.0.exp_avg should have the shape \[4, 4\], but is float32\[1, 4\]"):
        trained(CART_POLE, run, more_steps=20)


def test_of_an_error_that_holds_a_traceback_the_last_line_is_said() -> None:
    learner = LearnerFailed("the learner raised:\nTraceback (most recent call last):\n  File …\nValueError: seven\n")
    words = r"^it does not fit: ValueError: seven\. Take care\.$"
    with pytest.raises(UsageError, match=words), restoring("it does not fit", advice="Take care."):
        raise learner


def test_a_training_goes_on_from_the_checkpoint_whose_name_is_written_into_latest(tmp_path: Path) -> None:
    config = {**CART_POLE, "training": {**CART_POLE["training"], "checkpoint_every": 20}}
    trained(config, tmp_path)
    (tmp_path / "checkpoints" / "000000000040" / "state.json").write_text("")
    with pytest.raises(UsageError, match=r"000000000040 cannot be read: state\.json: .*write its name into"):
        trained(config, tmp_path, more_steps=20)

    (tmp_path / "checkpoints" / "latest").write_text("000000000020")

    assert trained(config, tmp_path, more_steps=20).n_steps_before == 20


def test_what_a_later_version_says_besides_is_passed_over(one_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(one_run, tmp_path / "run")
    facts = json.loads((checkpoint_in(run) / "state.json").read_text())
    for table in (facts, facts["parts"]["controller"], facts["parts"]["trainer-default"]):
        table["later"] = {"than": ["this"]}
    write_json(checkpoint_in(run), facts)
    assert load_policy(run).n_steps == 40
    assert trained(CART_POLE, run, more_steps=20).n_steps_before == 40


@pytest.mark.load
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("config", [CART_POLE, DUEL, DQN, SAC], ids=["CartPole", "Duel", "DQN", "SAC"])
def test_each_way_to_damage_a_checkpoint_is_refused_with_its_folder_or_works(
    config: dict[str, Any], tmp_path: Path
) -> None:
    outcomes = Outcomes(config, run_of(config, tmp_path))
    for damage in all_damages(outcomes.run):
        outcomes.add(damage, resumes=True)
    print(outcomes)
    assert not outcomes.raw + outcomes.unnamed, str(outcomes)
