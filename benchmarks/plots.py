"""Plots as PNG files, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter, ScalarFormatter

from benchmarks.figures import Bars, Curve, bars, step_times, worker_step_costs
from benchmarks.summary import CellSummary
from benchmarks.workloads import ALL
from envmanager.observe.files import replacing

OURS, PEER, LINEAR = "#1f6feb", "#b8bec7", "#57606a"


def draw_all(summaries: Sequence[CellSummary], folder: Path) -> list[Path]:
    """Draw all plots for which ``summaries`` has data, as files in ``folder``; return the files."""
    figures: dict[str, Figure] = {}
    if curves := step_times(summaries):
        figures["time-per-step.png"] = draw_step_times(curves)
    if points := worker_step_costs(summaries).points:
        figures["worker-step-cost.png"] = draw_costs(points)
    for group in bars(summaries):
        figures[f"steps-per-second-{group.workload}-{group.n_envs}.png"] = draw_bars(group)
    for name, figure in figures.items():
        with replacing(folder / name) as file:
            figure.savefig(file, dpi=120, format="png")
    return [folder / name for name in figures]


def draw_step_times(curves: Sequence[Curve]) -> Figure:
    """Draw the time for one step of all environments against their number."""
    figure, axes = _one_axes("number of environments", "time for one step of all environments (ms)")
    for curve in curves:
        numbers, seconds = zip(*curve.points, strict=True)
        style: dict[str, Any] = {"marker": "o"}
        if curve is curves[-1]:
            style = {"linestyle": "--", "color": LINEAR}
        axes.plot(numbers, [1e3 * each for each in seconds], label=curve.label, **style)
    axes.set_title("Pong: time per step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def draw_costs(points: Sequence[tuple[int, float]]) -> Figure:
    """Draw the trainer's CPU time per worker step against the number of workers."""
    figure, axes = _one_axes("workers, each asleep for 50 ms per step", "trainer's CPU time per worker step (µs)")
    axes.plot(*zip(*points, strict=True), marker="o", color=OURS)
    axes.set_xscale("log", base=2)
    axes.set_xticks([n for n, _ in points])
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title("Cost of a worker step")
    axes.set_ylim(bottom=0)
    return figure


def draw_bars(group: Bars) -> Figure:
    """Draw a bar for each contender of one cell. The title says what a step of the workload does."""
    figure = Figure(figsize=(8, 0.27 * len(group.names) + 1.0), layout="constrained")
    axes = figure.subplots()
    drawn = axes.barh(group.names, group.rates, color=[OURS if ours else PEER for ours in group.ours])
    axes.bar_label(drawn, [f"{rate:,.0f}" for rate in group.rates], padding=4, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.01)
    figure.suptitle(f"Steps per second of {group.n_envs} environments (blue: envmanager)", fontsize=11)
    axes.set_title(ALL[group.workload].about, fontsize=9, color=LINEAR)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(labelsize=9)
    _open_frame(axes)
    return figure


def _one_axes(x_label: str, y_label: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    _open_frame(axes)
    return figure, axes


def _open_frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
