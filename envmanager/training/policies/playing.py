"""Playback of a training run's policies in one environment, in a window or for a video.

::

    SavedTraining ── policies ──▶ manager of one environment, in this process ── PlayedEpisode ──▶ the caller
                                        └── each reset and step is shown ──▶ a window, or frames

The rule: for a video, a frame is rendered right after each reset and step of the environment itself. After a step of
the manager, an episode's last frame could be lost, because the manager may have reset the environment.
"""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from envmanager.adapters.factories import call_factory, resolve
from envmanager.adapters.recipes import with_recipe
from envmanager.adapters.resets import Resetter
from envmanager.data.specs import describe_value
from envmanager.environment import EnvContext
from envmanager.errors import ImportFailed, UsageError
from envmanager.importing import needed_by
from envmanager.observe.episodes import Episodes
from envmanager.observe.files import reporting
from envmanager.registry import ManagerOptions
from envmanager.simple_env_manager import SimpleEnvManager
from envmanager.training.policies.saved import SavedTraining

WINDOW, FRAMES = "human", "rgb_array"
"""Render modes of Gymnasium and PettingZoo."""
FRAMES_PER_S = 30.0
"""Frames per second of a video if the environment's metadata does not set ``render_fps``."""


@attrs.frozen
class PlayedEpisode:
    """A finished episode. ``number`` counts from 0. ``returns`` maps each behavior to the returns of its agents.

    ``frames`` are the images that ``render`` returned, one for the reset and one for each environment step. The list
    is empty in mode WINDOW.
    """

    number: int
    n_steps: int
    returns: dict[str, list[float]]
    frames: list[np.ndarray] = attrs.field(repr=False)
    frames_per_s: float


def play(
    training: SavedTraining,
    *,
    n_episodes: int,
    mode: str,
    on_episode: Callable[[PlayedEpisode], Any],
    seed: int = 0,
    env: str | None = None,
    reset_options: Mapping[str, Any] | None = None,
) -> None:
    """Play ``n_episodes`` episodes and call ``on_episode`` after each.

    ``mode``: WINDOW or FRAMES. ``env``: name of an environment to play instead of the training's own.
    ``reset_options`` override the training's parameters. Raises UsageError if the environment cannot be rendered in
    ``mode`` or is a Godot game.
    """
    options = training.manager_options(env=env)
    if options.kind == "godot":
        raise UsageError(f"{options.env} is a Godot game: `envmanager godot watch` plays it in a window.")
    given = training.reset_options(seed=seed, given=reset_options)
    environment = make_shown(options, mode, given)
    frames_per_s = float((getattr(environment, "metadata", None) or {}).get("render_fps") or FRAMES_PER_S)
    scenes = filmed(environment, takes_frames=mode == FRAMES)
    returns: dict[str, list[float]] = {}
    episodes = Episodes(on_end=lambda ended: returns.setdefault(ended.behavior, []).append(ended.total))
    with SimpleEnvManager(lambda: environment) as manager:
        for behavior, policy in training.policies_for(manager.behavior_specs).items():
            manager.set_policy(behavior, policy)
        episodes.add_all(manager.reset({"seed": seed, "options": given}))
        for number in range(n_episodes):
            while len(scenes) < 2:
                episodes.add_all(manager.step())
            scene = scenes.pop(0)
            frames = scene if mode == FRAMES else []
            on_episode(PlayedEpisode(number, len(scene) - 1, dict(returns), frames, frames_per_s))
            returns.clear()


def filmed(environment: Any, *, takes_frames: bool) -> list[list[Any]]:
    """Wrap an environment's reset and step. Return a list, to which a list for each episode is added as it begins.

    It has a frame, or None without ``takes_frames``, for the reset and each step. It is whole once another has begun.
    """
    scenes: list[list[Any]] = []

    def watched(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        if method == reset:
            scenes.append([])
        scenes[-1].append(np.array(environment.render()) if takes_frames else None)
        return result

    reset, step = environment.reset, environment.step
    environment.reset = functools.wraps(reset)(functools.partial(watched, reset))
    environment.step = functools.wraps(step)(functools.partial(watched, step))
    return scenes


def make_shown(options: ManagerOptions, mode: str, given: Mapping[str, Any] | None = None) -> Any:
    """Return a new environment with render mode ``mode``, after one reset with the options ``given``.

    Raises UsageError if it cannot be shown.
    """
    env = str(options.env)
    if mode == WINDOW and not has_display() and not os.environ.get("SDL_VIDEODRIVER"):
        raise UsageError(
            "there is no display for a window (neither DISPLAY nor WAYLAND_DISPLAY is set): make a video (--video "
            "out.mp4), or run it where there is a screen."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mistakes raise errors below
        try:
            arguments = {name: value for name, value in (options.env_kwargs or {}).items() if name != "render_mode"}
            shown = attrs.evolve(options, env_kwargs=arguments, render_mode=mode)
            environment = call_factory(resolve(with_recipe(shown.env, shown)), EnvContext(env_id=0, worker_id=0))
        except (ImportFailed, UsageError):
            raise
        except Exception as error:
            raise _cannot_be_shown(env, mode, error) from error
        try:
            _show_once(environment, env, mode, given)
        except BaseException:
            environment.close()
            raise
    return environment


def has_display() -> bool:
    """Return whether the environment variable DISPLAY or WAYLAND_DISPLAY is set."""
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _show_once(environment: Any, env: str, mode: str, given: Mapping[str, Any] | None) -> None:
    """Raise UsageError unless ``environment`` has the mode, can be reset and, in mode FRAMES, renders an image."""
    modes = (getattr(environment, "metadata", None) or {}).get("render_modes") or ()
    if hasattr(environment, "num_envs"):
        raise UsageError(f"{env!r} cannot be shown: it is a vector of several environments.")
    if mode not in modes or getattr(environment, "render_mode", None) != mode:
        raise UsageError(
            f"{env!r} cannot be shown with render_mode={mode!r}: its render_modes are {', '.join(modes) or 'none'}. A "
            "function that makes an environment needs a parameter render_mode, which it passes on."
        )
    try:
        Resetter(environment)(environment, seed=None, options=given)
        frame: Any = environment.render() if mode == FRAMES else None
    except Exception as error:
        raise _cannot_be_shown(env, mode, error) from error
    if mode == FRAMES and np.ndim(frame) != 3:
        raise UsageError(f"{env!r} cannot be filmed: its render() returned {describe_value(frame)}, not an image.")


def _cannot_be_shown(env: str, mode: str, error: Exception) -> UsageError:
    return UsageError(f"{env!r} cannot be shown with render_mode={mode!r}. {type(error).__name__}: {error}")


def require_video() -> None:
    """Raise MissingExtra if moviepy, the library that writes videos, is not installed."""
    with needed_by("a video", extra="video"):
        import moviepy  # noqa: F401


def save_video(frames: list[np.ndarray], file: Path, *, fps: float) -> None:
    """Write a video of ``frames``. Raises MissingExtra without moviepy, NotWritten if ``file`` cannot be written."""
    require_video()
    from gymnasium.utils import save_video as of_gymnasium

    seen = list(frames)
    while int(sum([1.0 / fps] * len(seen)) * fps) < len(frames):  # moviepy, which rounds it down, would drop the last
        seen.append(frames[-1])
    with reporting(file), tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as folder:
        of_gymnasium.save_video(seen, folder, episode_trigger=lambda _: True, fps=fps)
        (made,) = Path(folder).iterdir()
        made.replace(file)
