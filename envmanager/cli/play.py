"""``envmanager play``: show the policies of a training in a window, or in a video."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import numpy as np

from envmanager.cli.display import count, describe_returns, of_behavior
from envmanager.cli.evaluate import Remarks, leave_cores
from envmanager.cli.run import EXIT_DONE, Notices, Stopped, StopSignals
from envmanager.cli.wrapping import print_pairs, print_text
from envmanager.errors import UsageError
from envmanager.training.playing import FRAMES, WINDOW, PlayedEpisode, has_display, play, require_video, save_video
from envmanager.training.saved import SavedTraining

SUFFIX = ".mp4"
"""Suffix of the videos that Gymnasium writes."""


@attrs.frozen(kw_only=True)
class PlayPlan:
    """The episodes to play. ``video``: a file for all episodes, or a folder for a file per episode."""

    directory: Path
    checkpoint: str
    episodes: int
    seed: int
    video: Path | None = None
    fps: float | None = None
    env: str | None = None


def run_play(plan: PlayPlan) -> int:
    """Play and return the exit code: 128 + the signal's number when a signal ended it."""
    leave_cores()
    if not has_display():
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo's own default needs a screen
    _check(plan)
    training = SavedTraining.open(plan.directory, plan.checkpoint)
    show = Show(plan, training.name)
    with Notices(Remarks()), StopSignals():
        try:
            print_text(f"{training.manager_options(env=plan.env).env}: checkpoint {training.path} plays")
            play(
                training,
                n_episodes=plan.episodes,
                mode=WINDOW if plan.video is None else FRAMES,
                on_episode=show.ended,
                seed=plan.seed,
                env=plan.env,
            )
            show.finish()
        except Stopped as stopped:
            return stopped.exit_code
    return EXIT_DONE


class Show:
    """A printer of episodes, which also writes their videos."""

    def __init__(self, plan: PlayPlan, name: str) -> None:
        self._video = plan.video
        self._fps = plan.fps
        self._name = name
        self._frames: list[np.ndarray] = []

    def ended(self, episode: PlayedEpisode) -> None:
        """Print the return of an episode; write its video, or keep its frames for the video of all."""
        told = [f"episode {episode.number}", count(episode.n_steps, "environment step")]
        for behavior, returns in episode.returns.items():
            told.append(f"return{of_behavior(behavior, episode.returns)} {describe_returns(returns)}")
        print_text("  ".join(told))
        if self._video is None:
            return
        self._fps = self._fps or episode.frames_per_s
        self._frames += episode.frames
        if _is_folder(self._video):
            self._write(_free(self._video, self._name))

    def finish(self) -> None:
        """Write the video of all episodes."""
        if self._video is not None and self._frames:
            self._write(self._video)

    def _write(self, file: Path) -> None:
        assert self._fps is not None
        file.parent.mkdir(parents=True, exist_ok=True)
        frames, self._frames = self._frames, []
        save_video(frames, file, fps=self._fps)
        print_pairs([("video", f"{file}: {count(len(frames), 'frame')}, {self._fps:g} a second")])


def _free(folder: Path, name: str) -> Path:
    """Return the first file name that is free in the folder."""
    number = 0
    while (file := folder / f"{name}-episode-{number}{SUFFIX}").exists():
        number += 1
    return file


def _is_folder(video: Path) -> bool:
    return video.is_dir() or not video.suffix


def _check(plan: PlayPlan) -> None:
    video = plan.video
    if video is None:
        if plan.fps is not None:
            raise UsageError("--fps is for a video; a window has the speed of its environment. Add --video FILE.mp4.")
        return
    if not _is_folder(video) and video.suffix != SUFFIX:
        raise UsageError(f"--video {video}: a video is an {SUFFIX} file, or a folder for a file per episode.")
    if video.exists() and not (video.is_dir() if _is_folder(video) else video.is_file()):
        raise UsageError(f"--video {video} is not a {'folder' if _is_folder(video) else 'regular file'}; name another.")
    if not _is_folder(video) and not video.parent.is_dir():
        raise UsageError(f"--video {video}: there is no directory {video.parent}; make it first.")
    require_video()
