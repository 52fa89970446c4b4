"""The commands for a saved training: ``evaluate``, ``play`` and ``export``, and the options that they share.

``evaluate.py``, ``play.py`` and ``export.py`` do the work. They are imported when their command is called, since
PyTorch takes a second.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from envmanager.cli.loading import loading
from envmanager.cli.plan import check_out

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a training, such as runs/NAME, or of one checkpoint.")
]
CheckpointOption = Annotated[
    str,
    typer.Option(metavar="latest|best|STEP", help="The checkpoint: latest, best, its step, or its name."),
]
OtherEnvOption = Annotated[
    str | None, typer.Option("--env", metavar="ENV", help="Another environment; the training's if unset.")
]
VerboseOption = Annotated[
    bool,
    typer.Option(
        "--verbose", help="Show all evidence of each failure of a worker: traceback, crash report, end of its output."
    ),
]


def evaluate_command(
    directory: RunArgument,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes, dealt evenly to the environments.")] = 100,
    checkpoint: CheckpointOption = "latest",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same episodes.")] = 0,
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
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the same JSON to this file.")] = None,
    verbose: VerboseOption = False,
) -> None:
    """Play whole episodes greedily with the policies of a training, and print their returns and lengths.

    The exit code is 0, 1 after an error, 2 after a mistake in the call, 130 after
    Ctrl-C and 143 after SIGTERM.
    """
    check_out(out)
    with loading():
        command = importlib.import_module("envmanager.cli.evaluate")
    plan = command.EvaluationPlan(
        directory=directory,
        checkpoint=checkpoint,
        episodes=episodes,
        seed=seed,
        n_envs=n_envs,
        manager=manager,
        env=env,
        restarts=restarts,
        as_json=as_json,
        out=out,
    )
    raise typer.Exit(command.run_evaluation(plan, verbose=verbose))


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
) -> None:
    """Show the policies of a training, playing greedily, in a window or in a video.

    The exit code is 0, 1 after an error, 2 after a mistake in the call or where
    nothing can be shown, 130 after Ctrl-C and 143 after SIGTERM.
    """
    with loading():
        command = importlib.import_module("envmanager.cli.play")
    plan = command.PlayPlan(
        directory=directory, checkpoint=checkpoint, episodes=episodes, seed=seed, video=video, fps=fps, env=env
    )
    raise typer.Exit(command.run_play(plan))


def export_command(
    directory: RunArgument,
    to: Annotated[str, typer.Option(metavar="onnx|torchscript", help="The format.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file to write; NAME.onnx or NAME.pt, after the training, if unset."),
    ] = None,
    behavior: Annotated[
        str | None, typer.Option(metavar="NAME", help="The behavior to export; the only one if unset.")
    ] = None,
    checkpoint: CheckpointOption = "latest",
    opset: Annotated[int, typer.Option(help="The version of ONNX's operators, 11 to 20.")] = 17,
    env: OtherEnvOption = None,
) -> None:
    """Write the greedy policy of a training to a file for other programs, and check that it acts the same there.

    The exit code is 0, 1 after an error or when the actions differ (then no file
    is written), 2 after a mistake in the call, 130 after Ctrl-C and 143 after
    SIGTERM.
    """
    with loading():
        command = importlib.import_module("envmanager.cli.export")
    plan = command.ExportPlan(
        directory=directory, checkpoint=checkpoint, to=to, opset=opset, behavior=behavior, out=out, env=env
    )
    raise typer.Exit(command.run_export(plan))
