"""What a scene declares about its training, in real engines: read, checked, trained, and drawn for each episode."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import RestartPolicy, Task
from envmanager.cli.app import run_command_line
from envmanager.cli.config_files import TRAINING_TABLES, load_config
from envmanager.errors import EnvRaised, UsageError, WorkerDied
from envmanager.godot.declared import declared
from envmanager.godot.manager import GodotEnvManager
from envmanager.policy import RandomPolicy
from envmanager.training.runs import checkpoints

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
ProjectOf = Callable[[str, int], Path]


@pytest.fixture
def use_engine(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVMANAGER_GODOT", program)


@pytest.fixture
def chase(project_of: ProjectOf, major: int, tmp_path: Path) -> Path:
    """A copy of coin_chase, whose scene a test may change."""
    return Path(shutil.copytree(project_of("coin_chase", major), tmp_path / "chase"))


def change(project: Path, *pairs: tuple[str, str]) -> None:
    file = project / "coin_chase.tscn"
    text = file.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)


def train(*arguments: str | Path) -> int:
    return run_command_line(["train", *map(str, arguments), "--plain"])


def weights(run: Path) -> dict[str, bytes]:
    newest = checkpoints.latest(run / "checkpoints")
    return {file.name: file.read_bytes() for file in newest.glob("trainer-*.safetensors")}


@pytest.mark.parametrize("demo", ["coin_chase", "rolling_ball"])
def test_the_demos_declare_what_their_configs_say(demo: str, program: str) -> None:
    config = load_config(EXAMPLES / f"godot_{demo}.yaml", TRAINING_TABLES)
    found = declared(f"demo:{demo}", {"binary": program})
    for_all = config["trainers"].pop("*", None)
    if for_all is not None:
        config["trainers"] = dict.fromkeys(found.behaviors, for_all)

    assert found.under({"manager": {"kind": "godot", "env": f"demo:{demo}"}}) == config


@pytest.mark.usefixtures("use_engine")
class TestTraining:
    SHORT = ("--steps", "3000", "--n-envs", "8", "--n-workers", "1", "--set", "training.evaluation_episodes=0")

    def test_the_scene_alone_gives_the_weights_of_its_config(self, tmp_path: Path) -> None:
        for config, run in ((EXAMPLES / "godot_coin_chase.yaml", "by_config"), ("demo:coin_chase", "by_scene")):
            assert train(config, "--dir", tmp_path / run, *self.SHORT) == 0

        by_config, by_scene = weights(tmp_path / "by_config"), weights(tmp_path / "by_scene")
        assert len(by_scene) == 2
        assert by_scene == by_config

    def test_a_game_is_trained_in_the_place_of_a_config_and_resumed(
        self, chase: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        change(chase, ("steps = 600000", "steps = 2000"), ("evaluation_episodes = 64", "evaluation_episodes = 0"))
        few = ("--n-envs", "8", "--n-workers", "1", "--set", "trainers.hero.hidden=[8]")

        assert train(chase, *few) == 0
        used = json.loads((tmp_path / "runs/chase/config.json").read_text())
        assert used["training"]["rounds"] == {"steps": 64, "train": [["hero"], ["hero"], ["target"]]}
        assert used["trainers"]["target"]["gae_lambda"] == 0.98
        assert used["trainers"]["hero"]["hidden"] == [8]
        assert used["manager"]["n_envs"] == 8
        assert train("chase", *few, "--resume", "--steps", "3000") == 0
        assert "with those before" in capsys.readouterr().out

    def test_a_run_inside_of_the_project_is_none_of_the_editors_business(
        self, chase: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(chase)

        assert train(".", *self.SHORT) == 0
        assert (chase / "runs" / "chase" / ".gdignore").exists()
        assert (chase / "runs" / "chase" / "episodes.csv").exists()

    def test_a_behavior_that_does_not_learn_is_frozen(self, chase: Path, tmp_path: Path) -> None:
        for learns in ("", "learns = false\n"):
            if learns:
                change(chase, ("entropy_coefficient = 0.01\n", f"entropy_coefficient = 0.01\n{learns}"))
            run = tmp_path / f"run{len(learns)}"
            both = ("--set", "training.rounds=null", "--set", "trainers.hero.frozen=false")
            assert train(chase, "--dir", run, *self.SHORT, *both) == 0
        before, after = weights(tmp_path / "run0"), weights(tmp_path / "run15")

        assert before.keys() == after.keys()
        assert before["trainer-target.safetensors"] != after["trainer-target.safetensors"]
        resumed = ("--resume", "--steps", "5000", *self.SHORT[2:], "--set", "training.rounds=null")
        assert train(chase, "--dir", tmp_path / "run15", *resumed, "--set", "trainers.hero.frozen=false") == 0
        assert _policy_of("target", tmp_path / "run15", 0) == _policy_of("target", tmp_path / "run15", 1)
        assert _policy_of("hero", tmp_path / "run15", 0) != _policy_of("hero", tmp_path / "run15", 1)

    @pytest.mark.parametrize(
        ("old", "new", "says"),
        [
            ('trainer = "ppo"', 'trainer = "pop"', "trainer of {place} is 'pop': there is no such trainer"),
            ("learning_rate = 0.001", "learning_rate = -1.0", "learning_rate of {place} must be a number from 0,"),
            ("minibatch = 256", "minibatch = -1", "minibatch of {place} must be a whole number of at least 1"),
            ("gamma = 0.99", "gamma = 1.5", "gamma of {place} must be a number from 0 to 1, not 1.5"),
            ("epochs = 6", 'more = {\n"epoch": 6\n}', "There is no option epoch of {place}"),
            ("epochs = 6", "batch = 6", "There is no option batch of {place}"),
            ("steps = 600000", "steps = -3", "steps of {arena} must be a whole number of at least 1, not -3"),
            ("environments = 64", "environments = -3", "environments of {arena} must be a whole number of at least 1"),
            ('"hero", "target"', '"hero", "targte"', "round_learners of {arena} names 'targte', which has no trainer"),
        ],
    )  # fmt: skip
    def test_a_wrong_value_is_named_with_its_file_and_node_before_anything_is_written(
        self, old: str, new: str, says: str, chase: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        change(chase, (old, new))

        assert train(chase, "--dir", tmp_path / "run") == 2
        place = "res://coin_chase.tscn (node CoinChase/Hero/Agent)"
        said = says.format(place=place, arena="res://coin_chase.tscn (node CoinChase/Arena)")
        assert said in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "run").exists()

    def test_a_trainer_that_does_not_fit_is_named_with_its_file_and_node(
        self, chase: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = ("epochs = 6\n", "gae_lambda = 0.98\n", "entropy_coefficient = 0.01\n", "minibatch = 256\n")
        change(chase, ('trainer = "ppo"', 'trainer = "dqn"'), *((line, "") for line in lines))

        assert train(chase, "--dir", tmp_path / "run") == 2
        place = "res://coin_chase.tscn (node CoinChase/Hero/Agent)"
        assert f"trainer of {place} is 'dqn', which does not fit: DQN needs" in " ".join(
            capsys.readouterr().err.split()
        )

    def test_a_config_mends_a_wrong_value(self, chase: Path, tmp_path: Path) -> None:
        change(chase, ("gamma = 0.99", "gamma = 1.5"))
        mended = [f"--set=trainers.{each}.gamma=0.9" for each in ("hero", "target")]

        assert train(chase, "--dir", tmp_path / "run", *self.SHORT, *mended) == 0

    def test_a_folder_without_the_addon_is_told_how_to_get_it(
        self, chase: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shutil.rmtree(chase / "addons")

        assert train(chase) == 2
        assert "envmanager godot install-addon" in capsys.readouterr().err

    def test_the_folder_is_asked_for_where_a_file_of_the_game_is_named(
        self, chase: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert train(chase / "project.godot") == 2
        assert "A Godot game is named by its folder" in " ".join(capsys.readouterr().err.split())

    def test_an_older_addon_plays_and_a_warning_says_how_to_update_it(
        self, project_of: ProjectOf, major: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        game = Path(shutil.copytree(project_of("rolling_ball", major), tmp_path / "ball"))
        scripts = game / "addons" / "envmanager"
        (scripts / "declared.gd").rename(scripts / "older.gd")
        for file in scripts.glob("*.gd"):
            file.write_text(file.read_text().replace("envmanager/declared.gd", "envmanager/older.gd"))

        assert train(game, "--dir", tmp_path / "run", *self.SHORT) == 0
        assert f"install-addon {game}" in caplog.text

    def test_check_tells_what_is_declared_and_what_is_wrong_with_it(
        self, chase: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run_command_line(["godot", "check", str(chase), "--steps", "5"]) == 0
        assert "hero, res://coin_chase.tscn (node CoinChase/Hero/Agent)" in capsys.readouterr().out
        change(chase, ("gamma = 0.99", "gamma = 1.5"))
        assert run_command_line(["godot", "check", str(chase), "--steps", "5"]) == 1
        assert "gamma of res://coin_chase.tscn" in capsys.readouterr().out


def _policy_of(behavior: str, run: Path, number: int) -> dict[str, Any]:
    from safetensors.numpy import load_file

    folder = sorted(path for path in (run / "checkpoints").iterdir() if path.is_dir())[number]
    arrays = load_file(folder / f"trainer-{behavior}.safetensors")
    return {name: array.tobytes() for name, array in arrays.items() if "actor" in name}


def test_two_settings_of_one_behavior_are_an_error_that_names_both_nodes(
    chase: Path, program: str, major: int, tmp_path: Path
) -> None:
    def settings(gamma: float) -> str:
        script = 'ExtResource("5")' if major == 4 else "ExtResource( 5 )"
        number = '"one"' if major == 4 else "9"
        return (
            f'[sub_resource type="Resource" id={number}]\nscript = {script}\ngamma = {gamma}\n\n[node name="CoinChase"'
        )

    other = 'SubResource("one")' if major == 4 else "SubResource( 9 )"
    both = 'SubResource("both")' if major == 4 else "SubResource( 2 )"
    change(
        chase,
        ('[node name="CoinChase"', settings(0.5)),
        (f'"target"\nsettings = {both}', f'"hero"\nsettings = {other}'),
    )

    with pytest.raises(EnvRaised) as raised, GodotEnvManager(str(chase), 1, engine={"binary": program}):
        pass
    assert "node CoinChase/Hero/Agent refers to some in res://coin_chase.tscn" in str(raised.value)
    assert "node CoinChase/Coin/Agent to others in res://coin_chase.tscn" in str(raised.value)


def test_settings_that_are_not_there_are_an_error_that_names_the_file(chase: Path, program: str, major: int) -> None:
    settings = {
        4: ('settings = SubResource("both")', '[ext_resource type="Resource" path="res://hero.tres" id="9"]', '"9"'),
        3: ("settings = SubResource( 2 )", '[ext_resource path="res://hero.tres" type="Resource" id=9]', " 9 "),
    }
    old, entry, number = settings[major]
    change(chase, (old, f"settings = ExtResource({number})"), ("\n\n[ext_resource", f"\n\n{entry}\n[ext_resource"))

    with pytest.raises(EnvRaised if major == 4 else WorkerDied) as raised:  # Godot 3 does not load such a scene
        GodotEnvManager(str(chase), 1, engine={"binary": program}).close()
    assert "res://hero.tres" in str(raised.value)


def test_settings_of_another_class_are_an_error_that_names_the_node(chase: Path, program: str, major: int) -> None:
    both, own = ('"both"', 'SubResource("both")') if major == 4 else ("2", "SubResource( 2 )")
    number = '"other"' if major == 4 else "9"
    change(
        chase,
        (f"settings = {own}", f"settings = {own}".replace(both, number)),
        ('[node name="CoinChase"', f'[sub_resource type="Gradient" id={number}]\n\n[node name="CoinChase"'),
    )

    with pytest.raises(EnvRaised, match="no EnvManagerBehavior") as raised:
        GodotEnvManager(str(chase), 1, engine={"binary": program}).close()
    assert "node CoinChase/Hero/Agent" in str(raised.value)


def test_a_behavior_without_a_name_is_an_error(chase: Path, program: str) -> None:
    change(chase, ('behavior = "hero"', 'behavior = ""'))

    with pytest.raises(EnvRaised, match="has no name: set the field behavior"):
        GodotEnvManager(str(chase), 1, engine={"binary": program}).close()


class TestParameters:
    @pytest.fixture
    def manager(self, major: int, program: str, project_of: ProjectOf) -> Iterator[Callable[..., GodotEnvManager]]:
        made: list[GodotEnvManager] = []

        def make(n_envs: int = 1, game: str = "games", **options: Any) -> GodotEnvManager:
            engine = {"binary": program, **({"scene": "res://weather.tscn"} if game == "games" else {})}
            own = GodotEnvManager(
                str(project_of(game, major)), n_envs, engine=engine | options.pop("engine", {}), **options
            )
            made.append(own)
            for name, spec in own.behavior_specs.items():
                own.set_policy(name, RandomPolicy(spec, 0))
            return own

        yield make
        for own in made:
            own.close()

    @staticmethod
    def seen(infos: Any) -> np.ndarray:
        (info,) = infos
        obs: np.ndarray = info.current["default"].obs
        return obs[:, :4]

    def test_without_a_trainers_values_the_declared_ones_count_and_then_the_argument(self, manager: Any) -> None:
        assert self.seen(manager().reset()).tolist() == [[1.5, 0.5, 4.0, -1.0]]

    def test_reset_options_and_the_engines_parameters_win(self, manager: Any) -> None:
        own = manager(engine={"parameters": {"hail": 7, "wind": 8}})

        assert self.seen(own.reset({"options": {"wind": 9}})).tolist() == [[9.0, 0.5, 4.0, 7.0]]

    @pytest.mark.parametrize("n_workers", [1, 2])
    def test_each_task_is_one_episode_with_its_options_and_seed(self, manager: Any, n_workers: int) -> None:
        own = manager(4, n_workers=n_workers, infos=True, engine={"parameters": {"hail": 7}})
        seen: dict[int, list[float]] = {}
        infos = own.reset(seed=3, tasks=[Task(options={"wind": k, "rain": k / 2}, seed=k) for k in range(11)])
        while True:
            for info in infos:
                for env_id, row in zip(info.current["default"].env_id, info.current["default"].obs, strict=True):
                    task = info.tasks.get(int(env_id))
                    if task is not None and int(env_id) not in info.final_tasks:
                        seen.setdefault(task, row.tolist())
            if own.tasks.done:
                break
            infos = own.step()

        assert [(each.index, each.terminated, each.length) for each in own.tasks.results] == [
            (index, True, 2) for index in range(11)
        ]
        assert [each.total for each in own.tasks.results] == [index / 2 for index in range(11)]
        assert [seen[index][:4] for index in range(11)] == [[index, index / 2, 4.0, 7.0] for index in range(11)]
        assert len({seen[index][4] for index in range(11)}) == 11

    def test_tasks_of_several_agents_end_with_their_arena(self, manager: Any) -> None:
        own = manager(3, game="coin_chase")
        infos = own.reset(seed=1, tasks=[Task(seed=k) for k in range(5)])
        while not own.tasks.done:
            infos = own.step()

        assert infos
        assert [each.index for each in own.tasks.results] == list(range(5))
        assert all({episode.behavior for episode in each.episodes} == {"hero", "target"} for each in own.tasks.results)

    def test_an_engine_that_is_killed_loses_no_task(self, manager: Any) -> None:
        own = manager(4, n_workers=2, restarts=RestartPolicy(max_restarts=3))
        own.reset(seed=1, tasks=[Task(options={"rain": k}) for k in range(40)])
        n = 0
        while not own.tasks.done:
            own.step()
            n += 1
            if n in (3, 9):
                os.kill(own.stats().workers[n == 9].pid, signal.SIGKILL)

        assert [each.total for each in own.tasks.results] == list(range(40))

    def test_rows_are_sent_and_received_with_tasks(self, manager: Any) -> None:
        own = manager(3)
        own.reset(seed=1, tasks=[Task(options={"rain": k}) for k in range(7)])
        while not own.tasks.done:
            batch = own.recv()
            own.send(np.zeros((len(batch.env_ids), 1), np.float32), batch.env_ids)

        assert [each.total for each in own.tasks.results] == list(range(7))

    def test_episodes_are_begun_by_hand_where_arenas_rest(self, manager: Any) -> None:
        own = manager(2, episodes="on_demand")
        own.reset(seed=1)
        own.recv()
        with pytest.raises(UsageError, match="env 1 plays, and the environments of its worker move together"):
            own.begin([1])
        for _ in range(2):
            own.send(np.zeros((2, 1), np.float32), [0, 1])
            batch = own.recv()
        assert batch.terminated.all()
        own.begin([1], [Task(options={"wind": 9})])
        batch = own.recv()

        assert batch.env_ids.tolist() == [1]
        assert batch.first.all()
        assert batch.obs[0, 0] == 9.0

    def test_the_only_arena_of_an_engine_is_cut_by_hand(self, manager: Any) -> None:
        own = manager(2, n_workers=2, episodes="on_demand")
        own.reset(seed=1)
        own.recv("all")
        own.begin([1], [Task(options={"wind": 9})])
        own.send(np.zeros((1, 1), np.float32), [0])
        batch = own.recv("all")

        assert batch.env_ids[batch.first].tolist() == [1]
        assert batch.obs[batch.first][0, 0] == 9.0

    @pytest.mark.usefixtures("use_engine")
    def test_a_training_draws_samplers_and_goes_through_the_lessons_of_the_scene(
        self, major: int, project_of: ProjectOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = [project_of("games", major), "--set", "manager.engine.scene=res://weather.tscn", "--dir"]
        few = ["--steps", "200", "--set", "trainers.default.rollout=64", "--out", tmp_path / "out.json"]
        evaluated = ["--set", "training.evaluation_episodes=6"]

        assert train(*arguments, tmp_path / "run", *few, *evaluated) == 0
        out = json.loads((tmp_path / "out.json").read_text())
        used = json.loads((tmp_path / "run" / "config.json").read_text())
        assert out["lessons"] == {"rain": 2}
        assert "lesson      rain: lesson 2 of 2 begins after reward 0.25" in capsys.readouterr().out
        assert used["training"]["parameters"]["wind"] == {"sampler": "uniform", "min": 1.0, "max": 2.0}
        assert used["training"]["keep"] == 2
        assert out["evaluation"]["returns"] == {"default": [0.75] * 6}
        assert train(*arguments, tmp_path / "run", *few[2:], "--steps", "300", "--resume", *evaluated) == 0
        assert json.loads((tmp_path / "out.json").read_text())["lessons"] == {"rain": 2}
