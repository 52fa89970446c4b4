"""The tables of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from benchmarks.roster import family_of, label_of
from benchmarks.schedule import LeftOut
from benchmarks.summary import CellSummary, Line
from benchmarks.targets import Outcome
from benchmarks.workloads import ALL, BARE

QUIET_SPREAD = 1.3
"""Ratio of the bare environment's fastest to its slowest run at which a warning is shown."""

MET = {True: Text("met", style="green"), False: Text("not met", style="red"), None: Text("not measured", style="dim")}
LOST = Text("lost in the noise", style="yellow")


def cell_title(summary: CellSummary) -> Text:
    """Return the title of a cell's table."""
    about = ALL[summary.workload].about
    return Text(f"{summary.workload}, {summary.n_envs} environments: {about}", style="bold")


def cell_table(summary: CellSummary) -> Table:
    """Return the table of one workload with one number of environments: a row per contender, the best first."""
    workload = ALL[summary.workload]
    table = _table()
    table.add_column("contender")
    columns = _columns(summary)
    for name, _ in columns:
        table.add_column(name, justify="right")
    for line in sorted(summary.lines, key=_order(workload.shows)):
        style = "bold" if family_of(line.contender) == "ours" else ""
        table.add_row(label_of(line.contender, summary.n_envs), *(cell(line) for _, cell in columns), style=style)
    if workload.shows != "start_s":
        table.add_row(label_of(BARE, summary.n_envs), f"{summary.bare_rate:,.0f}", style="dim")
    return table


def _table() -> Table:
    return Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")


def _order(shows: str) -> Callable[[Line], float]:
    orders: dict[str, Callable[[Line], float]] = {
        "rate": lambda line: -line.to_bare,
        "cores": lambda line: line.cores,
        "start_s": lambda line: line.start_s,
    }
    return orders[shows]


def _columns(summary: CellSummary) -> list[tuple[str, Callable[[Line], str]]]:
    if ALL[summary.workload].shows == "start_s":
        return [("seconds", lambda line: f"{line.start_s:.3f}")]
    best = summary.best_of_ours

    def ours_to_it(line: Line) -> str:
        ratio = None if best is None or best == line.contender else summary.ratio(best, line.contender)
        return "" if ratio is None else f"{ratio:.3g}"

    columns: list[tuple[str, Callable[[Line], str]]] = [
        ("env steps/s", lambda line: f"{line.rate:,.0f}"),
        ("x bare", lambda line: f"{line.to_bare:.3g}"),
    ]
    if ALL[summary.workload].sleeps:
        columns.append(("of the limit", lambda line: "" if line.to_limit is None else f"{line.to_limit:.0%}"))
    columns += [("best of ours / it", ours_to_it), ("trainer's cores", lambda line: f"{line.cores:.2f}")]
    columns.append(("all cores", lambda line: f"{line.all_cores:.2f}"))
    return columns


def warning_of(summary: CellSummary) -> Text:
    """Return a warning if the figures of a cell are doubtful, else an empty text."""
    if summary.bare_spread < QUIET_SPREAD:
        return Text()
    return Text(
        f"The bare environment was once {summary.bare_spread:.2g} times as fast as another time: something else was "
        "running. Measure again on a quiet machine.",
        style="yellow",
    )


def target_table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table of the goals, the measured values, and whether each goal is met."""
    table = _table()
    for name in ("workload", "what", "against"):
        table.add_column(name)
    for name in ("goal", "measured"):
        table.add_column(name, justify="right")
    for name in ("by", ""):
        table.add_column(name)
    for outcome in outcomes:
        target = outcome.target
        against = _against(outcome)
        sign = "≤" if target.at_most else "≥"
        measured = "" if outcome.value is None else f"{outcome.value:.3g}"
        by = "" if outcome.by is None else label_of(outcome.by, target.n_envs)
        table.add_row(
            *(f"{target.workload} {target.n_envs}", target.about, against, f"{sign} {target.goal:g}", measured, by),
            LOST if outcome.is_lost_in_noise else MET[outcome.met],
        )
    return table


def _against(outcome: Outcome) -> str:
    target = outcome.target
    names = (BARE,) if target.figure == "to_bare" else (outcome.against,) if outcome.against else target.peers
    return ", ".join(label_of(name, target.n_envs) for name in names)


def left_out_lines(left_out: Sequence[LeftOut]) -> list[str]:
    """Return one line per reason, with all contenders that were left out for this reason."""
    concerned: dict[tuple[str, str], list[str]] = {}
    for out in left_out:
        # A missing library is missing in all cells, and for its whole family.
        everywhere = out.kind == "missing" and out.contender
        whom = family_of(out.contender) if everywhere else f"{out.contender} ({out.workload} {out.n_envs})"
        names = concerned.setdefault((out.kind, out.reason), [])
        if out.contender and whom not in names:
            names.append(whom)
    words = {"missing": "skipped", "unable": "skipped", "failed": "failed"}
    return [
        f"{words[kind]}: {', '.join(names)}: {reason}" if names else f"{words[kind]}: {reason}"
        for (kind, reason), names in concerned.items()
    ]
