"""The plan of one call of ``python -m benchmarks``.

The rule: names are checked and missing libraries are found before a process is started.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

import attrs

from benchmarks.roster import FAMILIES, OUT_OF_REACH, ROSTER, family_of
from benchmarks.schedule import Cell, LeftOut, Pace
from benchmarks.workloads import ALL, BARE
from envmanager.errors import MissingExtra, UsageError

QUICK = ("noop",)
QUICK_CONTENDERS = ("ours-simple", "ours-processes", "gymnasium-sync", "gymnasium-async")
QUICK_PACE = Pace(rounds=1, seconds=0.1, warm_up_s=0.02)


@attrs.frozen(kw_only=True)
class BenchPlan:
    """The cells in the order of their runs, the pace, the interpreters, and the files for the results.

    ``goals``: whether the results are compared with this project's own goals.
    """

    cells: tuple[Cell, ...]
    pace: Pace
    left_out: tuple[LeftOut, ...] = ()
    pythons: dict[str, str] = attrs.field(factory=dict)
    out: Path | None = None
    plot: Path | None = None
    goals: bool = False


def plan_bench(
    *,
    workloads: Sequence[str] = (),
    n_envs: Sequence[int] = (),
    contenders: Sequence[str] = (),
    pythons: Sequence[str] = (),
    rounds: int | None = None,
    seconds: float | None = None,
    quick: bool = False,
    out: Path | None = None,
    plot: Path | None = None,
    goals: bool = False,
) -> BenchPlan:
    """Make a plan from command-line options. Raises UsageError, or MissingExtra without Gymnasium or matplotlib."""
    if sys.platform != "linux":
        raise UsageError("python -m benchmarks needs Linux: it measures worker processes.")
    _require(plot)
    _make_folder(plot)
    names = _known(workloads, ALL, "workload") or (QUICK if quick else tuple(ALL))
    interpreters = dict(map(_python, pythons))
    wanted = _wanted(contenders) or ("ours", *interpreters)  # no library that was not asked for
    left_out = [LeftOut(name, 0, "", "missing", text) for name in names if (text := _missing(name))]
    skipped = {out.workload for out in left_out}
    cells = [
        Cell(name, size, (BARE, *taking_part))
        for name in names
        if name not in skipped and (taking_part := _taking_part(name, wanted, quick))
        for size in n_envs or ALL[name].sizes[: 1 if quick else None]
    ]
    if not cells:
        raise UsageError("; ".join(out.reason for out in left_out) or "No contender takes part in these workloads.")
    return BenchPlan(
        cells=tuple(cells),
        left_out=tuple(left_out),
        pace=_pace(QUICK_PACE if quick else Pace(), rounds, seconds),
        pythons=interpreters,
        out=out,
        plot=plot,
        goals=goals,
    )


def _require(plot: Path | None) -> None:
    if find_spec("gymnasium") is None:
        raise MissingExtra("python -m benchmarks", library="gymnasium", extra="bench")
    if plot is not None and find_spec("matplotlib") is None:
        raise MissingExtra("--plot", library="matplotlib", extra="bench")


def _make_folder(plot: Path | None) -> None:
    try:
        if plot is not None:
            plot.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--plot {plot}: this folder cannot be made: {error.strerror}.") from error


def _missing(workload: str) -> str:
    """Return a text that says what to install for a workload; empty if it can run."""
    missing = [library for library in ALL[workload].requires if find_spec(library) is None]
    if not missing:
        return ""
    return f"the workload {workload} needs {' and '.join(missing)}, not installed here: pip install 'envmanager[bench]'"


def _known(given: Iterable[str], known: Iterable[str], what: str) -> tuple[str, ...]:
    """Split names at commas. Raise UsageError for an unknown name, with the nearest known one."""
    names = tuple(dict.fromkeys(name.strip() for text in given for name in text.split(",") if name.strip()))
    known = list(known)
    for name in names:
        if name not in known:
            if name in OUT_OF_REACH:
                raise UsageError(f"{name} is not measured: {OUT_OF_REACH[name]}.")
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
            raise UsageError(f"There is no {what} {name!r}{hint} Known: {', '.join(known)}.")
    return names


def _wanted(contenders: Sequence[str]) -> tuple[str, ...]:
    return _known(contenders, [*(name for name in FAMILIES if name != BARE), *ROSTER], "contender")


def _taking_part(workload: str, wanted: Sequence[str], quick: bool) -> tuple[str, ...]:
    """Return the workload's contenders of the wanted families, and all contenders that are wanted by name."""
    own = QUICK_CONTENDERS if quick else ALL[workload].contenders
    chosen = [name for name in own if family_of(name) in wanted]
    return tuple(dict.fromkeys([*chosen, *(name for name in wanted if name in ROSTER and name != BARE)]))


def _pace(pace: Pace, rounds: int | None, seconds: float | None) -> Pace:
    rounds = pace.rounds if rounds is None else rounds
    return attrs.evolve(pace, rounds=rounds, seconds=pace.seconds if seconds is None else seconds)


def _python(text: str) -> tuple[str, str]:
    """Parse ``"tianshou=/path/to/python"`` to a family and its interpreter."""
    family, equals, path = text.partition("=")
    if not equals or family not in FAMILIES or family in (BARE, "ours"):
        peers = ", ".join(name for name in FAMILIES if name not in (BARE, "ours"))
        raise UsageError(f"--python takes PEER=/path/to/python with PEER one of {peers}, not {text!r}.")
    if not os.access(path, os.X_OK):
        raise UsageError(f"--python {text}: {path} cannot be run.")
    return family, os.path.abspath(path)
