"""The commands for a saved training run: ``envmanager evaluate``, ``play`` and ``export``.

Modules that need PyTorch are imported only when a command runs, because the import takes a second. A command ended
by SIGINT or SIGTERM exits with 128 + the signal's number.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from envmanager.adapters.recipes import RECIPE_OPTIONS
from envmanager.cli.config_files import options_of
from envmanager.cli.display import EpisodeProgress, describe_returns, evaluation_lines, of_behavior, write_json
from envmanager.cli.loading import loading
from envmanager.cli.output import NAMES, PlainOutput, output_for, print_pairs, print_text, prints_on_stderr
from envmanager.cli.plan import check_out
from envmanager.cli.run import EndOfInput, Notices, StopSignals
from envmanager.cli.task_files import read_tasks, tasks_of_seeds
from envmanager.errors import ConfigError, UsageError
from envmanager.observe.files import json_safe
from envmanager.placing.placement import count
from envmanager.registry import ManagerOptions, make_manager
from envmanager.training.evaluation import (
    Evaluation,
    episodes_for,
    evaluate_until,
    mean_and_spread,
    seeded,
    tasks_for,
    write_csv,
)

if TYPE_CHECKING:
    import numpy as np

    from envmanager.tasks import Task
    from envmanager.training.policies.playing import PlayedEpisode
    from envmanager.training.policies.saved import SavedTraining

N_CHECKED = 300
"""Minimum number of recorded observations on which an exported policy must choose the same actions as the original."""
VIDEO = ".mp4"
"""Suffix of the videos that Gymnasium writes."""

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a training run, such as runs/NAME, or of one checkpoint.")
]
CheckpointOption = Annotated[
    str,
    typer.Option(metavar="latest|best|STEP", help="The checkpoint: latest, best, its step, or its name."),
]
OtherEnvOption = Annotated[
    str | None, typer.Option("--env", metavar="ENV", help="Another environment; the training's if unset.")
]
OptionsOption = Annotated[
    str | None,
    typer.Option(
        "--options", metavar="{NAME: VALUE}", help="Options of each reset, as YAML.", show_default="no options"
    ),
]
PlainOption = Annotated[bool, typer.Option("--plain", help="Print lines of text instead of drawing.")]
VerboseOption = Annotated[
    bool,
    typer.Option(
        "--verbose", help="Show all evidence of each failure of a worker: traceback, crash report, end of its output."
    ),
]

UntilEofOption = Annotated[bool, typer.Option("--until-eof", help="Stop as after a Ctrl-C when standard input ends.")]


def evaluate_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of training runs, such as runs/NAME, or of single checkpoints."),
    ],
    episodes: Annotated[int | None, typer.Option(min=1, help="Number of episodes.", show_default="100")] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="0:50|3,7,9", help="Play each seed (50 is left out); derived from --seed if unset."),
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv|FILE.jsonl", help="Play each row (seed, id, options); no options if unset."),
    ] = None,
    checkpoint: CheckpointOption = "latest",
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same episodes, if tasks have no seeds.")] = 0,
    n_envs: Annotated[int | None, typer.Option(min=1, help="Number of environments; the training's if unset.")] = None,
    manager: Annotated[
        str | None, typer.Option(metavar="KIND", help="auto, subprocess, simple, …; the training's if unset.")
    ] = None,
    env: OtherEnvOption = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="How many restarts a worker that dies or hangs gets within a minute; 0: none.",
            show_default="the training's",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv|FILE.json", help="Write all episodes as a table or JSON; no file if unset."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Go on from this file if it is there, and keep in it what was played; no file if unset.",
        ),
    ] = None,
    plain: PlainOption = False,
    verbose: VerboseOption = False,
    until_eof: UntilEofOption = False,
) -> None:
    """Play whole episodes greedily with the policies of training runs, and print the episodes' returns and lengths.

    After an error or a signal, what was played until then is printed and written.
    The exit code is 0 on success, 1 after an error, 2 after a usage error, 3 when
    a file cannot be written, 130 after Ctrl-C and 143 after SIGTERM.
    """
    if until_eof:
        EndOfInput()
    check_out(out, ".csv", ".json")
    if [episodes, seeds, tasks].count(None) < 2:
        raise UsageError("evaluate takes one of --episodes, --seeds and --tasks.")
    given = tasks_of_seeds(seeds) if seeds is not None else read_tasks(tasks) if tasks is not None else None
    n_episodes = len(given) if given is not None else episodes or 100
    if n_envs is not None and n_envs > n_episodes:
        wanted = f"--episodes {n_episodes}" if given is None else f"the number of tasks, {n_episodes}"
        raise ConfigError(f"--n-envs {n_envs} is more than {wanted}: some would have nothing to play.")
    with loading():
        from envmanager.training.policies.saved import SavedTraining, with_n_envs
    output = output_for(plain=plain or as_json)
    courses: list[_Course] = []
    try:
        printing = prints_on_stderr() if as_json else nullcontext()
        with printing, Notices(output.show_notice, verbose=verbose), StopSignals(), output.drawing():
            leave_cores()
            trainings = [SavedTraining.open(run, checkpoint) for run in runs]
            if seeds is not None and any(training.plan.parameters for training in trainings):
                output.show_notice(
                    "note", "with --seeds, episodes begin without the training's environment parameters."
                )
            for training in trainings:
                options = training.manager_options(env=env, kind=manager)
                options = attrs.evolve(with_n_envs(options, min(n_envs or options.n_envs, n_episodes)), seed=None)
                if given is not None and options.kind == "godot":
                    raise _without_tasks(options)
                if restarts is not None:
                    options = attrs.evolve(options, restarts=attrs.evolve(options.restarts, max_restarts=restarts))
                if resume is not None:
                    options = attrs.evolve(options, restarts=attrs.evolve(options.restarts, keep_episodes=True))
                number = "" if not courses else f".{len(courses) + 1}"
                file = None if resume is None else resume.with_name(resume.name + number)
                courses.append(_Course(training, options, file))
            _play(courses, None if given is None else seeded(given, seed), n_episodes, seed, output, prints=not as_json)
    finally:
        if any(course.evaluation is not None for course in courses):  # then all are
            table, told = [], []
            for run, course in zip(map(str, runs), courses, strict=True):
                training, options, evaluation = course.training, course.options, course.evaluation
                assert evaluation is not None
                table.append(({"run": run, "checkpoint": training.path.name}, evaluation))
                facts: dict[str, Any] = {"run": run, "env": options.env_name, "checkpoint": str(training.path)}
                facts |= {"n_steps": training.n_steps, "seed": seed, "n_envs": options.n_envs}
                told.append(facts | _figures(evaluation))
            data = json_safe(told[0] if len(told) == 1 else {"runs": told})
            if as_json:
                print(json.dumps(data, indent=1, allow_nan=False))
            if out is not None and out.suffix.lower() == ".csv":
                write_csv(out, table)
            elif out is not None:
                write_json(out, data)


@attrs.define
class _Course:
    """A training that is evaluated in a manager with ``options``. The evaluation is None until it has been played.

    ``file``: the file from which it goes on if it was killed, or None.
    """

    training: SavedTraining
    options: ManagerOptions
    file: Path | None = None
    evaluation: Evaluation | None = None


def _play(
    courses: Sequence[_Course],
    tasks: Sequence[Task] | None,
    n_episodes: int,
    seed: int,
    output: PlainOutput,
    *,
    prints: bool,
) -> None:
    """Evaluate trainings and store their evaluations. Those with equal options share a manager.

    ``tasks``: the given tasks; None: play ``n_episodes``. ``prints``: whether to print. If an error or a signal ends
    this after an episode has begun, each training has an evaluation too, which says what was not played.
    """
    progress = EpisodeProgress(output, n_episodes * len(courses))
    width = max(len(str(course.training.path)) for course in courses)

    def store(course: _Course, evaluation: Evaluation) -> None:
        course.evaluation = evaluation
        path = f"{course.training.path!s:<{width}}" if len(courses) > 1 else ""
        for line in _lines(evaluation, path) if prints else ():
            output.line(line, indent=NAMES)

    try:
        for first in courses:
            options = first.options
            alike = [course for course in courses if course.options == options]
            if alike[0] is not first:
                continue
            label = [str(getattr(options, name)) for name in ("env", "engine", *RECIPE_OPTIONS)]
            what = f"checkpoint {first.training.path}" if len(alike) == 1 else f"{len(alike)} checkpoints"
            start = f"{options.env_name}: {what}, {count(options.n_envs, 'environment')}, manager {options.kind}"
            output.line(start) if prints else print_text(start, sys.stderr)
            with first.training.logged(options, "evaluate") as kept, make_manager(kept) as made:
                if tasks is not None and not made.begins_on_demand:
                    raise _without_tasks(options)
                policies_of = [course.training.policies_for(made.behavior_specs) for course in alike]
                for course, policies in zip(alike, policies_of, strict=True):
                    played: Mapping[str, Any] = {"tasks": tasks}
                    if tasks is None:
                        played = episodes_for(made, n_episodes, seed, course.training.curriculum(seed=seed))
                    played = {**played, "resume": course.file, "label": label, "on_cut": partial(store, course)}
                    evaluation = evaluate_until(progress.show, made, policies, **played)
                    assert evaluation is not None
                    store(course, evaluation)
                    progress.n_before += n_episodes
            if prints and kept.log_dir is not None and os.path.isdir(kept.log_dir):  # else nothing was printed
                output.line(f"{'output':<{NAMES}}{kept.log_dir}")
    except BaseException as error:
        if any(course.evaluation is not None for course in courses):
            for course in courses:
                if course.evaluation is None:
                    own = tasks or tasks_for(n_episodes, seed, course.training.curriculum(seed=seed))
                    store(course, Evaluation.of_tasks(own, course.training.behaviors, None, error))
        raise


def _without_tasks(options: ManagerOptions) -> UsageError:
    return UsageError(
        f"episodes of {options.env_name} cannot begin on demand, so there can be no tasks: pass --episodes in place of "
        "--seeds or --tasks."
    )


def _lines(evaluation: Evaluation, path: str) -> Iterator[str]:
    """Yield lines with the returns and lengths of an evaluation or, after ``path``, with its returns."""
    for line in evaluation_lines(evaluation):
        yield f"{path}  {line}" if path else f"{'return':<{NAMES}}{line}"
    for behavior, lengths in evaluation.lengths_of.items():
        if lengths and not path:
            whose = of_behavior(behavior, evaluation.lengths_of)
            yield f"{'length':<{NAMES}}{describe_returns(lengths)} agent steps{whose}"


def _figures(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation's results for JSON."""
    behaviors = {
        behavior: {
            "episodes": evaluation.n_episodes,
            "return": _spread_of(returns),
            "length": _spread_of(evaluation.lengths_of[behavior]),
            "returns": returns,
            "lengths": evaluation.lengths_of[behavior],
            "measures": evaluation.means_of_measures(behavior),
        }
        for behavior, returns in evaluation.returns_of.items()
        if returns
    }
    facts = {"lost": evaluation.lost, "unplayed": evaluation.unplayed, "complete": evaluation.is_complete}
    return {**facts, "behaviors": behaviors, "results": list(evaluation.rows())}


def leave_cores() -> None:
    """Limit PyTorch to one thread, so that the workers can use the other cores."""
    import torch

    torch.set_num_threads(1)


def _spread_of(numbers: Sequence[float]) -> dict[str, float]:
    mean, spread = mean_and_spread(numbers)
    return {"mean": mean, "spread": spread, "min": min(numbers), "max": max(numbers)}


def play_command(
    directory: RunArgument,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 1,
    checkpoint: CheckpointOption = "latest",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same episodes.")] = 0,
    video: Annotated[
        Path | None,
        typer.Option(metavar="FILE.mp4|DIR", help="A video, or a folder for a video per episode; a window if unset."),
    ] = None,
    fps: Annotated[
        float | None, typer.Option(min=1, help="Frames per second of the video; the environment's own if unset.")
    ] = None,
    env: OtherEnvOption = None,
    options: OptionsOption = None,
) -> None:
    """Play episodes greedily with the policies of a training run, and show them in a window or in a video.

    The exit code is 0 on success, 1 after an error, 2 after a usage error or if the
    environment cannot be shown, 3 when a video cannot be written, 130 after Ctrl-C
    and 143 after SIGTERM.
    """
    with loading():
        from envmanager.training.policies.playing import FRAMES, WINDOW, has_display, play, require_video
        from envmanager.training.policies.saved import SavedTraining
    given = options_of(options)
    leave_cores()
    if not has_display():
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo's own default needs a screen
    if video is not None:
        _check_video(video)
        require_video()
    elif fps is not None:
        raise UsageError("--fps is for a video; a window has the speed of its environment. Add --video FILE.mp4.")
    training = SavedTraining.open(directory, checkpoint)
    show = Show(training.name, video, fps)
    mode = WINDOW if video is None else FRAMES
    with Notices(PlainOutput().show_notice), StopSignals():
        print_text(f"{training.manager_options(env=env).env_name}: checkpoint {training.path} plays")
        play(training, n_episodes=episodes, mode=mode, on_episode=show.ended, seed=seed, env=env, reset_options=given)
        show.finish()


class Show:
    """A display of ``envmanager play`` that prints each episode and can write a single video or a video per episode."""

    def __init__(self, name: str, video: Path | None, fps: float | None) -> None:
        self._name, self._video, self._fps = name, video, fps
        self._frames: list[np.ndarray] = []

    def ended(self, episode: PlayedEpisode) -> None:
        """Print an episode's returns. With ``--video``, write the episode's video or keep its frames for ``finish``."""
        told = [f"episode {episode.number}", count(episode.n_steps, "environment step")]
        for behavior, returns in episode.returns.items():
            told.append(f"return{of_behavior(behavior, episode.returns)} {describe_returns(returns)}")
        print_text("  ".join(told))
        if self._video is None:
            return
        self._fps = self._fps or episode.frames_per_s
        self._frames += episode.frames
        if _is_folder(self._video):
            files = (self._video / f"{self._name}-episode-{number}{VIDEO}" for number in itertools.count())
            self._write(next(file for file in files if not file.exists()))

    def finish(self) -> None:
        """Write the video of all episodes. Do nothing without ``--video``, or if each episode has its own video."""
        if self._video is not None and self._frames:
            self._write(self._video)

    def _write(self, file: Path) -> None:
        from envmanager.training.policies.playing import save_video

        assert self._fps is not None
        file.parent.mkdir(parents=True, exist_ok=True)
        frames, self._frames = self._frames, []
        save_video(frames, file, fps=self._fps)
        print_pairs([("video", f"{file}: {count(len(frames), 'frame')}, {self._fps:g} a second")])


def _is_folder(video: Path) -> bool:
    return video.is_dir() or not video.suffix


def _check_video(video: Path) -> None:
    if not _is_folder(video) and video.suffix != VIDEO:
        raise UsageError(f"--video {video}: a video is an {VIDEO} file, or a folder for a file per episode.")
    if video.exists() and not (video.is_dir() if _is_folder(video) else video.is_file()):
        raise UsageError(f"--video {video} is not a {'folder' if _is_folder(video) else 'regular file'}; name another.")
    if not _is_folder(video) and not video.parent.is_dir():
        raise UsageError(f"--video {video}: there is no directory {video.parent}; make it first.")


def export_command(
    directory: RunArgument,
    to: Annotated[str, typer.Option(metavar="onnx|torchscript|godot", help="The format.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR",
            help="The file to write, or its folder. If unset, NAME.onnx, NAME.pt or NAME.policy, after the training.",
        ),
    ] = None,
    behavior: Annotated[
        str | None, typer.Option(metavar="NAME", help="The behavior to export; each in a file of its own if unset.")
    ] = None,
    checkpoint: CheckpointOption = "latest",
    opset: Annotated[int, typer.Option(help="The version of ONNX's operators, 11 to 20.")] = 17,
    env: OtherEnvOption = None,
    options: OptionsOption = None,
) -> None:
    """Export a training run's greedy policies for other programs, and check that the exported ones act the same.

    The exit code is 0 on success, 1 after an error or when the actions differ (then
    no file is written), 2 after a usage error, 3 when the file cannot be written,
    130 after Ctrl-C and 143 after SIGTERM.
    """
    with loading():
        from envmanager.training.policies import exporting
        from envmanager.training.policies.saved import SavedTraining
    exporting.check_format(to, opset)
    given = options_of(options)
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # else onnxruntime sends usage data
    leave_cores()
    training = SavedTraining.open(directory, checkpoint)
    policies = [training.policy(name) for name in (training.behaviors if behavior is None else [behavior])]
    if out is not None and not out.is_dir() and len(policies) > 1:
        names = ", ".join(map(repr, training.behaviors))
        raise UsageError(
            f"--out {out} is one file, for several behaviors: make that folder, or --behavior one of {names}."
        )
    files = {}
    for policy in policies:
        of_one = f"-{policy.behavior}" if len(training.behaviors) > 1 else ""
        named = Path(f"{training.name}{of_one}{exporting.SUFFIXES[to]}")
        files[policy.behavior] = named if out is None else out / named if out.is_dir() else out
        check_out(files[policy.behavior])
    for policy in policies:
        file = files[policy.behavior]
        with Notices(PlainOutput().show_notice), StopSignals():
            exported = exporting.export_policy(
                policy,
                file,
                to=to,
                observations=exporting.record(training, policy.behavior, n=N_CHECKED, env=env, reset_options=given),
                opset=opset,
                ticks_per_action=exporting.ticks_per_action_of(training),
            )
        lines = [("checkpoint", f"{training.path}, behavior {policy.behavior!r}")]
        lines += [("input", f"{name}  {told}") for name, told in exported.inputs.items()]
        lines += [("output", f"{name}  {told}") for name, told in exported.outputs.items()]
        lines.append(("checked", f"same actions on {exported.n_checked:,} observations"))
        lines.append(("written", f"{file}, opset {opset}" if to == exporting.ONNX else str(file)))
        print_pairs(lines)
