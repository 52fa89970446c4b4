"""Calls each policy once with the rows of all workers that are ready, and deals its actions back to them.

The rule: everything is checked here, before the first byte is sent, so that a BadAction leaves the manager as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envmanager.data.fitting import check_batch
from envmanager.data.specs import ArraySpec, BehaviorSpec, SpecMismatch, as_array, describe_value, zeros
from envmanager.data.steps import ActionInfo, AgentSteps, StepInfo, concat_steps
from envmanager.data.trees import Tree, leaves, map_tree
from envmanager.errors import BadAction, UsageError
from envmanager.policy import Policy


def check_policies(infos: Sequence[StepInfo], policies: Mapping[str, Policy], *, partial_actions: bool) -> None:
    """Raise UsageError when some worker would get no action, or too few for its environments."""
    for info in infos:
        if policies.keys() >= info.current.keys():
            continue
        acting = [name for name, steps in info.current.items() if len(steps.acting_rows)]
        missing = [name for name in acting if name not in policies]
        if missing and (not partial_actions or len(missing) == len(acting)):
            raise UsageError(
                f"worker {info.worker_id} has agents of behavior {', '.join(map(repr, missing))}, but no policy was "
                f"set for it: call manager.set_policy({missing[0]!r}, policy) before step()."
            )


def call_policies(
    infos: Sequence[StepInfo],
    policies: Mapping[str, Policy],
    specs: Mapping[str, BehaviorSpec],
    strict: bool = True,
) -> list[dict[str, ActionInfo]]:
    """``{behavior: ActionInfo}`` for each of ``infos``; behaviors without a policy are left out."""
    shares: list[dict[str, ActionInfo]] = []
    members: dict[str, list[dict[str, ActionInfo]]] = {}
    parts: dict[str, list[AgentSteps]] = {}
    for info in infos:
        share: dict[str, ActionInfo] = {}
        shares.append(share)
        for behavior, steps in info.current.items():
            if behavior in policies:
                members.setdefault(behavior, []).append(share)
                parts.setdefault(behavior, []).append(steps if steps.acting is None else deciding(steps))
    for behavior, own in parts.items():
        taken = _call(policies[behavior], behavior, own, specs.get(behavior), strict)
        if len(own) == 1:
            members[behavior][0][behavior] = taken
            continue
        stop = 0
        for share, part in zip(members[behavior], own, strict=True):
            start, stop = stop, stop + len(part.agent_id)
            share[behavior] = taken.take(slice(start, stop))
    return shares


def deciding(steps: AgentSteps) -> AgentSteps:
    """The rows that want an action."""
    if steps.acting is None or steps.acting.all():
        return steps
    return steps.take(steps.acting_rows)


def _call(
    policy: Policy, behavior: str, parts: list[AgentSteps], spec: BehaviorSpec | None, strict: bool
) -> ActionInfo:
    steps = concat_steps(parts)  # copies, because a policy may write into its steps and the trainer holds the parts
    n = len(steps.agent_id)
    if not n and spec is not None:
        return ActionInfo(zeros(spec.action, 0))
    taken = policy.get_action(steps)
    if not isinstance(taken, ActionInfo):
        raise BadAction(f"the policy of behavior {behavior!r} returned {describe_value(taken)}, not an ActionInfo.")
    return ActionInfo(
        checked_actions(spec, taken.action, n, f"action of behavior {behavior!r}", strict),
        {} if taken.outputs.__class__ is dict and not taken.outputs else _checked_outputs(taken.outputs, n, behavior),
        taken.version,
    )


def checked_actions(spec: BehaviorSpec | None, action: Tree, n: int, what: str, strict: bool) -> Tree:
    """Return ``action`` as arrays of its own ``[n, …]``; raise BadAction if it does not fit. Without a spec, unchanged.

    Actions of another kind of numbers are cast, or refused if ``strict``. The arrays are copies because a policy may
    write its next actions into the same ones.
    """
    if spec is None:
        return action
    only = spec.action
    if only.__class__ is ArraySpec and only.is_choices(action) and len(action) == n:
        return action.copy()
    try:
        checked = check_batch(spec.action, action, n, "action", strict)
    except SpecMismatch as error:
        raise BadAction(f"{what}: {error}. Nothing was sent; the manager is as it was.") from error
    if checked.__class__ is np.ndarray:
        return checked.copy() if checked is action or checked.base is not None else checked
    given = {id(leaf) for leaf in leaves(action)}
    return map_tree(lambda leaf: leaf.copy() if id(leaf) in given or leaf.base is not None else leaf, checked)


def _checked_outputs(outputs: Any, n: int, behavior: str) -> dict[str, np.ndarray]:
    """``outputs`` as arrays of their own, because a policy may write its next outputs into the same ones."""
    policy = f"the policy of behavior {behavior!r}"
    if not isinstance(outputs, Mapping):
        raise BadAction(
            f"the outputs of {policy} should be a mapping of names to arrays, but are {describe_value(outputs)}."
        )
    return {name: _checked_output(values, n, f"output {name!r} of {policy}") for name, values in outputs.items()}


def _checked_output(values: Any, n: int, what: str) -> np.ndarray:
    expected = f"{what} should be an array of {n} rows, one per agent, but is"
    try:
        array = as_array(values)
    except ValueError as error:
        raise BadAction(f"{expected} {error}.") from error
    if array.ndim == 0 or len(array) != n:
        raise BadAction(f"{expected} {describe_value(array if array.ndim else values)}.")
    own: np.ndarray = array.copy()
    return own
