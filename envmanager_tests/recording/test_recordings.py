"""A recorded run comes again: bit for bit without its environments, or in its order with them; and it is data."""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from envmanager import (
    AsyncioEnvManager,
    RandomPolicy,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    UsageError,
    Wait,
    make_manager,
)
from envmanager.interop.minari import to_minari
from envmanager.recording.data import about, episodes, table
from envmanager.recording.file import BadRecording, read_records
from envmanager.recording.tape import RecordingEnded, ReplayDiverged, same
from envmanager.replay_env_manager import ReplayEnvManager
from envmanager_tests.recording.runs import Uneven, by_rows, by_steps, kill
from envmanager_tests.serving.asking import succeeding

RESTARTS = RestartPolicy(max_restarts=100, backoff_s=0.02)
KINDS = {
    "one each": lambda **options: SubprocessEnvManager(Uneven, 4, restarts=RESTARTS, **options),
    "two workers": lambda **options: SubprocessEnvManager(Uneven, 4, n_workers=2, restarts=RESTARTS, **options),
    "portable": lambda **options: SubprocessEnvManager(
        Uneven, 4, n_workers=2, transport="portable", restarts=RESTARTS, **options
    ),
    "zero copy": lambda **options: SubprocessEnvManager(Uneven, 4, zero_copy=True, restarts=RESTARTS, **options),
    "share": lambda **options: SubprocessEnvManager(Uneven, 4, local_envs=1, restarts=RESTARTS, **options),
    "simple": lambda **options: SimpleEnvManager(Uneven, 4, **options),
    "asyncio": lambda **options: AsyncioEnvManager(Uneven, 4, **options),
}
KILLS = (20, 21, 50)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run.emrec")


@pytest.mark.parametrize(
    ("kind", "use"),
    [(kind, use) for kind in KINDS for use in (by_steps, by_rows) if (kind, use) != ("portable", by_steps)],
)
def test_a_replay_delivers_the_same_to_the_bit_in_the_same_order(kind: str, use: Any, path: str) -> None:
    with KINDS[kind](record=path) as manager:
        recorded = use(manager, 1, kills=KILLS)
        restarts = manager.stats().restarts

    for _ in range(2):
        with ReplayEnvManager(recording=path) as manager:
            assert use(manager, 1) == recorded
            assert manager.stats().restarts == restarts


@pytest.mark.parametrize("use", [by_steps, by_rows])
def test_tasks_come_again_too(use: Any, path: str) -> None:
    tasks = [{"level": number} for number in range(200)]
    with KINDS["two workers"](record=path) as manager:
        recorded = use(manager, 1, kills=KILLS, tasks=tasks)
    with ReplayEnvManager(recording=path) as manager:
        assert use(manager, 1, tasks=tasks) == recorded


@pytest.mark.parametrize("wait", [Wait.any(timeout_s=0.001), Wait.any(max_lead=2), Wait.all(), "2"])
def test_waits_that_end_by_the_clock_end_again(wait: Any, path: str) -> None:
    with KINDS["one each"](record=path, wait=wait) as manager:
        recorded = by_steps(manager, 1, kills=KILLS)
    with ReplayEnvManager(recording=path) as manager:
        assert by_steps(manager, 1) == recorded


def test_another_action_is_found_in_the_exact_step_worker_and_row(path: str, monkeypatch: Any) -> None:
    with KINDS["two workers"](record=path, wait="all") as manager:
        by_steps(manager, 1)

    class Once(type(np.random.default_rng(0))):  # type: ignore[misc]
        """Draws what the recorded policy has drawn, but in one step."""

        n_calls = 0

        def integers(self, *args: Any, **kwargs: Any) -> Any:
            drawn = super().integers(*args, **kwargs)
            Once.n_calls += 1
            if Once.n_calls == 8:
                drawn[3] += 1
            return drawn

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Once(np.random.PCG64(seed)))
    with ReplayEnvManager(recording=path) as manager, pytest.raises(ReplayDiverged) as caught:
        by_steps(manager, 1)
    found = caught.value
    assert (found.step, found.worker_id, found.row) == (7, 1, 1)
    assert found.found == found.recorded + 1
    assert str(found.recorded) in str(found)


def test_without_strict_other_actions_are_counted(path: str) -> None:
    with KINDS["one each"](record=path) as manager:
        by_steps(manager, 1)
    with ReplayEnvManager(recording=path, strict=False) as manager:
        by_steps(manager, 2)
        assert 0 < manager.n_diverged <= 80 * 4


def test_who_goes_on_or_does_something_else_is_told(path: str) -> None:
    with KINDS["one each"](record=path) as manager:
        by_steps(manager, 1)
    with ReplayEnvManager(recording=path) as manager, pytest.raises(RecordingEnded, match="but the trainer goes on"):
        by_steps(manager, 1, n=81)
    with ReplayEnvManager(recording=path) as manager:
        manager.reset(seed=5)
        with pytest.raises(ReplayDiverged, match="came next in the recording"):
            manager.get_attr("slow_s")


@pytest.mark.parametrize(
    ("kind", "observations"),
    [(kind, observations) for kind in KINDS for observations in (True, False) if observations or kind != "portable"],
)
def test_live_environments_deliver_in_the_recorded_order(kind: str, observations: bool, path: str) -> None:
    with KINDS[kind](record=path, record_observations=observations) as manager:
        recorded = by_steps(manager, 1, kills=KILLS)
    with KINDS[kind](order=path) as manager:
        assert by_steps(manager, 1) == recorded


@pytest.mark.parametrize("kind", ["one each", "two workers", "share", "asyncio"])
def test_one_process_repeats_the_order_of_many(kind: str, path: str) -> None:
    with KINDS[kind](record=path) as manager:
        recorded = by_steps(manager, 1, kills=KILLS)
    with SimpleEnvManager(Uneven, 4, restarts=RESTARTS, order=path) as manager:
        assert by_steps(manager, 1) == recorded


def test_an_order_is_refused_by_other_workers(path: str) -> None:
    with KINDS["two workers"](record=path) as manager:
        by_steps(manager, 1)
    with pytest.raises(UsageError, match="or the kind simple"):
        KINDS["one each"](order=path)
    with pytest.raises(UsageError, match="or the kind simple"):
        SimpleEnvManager(Uneven, 3, order=path)


class Forgetful(Uneven):
    """An environment that depends on more than its seed and actions."""

    def obs(self) -> np.ndarray:
        return super().obs() + (random.random() if self.n_steps == 3 else 0.0)


@pytest.mark.parametrize("observations", [True, False])
def test_environments_that_do_not_repeat_are_found(observations: bool, path: str) -> None:
    with SubprocessEnvManager(Forgetful, 2, record=path, record_observations=observations) as manager:
        by_steps(manager, 1, n=20)
    with (
        SubprocessEnvManager(Forgetful, 2, order=path) as manager,
        pytest.raises(ReplayDiverged, match="must depend on their seeds and actions alone"),
    ):
        by_steps(manager, 1, n=20)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("kind", ["one each", "two workers"])
def test_episodes_and_the_table_are_those_of_the_run(kind: str, prefetch: bool, path: str) -> None:
    with KINDS[kind](record=path) as manager:
        manager.reset(tasks=[{"level": number} for number in range(40)], prefetch=prefetch)
        number, of_killed = 0, manager.stats().workers[1].env_ids
        while not manager.tasks.done:
            number += 1
            batch = manager.recv()
            plays = np.isin(batch.env_ids, of_killed) & ~batch.terminated & ~batch.truncated
            if number > 5 and plays.any() and not manager.stats().restarts:
                kill(manager, 1)
            manager.send(np.arange(len(batch)) + number, batch.env_ids)
        results = {result.index: (result.total, result.length) for result in manager.tasks.results}

    read = list(episodes(path))
    whole = [each for each in read if each.error is None and not each.is_cut]
    assert {each.task: (each.total, each.length) for each in whole} == results
    assert sum(each.error is not None for each in read) > 0
    for each in whole:
        assert each.options == {"level": each.task}
        assert each.obs[:, 0].tolist() == [each.env_id] * (each.length + 1)
        assert each.obs[:, 1].tolist() == list(range(each.length + 1))
        assert each.obs[1:, 2].tolist() == each.actions.tolist()
        assert (each.actions % 7 == each.rewards).all()
        assert each.terminated
    steps = table(path)
    assert {len(column) for column in steps.values()} == {sum(each.length for each in read)}
    assert steps["reward"].sum() == sum(each.total for each in read)
    assert about(path)["n_envs"] == 4


def test_minari_reads_the_episodes_that_were_exported(path: str, tmp_path: Path, monkeypatch: Any) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    with KINDS["simple"](record=path) as manager:
        by_steps(manager, 1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody has said who made it
        to_minari(path, "recorded/uneven-v0")
        read = list(minari.load_dataset("recorded/uneven-v0").iterate_episodes())
    whole = [each for each in episodes(path) if not each.is_cut]
    assert len(read) == len(whole) > 20
    for of_minari, each in zip(read, whole, strict=True):
        assert (of_minari.observations == each.obs).all()
        assert (of_minari.actions == each.actions).all()
        assert of_minari.rewards.tolist() == each.rewards.tolist()
        assert of_minari.terminations[-1] == each.terminated


class Sees(gymnasium.Env):  # type: ignore[type-arg, misc]
    """It shows an image, a small one and numbers, all drawn."""

    observation_space = gymnasium.spaces.Dict(
        {
            "image": gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8),
            "small": gymnasium.spaces.Box(0, 255, (8, 8), np.uint8),
            "numbers": gymnasium.spaces.Tuple([gymnasium.spaces.Box(-9, 9, (2,), kind) for kind in (np.float32, int)]),
        }
    )
    action_space = gymnasium.spaces.Discrete(5)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.observation_space.seed(seed)
        self.n = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.n += 1
        return self.observation_space.sample(), 0.1 * action, self.n == 4, False, {}


class Says(Sees):
    observation_space = gymnasium.spaces.Text(8)


def recorded_rows(kind: Any, path: str, n: int = 12) -> None:
    with SimpleEnvManager(kind, 1, record=path) as manager:
        manager.reset(seed=1)
        for number in range(n):
            manager.recv()
            manager.send([number % 5], [0])


@pytest.mark.filterwarnings("ignore")  # nobody has said who made it
def test_a_data_set_of_minari_has_images_and_numbers_to_the_bit_or_is_refused(
    path: str, tmp_path: Path, monkeypatch: Any
) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    recorded_rows(Sees, path)
    to_minari(path, "recorded/sees-v0")
    whole = [each for each in episodes(path) if not each.is_cut]
    read = list(minari.load_dataset("recorded/sees-v0").iterate_episodes())
    assert len(read) == len(whole) == 2
    for of_minari, each in zip(read, whole, strict=True):
        assert same(each.obs, of_minari.observations)
        assert same(each.actions, of_minari.actions)
        assert of_minari.rewards.astype(np.float32).tobytes() == each.rewards.tobytes()

    to_minari(path, "recorded/lossy-v0", jpeg_encoding=True)  # asked for

    def create_of_old(dataset_id: Any, buffers: Any, observation_space: Any, action_space: Any) -> Any:
        return create(dataset_id, buffers, observation_space=observation_space, action_space=action_space)

    create = minari.create_dataset_from_buffers
    monkeypatch.setattr(minari, "create_dataset_from_buffers", create_of_old)
    with pytest.raises(UsageError, match="does not keep the data"):
        to_minari(path, "recorded/changed-v0")
    assert sorted(minari.list_local_datasets()) == ["recorded/lossy-v0", "recorded/sees-v0"]


def test_texts_are_refused_by_minari_with_advice_that_can_be_followed(path: str) -> None:
    pytest.importorskip("minari")
    recorded_rows(Says, path)
    with pytest.raises(UsageError, match=r"recording\.episodes"):
        to_minari(path, "recorded/says-v0")


def test_without_observations_a_recording_is_small_data_and_no_replay(path: str) -> None:
    with KINDS["one each"](record=path, record_observations=False) as manager:
        by_steps(manager, 1)
    assert all(each.obs is None for each in episodes(path))
    assert table(path)["reward"].sum() > 0
    with pytest.raises(UsageError, match="without observations"):
        ReplayEnvManager(recording=path)


def test_a_config_switches_to_a_replay(path: str) -> None:
    config = {"kind": "subprocess", "env": "CartPole-v1", "n_envs": 2, "seed": 1, "record": path, "infos": True}
    config |= {"check_values": True, "zero_copy": True, "restarts": {"max_restarts": 3}}
    replay = {"kind": "replay", "recording": path}
    seen = []
    for options in (config, config | replay, replay):
        with make_manager(options) as manager:
            manager.reset()
            batch = manager.recv("all")
            manager.send(np.zeros(2, np.int64), [0, 1])
            seen.append((batch.obs.tobytes(), manager.recv("all").obs.tobytes()))
    assert seen[0] == seen[1] == seen[2]


def test_measures_come_again_too(path: str) -> None:
    def use(manager: Any) -> Any:
        episodes = manager.episodes
        manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"], seed=0))
        manager.reset()
        while episodes.count < 8:
            manager.step()
        return episodes.means_of_measures()

    with SimpleEnvManager(succeeding, 2, measures=["is_success"], record=path) as manager:
        assert use(manager) == {"is_success": 0.5}
    with ReplayEnvManager(recording=path) as manager:
        assert use(manager) == {"is_success": 0.5}


def test_any_part_of_a_recording_is_read_up_to_its_last_whole_record(path: str) -> None:
    with KINDS["simple"](record=path) as manager:
        by_steps(manager, 1)
    data, whole, chance = Path(path).read_bytes(), list(read_records(path)), random.Random(1)
    for _ in range(100):
        Path(path).write_bytes(data[: chance.randrange(len(data))])
        try:
            records = list(read_records(path))
        except BadRecording:
            continue  # not one record is whole
        assert [each.time_ns for each in records] == [each.time_ns for each in whole[: len(records)]]


def test_damaged_recordings_are_typed_errors(path: str) -> None:
    with KINDS["simple"](record=path) as manager:
        by_steps(manager, 1)
    data, chance = Path(path).read_bytes(), random.Random(2)
    refused = 0
    for _ in range(500):
        damaged = bytearray(data)
        at = chance.randrange(len(damaged))
        damaged[at : at + chance.randrange(9)] = chance.randbytes(chance.randrange(1, 9))
        Path(path).write_bytes(damaged)
        try:
            list(episodes(path))
        except BadRecording:
            refused += 1
    assert refused > 250
    Path(path).write_bytes(b"no recording at all")
    with pytest.raises(BadRecording):
        ReplayEnvManager(recording=path)
    with pytest.raises(UsageError, match="cannot be read"):
        ReplayEnvManager(recording=path + ".missing")


SCRIPT = """
import os, sys
from envmanager import SimpleEnvManager
from envmanager.replay_env_manager import ReplayEnvManager
from envmanager_tests.serving.asking import succeeding
from envmanager_tests.recording.runs import Uneven
with SimpleEnvManager(Uneven, 4, record=sys.argv[1]) as manager:
    manager.reset(seed=1)
    {limit}
    for number in range(800):
        batch = manager.recv("all")
        manager.send(batch.env_ids, batch.env_ids)
        os.write(1, b".")
    print([type(event).__name__ for event in manager.events])
"""


def test_a_killed_trainer_leaves_a_file_that_is_read(path: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(limit=""), path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        assert len(trainer.stdout.read(200)) == 200
        trainer.kill()
        n_batches = 200 + len(trainer.stdout.read())
    steps = table(path)
    assert len(steps["reward"]) > 0
    assert len(steps["reward"]) <= 4 * n_batches


def test_a_full_disk_ends_the_recording_and_not_the_run(path: str) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    command = [sys.executable, "-c", SCRIPT.format(limit=limit), path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "." * 800 in done.stdout
    assert "RecordingFailed" in done.stdout
    assert len(table(path)["reward"]) > 0


def test_a_recording_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="directory"):
        SimpleEnvManager(Uneven, 1, record=tmp_path / "missing" / "run.emrec")
