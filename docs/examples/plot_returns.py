"""Draw the returns of training runs over the steps that they took, one line per run and behavior.

    python docs/examples/plot_returns.py runs/dqn_pong --unit "frames=4" --out returns.png
    python docs/examples/plot_returns.py runs/chase-* --behavior hero --seconds --out chase.png

Each line is the mean of the last ``--window`` episodes, each dot one of them, if they are few. A vertical line is where
somebody froze a behavior, or let it learn again, while it trained (control.toml), or where a lesson of an environment
parameter began. Needs matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from envmanager.training.runs import checkpoints, figures
from envmanager.training.runs.figures import EpisodeEnd

MOST_DOTS = 500
STYLES = ["-", "--", ":", "-."]
"""Of a run's behaviors; those that always share their returns are one line."""


def draw_run(axes: Any, directory: Path, color: str, arguments: argparse.Namespace) -> None:
    """The behaviors of one run."""
    directory = directory.resolve()
    episodes = figures.read_episodes(directory / figures.EPISODES)
    lines = lines_of(episodes, arguments.behavior)
    for number, (returns, behaviors) in enumerate(lines.items()):
        own = [episode for episode in episodes if episode.behavior == behaviors[0]]
        at = places(own, arguments)
        n = min(arguments.window, len(own))
        means = np.convolve(returns, np.full(n, 1 / n), mode="valid")
        label = directory.name if len(lines) == 1 else f"{directory.name} {', '.join(behaviors)}"
        axes.plot(at[n - 1 :], means, STYLES[number % len(STYLES)], color=color, label=label)
        if len(own) <= MOST_DOTS:
            axes.plot(at, returns, ".", markersize=4, alpha=0.4, color=color)
    for n_steps, text in changes_of(directory):
        mark(axes, text, where(n_steps, episodes, arguments), color)


def lines_of(episodes: list[EpisodeEnd], behavior: str | None) -> dict[tuple[float, ...], list[str]]:
    """The returns of each behavior, or of one, and who has them: agents of one team have the same."""
    returns: dict[str, list[float]] = {}
    for episode in episodes:
        if behavior in (None, episode.behavior):
            returns.setdefault(episode.behavior, []).append(episode.total)
    lines: dict[tuple[float, ...], list[str]] = {}
    for name, own in returns.items():
        lines.setdefault(tuple(own), []).append(name)
    return lines


def places(episodes: list[EpisodeEnd], arguments: argparse.Namespace) -> np.ndarray:
    """Where on the horizontal axis they ended."""
    if arguments.seconds:
        return np.array([episode.seconds for episode in episodes])
    return np.array([episode.steps for episode in episodes]) * per_step(arguments)


def where(n_steps: int, episodes: list[EpisodeEnd], arguments: argparse.Namespace) -> float:
    """The place of a step on the horizontal axis."""
    if not arguments.seconds:
        return n_steps * per_step(arguments)
    steps = [episode.steps for episode in episodes]
    return float(np.interp(n_steps, steps, [episode.seconds for episode in episodes]))


def per_step(arguments: argparse.Namespace) -> float:
    """How many of what is counted are in a step."""
    return float(arguments.unit.partition("=")[2] or 1)


def changes_of(directory: Path) -> list[tuple[int, str]]:
    """Who was frozen when, who learned again, and which lessons began, as the run's last checkpoint tells."""
    folder = directory / "checkpoints"
    if not (folder / checkpoints.LATEST).exists():
        return []
    training = checkpoints.load_latest(folder).training
    changes = [(began.n_steps, f"{began.parameter} {began.lesson + 1}") for began in training.lessons]
    for change in training.changes:
        texts = [f"{behavior} frozen" for behavior in change.frozen]
        changes.append((change.n_steps, "\n".join([*texts, *(f"{behavior} learns" for behavior in change.unfrozen)])))
    return changes


def mark(axes: Any, text: str, at: float, color: str) -> None:
    """A vertical line; the first run that has such a change says what it is."""
    axes.axvline(at, color=color, linestyle=(0, (4, 3)), linewidth=1)
    if text not in [one.get_text() for one in axes.texts]:
        axes.annotate(text, (at, 1.01), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="directories that training runs left")
    parser.add_argument("--out", type=Path, default=Path("returns.png"), help="the file to write; returns.png if unset")
    parser.add_argument(
        "--unit",
        default="steps of agents=1",
        help="unit of the horizontal axis, and its number per step, such as frames=4",
    )
    parser.add_argument("--seconds", action="store_true", help="draw the returns over the seconds of the training")
    parser.add_argument("--behavior", help="draw only this behavior")
    parser.add_argument(
        "--window", type=int, default=20, help="number of episodes of which the mean is drawn; 20 if unset"
    )
    parser.add_argument("--goal", type=float, help="a return to draw a line at")
    arguments = parser.parse_args()
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, directory in enumerate(arguments.runs):
        draw_run(axes, directory, f"C{number}", arguments)
    if arguments.goal is not None:
        goal = f"goal {arguments.goal:g}".replace("-", "\N{MINUS SIGN}")
        axes.axhline(arguments.goal, color="gray", linestyle="--", linewidth=1, label=goal)
    axes.set_xlabel("seconds" if arguments.seconds else arguments.unit.partition("=")[0])
    of_whom = "" if arguments.behavior is None else f" of {arguments.behavior}"
    axes.set_ylabel(f"return{of_whom}, mean of {arguments.window} episodes")
    axes.xaxis.set_major_formatter("{x:g}" if arguments.seconds else "{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(arguments.out, dpi=120)
    print(f"drawn: {arguments.out}")


if __name__ == "__main__":
    main()
