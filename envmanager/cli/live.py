"""The command ``envmanager replay --live``: an environment of a recording, alive, at a step of its worker."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from envmanager.adapters.factories import resolve
from envmanager.adapters.recipes import EnvRecipe, Prepared
from envmanager.cli.output import PlainOutput
from envmanager.data.differences import Difference, differences
from envmanager.data.steps import Begin, Steps
from envmanager.data.trees import leaves
from envmanager.environment import EnvGroup
from envmanager.errors import UsageError
from envmanager.hosts.hosting import GroupFactory, make_contexts
from envmanager.importing import needed_by
from envmanager.keeping.log import joined_actions

with needed_by("envmanager replay", extra="record"):
    from envmanager.recording.codec import Apart
    from envmanager.recording.data import about
    from envmanager.recording.place import Place, walk


def show_live(
    path: Path, output: PlainOutput, env_id: int, step: int, *, trust: bool, render: bool, debugger: bool
) -> bool:
    """Make an environment again, let it do what it did up to ``step`` of its worker, and go on as recorded.

    Print what it observes beside what is recorded. Return whether both are equal to the end of the episode. Raises
    UsageError without ``trust``, because the environment is code that the recording holds.
    """
    first = about(path)
    if not trust:
        raise UsageError(
            f"--live runs the environment that {path} holds as a pickle, and its objects: add --trust if you trust the "
            "file as you would a program."
        )
    if not first["observations"]:
        raise UsageError(f"{path} was recorded without observations, so there is nothing to compare with.")
    place, later = walk(path, env_id, step, Apart.load)
    group = _made(first, path, place, render=render)
    try:
        steps = _led_to(group, place)
        output.pairs(
            [
                ("environment", f"env {env_id} before step {step} of worker {place.worker_id}"),
                ("episode", _beginning(place)),
                ("recorded", _observed(place.steps)),
                ("here", _observed(steps)),
            ]
        )
        difference = _difference(_first(place.steps), _first(steps))
        output.line("equal" if difference is None else f"different: {difference}")
        subject, number, is_equal = group.subjects[0], 0, difference is None
        for calls, actions, recorded in later:
            if render:
                group.render([0])
            if debugger and not number:
                _stop(subject, actions)
            for call in calls:
                group.repeat(0, call)
            steps, number = group.step(actions), number + 1
            difference = _difference(recorded, steps)
            if difference is not None and is_equal:
                output.line(f"{number} steps later: {difference}")
                is_equal = False
        if render:
            group.render([0])
        output.line(f"went on for {number:,} steps as recorded" + (": all equal" if is_equal else ""))
        return is_equal
    finally:
        group.close()


def _stop(env: Any, actions: Any) -> None:  # noqa: ARG001
    """Stop in the debugger, before ``env`` takes a step with ``actions``."""
    breakpoint()


def _made(first: Mapping[str, Any], path: Path, place: Place, *, render: bool) -> EnvGroup:
    if not first.get("factories"):
        raise UsageError(
            f"{path} holds no environment: it is of an engine or an older version, or what made it cannot be pickled."
        )
    factory = pickle.loads(first["factories"])[place.env_id]
    if isinstance(factory, Prepared) and render:
        target, arguments = factory.make
        factory = attrs.evolve(factory, make=(target, {**arguments, "render_mode": "human"}))
    elif render:
        factory = resolve(EnvRecipe(factory, render_mode="human"))
    seed, who = first["seed"], {"worker_id": place.worker_id, "generation": place.generation}
    contexts = make_contexts([place.env_id], seed=seed if isinstance(seed, int) else None, log_dir=None, **who)
    kind = first["kinds"][place.worker_id] if first.get("kinds") else ""
    group = GroupFactory([factory], contexts, infos=False, check_values=False, kind=kind)()
    if len(group.env_ids) != 1 or not (place.begins_itself or group.takes_actions):
        group.close()
        raise UsageError(f"env {place.env_id} is part of a vector, or cannot rest: replay the run with order=….")
    return group


def _led_to(group: EnvGroup, place: Place) -> Steps:
    """Let the environment do what it did since the beginning. Return its last steps. Raises UsageError if it cannot."""
    begin = place.begin
    assert begin is not None
    for name, value in place.held.items():
        group.set_attr(name, [value], [0])
    if place.begins_itself and begin.actions is None:
        steps = group.reset(seeds=[begin.seed], options=begin.options)
        calls = deque(place.calls)
        for number, actions in enumerate([*place.actions, None]):
            while calls and calls[0][0] == number:
                group.repeat(0, calls.popleft()[1])
            steps = steps if actions is None else group.step(actions)
        return steps
    taken = joined_actions([begin.actions, *place.actions]) or {}
    steps = group.reset_on_demand(
        [Begin(0, True, begin.seed, begin.options, begin.task, taken, calls=place.calls_so_far())]
    )
    for _, step, error in group.not_begun.values():
        why = "the episode ended" if error is None else f"{type(error).__name__}: {error}"
        raise UsageError(f"the environment did not come there: at action {step} of its episode, {why}.") from error
    return steps


def _beginning(place: Place) -> str:
    begin = place.begin
    assert begin is not None
    seed = "without a seed" if begin.seed is None else f"with seed {begin.seed}"
    options = f" and options {dict(begin.options)}" if begin.options else ""
    others = f", {place.n_ended:,} episodes ago" if place.n_ended else ""
    more = f" and {begin.n_repeated:,} actions" if begin.n_repeated else ""
    return f"begun {seed}{options}{more}{others}; {len(place.actions):,} steps since"


def _observed(steps: Steps) -> str:
    with np.printoptions(threshold=12, edgeitems=3, precision=6):
        shown = {name: [" ".join(str(leaf).split()) for leaf in leaves(each.obs)] for name, each in steps.items()}
    return "; ".join(f"{name}: {', '.join(each)}" for name, each in shown.items())


def _difference(recorded: Steps, found: Steps) -> Difference | None:
    return next(differences(_told(recorded), _told(found)), None)


def _told(steps: Steps) -> dict[str, Any]:
    """Return what is compared: not what follows an end, which may be the beginning of another episode."""
    told: dict[str, Any] = {}
    for behavior, each in steps.items():
        seen = {"obs": each.obs} if each.final_obs is None else {"final_obs": each.final_obs}
        columns = {name: getattr(each, name) for name in ("agent_id", "reward", "terminated", "truncated")}
        told[behavior] = {**seen, **columns}
    return told[behavior] if len(told) == 1 else told


def _first(steps: Steps) -> Steps:
    return {behavior: each.as_first() for behavior, each in steps.items()}
