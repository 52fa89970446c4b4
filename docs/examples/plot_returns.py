"""Draw the returns of trainings over the steps that they took, one line per run and behavior.

    python docs/examples/plot_returns.py runs/dqn_pong --unit "frames=4" --out returns.png

Each line is the mean of the last ``--window`` episodes, each dot one of them, if they are few. Needs matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from envmanager.training import episode_log

MOST_DOTS = 500
STYLES = ["-", "--", ":", "-."]
"""Of a run's behaviors: where they share their returns, their lines lie on each other."""


def draw_run(axes: Any, directory: Path, color: str, *, per_step: float, window: int) -> None:
    """The behaviors of one run."""
    directory = directory.resolve()
    episodes = episode_log.read(directory / episode_log.FILE)
    behaviors = list(dict.fromkeys(episode.behavior for episode in episodes))
    for number, behavior in enumerate(behaviors):
        own = [episode for episode in episodes if episode.behavior == behavior]
        at = np.array([episode.steps * per_step for episode in own])
        returns = np.array([episode.total for episode in own])
        n = min(window, len(own))
        means = np.convolve(returns, np.full(n, 1 / n), mode="valid")
        label = f"{directory.name} {behavior}" if len(behaviors) > 1 else directory.name
        axes.plot(at[n - 1 :], means, STYLES[number % len(STYLES)], color=color, label=label)
        if len(own) <= MOST_DOTS:
            axes.plot(at, returns, ".", markersize=4, alpha=0.4, color=color)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="directories that trainings left")
    parser.add_argument("--out", type=Path, default=Path("returns.png"))
    parser.add_argument("--unit", default="steps of agents=1", help="what to count, and how many of it are in a step")
    parser.add_argument("--window", type=int, default=20, help="over how many episodes the mean is taken")
    parser.add_argument("--goal", type=float, help="a return to draw a line at")
    arguments = parser.parse_args()
    unit, _, per_step = arguments.unit.partition("=")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, directory in enumerate(arguments.runs):
        draw_run(axes, directory, f"C{number}", per_step=float(per_step or 1), window=arguments.window)
    if arguments.goal is not None:
        axes.axhline(arguments.goal, color="gray", linestyle="--", linewidth=1)
    axes.set_xlabel(unit)
    axes.set_ylabel(f"return, mean of {arguments.window} episodes")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(arguments.out, dpi=120)
    print(f"drawn: {arguments.out}")


if __name__ == "__main__":
    main()
