"""The implementation of ``step``. It calls policies for the idle workers and builds StepInfos from responses.

The rule: every action is checked before the first byte is sent, so a BadAction leaves the manager unchanged. A StepInfo
is complete before the next command is sent to its worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from envmanager.data.casting import checked_actions
from envmanager.data.specs import BehaviorSpec, as_array, describe_value, zeros
from envmanager.data.steps import ActionInfo, AgentSteps, CommandName, Lost, StepInfo, concat_steps
from envmanager.errors import BadAction, EnvManagerError, UsageError
from envmanager.kernel.calls import Calls
from envmanager.kernel.host import WorkerHost
from envmanager.kernel.recovery import Recovery
from envmanager.kernel.table import Entry, WorkerState, WorkerTable
from envmanager.options import Wait
from envmanager.policy import Policy
from envmanager.system.interrupts import allow_interrupts

_IDLE, _IN_FLIGHT, _STEP = WorkerState.IDLE, WorkerState.IN_FLIGHT, CommandName.STEP
_BY_WORKER = attrgetter("worker_id")


class PolicyStepper:
    """The part of a manager that calls policies, sends their actions and builds StepInfos from the responses."""

    def __init__(self, table: WorkerTable, recovery: Recovery, calls: Calls, *, check_values: bool) -> None:
        self.host: WorkerHost
        self.policies: dict[str, Policy] = {}
        self.takes_partial_actions = True
        """Whether every environment can step with actions for only some of its behaviors."""
        self._returned: dict[Entry, None] = {}
        """Entries whose last StepInfo was returned, and for which no action has been sent since."""
        self._table = table
        self._recovery = recovery
        self._calls = calls
        self._check_values = check_values

    def send_actions(self, wait: Wait, *, is_begun: bool) -> None:
        """Send the policies' actions to the idle workers that are not ``wait.max_lead`` steps ahead of the slowest.

        ``is_begun``: whether this is not the first call after a reset, so only workers in ``_returned`` can be idle.
        """
        table = self._table
        idle = [entry for entry in (self._returned if is_begun else table.entries) if entry.state is _IDLE]
        idle.sort(key=_BY_WORKER)
        held_back: list[Entry] = []
        if wait.max_lead is not None:
            limit = table.slowest() + wait.max_lead
            held_back = [entry for entry in idle if entry.steps_since_reset >= limit]
            idle = [entry for entry in idle if entry.steps_since_reset < limit]
        book = table.book
        seats = book.seats
        if seats.n_acting < seats.n_envs:
            held_back += [entry for entry in idle if seats.rests_in(entry.worker_id)]
            idle = [entry for entry in idle if not seats.rests_in(entry.worker_id)]
        if not idle:
            self._returned = dict.fromkeys(held_back)
            return
        infos = []
        for entry in idle:
            if entry.previous_step is None:
                raise UsageError("step() before reset(): call reset() first.")
            infos.append(entry.previous_step)
        with allow_interrupts():
            self._check_policies(infos)
            foreign = self.host.accepts_device_arrays
            taken, of_all = call_policies(infos, self.policies, table.specs, self._check_values, foreign)
        self._calls.require_open("step")
        payloads = []
        for actions in taken:
            payload = {}
            for name, decided in actions.items():  # a comprehension would cost a call
                payload[name] = decided.action
            payloads.append(payload)
        if table.has_objects:
            self.host.check_can_travel(payloads)
        workers, keeper = self.host.workers, self._recovery.keeper
        is_logged = keeper is None or (len(of_all) == 1 and keeper.log_all(next(iter(of_all.values())).action))
        for entry, actions, payload in zip(idle, taken, payloads, strict=True):
            if entry.state is not _IDLE:  # the worker failed in a call that the policy made
                self._recovery.discard_action(entry)
                continue
            entry.actions, entry.n_envs_in_flight = actions, seats.n_acting_in[entry.worker_id]
            worker = workers[entry.worker_id] if entry.restore is None else entry.restore
            if seats.untold:
                book.send_begins(entry.worker_id, worker)
            if not is_logged:
                keeper.log_step(entry, payload)
            worker.send(_STEP, payload)
            entry.state = _IN_FLIGHT
            table.n_waiting += 1
            if entry.restore is not None:
                keeper.send_again(entry)
        self._returned = dict.fromkeys(held_back)

    def _check_policies(self, infos: Sequence[StepInfo]) -> None:
        """Raise UsageError if an acting behavior has no policy. With partial actions, one per worker is enough."""
        for info in infos:
            if self.policies.keys() >= info.current.keys():
                continue
            acting = [name for name, steps in info.current.items() if len(steps.acting_rows)]
            missing = [name for name in acting if name not in self.policies]
            if missing and (not self.takes_partial_actions or len(missing) == len(acting)):
                raise UsageError(
                    f"worker {info.worker_id} has agents of behavior {', '.join(map(repr, missing))}, but no policy "
                    f"was set for it: call manager.set_policy({missing[0]!r}, policy) before step()."
                )

    def infos_of(self, entries: Sequence[Entry]) -> list[StepInfo]:
        """Return a StepInfo for each entry's next response, and mark these responses as delivered."""
        infos, specs, book, keeper = [], self._table.specs, self._table.book, self._recovery.keeper
        not_begun: dict[int, EnvManagerError] = {}
        cuts: list[tuple[Entry, EnvManagerError, Sequence[int]]] = []
        notes_ends = keeper is not None and book.is_automatic
        for entry in entries:
            before, actions, lost = entry.previous_step, entry.actions, None
            cut = None if entry.replacement is None else self._recovery.cut(entry)
            if cut is None:
                current = entry.outbox[0].payload
                if self.host.rewrites_arrays:
                    current = {name: steps.copy() for name, steps in current.items()}
            else:
                current, lost = cut
                cuts.append((entry, lost.cause, lost.env_ids))
            if entry.restore is not None and (told := keeper.tell(entry)):
                cuts += [(entry, *each) for each in told]
                env_ids = sorted(env_id for _, own in told for env_id in own)
                lost = Lost(told[0][0], entry.generation, tuple(env_ids))
            if lost is not None and entry.outbox[0].name is not _STEP:
                actions = None
            if entry.outbox[0].not_begun is not None:
                not_begun.update(entry.outbox[0].not_begun)
            info = StepInfo(None, current, actions, entry.worker_id, lost, specs)
            if before is not None:
                info.previous, info.waiting = before.current, before.still_waiting
            infos.append(info)
            if notes_ends:
                for steps in current.values():
                    if steps.final_obs is not None and entry.log is not None:
                        keeper.note_ends(entry, steps, cuts)
        book.cuts, book.not_begun = cuts, not_begun
        self._table.delivered(entries)
        self._returned.update(dict.fromkeys(entries))
        for entry, info in zip(entries, infos, strict=True):
            entry.actions, entry.previous_step = None, info
        return infos


def call_policies(
    infos: Sequence[StepInfo],
    policies: Mapping[str, Policy],
    specs: Mapping[str, BehaviorSpec],
    strict: bool = True,
    foreign: bool = False,
) -> tuple[list[dict[str, ActionInfo]], dict[str, ActionInfo]]:
    """Return a dict ``{behavior: ActionInfo}`` for each StepInfo in ``infos``, without behaviors that have no policy.

    The second dict has the ActionInfos of all of them together. Calls each policy at most once, with the rows of all
    agents that need an action. Raises BadAction if a policy's actions or outputs have a wrong shape, type or value.
    ``checked_actions`` explains ``strict`` and ``foreign``.
    """
    shares: list[dict[str, ActionInfo]] = []
    of_all: dict[str, ActionInfo] = {}
    members: dict[str, list[dict[str, ActionInfo]]] = {}
    parts: dict[str, list[AgentSteps]] = {}
    for info in infos:
        share: dict[str, ActionInfo] = {}
        shares.append(share)
        for behavior, steps in info.current.items():
            if behavior in policies:
                decides_for_all = steps.acting is None or steps.acting.all()
                members.setdefault(behavior, []).append(share)
                if not decides_for_all:
                    info.keep_waiting(behavior)
                    steps = steps.take(steps.acting_rows)
                parts.setdefault(behavior, []).append(steps)
    for behavior, own in parts.items():
        taken = of_all[behavior] = _call(policies[behavior], behavior, own, specs.get(behavior), strict, foreign)
        if len(own) == 1:
            members[behavior][0][behavior] = taken
            continue
        stop = 0
        for share, part in zip(members[behavior], own, strict=True):
            start, stop = stop, stop + len(part.agent_id)
            share[behavior] = taken.take(slice(start, stop))
    return shares, of_all


def _call(
    policy: Policy, behavior: str, parts: list[AgentSteps], spec: BehaviorSpec | None, strict: bool, foreign: bool
) -> ActionInfo:
    steps = concat_steps(parts)  # copies, because a policy may write into its steps and the trainer holds the parts
    n = len(steps.agent_id)
    if not n and spec is not None:
        return ActionInfo(zeros(spec.action, 0))
    taken = policy.get_action(steps)
    if not isinstance(taken, ActionInfo):
        raise BadAction(f"the policy of behavior {behavior!r} returned {describe_value(taken)}, not an ActionInfo.")
    return ActionInfo(
        checked_actions(spec, taken.action, n, f"action of behavior {behavior!r}", strict, foreign),
        {} if taken.outputs.__class__ is dict and not taken.outputs else _checked_outputs(taken.outputs, n, behavior),
        taken.version,
    )


def _checked_outputs(outputs: Any, n: int, behavior: str) -> dict[str, np.ndarray]:
    """Return copies of a policy's outputs. Raises BadAction unless they map names to arrays of ``n`` rows."""
    policy = f"the policy of behavior {behavior!r}"
    if not isinstance(outputs, Mapping):
        raise BadAction(
            f"the outputs of {policy} should be a mapping of names to arrays, but are {describe_value(outputs)}."
        )
    checked = {}
    for name, values in outputs.items():
        expected = f"output {name!r} of {policy} should be an array of {n} rows, one per agent, but is"
        try:
            array = as_array(values)
        except ValueError as error:
            raise BadAction(f"{expected} {error}.") from error
        if array.ndim == 0 or len(array) != n:
            raise BadAction(f"{expected} {describe_value(array if array.ndim else values)}.")
        checked[name] = array.copy()
    return checked
