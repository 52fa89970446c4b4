"""The commands ``envmanager godot new``, ``install-addon``, ``check`` and ``watch``, for games made with Godot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from envmanager.check.game import check_game
from envmanager.cli.check import show_finding, show_verdict
from envmanager.cli.display import of_behavior
from envmanager.cli.loading import loading
from envmanager.cli.output import PlainOutput, print_text
from envmanager.cli.run import EndOfInput, Notices, StopSignals
from envmanager.cli.trained import UntilEofOption
from envmanager.godot.games import find_major, install_addon, new_project
from envmanager.training.evaluation import mean_and_spread

app = typer.Typer(help="Godot games as environments.", no_args_is_help=True)


@app.command("new")
def new_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist, or is empty.")],
    major: Annotated[
        int | None,
        typer.Option(
            "--godot", metavar="4|3", help="The major version of Godot.", show_default="the one installed here"
        ),
    ] = None,
) -> None:
    """Create a small Godot game to start from, with the addon and an arena for one agent."""
    version = major or find_major() or 4
    made = new_project(directory, version)
    typer.echo(f"{made} is a game for Godot {version}. Next: envmanager godot check {made}")


@app.command("install-addon")
def install_addon_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder with project.godot.")],
) -> None:
    """Install the addon in a game and enable its plugin, or replace an older version of the addon."""
    addon = install_addon(directory)
    typer.echo(
        f"The addon is in {addon}, and its plugin is enabled (an open editor has to reload the project). Next: add an "
        "EnvManagerArena to the scene that is to be trained and extend its script (docs/godot.md), then run "
        f"envmanager godot check {directory}"
    )


@app.command("check")
def check_command(
    game: Annotated[str, typer.Argument(metavar="GAME", help="A folder, a .pck, an exported game, or demo:NAME.")],
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to try.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="The seed to try.")] = 0,
    binary: Annotated[str | None, typer.Option(metavar="PATH", help="The engine; one that is found if unset.")] = None,
    scene: Annotated[
        str | None, typer.Option(metavar="res://…", help="The scene; the project's main scene if unset.")
    ] = None,
    window: Annotated[bool, typer.Option("--window", help="Open a window, for a game that observes pictures.")] = False,
) -> None:
    """Play a game with random actions and report the problems found.

    The exit code is 0 without problems (notes do not count), otherwise 1, or 2 after a usage error.
    """
    engine: dict[str, Any] = {"window": True, "shown": 0} if window else {}
    engine |= {name: value for name, value in (("binary", binary), ("scene", scene)) if value is not None}
    console, findings = Console(highlight=False), []
    print_text(f"{game}: an engine is started")
    with Notices(Lines().show_notice):  # such as that the game is imported first
        for finding in check_game(game, engine=engine, n_steps=steps, seed=seed):
            show_finding(console, finding)
            findings.append(finding)
    raise typer.Exit(show_verdict(game, findings, console))


@app.command("watch")
def watch_command(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a training run, such as runs/NAME.")],
    shown: Annotated[int, typer.Option(min=1, help="Number of arenas.")] = 3,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="NAME|DIR", help="One checkpoint; always the newest if unset.")
    ] = None,
    binary: Annotated[
        str | None, typer.Option(metavar="PATH", help="The engine; that of the training if unset.")
    ] = None,
    headless: Annotated[bool, typer.Option("--headless", help="Open no window.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps of each arena; endless if unset.")] = None,
    until_eof: UntilEofOption = False,
) -> None:
    """Play the policies of a training run in a window, in real time, and load newer checkpoints by default.

    The training may still be running. The command ends when the window is closed
    or after --steps. The exit code is then 0. It is 1 after an error, 2 after a
    usage error, 130 after Ctrl-C and 143 after SIGTERM.
    """
    if until_eof:
        EndOfInput()
    with loading():  # PyTorch takes a second to import
        from envmanager.training.policies.watching import Watching, WatchPlan
    plan = WatchPlan(
        directory=directory, checkpoint=checkpoint, shown=shown, binary=binary, headless=headless, steps=steps
    )
    lines = Lines()
    with Notices(lines.show_notice), StopSignals():
        Watching(plan, lines).go()


class Lines(PlainOutput):
    """A display that prints notices, and for ``envmanager godot watch`` names of checkpoints and episode returns."""

    def plays(self, game: str, checkpoint: str) -> None:
        print_text(f"{game}: checkpoint {checkpoint} plays")

    def ended(self, n_steps: int, returns: Mapping[str, list[float]]) -> None:
        """Print the steps per arena so far, the number of newly ended episodes, and their mean return by behavior."""
        told = [f"steps of each arena {n_steps:,}", f"episodes {sum(map(len, returns.values())):,}"]
        for behavior, own in returns.items():
            told.append(f"return{of_behavior(behavior, returns)} {mean_and_spread(own)[0]:.4g}")
        print_text("  ".join(told))
