"""A check that a Godot game works as an environment for training.

::

    game ── one engine, a few arenas ──▶ specs, reset, random steps ── the same seed again ──▶ findings

As in ``check.environment``, a Finding answers one question and may give advice. The game runs in a real engine, through
the same code as in training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from envmanager.check.environment import Finding
from envmanager.data.steps import StepInfo
from envmanager.data.trees import leaves_like, paths
from envmanager.env_manager import EnvManager
from envmanager.errors import EnvManagerError, EnvRaised, MissingExtra, UsageError
from envmanager.godot.declared import parse
from envmanager.godot.games import THREADS, major_of, protocol_of
from envmanager.godot.manager import GodotEnvManager
from envmanager.observe.events import Note
from envmanager.options import RestartPolicy, Timeouts
from envmanager.placing.pair import ByRow

N_ARENAS = 4
_START_S = 120.0
_STEP_S = 20.0


def check_game(
    game: str, *, engine: Mapping[str, Any] | None = None, n_steps: int = 200, seed: int = 0
) -> Iterator[Finding]:
    """Check a Godot game. Yield each finding when it is known. Takes up to ``2 * n_steps`` steps.

    ``game``: a project's folder or an exported game. ``engine``: fields of EngineOptions, by name.
    """
    engine = dict(engine or {})
    is_unchanged = (engine.get("protocol") or protocol_of(game)) == "godot_rl"
    missing = None if is_unchanged else _missing_addon(game)
    if missing is not None:
        yield missing
        return
    n_envs = 1 if is_unchanged else N_ARENAS
    began = time.monotonic()
    try:
        manager = GodotEnvManager(
            game,
            n_envs,
            engine=engine,
            seed=seed,
            wait="all",
            check_values=True,
            restarts=RestartPolicy(max_restarts=0),
            timeouts=Timeouts(start_s=_START_S, reset_s=_STEP_S, step_s=_STEP_S),
        )
    except EnvManagerError as error:
        advice = "" if isinstance(error, UsageError) else "Play the game in the editor: its output says more."
        yield Finding("starts", "problem", str(error), advice)
        return
    with manager:
        what = "engine with a game of godot_rl_agents is" if is_unchanged else f"engine and {N_ARENAS} arenas are"
        yield Finding("starts", "ok", f"The {what} up in {time.monotonic() - began:.1f} s.")
        yield from _threads_findings(game)
        for event in manager.events:
            if isinstance(event, Note) and event.name == "misfit":
                advice = "Without a trainer this agent does nothing."
                yield Finding("policies", "problem", f"{event.data['problem']}.", advice)
        for name, spec in manager.behavior_specs.items():
            yield Finding("behaviors", "ok", f"{name}: observes {spec.observation}, acts by {spec.action}.")
        yield from _declared_findings(game, manager)
        try:
            yield from _play_findings(manager, n_steps, seed, has_seeds=not is_unchanged)
        except EnvManagerError as error:
            is_script = isinstance(error, EnvRaised)
            advice = "Fix the script; after such an error the game goes on with null." if is_script else ""
            yield Finding("steps", "problem", str(error).strip(), advice)


def _missing_addon(game: str) -> Finding | None:
    folder = Path(game)
    if not (folder / "project.godot").is_file() or (folder / "addons" / "envmanager" / "bridge.gd").is_file():
        return None
    text = f"{game} has no addons/envmanager, so it cannot connect to a trainer."
    return Finding("starts", "problem", text, f"Run `envmanager godot install-addon {game}`.")


def _threads_findings(game: str) -> Iterator[Finding]:
    file = Path(game) / "project.godot"
    if file.is_file() and major_of(file.parent) == 4 and THREADS not in file.read_text(encoding="utf-8"):
        text = "Godot starts a thread for each core of the machine, and they wake one another in each tick."
        advice = f"Set {THREADS}=1 under [threading] in project.godot: in a training run, an engine has one core."
        yield Finding("threads", "note", text, advice)


def _declared_findings(game: str, manager: GodotEnvManager) -> Iterator[Finding]:
    """Yield what the scene declares about its training, and the first mistake in it."""
    if not any(manager.declared.values()):
        return
    try:
        found = parse(manager.declared, tuple(manager.behavior_specs))
        for place, options in found.describe():
            yield Finding("settings", "ok", f"{place}: {options}.")
        tables = found.under({"manager": {"kind": "godot", "env": game}})
        from envmanager.training.algorithms.trainers import check_tables  # needs PyTorch
        from envmanager.training.runs.plan import TrainingPlan

        with found.located(tables):
            check_tables(TrainingPlan.parse(tables, Path()).trainers)
    except MissingExtra as error:
        yield Finding("settings", "note", "The settings are not checked: this needs PyTorch.", str(error))
    except UsageError as error:
        yield Finding("settings", "problem", str(error), "Change it in the inspector.")


@attrs.define
class _Played:
    """The record of a reset and the steps after it. Two records with the same seed are compared."""

    rows: list[dict[str, dict[str, np.ndarray]]] = attrs.field(factory=list)
    """Arrays by behavior and name, for the reset and each step."""
    n_ended: int = 0
    n_agent_steps: int = 0
    took_s: float = 0.0


def _play_findings(manager: EnvManager, n_steps: int, seed: int, *, has_seeds: bool) -> Iterator[Finding]:
    first = _play(manager, n_steps, seed)
    rate = first.n_agent_steps / max(first.took_s, 1e-9)
    what = f"{n_steps} steps of {f'{manager.n_envs} arenas' if has_seeds else 'one engine'}"
    yield Finding("steps", "ok", f"{what} fit their specs: {rate:,.0f} agent steps per second.")
    if first.n_ended:
        yield Finding("episodes", "ok", f"{first.n_ended} agent episodes ended.")
    else:
        yield Finding(
            "episodes",
            "note",
            f"No episode ended within {n_steps} steps.",
            "An arena ends its episode with end_episode(), an agent with end(); limit long episodes."
            if has_seeds
            else "Take more steps (--steps), or limit the episodes.",
        )
    if not has_seeds:
        yield Finding("seeding", "note", "A reset cannot seed such a game: its engine is seeded when it starts.")
        return
    yield _seeding_finding(first, _play(manager, n_steps, seed))


def _play(manager: EnvManager, n_steps: int, seed: int) -> _Played:
    played = _Played()
    for name, spec in manager.behavior_specs.items():
        manager.set_policy(name, ByRow(spec, seed))
    _note(played, manager.reset({"seed": seed}))
    began = time.monotonic()
    for _ in range(n_steps):
        _note(played, manager.step())
    played.took_s = time.monotonic() - began
    return played


def _note(played: _Played, infos: list[StepInfo]) -> None:
    (info,) = infos  # there is one engine
    rows = {}
    for name, steps in info.current.items():
        spec = info.specs[name].observation
        seen = zip(paths(spec, "obs"), leaves_like(spec, steps.obs), strict=True)
        rows[name] = {"environment": steps.env_id, "reward": steps.reward, **dict(seen)}
        played.n_ended += int((steps.terminated | steps.truncated).sum())
        played.n_agent_steps += len(steps.agent_id)
    played.rows.append(rows)


def _seeding_finding(first: _Played, again: _Played) -> Finding:
    for at_step, (ours, theirs) in enumerate(zip(first.rows, again.rows, strict=True)):
        difference = _first_difference(ours, theirs)
        if difference is not None:
            return Finding(
                "seeding",
                "problem",
                f"The same seed and actions give other data from {'the reset' if at_step == 0 else f'step {at_step}'} "
                f"on: {difference}.",
                "Draw random numbers from the arena's rng, never from randf(), and let reset() put back all that "
                "an episode changes.",
            )
    return Finding("seeding", "ok", f"The same seed and actions give the same {len(first.rows) - 1} steps.")


def _first_difference(ours: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Describe the first difference between the arrays of a step and of its repetition, or return None."""
    for behavior in {**ours, **theirs}:
        arrays, others = ours.get(behavior, {}), theirs.get(behavior, {})
        n, n_other = (len(each.get("reward", ())) for each in (arrays, others))
        if n != n_other:
            return f"{n} agents of {behavior!r}, and {n_other} when it is repeated"
        for name, array in arrays.items():
            other = others[name]
            places = np.argwhere((array != other) & ((array == array) | (other == other)))  # NaN is unequal to itself
            if len(places):
                row, *column = places[0].tolist()
                value, repeated = (f"{each[tuple(places[0])]:.9g}" for each in (array, other))
                where = f"of {behavior!r} in environment {arrays['environment'][row]}"
                return f"{name}{column or ''} {where} is {value}, and {repeated} when it is repeated"
    return None
