"""Conversion of a measurement to plain data, for the JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from benchmarks.roster import label_of
from benchmarks.schedule import LeftOut, Pace, Results, Turn
from benchmarks.summary import CellSummary, Line, rate_of
from benchmarks.targets import Outcome


def to_json(
    results: Results,
    summaries: Sequence[CellSummary],
    outcomes: Sequence[Outcome],
    *,
    ended: str,
    pace: Pace,
    machine: Mapping[str, Any],
    versions: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """Return a measurement with its machine, its summary, and the goals if it was compared with them."""
    document = {
        "ended": ended,
        "machine": dict(machine),
        "versions": {family: dict(found) for family, found in versions.items()},
        "pace": attrs.asdict(pace),
        "summary": [_cell(summary) for summary in summaries],
        "left_out": [_left_out(out) for out in results.left_out],
        "turns": [_turn(turn) for turn in results.turns],
    }
    return {**document, "targets": [_target(outcome) for outcome in outcomes]} if outcomes else document


def _cell(summary: CellSummary) -> dict[str, Any]:
    best = summary.best_of_ours
    return {
        "workload": summary.workload,
        "n_envs": summary.n_envs,
        "bare_steps_per_s": summary.bare_rate,
        "bare_spread": summary.bare_spread,
        "best_of_ours": best,
        "contenders": [
            _line(line, summary.n_envs, None if best is None else summary.ratio(best, line.contender))
            for line in summary.lines
        ],
    }


def _line(line: Line, n_envs: int, ours_to_it: float | None) -> dict[str, Any]:
    return {
        "contender": line.contender,
        "label": label_of(line.contender, n_envs),
        "steps_per_s": line.rate,
        "times_bare": line.to_bare,
        "share_of_limit": line.to_limit,
        "best_of_ours_to_it": ours_to_it,
        "trainer_cores": line.cores,
        "all_cores": line.all_cores,
        "start_s": line.start_s,
        "rounds": line.rounds,
    }


def _target(outcome: Outcome) -> dict[str, Any]:
    target = outcome.target
    return {
        "workload": target.workload,
        "n_envs": target.n_envs,
        "about": target.about,
        "figure": target.figure,
        "goal": target.goal,
        "at_most": target.at_most,
        "value": outcome.value,
        "by": outcome.by,
        "against": outcome.against,
        "met": outcome.met,
    }


def _left_out(out: LeftOut) -> dict[str, Any]:
    return attrs.asdict(out)


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "workload": turn.workload,
        "n_envs": turn.n_envs,
        "round": turn.round,
        "contender": turn.contender,
        "steps_per_s": rate_of(turn),
        **{name: getattr(turn.measured, name) for name in turn.measured.__dataclass_fields__},
    }
