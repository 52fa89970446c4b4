"""``envmanager evaluate``: play whole episodes greedily with the policies of a training, and print their returns."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from envmanager.cli.display import count, describe_notice, describe_returns, evaluation_lines, of_behavior
from envmanager.cli.run import EXIT_DONE, Notices, Stopped, StopSignals
from envmanager.cli.summary import sayable, write_json
from envmanager.cli.wrapping import print_pairs, print_text
from envmanager.errors import ConfigError
from envmanager.importing import needed_by
from envmanager.registry import make_manager
from envmanager.training.evaluation import Evaluation, evaluate, mean_and_spread, shares
from envmanager.training.saved import SavedTraining, with_n_envs

with needed_by("envmanager.training", extra="torch"):
    import torch


@attrs.frozen(kw_only=True)
class EvaluationPlan:
    """One evaluation. ``n_envs``, ``manager`` and ``env`` are the training's own if None."""

    directory: Path
    checkpoint: str
    episodes: int
    seed: int
    n_envs: int | None = None
    manager: str | None = None
    env: str | None = None
    restarts: int | None = None
    as_json: bool = False
    out: Path | None = None


def run_evaluation(plan: EvaluationPlan, *, verbose: bool = False) -> int:
    """Evaluate and return the exit code: 128 + the signal's number when a signal ended it."""
    with Notices(Remarks(), verbose=verbose), StopSignals():
        try:
            evaluation, facts = _evaluate(plan)
            told = sayable({**facts, "behaviors": _figures(evaluation)})
        except Stopped as stopped:
            return stopped.exit_code
    if plan.as_json:
        print(json.dumps(told, indent=1, allow_nan=False))
    else:
        print_pairs(lines_of(evaluation))
    if plan.out is not None:
        write_json(plan.out, told)
    return EXIT_DONE


def leave_cores() -> None:
    """Limit PyTorch to one core, and leave the others to the workers."""
    torch.set_num_threads(1)


class Remarks:
    """A display of notices on stderr, because stdout may have JSON."""

    def show_notice(self, level: str, text: str) -> None:
        """Show an event of a worker."""
        print_text(describe_notice(level, text), sys.stderr)


def _evaluate(plan: EvaluationPlan) -> tuple[Evaluation, dict[str, Any]]:
    leave_cores()
    training = SavedTraining.open(plan.directory, plan.checkpoint)
    if plan.n_envs is not None and plan.n_envs > plan.episodes:
        raise ConfigError(
            f"--n-envs {plan.n_envs} is more than --episodes {plan.episodes}: some would have nothing to play."
        )
    options = training.manager_options(env=plan.env, kind=plan.manager)
    options = with_n_envs(options, min(plan.n_envs or options.n_envs, plan.episodes))
    if plan.restarts is not None:
        options = attrs.evolve(options, restarts=attrs.evolve(options.restarts, max_restarts=plan.restarts))
    envs = count(options.n_envs, "environment")
    print_text(
        f"{options.env}: checkpoint {training.path}, {envs}, manager {options.kind}",
        sys.stderr if plan.as_json else sys.stdout,
    )
    with make_manager(options) as manager:
        policies = training.policies_for(manager.behavior_specs)
        evaluation = evaluate(
            manager,
            policies,
            episodes_per_env=shares(plan.episodes, manager.n_envs),
            config={"seed": plan.seed},
        )
    return evaluation, {
        "env": str(options.env),
        "checkpoint": str(training.path),
        "n_steps": training.n_steps,
        "seed": plan.seed,
        "n_envs": options.n_envs,
    }


def _figures(evaluation: Evaluation) -> dict[str, Any]:
    return {
        behavior: {
            "episodes": evaluation.n_episodes,
            "return": _spread_of(returns),
            "length": _spread_of(evaluation.lengths_of[behavior]),
            "returns": returns,
            "lengths": evaluation.lengths_of[behavior],
        }
        for behavior, returns in evaluation.returns_of.items()
        if returns
    }


def _spread_of(numbers: Sequence[float]) -> dict[str, float]:
    mean, spread = mean_and_spread(numbers)
    return {"mean": mean, "spread": spread, "min": min(numbers), "max": max(numbers)}


def lines_of(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return the results as names and texts."""
    lines = [("return", line) for line in evaluation_lines(evaluation)]
    for behavior, lengths in evaluation.lengths_of.items():
        if lengths:
            whose = of_behavior(behavior, evaluation.lengths_of)
            lines.append(("length", f"{describe_returns(lengths)} agent steps{whose}"))
    return lines
