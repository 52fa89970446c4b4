"""A damaged checkpoint is refused with its place and what is wrong in it. Damage where nobody looks does no harm."""

from __future__ import annotations

import copy
import json
import logging
import os
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
from envmanager.errors import EnvManagerError, NotWritten, UsageError
from envmanager.keeping.state import checksum_of
from envmanager.training import load_policy
from envmanager.training.learner_process import LearnerFailed
from envmanager.training.policies.saved import SavedTraining
from envmanager.training.runs import checkpoints
from envmanager.training.runs.checkpoints import CheckpointDamaged, restoring
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun
from envmanager_tests.training.killable import digests, plan_of

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
            if json.dumps(value) == json.dumps(node_at(facts, path)):
                continue
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
        self.call(damage, "load_policy", copied, lambda run: self.same_as_before(self.load(run)))
        self.call(damage, "manager_options", copied, lambda run: SavedTraining.open(run).manager_options())
        if resumes:
            self.call(damage, "resume", copied, lambda run: self.must_refuse(run))
        shutil.rmtree(copied)

    def load(self, run: Path) -> Any:
        behavior = "default" if "default" in self.config["trainers"] else "hero"
        policy = load_policy(run, behavior=behavior)
        return policy(zeros(policy.spec.observation, 3))

    def same_as_before(self, action: Any) -> None:
        np.testing.assert_array_equal(action, self.load(self.run))

    def must_refuse(self, run: Path) -> None:
        trained(self.config, run, more_steps=60)
        raise AssertionError("it went on")

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


def whole(folder: Path) -> tuple[Any, ...]:
    """All that a checkpoint says, in a form that can be compared."""
    found = checkpoints.load(folder)
    read = {name: (facts, arrays_of(arrays)) for name, (arrays, facts) in found.trainers.items()}
    place = None if found.place is None else (arrays_of(found.place[0]), found.place[1])
    return found.run, found.training, read, arrays_of(found.generators), place


def arrays_of(arrays: Any) -> dict[str, Any]:
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}


@pytest.mark.parametrize("config", [DUEL, DQN, SAC], ids=["Duel", "DQN", "SAC"])
def test_no_changed_byte_of_any_file_goes_unnoticed(config: dict[str, Any], tmp_path: Path) -> None:
    """Weights, optimizer, replay, normalization, counts, generators and options."""
    folder = checkpoint_in(run_of(config, tmp_path))
    before, rng, n_refused = whole(folder), random.Random(2), 0
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for place in rng.sample(range(len(content)), 60):
            changed = bytearray(content)
            changed[place] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
            try:
                found = whole(folder)
            except CheckpointDamaged as error:
                n_refused += path.name in str(error)
            else:
                assert found == before, f"{path.name}: byte {place}"  # that of a space, for example
        path.write_bytes(content)
    assert n_refused > 150
    assert whole(folder) == before


def test_a_changed_weight_is_refused_by_all_who_would_use_it(one_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(one_run, tmp_path / "run")
    file = checkpoint_in(run) / "trainer-default.safetensors"
    content = file.read_bytes()
    weight = load_file(file)["model.actor.0.weight"].tobytes()
    place = content.index(weight) + 3
    file.write_bytes(content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :])

    words = rf"{checkpoint_in(run)} cannot be read: {file.name}: model.actor.0.weight is not what.*write its name into"
    for act in (load_policy, lambda run: trained(CART_POLE, run, more_steps=20)):
        with pytest.raises(CheckpointDamaged, match=words):
            act(run)


def test_files_that_changed_places_are_refused(tmp_path: Path) -> None:
    run = run_of(DUEL, tmp_path)
    hero, target = (checkpoint_in(run) / f"trainer-{name}.safetensors" for name in ("hero", "target"))
    content = hero.read_bytes()
    hero.write_bytes(target.read_bytes())
    target.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=r"trainer-hero\.safetensors"):
        load_policy(run, behavior="hero")


def test_a_file_of_another_checkpoint_of_the_same_training_is_refused(tmp_path: Path) -> None:
    config = {**CART_POLE, "training": {**CART_POLE["training"], "checkpoint_every": 20}}
    trained(config, tmp_path)
    earlier, later = (tmp_path / "checkpoints" / name for name in ("000000000020", "000000000040"))
    shutil.copy(earlier / "trainer-default.safetensors", later)
    with pytest.raises(CheckpointDamaged, match="000000000040 cannot be read: trainer-default"):
        trained(config, tmp_path, more_steps=20)


def test_what_a_policy_does_not_need_is_not_read_for_it(one_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(one_run, tmp_path / "run")
    file = checkpoint_in(run) / "trainer-default.safetensors"
    arrays = load_file(file)
    save_file({**arrays, "rollout.reward": arrays["rollout.reward"] + 1}, file)
    assert load_policy(run).n_steps == 40
    with pytest.raises(CheckpointDamaged, match=r"rollout\.reward"):
        trained(CART_POLE, run, more_steps=20)


def test_a_config_that_was_edited_in_the_folder_is_said_when_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    logging.getLogger("envmanager").setLevel(logging.WARNING)
    trained(CART_POLE, tmp_path)
    trained(CART_POLE, tmp_path, more_steps=20)
    assert warnings() == []
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"gamma": 0.99', '"gamma": 0.9'))
    trained(CART_POLE, tmp_path, more_steps=40)
    (said,) = warnings()
    assert str(file) in said
    assert "gamma was 0.9 and is 0.99" in said


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


@pytest.mark.parametrize("nth", range(1, 6), ids=["state", "controller", "place", "trainer", "latest"])
def test_a_flush_that_fails_leaves_the_checkpoint_before_and_the_same_training(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_once(fd: int) -> None:
        n_of_second.append(fd)
        if is_on and len(n_of_second) == nth:
            raise OSError(5, "Input/output error")
        flush(fd)

    def begins(*of_save: Any, **more: Any) -> Path:
        is_on[:] = [True] if run.saved_at else []
        n_of_second.clear()
        return save(*of_save, **more)

    is_on: list[bool] = []
    n_of_second: list[int] = []
    flush, save = os.fsync, checkpoints.save
    TrainingRun(plan_of("ppo", 0, tmp_path / "one"), Silent()).go()
    run = TrainingRun(plan_of("ppo", 0, tmp_path / "other"), Silent())
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fails_once)
        patched.setattr(checkpoints, "save", begins)
        with pytest.raises(NotWritten, match=r"000000000232, is complete: resume"):
            run.go()
    TrainingRun(plan_of("ppo", 0, tmp_path / "other", resume=True), Silent()).go()

    assert digests(tmp_path / "other") == digests(tmp_path / "one")


def test_a_folder_that_cannot_be_listed_is_named(
    one_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Any = ".") -> Any:
        raise OSError(5, "Input/output error")

    run = shutil.copytree(one_run, tmp_path / "run")
    monkeypatch.setattr(os, "listdir", fails)
    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(NotWritten, match=r"Input/output error\. The last one"):
        checkpoints.save(run / "checkpoints", checkpoints.load_latest(run / "checkpoints"))


def test_no_changed_byte_of_the_best_makes_another_one_the_best(one_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(one_run, tmp_path / "run"))
    best, of_run = run / "checkpoints" / "best", checkpoints.load_latest(run / "checkpoints").run
    checkpoints.mark_best(checkpoint_in(run), 12.5)
    assert checkpoints.best_mean(best.parent, of_run) == 12.5
    content = best.read_bytes()
    for place in range(len(content) - 1):
        for damaged in (content[:place], content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]):
            best.write_bytes(damaged)
            with pytest.raises(UsageError, match=r"best is not what was written: .* Delete it"):
                checkpoints.best_mean(best.parent, of_run)
    with pytest.raises(UsageError, match=r"best is not what was written"):
        trained(CART_POLE, run, more_steps=20)


def test_an_empty_latest_is_named(one_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(one_run, tmp_path / "run")
    (run / "checkpoints" / "latest").write_text("")
    with pytest.raises(UsageError, match=r"checkpoints/latest is empty: write the name"):
        load_policy(run)


def test_a_checkpoint_without_a_checksum_is_said_to_be_that(one_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(one_run, tmp_path / "run"))
    facts = json.loads((checkpoint_in(run) / "state.json").read_text())
    del facts["checksum"]
    write_json(checkpoint_in(run), facts)

    with pytest.raises(CheckpointDamaged, match=r"state\.json: it has no checksum"):
        load_policy(run)


def test_what_a_later_version_says_besides_is_passed_over(one_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(one_run, tmp_path / "run")
    facts = json.loads((checkpoint_in(run) / "state.json").read_text())
    for table in (facts, facts["parts"]["controller"], facts["parts"]["trainer-default"]):
        table["later"] = {"than": ["this"]}
    del facts["checksum"]
    write_json(checkpoint_in(run), {**facts, "checksum": checksum_of(facts)})
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
