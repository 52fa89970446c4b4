"""The commands about Godot games: ``new``, ``install-addon``, ``check`` and ``watch``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from envmanager.check.game import check_game
from envmanager.cli.check import show_findings
from envmanager.cli.loading import loading
from envmanager.godot.games import find_major, install_addon, new_project

app = typer.Typer(help="Godot games as environments.", no_args_is_help=True)

Major = Annotated[
    int | None,
    typer.Option("--godot", metavar="4|3", help="The major version of Godot.", show_default="the one installed here"),
]


@app.command("new")
def new_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist, or is empty.")],
    major: Major = None,
) -> None:
    """Make a small game to start from: an arena with one agent, and the addon."""
    version = major or find_major(None) or 4
    made = new_project(directory, version)
    typer.echo(f"{made} is a game for Godot {version}. Next: envmanager godot check {made}")


@app.command("install-addon")
def install_addon_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder with project.godot.")],
) -> None:
    """Install the addon in a game, or replace an older version of it."""
    typer.echo(f"The addon is in {install_addon(directory)}.")


@app.command("check")
def check_command(
    game: Annotated[str, typer.Argument(metavar="GAME", help="A folder, a .pck, an exported game, or demo:NAME.")],
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to try.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="The seed to try.")] = 0,
    binary: Annotated[str | None, typer.Option(metavar="PATH", help="The engine; one that is found if unset.")] = None,
    scene: Annotated[
        str | None, typer.Option(metavar="res://…", help="The scene; the project's main scene if unset.")
    ] = None,
) -> None:
    """Play a game with random actions and report in plain words what is wrong with it.

    Exit code 0 when nothing is wrong (notes are not wrong), 1 otherwise.
    """
    engine = {name: value for name, value in (("binary", binary), ("scene", scene)) if value is not None}
    findings = check_game(game, engine=engine, n_steps=steps, seed=seed)
    raise typer.Exit(show_findings(game, findings, Console(highlight=False)))


@app.command("watch")
def watch_command(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a training, such as runs/NAME.")],
    shown: Annotated[int, typer.Option(min=1, help="Number of arenas.")] = 3,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="NAME|DIR", help="One checkpoint; always the newest if unset.")
    ] = None,
    binary: Annotated[
        str | None, typer.Option(metavar="PATH", help="The engine; that of the training if unset.")
    ] = None,
    headless: Annotated[bool, typer.Option("--headless", help="Open no window.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps of each arena; endless if unset.")] = None,
) -> None:
    """Play the policies of a training in a window, in real time, and load each newer checkpoint.

    Ends when the window is closed, with exit code 0; 1 after an error, 2 after a
    mistake in the call, 130 after Ctrl-C and 143 after SIGTERM. The training may
    have ended, or still run.
    """
    with loading():
        watch = importlib.import_module("envmanager.cli.watch")  # PyTorch takes a second to import
    raise typer.Exit(
        watch.watch(
            directory=directory,
            checkpoint=checkpoint,
            shown=shown,
            binary=binary,
            headless=headless,
            steps=steps,
        )
    )
