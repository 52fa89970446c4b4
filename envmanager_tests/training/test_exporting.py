"""Policies as files of other formats, which act alike."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from envmanager import BehaviorSpec, MissingExtra, UsageError
from envmanager.cli.app import run_command_line
from envmanager.data.specs import ArraySpec
from envmanager.data.trees import leaves
from envmanager.training import load_policy
from envmanager.training.algorithms.networks import DenseLayer
from envmanager.training.algorithms.ppo import LikeliestAction
from envmanager.training.algorithms.trainers import make_trainer
from envmanager.training.policies.exporting import Exported, ExportFailed, export_policy, leaf_names, record
from envmanager.training.policies.game_file import acting
from envmanager.training.policies.saved import SavedPolicy, SavedTraining
from envmanager_tests.training.puzzles import PUZZLE, SMALL_DQN, SMALL_PPO, SPEAKERS, trained

NORMALIZED = {**SMALL_PPO, "normalize_observations": True}
SMALL_SAC = {"kind": "sac", "hidden": [8], "batch": 8, "learning_starts": 20, "normalize_observations": True}
DOORS = "envmanager_tests.training.test_masks:Doors"
"""Of which some are shut: their observations have action masks."""


@pytest.fixture
def onnxruntime() -> Any:
    pytest.importorskip("onnx")
    return pytest.importorskip("onnxruntime")


def exported(directory: Path, file: Path, to: str, *, behavior: str = "default", **options: Any) -> Exported:
    training = SavedTraining.open(directory)
    observations = record(training, behavior, n=60)
    return export_policy(training.policy(behavior), file, to=to, observations=observations, **options)


def arrays(observations: Any) -> list[np.ndarray]:
    return [np.ascontiguousarray(leaf) for leaf in leaves(observations)]


@pytest.mark.parametrize("to", ["onnx", "torchscript"])
@pytest.mark.parametrize(
    ("env", "trainer"),
    [
        ("CartPole-v1", NORMALIZED),
        ("CartPole-v1", SMALL_DQN),
        ("CartPole-v1", {**SMALL_DQN, "duelling": False}),
        ("Pendulum-v1", NORMALIZED),
        ("FrozenLake-v1", SMALL_DQN),
        (PUZZLE, SMALL_PPO),
        (DOORS, SMALL_PPO),
        (DOORS, SMALL_DQN),
        ("Pendulum-v1", SMALL_SAC),
    ],
    ids=str,
)
def test_an_exported_policy_acts_as_the_one_that_was_saved_in_batches_of_any_size(
    tmp_path: Path, env: str, trainer: dict[str, Any], to: str, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("pygame")
    trained(tmp_path / "run", env, {"default": trainer})
    file = tmp_path / "policy"
    runtime = request.getfixturevalue("onnxruntime") if to == "onnx" else None

    result = exported(tmp_path / "run", file, to)

    assert result.n_checked >= 60
    policy = load_policy(tmp_path / "run")
    for n in (1, 5):
        seen = record(SavedTraining.open(tmp_path / "run"), "default", n=n)
        if runtime is not None:
            session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
            assert [each.name for each in session.get_inputs()] == list(result.inputs)
            assert [each.name for each in session.get_outputs()] == list(result.outputs)
            acted = session.run(None, dict(zip(result.inputs, arrays(seen), strict=True)))
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch would have us use torch.export
                module = torch.jit.load(file)
            acted = [each.numpy() for each in module(*map(torch.from_numpy, arrays(seen)))]
        for got, wanted in zip(acted, leaves(policy(seen)), strict=True):
            assert got.dtype == wanted.dtype
            if wanted.dtype.kind == "f":
                np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
            else:
                np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    "trainer", [NORMALIZED, {**SMALL_PPO, "hidden": []}, SMALL_DQN, {**SMALL_DQN, "duelling": False}], ids=str
)
def test_a_policy_file_for_a_game_acts_as_the_policy(tmp_path: Path, trainer: dict[str, Any]) -> None:
    trained(tmp_path / "run", "CartPole-v1", {"*": trainer})
    result = exported(tmp_path / "run", tmp_path / "cart.policy", "godot", ticks_per_action=5)

    assert (result.inputs, result.outputs) == ({"obs": "float32[batch, 4]"}, {"action": "int64[batch]"})
    policy = load_policy(tmp_path / "run")
    act = acting((tmp_path / "cart.policy").read_bytes(), policy.spec)
    seen = np.random.default_rng(0).normal(0, 2, (1000, 4)).astype(np.float32)
    np.testing.assert_array_equal(act([seen])[0], policy(seen))


@pytest.mark.parametrize(
    ("env", "trainer", "why"),
    [
        (
            "Pendulum-v1",
            SMALL_PPO,
            r"acts by float32\[1\] in \[-2, 2\], but an agent of a game acts by numbers from -1",
        ),
        ("FrozenLake-v1", SMALL_DQN, "obs is a bounded whole number"),
        (PUZZLE, SMALL_PPO, "obs\\['camera'\\] is a picture"),
        (DOORS, SMALL_PPO, "action_mask'\\] is an action mask"),
    ],
    ids=str,
)
def test_what_a_game_cannot_evaluate_is_told_with_what_there_is_instead(
    tmp_path: Path, env: str, trainer: dict[str, Any], why: str
) -> None:
    pytest.importorskip("pygame")
    trained(tmp_path / "run", env, {"*": trainer})

    with pytest.raises(UsageError, match=f"the policy of 'default' cannot be evaluated in a game: .*{why}.*--to onnx"):
        exported(tmp_path / "run", tmp_path / "out.policy", "godot")
    assert not (tmp_path / "out.policy").exists()


def test_a_policy_file_that_acts_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "run", "CartPole-v1", {"*": SMALL_PPO})
    upside_down = DenseLayer(-np.eye(2, dtype=np.float32), np.zeros(2, np.float32), "linear")
    dense = LikeliestAction.dense
    monkeypatch.setattr(LikeliestAction, "dense", lambda self: (dense(self)[0], [*dense(self)[1], upside_down]))

    with pytest.raises(ExportFailed, match="as godot acts differently"):
        exported(tmp_path / "run", tmp_path / "out.policy", "godot")
    assert not (tmp_path / "out.policy").exists()


def test_inputs_and_outputs_are_called_by_the_keys_that_lead_to_them(tmp_path: Path, onnxruntime: Any) -> None:
    trained(tmp_path / "run", PUZZLE, {"*": SMALL_PPO})

    result = exported(tmp_path / "run", tmp_path / "policy.onnx", "onnx")
    assert result.inputs == {
        "obs_body_0": "float32[batch, 2]",
        "obs_body_1": "int8[batch, 3]",
        "obs_camera": "uint8[batch, 36, 36, 3]",
        "obs_place": "int64[batch]",
    }
    assert result.outputs == {
        "action_arm_0": "float32[batch, 2]",
        "action_arm_1": "int64[batch, 2]",
        "action_keys": "int8[batch, 2]",
        "action_move": "int64[batch]",
    }


def test_names_are_different_for_different_leaves() -> None:
    spec = {"a_b": ArraySpec(), "a": {"b": ArraySpec()}, "left camera!": ArraySpec()}

    assert leaf_names(spec, "obs") == ["obs_a_b", "obs_a_b_2", "obs_left_camera"]
    assert leaf_names(ArraySpec(), "obs") == ["obs"]


@pytest.mark.parametrize("opset", [11, 17, 20])
def test_the_opset_is_the_one_that_was_wanted_and_the_file_says_what_it_is(
    tmp_path: Path, onnxruntime: Any, opset: int
) -> None:
    import onnx

    trained(tmp_path / "run", "CartPole-v1", {"*": NORMALIZED})
    exported(tmp_path / "run", tmp_path / "policy.onnx", "onnx", opset=opset)

    model = onnx.load(tmp_path / "policy.onnx")
    assert [each.version for each in model.opset_import if each.domain == ""] == [opset]
    facts = {each.key: each.value for each in model.metadata_props}
    assert (facts["behavior"], facts["n_steps"]) == ("default", "201")
    assert facts["action"] == "int64[] in [0, 1]"


# What acts otherwise is not left behind.


class Otherwise(torch.nn.Module):
    def forward(self, obs: Any) -> Any:
        return (torch.ones_like(obs[:, 0], dtype=torch.int64) * 7,)


class OfOneSize(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, obs: Any) -> Any:
        return (self.model(obs)[0].reshape(len(obs)),)


class InAnotherDtype(OfOneSize):
    def forward(self, obs: Any) -> Any:
        return (self.model(obs)[0].to(torch.int32),)


class NotTraceable(torch.nn.Module):
    def forward(self, obs: Any) -> Any:
        return {"action": obs}, "and a text"


@pytest.mark.parametrize("to", ["onnx", "torchscript"])
@pytest.mark.parametrize("wrong", [Otherwise, OfOneSize, InAnotherDtype, NotTraceable])
def test_a_file_that_acts_otherwise_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any, to: str, request: pytest.FixtureRequest
) -> None:
    if to == "onnx":
        request.getfixturevalue("onnxruntime")
    trained(tmp_path / "run", "CartPole-v1", {"*": SMALL_PPO})
    own = load_policy(tmp_path / "run").module()
    monkeypatch.setattr(SavedPolicy, "module", lambda _: wrong(own) if issubclass(wrong, OfOneSize) else wrong())
    file = tmp_path / "out" / "policy"
    file.parent.mkdir()
    file.write_text("what was there")

    with pytest.raises(ExportFailed, match="the policy of 'default'"):
        exported(tmp_path / "run", file, to)
    assert file.read_text() == "what was there"
    assert list(file.parent.iterdir()) == [file]


def test_exporting_leaves_the_policy_as_it_is(tmp_path: Path) -> None:
    trained(tmp_path / "run", "CartPole-v1", {"*": SMALL_PPO})
    policy = load_policy(tmp_path / "run")
    seen = record(SavedTraining.open(tmp_path / "run"), "default", n=30)
    before = policy(seen)

    export_policy(policy, tmp_path / "policy.pt", to="torchscript", observations=seen)
    np.testing.assert_array_equal(policy(seen), before)


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint16, np.bool_, np.float32, np.float64], ids=str
)
def test_actions_of_any_dtype_are_the_same_in_a_module_and_in_a_policy(dtype: Any) -> None:
    numbers = {"b": (None, None), "i": (-2, 3), "u": (2, 5), "f": (np.array([-1, -2]), np.array([0.5, np.inf]))}
    spec = BehaviorSpec(ArraySpec((3,)), ArraySpec((2,), dtype, *numbers[np.dtype(dtype).kind]))
    trainer = make_trainer("default", spec, {"kind": "ppo", "policy_gain": 3.0}, seed=1, device="cpu")
    policy = SavedPolicy("default", spec, trainer, 0)
    obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)

    (acted,) = policy.module()(torch.from_numpy(obs))
    wanted = policy(obs)
    assert len(np.unique(wanted)) > 1
    np.testing.assert_allclose(acted.detach().numpy(), wanted, rtol=1e-5)


# The command.


def command(*arguments: Any) -> int:
    return run_command_line(["export", *map(str, arguments)])


def test_the_command_tells_names_and_writes_here_under_the_name_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], onnxruntime: Any
) -> None:
    trained(tmp_path / "run", "CartPole-v1", {"*": SMALL_PPO})
    monkeypatch.chdir(tmp_path)

    assert command("run", "--to", "onnx") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "input       obs  float32[batch, 4]",
        "output      action  int64[batch]",
        "checked     same actions on 300 observations",
        "written     run.onnx, opset 17",
    ]
    assert (tmp_path / "run.onnx").is_file()
    assert command("run", "--to", "torchscript", "--out", "policy.pt") == 0
    assert (tmp_path / "policy.pt").is_file()


@pytest.mark.usefixtures("speakers")
def test_each_of_several_behaviors_is_exported_or_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run", SPEAKERS, {"*": SMALL_PPO})
    monkeypatch.chdir(tmp_path)
    Path("game").mkdir()

    assert command("run", "--to", "torchscript", "--behavior", "speaker") == 0
    assert [path.name for path in tmp_path.glob("*.pt")] == ["run-speaker.pt"]
    assert command("run", "--to", "torchscript", "--out", "both.pt") == 2
    assert "--behavior" in capsys.readouterr().err
    assert command("run", "--to", "torchscript", "--out", "game") == 0
    assert sorted(path.name for path in (tmp_path / "game").iterdir()) == ["run-listener.pt", "run-speaker.pt"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "onx"], "exported to 'onnx', 'torchscript', 'godot', not to 'onx'"),
        (["--to", "torchscript", "--opset", "3"], "opset must be from 11 to 20"),
        (["--to", "torchscript", "--out", "nowhere/policy.pt"], "there is no directory nowhere"),
        (["--to", "torchscript", "--behavior", "hero"], "'hero', which is not known"),
        (["--to", "torchscript", "--env", "Acrobot-v1"], "does not fit"),
    ],
    ids=str,
)
def test_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    trained(tmp_path / "run", "CartPole-v1", {"*": SMALL_PPO})
    assert command(tmp_path / "run", *arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("library", ["onnx", "onnxruntime"])
def test_without_a_library_the_pip_command_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    if library == "onnxruntime":
        pytest.importorskip("onnx")
    trained(tmp_path / "run", "CartPole-v1", {"*": SMALL_PPO})
    policy = load_policy(tmp_path / "run")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=r"pip install 'envmanager\[export\]'"):
        export_policy(policy, tmp_path / "policy.onnx", to="onnx", observations=np.zeros((3, 4), np.float32))


def test_an_agent_that_is_not_there_is_not_waited_for(tmp_path: Path) -> None:
    trained(tmp_path / "run", "CartPole-v1", {"*": SMALL_PPO})
    with pytest.raises(UsageError, match="there is no agent of 'hero' in CartPole-v1"):
        record(SavedTraining.open(tmp_path / "run"), "hero", n=5)
