"""``envmanager play``: policies in a window and in videos."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from envmanager import UsageError
from envmanager.cli.app import run_command_line
from envmanager.registry import ManagerOptions
from envmanager.training.policies.playing import FRAMES, WINDOW, PlayedEpisode, make_shown, play
from envmanager.training.policies.saved import SavedTraining
from envmanager_tests.training.puzzles import PUZZLE, SMALL_PPO, SPEAKERS, Puzzle, rewrite, trained

HERE = __name__


@pytest.fixture
def puzzles(tmp_path: Path) -> Path:
    trained(tmp_path / "run", PUZZLE, {"*": SMALL_PPO})
    return tmp_path / "run"


@pytest.fixture
def moviepy() -> None:
    pytest.importorskip("moviepy")


def decoded(video: Path) -> tuple[list[np.ndarray], float]:
    """The frames that a decoder finds in a file, and how many of them are a second."""
    cv2 = pytest.importorskip("cv2")
    capture = cv2.VideoCapture(str(video))
    frames = []
    while True:
        is_there, frame = capture.read()
        if not is_there:
            break
        frames.append(frame)
    fps = capture.get(cv2.CAP_PROP_FPS)
    capture.release()
    return frames, fps


def command(*arguments: Any) -> int:
    return run_command_line(["play", *map(str, arguments)])


@pytest.mark.usefixtures("moviepy")
def test_a_video_has_a_frame_of_each_reset_and_step_up_to_the_last_one(
    puzzles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = tmp_path / "out.mp4"

    assert command(puzzles, "--episodes", 2, "--video", video) == 0
    frames, fps = decoded(video)
    shown = [round(frame.mean() / 20) for frame in frames]
    assert shown[:11] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert shown[11:] in ([], [5])  # where moviepy would lose the last frame, it is there twice
    assert {frame.shape for frame in frames} == {(32, 48, 3)}
    assert fps == 10  # as its metadata says
    told = capsys.readouterr().out.splitlines()
    assert told[1:] == [
        "episode 0  4 environment steps  return 4",
        "episode 1  5 environment steps  return 5",
        f"video       {video}: 11 frames, 10 a second",
    ]


@pytest.mark.usefixtures("moviepy")
def test_a_video_that_cannot_be_written_is_one_line(
    puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gymnasium.utils.save_video.save_video", refuse)
    video = tmp_path / "out.mp4"

    assert command(puzzles, "--video", video) == 3
    assert capsys.readouterr().err == f"Error: {video} cannot be written: No space left on device.\n"
    assert list(tmp_path.glob("*out*")) == []


@pytest.mark.usefixtures("moviepy")
def test_without_a_screen_mujoco_is_told_to_draw_without_one(
    puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert command(puzzles, "--video", tmp_path / "out.mp4") == 0
    assert os.environ["MUJOCO_GL"] == "egl"


@pytest.mark.usefixtures("moviepy")
def test_the_frames_per_second_may_be_said(puzzles: Path, tmp_path: Path) -> None:
    assert command(puzzles, "--video", tmp_path / "out.mp4", "--fps", 25) == 0
    frames, fps = decoded(tmp_path / "out.mp4")
    assert (len(frames), fps) == (5, 25)


class Echoes(Puzzle):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        print("began with", options)
        return super().reset(seed=seed)


def test_episodes_that_are_played_or_recorded_begin_with_the_options_of_the_flag(
    puzzles: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(Echoes, "metadata", {"render_modes": [WINDOW]})
    given = ["--env", f"{HERE}:Echoes", "--options", "{level: 3}"]

    assert command(puzzles, "--episodes", 2, *given) == 0
    begun = re.findall("began with .*", capsys.readouterr().out)
    assert begun == ["began with {'level': 3}"] * 4  # the first is to see whether it can be shown
    exported = ["export", str(puzzles), "--to", "torchscript", "--out", str(tmp_path / "policy.pt"), *given]
    assert run_command_line(exported) == 0
    assert set(re.findall("began with .*", capsys.readouterr().out)) == {"began with {'level': 3}"}


@pytest.mark.usefixtures("moviepy")
def test_in_a_folder_each_episode_has_a_file_and_nothing_that_is_there_is_replaced(
    puzzles: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "videos"
    folder.mkdir()
    (folder / "run-episode-1.mp4").write_text("mine")

    for _ in range(2):
        assert command(puzzles, "--episodes", 2, "--video", folder) == 0
    assert (folder / "run-episode-1.mp4").read_text() == "mine"
    lengths = {file.name: len(decoded(file)[0]) for file in folder.iterdir() if file.name != "run-episode-1.mp4"}
    assert lengths == {f"run-episode-{number}.mp4": n for number, n in ((0, 5), (2, 6), (3, 5), (4, 6))}


@pytest.mark.usefixtures("moviepy")
def test_a_video_takes_the_place_of_the_one_before_and_leaves_nothing_else(puzzles: Path, tmp_path: Path) -> None:
    video = tmp_path / "videos" / "out.mp4"
    video.parent.mkdir()
    for n_episodes in (2, 1):
        assert command(puzzles, "--episodes", n_episodes, "--video", video) == 0
    assert len(decoded(video)[0]) == 5
    assert list(video.parent.iterdir()) == [video]


@pytest.mark.usefixtures("moviepy")
@pytest.mark.parametrize(("env", "n_frames"), [("CartPole-v1", None), (SPEAKERS, 26)])
@pytest.mark.usefixtures("speakers")
def test_real_environments_are_filmed(tmp_path: Path, env: str, n_frames: int | None) -> None:
    pytest.importorskip("pygame")
    trained(tmp_path / "run", env, {"*": SMALL_PPO})
    assert command(tmp_path / "run", "--video", tmp_path / "out.mp4") == 0
    frames, _ = decoded(tmp_path / "out.mp4")
    assert n_frames is None or len(frames) == n_frames
    assert frames[0].std() > 5  # something is to be seen
    assert any((frame != frames[0]).any() for frame in frames)  # and it moves


@pytest.mark.usefixtures("speakers")
def test_the_returns_are_those_of_the_agents(tmp_path: Path) -> None:
    trained(tmp_path, SPEAKERS, {"*": SMALL_PPO})
    seen: list[PlayedEpisode] = []

    play(SavedTraining.open(tmp_path), n_episodes=2, mode=FRAMES, on_episode=seen.append, seed=4)
    again: list[PlayedEpisode] = []
    play(SavedTraining.open(tmp_path), n_episodes=2, mode=FRAMES, on_episode=again.append, seed=4)
    assert [(each.number, each.n_steps, sorted(each.returns)) for each in seen] == [
        (0, 25, ["listener", "speaker"]),
        (1, 25, ["listener", "speaker"]),
    ]
    assert [each.returns for each in seen] == [each.returns for each in again]
    assert seen[0].returns != seen[1].returns


# Windows.


def test_a_window_shows_as_many_episodes_as_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pygame")
    trained(tmp_path, "CartPole-v1", {"*": SMALL_PPO})
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")

    assert command(tmp_path, "--episodes", 2) == 0
    told = capsys.readouterr().out
    assert "CartPole-v1: checkpoint" in told
    assert "episode 1  " in told


def test_without_a_display_a_video_is_advised(
    puzzles: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    assert command(puzzles) == 2
    assert "there is no display for a window" in capsys.readouterr().err


def test_a_display_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "nothing of that name")
    with pytest.raises(UsageError, match="'CartPole-v1' cannot be shown with render_mode='human'"):
        make_shown(ManagerOptions(env="CartPole-v1"), WINDOW)


# What cannot be shown.


class Blind(gymnasium.Env):  # type: ignore[misc]
    """Has no way to be looked at."""

    observation_space, action_space = Puzzle.observation_space, Puzzle.action_space


class Shy(Puzzle):
    """Says that it can be looked at, and shows nothing."""

    def render(self) -> Any:
        return None


class Broken(Puzzle):
    def render(self) -> Any:
        raise RuntimeError("no OpenGL here")


def without_a_parameter() -> Puzzle:
    return Puzzle()


def with_a_context(context: Any, render_mode: str | None = None) -> Puzzle:
    assert context.env_id == 0
    return Puzzle(render_mode)


def with_any_options(**options: Any) -> Puzzle:
    return Puzzle(**options)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("Blind", "takes no argument 'render_mode'"),
        ("without_a_parameter", "takes no argument 'render_mode'"),
        ("Shy", "cannot be filmed: its render.. returned None"),
        ("Broken", "RuntimeError: no OpenGL here"),
    ],
)
def test_what_cannot_be_shown_says_why(env: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_shown(ManagerOptions(env=f"{HERE}:{env}"), FRAMES)


@pytest.mark.parametrize("env", ["with_a_context", "with_any_options"])
def test_a_function_that_passes_the_render_mode_on_is_shown(env: str) -> None:
    made = make_shown(ManagerOptions(env=f"{HERE}:{env}"), FRAMES)
    assert made.render_mode == "rgb_array"
    made.close()


def test_a_way_to_render_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    with pytest.raises(UsageError, match="has no render_mode 'human'"):
        make_shown(ManagerOptions(env=PUZZLE), WINDOW)


def test_a_godot_game_is_watched_by_another_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, PUZZLE, {"*": SMALL_PPO})
    state = next(tmp_path.glob("checkpoints/*/state.json"))
    rewrite(state, '"kind": "simple"', '"kind": "godot"')
    with pytest.raises(UsageError, match="envmanager godot watch"):
        play(SavedTraining.open(tmp_path), n_episodes=1, mode=FRAMES, on_episode=lambda _: None)


def test_without_moviepy_the_pip_command_is_told_before_anything_is_played(
    puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "moviepy", None)
    assert command(puzzles, "--video", tmp_path / "out.mp4") == 1
    told = capsys.readouterr()
    assert "pip install 'envmanager[video]'" in told.err
    assert told.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--video", "out.gif"], "a video is an .mp4 file"),
        (["--video", "no/such/out.mp4"], "there is no directory no/such"),
        (["--fps", "20"], "--fps is for a video"),
        (["--video", "a_file"], "is not a folder"),
        (["--video", "a_socket.mp4"], "is not a regular file"),
        (["--video", "out.mp4", "--checkpoint", "3"], "there is no checkpoint '3'"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("moviepy")
def test_mistakes_are_named(
    puzzles: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").touch()
    os.mkfifo(tmp_path / "a_socket.mp4")
    assert command(puzzles, *arguments) == 2
    assert words in capsys.readouterr().err
