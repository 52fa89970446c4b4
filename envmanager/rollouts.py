"""Trajectories for a training loop of one's own, whose steps arrive in any order and number.

::

    recv() ── add ──▶ column 0   s s s s E s s s   full           s: a step, E: the last of an episode
                      column 1   s s L s s a               L: the last before its worker was lost, a: in flight
    ready, obs ── the loop's policy ── send ──▶ the manager
    step() ── add ──▶ the same, with the actions and outputs of the manager's policies
    full columns ── take ──▶ Rollout, arrays [length, n_columns]

An agent fills its own column, over the ends of episodes. If it leaves for good, a new agent goes on in its column.
Each observation is copied once, into its column: it is the ``next_obs`` of one step and the ``obs`` of the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from envmanager.data.specs import as_array, zeros
from envmanager.data.steps import AGENT_BITS, AgentSteps, Batch, StepInfo
from envmanager.data.trees import Tree, leaves, leaves_like, map_tree, take_rows
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.observe.events import Failed
from envmanager.system.interrupts import defer_interrupts

_AWAY, _READY, _ACTED, _WAITS = range(4)
"""States of a column's agent: absent; needs an action; its action is in flight; plays, but it is others' turn."""


@attrs.define(eq=False, slots=False)
class Rollout:
    """Arrays of T steps in each of n columns, all ``[T, n, …]``. The steps of a column follow each other in time.

    ``obs``, ``action``: trees; ``outputs``: the policy's outputs by name; ``reward``: float32; ``terminated``,
    ``truncated``: bool; ``agent_id``: int64. ``lost``: whether the episode went on, but its next step was lost with its
    worker. ``ended``: whether the episode ends here for any reason, also that it was lost, or that ``begin`` or
    ``reset`` began another; the next row is then of another episode. A step that did not terminate is worth
    ``reward`` and what follows ``next_obs``, also where it ended. The arrays belong to the caller.
    """

    obs: Tree
    action: Tree
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    lost: np.ndarray
    ended: np.ndarray
    agent_id: np.ndarray
    outputs: dict[str, np.ndarray]
    _seen: Tree = attrs.field(repr=False)
    _finals: np.ndarray = attrs.field(repr=False)
    """For each step at which an episode ended, its last observation, a list of leaves; 0 for others."""

    @property
    def env_id(self) -> np.ndarray:
        """Id of each step's environment: int64[T, n]."""
        env_id: np.ndarray = self.agent_id >> AGENT_BITS
        return env_id

    @cached_property
    def next_obs(self) -> Tree:
        """Observations to which the steps led, the last of the episode where it ended. Made at the first use."""
        following = map_tree(lambda leaf: leaf[1:].copy(), self._seen)
        into = leaves(following)
        for at in zip(*np.nonzero(self._finals), strict=True):
            for leaf, row in zip(into, self._finals[at], strict=True):
                leaf[at] = row
        return following


class Rollouts:
    """The trajectories of a manager's agents, in columns of ``length`` steps. Everything that arrives goes to ``add``.

    With ``send`` and ``recv``: call ``send`` of this object with the actions for ``obs``, which has a row for each
    environment in ``ready``. With ``step``, actions and outputs come with the StepInfos. ``behavior`` may be left out
    if there is only one. A step whose result was lost with its worker is in no trajectory.
    """

    def __init__(self, manager: EnvManager, length: int, *, behavior: str | None = None) -> None:
        if not isinstance(length, int) or length < 1:
            raise UsageError(f"the length of a rollout must be a whole number of at least 1, not {length!r}.")
        names = sorted(manager.behavior_specs) or ["default"]
        if behavior is None and len(names) > 1:
            raise UsageError(f"there are the behaviors {names}: say which, as in Rollouts(…, behavior={names[0]!r}).")
        self.length = length
        self._manager, self._behavior = manager, names[0] if behavior is None else behavior
        self._worker_of, self._is_out = np.zeros(manager.n_envs, np.int64), np.zeros(manager.n_workers, np.bool_)
        """Worker of each environment, and whether each worker was given up; see ``_plays``."""
        for worker in manager.stats().workers:
            self._worker_of[list(worker.env_ids)] = worker.worker_id
        self._n_failed = 0
        self._column_of: dict[int, int] = {}
        self._agent, self._place, self._state = self._table = np.zeros((3, 0), np.int64)
        """Agent of each column, or -1; number of its finished steps, and the agent's state."""
        dtypes = {"reward": np.float32, "agent_id": np.int64, "finals": np.object_}
        dtypes |= dict.fromkeys(("terminated", "truncated", "lost", "ended"), np.bool_)
        self._store: dict[str, Tree] = {name: np.zeros((length, 0), dtype) for name, dtype in dtypes.items()}
        """The fields of a Rollout, ``[length, n_columns, …]``; "obs" has a row more. The row of the next step is begun.

        The results of steps that are not finished are 0.
        """

    # What a loop asks.

    @property
    def ready(self) -> np.ndarray:
        """Ids of the environments to act for next: int64[k], sorted. An environment whose column is full is left out.

        But if its worker has an environment whose column is not full, all of the worker go on together.
        """
        env_ids: np.ndarray = self._agent[self._ready_columns()] >> AGENT_BITS
        return env_ids

    @property
    def obs(self) -> Tree:
        """Observations of the environments in ``ready``, in their order: a tree of ``[k, …]``."""
        return self._obs_of(self._ready_columns())

    @property
    def n_full(self) -> int:
        """Number of columns that ``take`` would return."""
        return int(np.count_nonzero(self._full))

    @property
    def is_full(self) -> bool:
        """Whether every agent that plays has a full column. Agents that rest, and workers given up, do not count."""
        full = self._full
        return bool(full.any() and np.isin(self._agent[self._plays()], self._store["agent_id"][-1, full]).all())

    # What a loop does.

    def add(self, received: Batch | StepInfo | Iterable[StepInfo]) -> None:
        """Add what ``recv``, ``step`` or ``reset`` has returned, all of it and in this order. The arrays are copied.

        A batch with a step whose action was not sent by ``send`` of this object is a UsageError.
        """
        with defer_interrupts():
            if isinstance(received, Batch):
                if self._manager.kinds and received.behavior != self._behavior:
                    own = f"these rollouts are of {self._behavior!r}: each kind needs Rollouts of its own"
                    raise UsageError(f"the batch is of the kind {received.behavior!r}, and {own}.")
                self._add_batch(received)
            else:
                for info in [received] if isinstance(received, StepInfo) else received:
                    self._add_info(info)

    def send(self, action: Tree, env_ids: Any = None, **outputs: Any) -> None:
        """Send actions to ``ready``, or to ``env_ids``, and keep them with the policy's outputs, arrays ``[k, …]``.

        An environment in ``env_ids`` whose column is full goes on in a new one. Raises what ``manager.send`` raises.
        """
        ids = self.ready if env_ids is None else np.asarray(env_ids)
        agents = [env_id << AGENT_BITS for env_id in ids.tolist()]
        unknown = [agent >> AGENT_BITS for agent in agents if agent not in self._column_of]
        if unknown:
            raise UsageError(f"no observation of env {unknown[0]} was added: call add(manager.recv()) before send().")
        kept = self._checked(outputs, len(ids))
        columns = self._columns(agents)
        acts = self._plays()[columns]  # the manager leaves out those that rest
        with defer_interrupts():
            self._manager.send(action, ids)
            self._act(columns, acts, action, kept)

    def take(self) -> Rollout:
        """Return the full columns, sorted by agent, and remove them. Raises UsageError if no column is full."""
        with defer_interrupts():
            columns = np.flatnonzero(self._full)
            if not len(columns):
                raise UsageError("no column is full: call take() when is_full, or when n_full is as large as you need.")
            agents = self._store["agent_id"][-1, columns]
            return self._taken(columns[np.argsort(agents, kind="stable")], self.length)

    def take_rest(self) -> list[Rollout]:
        """Return all finished steps, a Rollout ``[T, 1]`` for each column, full or not, and remove them."""
        with defer_interrupts():
            begun = np.flatnonzero(self._place).tolist()
            return [self._taken(np.array([column]), int(self._place[column])) for column in begun]

    # Columns.

    @property
    def _full(self) -> Any:
        """Whether each column is full and settled: others' turns may still bring a reward for its last step."""
        return (self._place == self.length) & (self._state != _WAITS)

    def _plays(self) -> Any:
        """Whether the agent of each column plays, and its next step or observation will arrive."""
        n_failed = self._manager.events.count(Failed)
        if n_failed != self._n_failed:
            self._n_failed = n_failed
            self._is_out[:] = [worker.failed for worker in self._manager.stats().workers]
        env_ids = self._agent >> AGENT_BITS
        plays = (self._state != _AWAY) & ~self._is_out[self._worker_of[env_ids]]
        try:
            return plays & self._manager.tasks.seats.acts[env_ids]
        except UsageError:  # episodes begin by themselves
            return plays

    def _ready_columns(self) -> np.ndarray:
        columns = np.flatnonzero((self._state == _READY) & self._plays())
        workers = self._worker_of[self._agent[columns] >> AGENT_BITS]
        goes_on = np.zeros(self._manager.n_workers, np.bool_)
        goes_on[workers[self._place[columns] < self.length]] = True
        columns = columns[goes_on[workers]]
        return np.take(columns, np.argsort(self._agent[columns]))

    def _columns(self, agents: Sequence[int]) -> np.ndarray:
        """Return the column of each agent. An agent without one gets an unused one, or that of an agent that left."""
        known = self._column_of
        missing = [agent for agent in agents if agent not in known]
        if missing:
            free = np.flatnonzero((self._state == _AWAY) & (self._place < self.length))
            free = free[~np.isin(free, [known[agent] for agent in agents if agent in known])]
            free = free[np.argsort(self._agent[free] >= 0, kind="stable")]
            n_more = len(missing) - len(free)
            if n_more > 0:
                free = np.append(free, len(self._agent) + np.arange(n_more))
                self._table = np.append(self._table, np.tile([[-1], [0], [_AWAY]], n_more), 1)
                self._agent, self._place, self._state = self._table
                self._store = map_tree(
                    lambda leaf: np.pad(leaf, [(0, 0), (0, n_more), *[(0, 0)] * (leaf.ndim - 2)]), self._store
                )
            for agent, column in zip(missing, free.tolist(), strict=False):
                known.pop(int(self._agent[column]), None)
                known[agent], self._agent[column] = column, agent
        return np.array([known[agent] for agent in agents], np.int64)

    def _taken(self, columns: np.ndarray, n: int) -> Rollout:
        """Return the first ``n`` steps of ``columns``, and begin the columns again with what follows these steps."""
        is_all = np.array_equal(columns, np.arange(len(self._agent)))
        chosen = slice(None) if is_all else columns
        taken = map_tree(lambda leaf: leaf[: n + 1, chosen], self._store)
        if is_all:  # no copy
            self._store = map_tree(np.empty_like, self._store)
        for into, values in zip(leaves(self._store), leaves(taken), strict=True):
            into[:, chosen] = 0
            if len(values) > n:  # the observation, and the action in flight
                into[0, chosen] = values[n]
        self._place[columns] = 0
        seen = taken.pop("obs")
        rest = map_tree(lambda leaf: leaf[:n], taken)
        return Rollout(map_tree(lambda leaf: leaf[:n], seen), seen=seen, **rest)

    def _obs_of(self, columns: np.ndarray) -> Tree:
        if "obs" not in self._store:
            raise UsageError("there is no observation yet: call add(manager.recv()) first.")
        place = self._place[columns]
        return map_tree(lambda leaf: leaf[place, columns], self._store["obs"])

    # Steps.

    def _add_batch(self, batch: Batch) -> None:
        if not len(batch):
            return
        if not self._column_of:  # so that column i is environment i
            self._columns([env_id << AGENT_BITS for env_id in range(self._manager.n_envs)])
        steps = AgentSteps(
            batch.env_ids << AGENT_BITS, batch.obs, batch.reward, batch.terminated, batch.truncated, batch.final_obs
        )
        columns, begins = self._columns(steps.agent_id.tolist()), batch.lost | batch.first
        is_step = (self._state[columns] == _ACTED) & ~begins
        unknown = batch.env_ids[~is_step & ~begins & (steps.ended | (steps.reward != 0))]
        if len(unknown):
            raise UsageError(
                f"env {unknown[0]} has taken a step whose action these rollouts do not know: send actions with "
                "Rollouts.send(), not with send() of the manager, and add every batch once."
            )
        if not is_step.all():
            self._end(columns[~is_step], lost=batch.lost[~is_step])
        self._add_steps(columns, steps)

    def _add_info(self, info: StepInfo) -> None:
        now, before = info.current.get(self._behavior), (info.previous or {}).get(self._behavior)
        taken = (info.actions or {}).get(self._behavior)
        if before is not None and taken is not None and len(before.acting_rows):  # no policy is asked for none
            columns = self._columns(before.agent_id[before.acting_rows].tolist())
            outputs = self._checked(taken.outputs, len(columns))
            self._act(columns, self._state[columns] == _READY, taken.action, outputs)
        present = [] if now is None else now.agent_id.tolist()
        known = [self._column_of[agent] for agent in present if agent in self._column_of]
        env_ids = self._agent >> AGENT_BITS
        begins = np.full(len(env_ids), info.previous is None)
        if info.lost is not None:
            begins |= info.lost.holds(self._agent)
        left = (self._state != _AWAY) & (self._worker_of[env_ids] == info.worker_id)
        left[known] &= begins[known]
        if left.any():
            self._end(np.flatnonzero(left), lost=begins[left] & (info.lost is not None), truncated=~begins[left])
        if now is not None:
            self._add_steps(self._columns(present), now)

    def _room(self, n: int, values: Tree) -> Tree:
        """Return zeros ``[n, n_columns, …]`` for each array ``[m, …]`` in ``values``."""
        n_columns = len(self._agent)
        return map_tree(lambda leaf: np.zeros((n, n_columns, *leaf.shape[1:]), as_array(leaf).dtype), values)

    def _checked(self, outputs: Mapping[str, Any], n: int) -> dict[str, np.ndarray]:
        """Return the outputs as arrays. Raises UsageError unless they are like those before, and have ``n`` rows."""
        arrays: dict[str, np.ndarray] = {}
        known = self._store.get("outputs")
        if known is not None and known.keys() != outputs.keys():
            raise UsageError(f"each action needs the same outputs: {sorted(known)} before, now {sorted(outputs)}.")
        for name, values in outputs.items():
            try:
                array = arrays[name] = as_array(values)
            except ValueError as error:
                raise UsageError(f"the output {name!r} is {error}.") from error
            shape = n, *(array.shape[1:] if known is None else known[name].shape[2:])
            if array.shape != shape:
                raise UsageError(f"the output {name!r} should be {list(shape)}, but its shape is {list(array.shape)}.")
        return arrays

    def _act(self, columns: np.ndarray, acts: np.ndarray, action: Tree, outputs: dict[str, np.ndarray]) -> None:
        """Write the actions in ``acts`` into the rows of the next steps. Agents of full columns go on in others."""
        columns = columns[acts]
        is_full = self._place[columns] == self.length
        if is_full.any():
            full, agents = columns[is_full], self._agent[columns].tolist()
            obs = self._obs_of(full)
            for agent in self._agent[full].tolist():
                del self._column_of[agent]
            self._state[full], self._agent[full] = _AWAY, -1
            columns = self._columns(agents)
            self._write(columns[is_full], obs=obs)
        given = {"action": map_tree(as_array, action), "outputs": outputs}
        if "action" not in self._store:
            spec = self._manager.behavior_specs.get(self._behavior)
            like = given if spec is None else {**given, "action": zeros(spec.action, 0)}
            self._store |= self._room(self.length, like)
        self._write(columns, **take_rows(given, acts), agent_id=self._agent[columns])
        self._state[columns] = _ACTED

    def _add_steps(self, columns: np.ndarray, steps: AgentSteps) -> None:
        """Write the results of actions, also those that others' turns bring, and the observations to act on next."""
        store, state, ended = self._store, self._state[columns], steps.ended
        if "obs" not in store:
            store["obs"] = self._room(self.length + 1, steps.obs)
        self._place[columns] += state == _ACTED
        row = self._place[columns] - 1
        told = (state >= _ACTED) & (row >= 0) & ~store["ended"][row, columns]
        store["reward"][row, columns] += np.where(told, steps.reward, 0)
        store["terminated"][row, columns] |= told & steps.terminated
        store["truncated"][row, columns] |= told & steps.truncated
        told &= ended
        if told.any():
            rows = (np.cumsum(ended) - 1)[told]
            self._close(row, columns, told, take_rows(map_tree(as_array, steps.final_obs), rows))
        self._write(columns, obs=steps.obs)
        acting = np.ones(len(steps), np.bool_) if steps.acting is None else steps.acting
        self._state[columns] = np.where(acting, _READY, np.where(ended, _AWAY, _WAITS))
        self._is_out[self._worker_of[steps.env_id]] = False

    def _end(self, columns: np.ndarray, *, lost: Any, truncated: Any = False) -> None:
        """End the episodes of agents that do not go on with what they last saw. An action in flight is dropped."""
        self._state[columns] = _AWAY
        row = self._place[columns] - 1
        goes_on = (row >= 0) & ~self._store["ended"][row, columns]
        self._store["lost"][row, columns] |= goes_on & lost
        self._store["truncated"][row, columns] |= goes_on & truncated
        if goes_on.any():
            self._close(row, columns, goes_on, self._obs_of(columns[goes_on]))

    def _close(self, row: np.ndarray, columns: np.ndarray, ended: np.ndarray, final_obs: Tree) -> None:
        self._store["ended"][row, columns] |= ended
        finals = zip(*leaves_like(self._store["obs"], final_obs), strict=True)
        for step, column, final in zip(row[ended].tolist(), columns[ended].tolist(), finals, strict=True):
            self._store["finals"][step, column] = list(final)

    def _write(self, columns: np.ndarray, **values: Tree) -> None:
        """Write ``values``, arrays with a row for each of ``columns``, into the rows of the next steps."""
        place, into = self._place[columns], {name: self._store[name] for name in values}
        for leaf, rows in zip(leaves(into), leaves_like(into, values), strict=True):
            leaf[place, columns] = as_array(rows)
