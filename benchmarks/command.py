"""The command ``python -m benchmarks`` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.plan import plan_bench
from benchmarks.run import run
from envmanager.cli.plan import check_out

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    workload: Annotated[
        list[str] | None, typer.Option(metavar="NAME,…", help="noop, cartpole, pong, …; all of them if unset.")
    ] = None,
    n_envs: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of environments; those of each workload if unset.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of runs of each contender; 5 if unset.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.01, help="Seconds per run; 2 if unset.")] = None,
    contenders: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,…", help="ours, gymnasium, sb3, …, or ours-simple, …; ours and the PEERs if unset."),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(metavar="PEER=PATH", help="The interpreter that has this library installed; this one if unset."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write all measurements to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw plots into this folder.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test: one short round of noop.")] = False,
    goals: Annotated[
        bool, typer.Option("--goals", help="Compare with the goals of this project; for its developers.")
    ] = False,
) -> None:
    """Measure the managers beside other libraries, in interleaved rounds.

    The exit code is 0, 1 when a contender failed, 2 after a usage error,
    130 after Ctrl-C.
    """
    check_out(out)
    plan = plan_bench(
        workloads=workload or (),
        n_envs=n_envs or (),
        contenders=contenders or (),
        pythons=python or (),
        rounds=rounds,
        seconds=seconds,
        quick=quick,
        out=out,
        plot=plot,
        goals=goals,
    )
    raise typer.Exit(run(plan, Console(highlight=False)))
