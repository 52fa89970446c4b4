"""Carries out ``step``: policies decide for whoever is idle, and each response becomes a StepInfo.

The rule: everything is checked before the first byte is sent, and a StepInfo exists before its worker moves on.
"""

from __future__ import annotations

from collections.abc import Sequence

from envmanager.core.calls import Calls
from envmanager.core.hosts import WorkerHost
from envmanager.core.last_rows import last_steps
from envmanager.core.policy_calls import call_policies, check_policies
from envmanager.core.recovery import Recovery
from envmanager.core.table import Entry, WorkerState, WorkerTable
from envmanager.data.steps import ActionInfo, CommandName, StepInfo
from envmanager.errors import UsageError
from envmanager.options import Wait
from envmanager.policy import Policy
from envmanager.system.interrupts import let_through

_IDLE, _STEP = WorkerState.IDLE, CommandName.STEP


class PolicySteps:
    """Asks the policies of one manager, sends what they decide and makes StepInfos of what comes back."""

    def __init__(self, table: WorkerTable, recovery: Recovery, calls: Calls, *, check_values: bool) -> None:
        self.host: WorkerHost
        self.policies: dict[str, Policy] = {}
        self.takes_partial_actions = True
        """Whether every environment can step with the actions of some behaviors only."""
        self._table = table
        self._recovery = recovery
        self._calls = calls
        self._check_values = check_values

    def send_actions(self, wait: Wait) -> None:
        """Have the policies decide for every worker that is idle, and not too far ahead, and send that."""
        idle = [entry for entry in self._table.entries if entry.state is _IDLE]
        if wait.max_lead is not None:
            slowest = self._table.slowest()
            idle = [entry for entry in idle if entry.steps_since_reset - slowest < wait.max_lead]
        if not idle:
            return
        infos = []
        for entry in idle:
            if entry.previous_step is None:
                raise UsageError("step() before reset(): call reset() first.")
            infos.append(entry.previous_step)
        with let_through():
            taken = self._decide(infos)
        self._calls.require_open("step")
        payloads = []
        for actions in taken:
            payload = {}
            for name, decided in actions.items():  # not a comprehension: each is a call, of which steps have few
                payload[name] = decided.action
            payloads.append(payload)
        if self._table.has_objects:
            self.host.check_can_travel(payloads)
        for entry, actions, payload in zip(idle, taken, payloads, strict=True):
            if entry.state is _IDLE:
                self.host.workers[entry.worker_id].send(_STEP, payload)
                entry.actions = actions
                self._table.sent(entry, len(entry.env_ids))
            else:  # it failed in a call that the policy made
                self._recovery.discard_action(entry)

    def _decide(self, infos: Sequence[StepInfo]) -> list[dict[str, ActionInfo]]:
        """What the policies do, one ``{behavior: ActionInfo}`` per StepInfo."""
        check_policies(infos, self.policies, partial_actions=self.takes_partial_actions)
        return call_policies(infos, self.policies, self._table.specs, strict=self._check_values)

    def infos_of(self, entries: Sequence[Entry]) -> list[StepInfo]:
        """Each response with its worker's previous step and actions; then they are handed out."""
        infos = []
        for entry in entries:  # as above
            infos.append(self._info_of(entry))
        self._table.handed_out(entries)
        for entry, info in zip(entries, infos, strict=True):
            entry.actions, entry.previous_step = None, info
        return infos

    def _info_of(self, entry: Entry) -> StepInfo:
        before, response, specs = entry.previous_step, entry.response, self._table.specs
        assert response is not None
        previous = None if before is None else before.current
        cut = None if entry.replacement is None else self._recovery.cut(entry, last_steps(entry))
        if cut is None:
            current = self.host.own(response.payload)
            return StepInfo(previous, current, entry.actions, entry.worker_id, None, specs)
        current, lost = cut
        return StepInfo(previous, current, None, entry.worker_id, lost, specs)
