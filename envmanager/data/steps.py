"""The objects that workers, managers, policies and trainers exchange for a step.

::

    manager ── EnvironmentCommand ──▶ worker         AgentSteps    n agents of one behavior, one step
    manager ◀─ EnvironmentResponse ── worker         ActionInfo    a policy's actions for AgentSteps
                                                     StepInfo      previous steps, actions, current steps of one worker

The arrays of one AgentSteps belong to the same step. ``reward`` is for the last action, and counts toward that action's
episode. ``obs`` has the observations to act on next. ``final_obs`` has the last observations of ended episodes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np

from envmanager.data.seeding import seed_of_series
from envmanager.data.specs import BehaviorSpecs, zeros
from envmanager.data.trees import Tree, concat_rows, copy_tree, leaves, take_rows, with_rows
from envmanager.errors import WorkerError

AGENT_BITS = 32
"""Number of bits below the env_id in an agent_id. Agent k of an environment has the id ``env_id << AGENT_BITS | k``."""


def only_agents(env_ids: Sequence[int]) -> np.ndarray:
    """Return the agent_ids, int64[n], of environments that have one agent each."""
    return np.array([env_id << AGENT_BITS for env_id in env_ids], np.int64)


class CommandName(str, enum.Enum):
    """The name of a command or response. Each member is equal to its string."""

    START = "start"
    RESET = "reset"
    STEP = "step"
    STEP_ROWS = "step_rows"
    BEGIN = "begin"
    """Episodes to begin, a list of Begin, which travel with the next step. It has no response."""
    CALL = "call"
    GET_ATTR = "get_attr"
    SET_ATTR = "set_attr"
    RENDER = "render"
    CLOSE = "close"
    FAILED = "failed"

    __str__ = str.__str__
    __hash__ = str.__hash__


STEPPING = (CommandName.STEP, CommandName.STEP_ROWS)
"""Commands to which a worker responds with a step."""

_PHASES = {
    CommandName.STEP_ROWS: "step",
    CommandName.GET_ATTR: "call",
    CommandName.SET_ATTR: "call",
    CommandName.RENDER: "call",
}


def phase_of(name: CommandName) -> str:
    """Return the ``phase`` (such as ``"step"``) of a WorkerError that is raised during the command ``name``."""
    return _PHASES.get(name, str(name))


@attrs.define(init=False)
class EnvironmentCommand:
    """A command that a manager sends to a worker. It has a name and a payload."""

    name: CommandName
    payload: Any

    def __init__(self, name: str, payload: Any = None) -> None:
        self.name = name if name.__class__ is CommandName else CommandName(name)
        self.payload = payload


@attrs.define(init=False)
class EnvironmentResponse:
    """The response of a worker to a command.

    The payload is ``{behavior: AgentSteps}`` after a step or reset. The response to a failed command has the name
    "failed" and the error as its payload. ``specs`` has the specs of all behaviors if a new behavior has appeared since
    the last response, else None. ``not_begun`` has the errors, by env_id, of episodes that could not begin with their
    actions, else None. Their environments rest, and have no rows. Where ``Begin.counted_from`` asks for it, it has the
    return and the length of each agent instead, by agent_id.
    """

    name: CommandName
    worker_id: int
    payload: Any
    specs: BehaviorSpecs | None
    not_begun: Mapping[int, Any] | None

    def __init__(
        self,
        name: str,
        worker_id: int,
        payload: Any = None,
        specs: BehaviorSpecs | None = None,
        not_begun: Mapping[int, Any] | None = None,
    ) -> None:
        self.name = name if name.__class__ is CommandName else CommandName(name)
        self.worker_id = worker_id
        self.payload = payload
        self.specs = specs
        self.not_begun = not_begun


@attrs.frozen
class StartReport:
    """The payload of the response to "start". See EnvGroup for the fields; ``specs`` are its ``behavior_specs``."""

    specs: BehaviorSpecs
    max_agents: Mapping[str, int]
    partial_actions: bool
    steps_some_rows: bool = True
    batch_size: int = 0
    begins_on_demand: bool = False
    begins_when_ready: bool = False
    takes_actions: bool = False


class Call(NamedTuple):
    """What a manager's ``call`` or ``set_attr`` did to an environment amid an episode, to do it again.

    ``after``: number of the episode's actions that came before, all agents' together; -1 for before its reset.
    ``command``: "call", "set_attr", whose value is the only one of ``args``, or "unset_attr", which gives an attribute
    the value that it had before any ``set_attr``.
    """

    after: int
    command: str
    name: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


class Begin(NamedTuple):
    """An episode to begin on demand in the environment at ``row`` of a worker.

    It begins with the worker's next step if ``at_once``, else as soon as the environment's present episode has ended.
    ``task`` is the index of its task, which only recordings need. ``actions``, if not None, are taken right after the
    reset: by behavior, a row for each action of an agent, in the order in which the agents act. It needs ``at_once``.
    ``series``: if not None, the arguments of ``seed_of_series`` for its seed; the next episode begins by itself.
    ``counted_from``: number of the ``actions`` after which steps count in the return and the length that the response
    has for each agent; None: it has none.
    ``calls``: what is repeated amid the actions, in order. With any, ``actions`` is not None.
    """

    row: int
    at_once: bool
    seed: int | None = None
    options: Mapping[str, Any] | None = None
    task: int = -1
    actions: Mapping[str, Tree] | None = None
    series: tuple[int, int] | None = None
    calls: Sequence[Call] = ()
    counted_from: int | None = None

    @property
    def n_repeated(self) -> int:
        """Number of actions that are taken before the first observation, of the behavior that has most."""
        return max((len(leaves(tree)[0]) for tree in (self.actions or {}).values()), default=0)

    @property
    def following(self) -> Begin | None:
        """The episode that begins by itself after this one, if it is one of a series."""
        if self.series is None:
            return None
        first, number = self.series
        return Begin(self.row, False, seed_of_series(first, number + 1), self.options, series=(first, number + 1))


_Dicts = list[dict[str, Any]] | None

COLUMNS: dict[str, np.dtype[Any]] = {
    "agent_id": np.dtype(np.int64),
    "reward": np.dtype(np.float32),
    "terminated": np.dtype(np.bool_),
    "truncated": np.dtype(np.bool_),
    "acting": np.dtype(np.bool_),
}
"""Dtypes of the fields of AgentSteps that are arrays ``[n]``."""


@attrs.define(eq=False)
class AgentSteps:
    """One environment step of n agents of one behavior, as a struct of arrays.

    ``agent_id`` int64[n]; ``obs`` a tree of ``[n, …]``; ``reward`` float32[n]; ``terminated`` and ``truncated``
    bool[n]; ``final_obs`` a tree of ``[m, …]`` for the m agents whose episode ended, in row order, or None; ``acting``
    bool[n], or None if every agent needs an action. If the manager has ``infos=True``, ``info`` has n dicts,
    one per row, and ``reset_info`` has m dicts, one per ended episode. Create valid steps with ``first`` and
    ``stepped``.
    """

    agent_id: np.ndarray
    obs: Tree
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_obs: Tree = None
    acting: np.ndarray | None = None
    info: list[dict[str, Any]] | None = None
    reset_info: list[dict[str, Any]] | None = None

    @classmethod
    def first(
        cls, *, agent_id: np.ndarray, obs: Tree, acting: np.ndarray | None = None, info: _Dicts = None
    ) -> AgentSteps:
        """Return the steps after a reset: all rewards are 0, and no episode has ended."""
        n = len(agent_id)
        flags = np.zeros(n, np.float32), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        return cls(agent_id, obs, *flags, acting=acting, info=info)

    @classmethod
    def stepped(
        cls,
        *,
        agent_id: np.ndarray,
        obs: Tree,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        final_obs: Tree = None,
        acting: np.ndarray | None = None,
        info: _Dicts = None,
        reset_info: _Dicts = None,
    ) -> AgentSteps:
        """Return the steps after actions. Raises ValueError if episodes ended without ``final_obs``, or vice versa."""
        steps = cls(agent_id, obs, reward, terminated, truncated, final_obs, acting, info, reset_info)
        if bool(steps.ended.any()) is (final_obs is None):
            raise ValueError(f"final_obs has a row for each of the {np.count_nonzero(steps.ended)} agents that ended")
        return steps

    def __len__(self) -> int:
        return len(self.agent_id)

    @property
    def env_id(self) -> np.ndarray:
        """Id of each agent's environment: int64[n]."""
        env_id: np.ndarray = self.agent_id >> AGENT_BITS
        return env_id

    @property
    def ended(self) -> np.ndarray:
        """Whether each agent's episode ended with this step: bool[n]."""
        ended: np.ndarray = self.terminated | self.truncated
        return ended

    @property
    def acting_rows(self) -> np.ndarray:
        """Indices of the rows that need an action: int64[k]."""
        return np.arange(len(self)) if self.acting is None else np.flatnonzero(self.acting)

    @property
    def decision_steps(self) -> DecisionSteps:
        """The agents that need an action, in the form of ML-Agents' DecisionSteps."""
        rows = self.acting_rows
        return DecisionSteps(self.agent_id[rows], take_rows(self.obs, rows), self.reward[rows])

    @property
    def terminal_steps(self) -> TerminalSteps:
        """The agents whose episode ended, in the form of ML-Agents' TerminalSteps. ``interrupted`` is ``truncated``."""
        rows = np.flatnonzero(self.ended)
        obs = take_rows(self.obs, rows) if self.final_obs is None else self.final_obs
        return TerminalSteps(self.agent_id[rows], obs, self.reward[rows], self.truncated[rows])

    def copy(self, *, obs: Tree = None) -> AgentSteps:
        """Return steps with copied arrays but the same infos. ``obs``, if given, replaces the copy of ``self.obs``."""
        seen, final_obs = self.obs, self.final_obs
        if obs is None:
            obs = seen.copy() if seen.__class__ is np.ndarray else copy_tree(seen)
        return AgentSteps(
            self.agent_id.copy(),
            obs,
            self.reward.copy(),
            self.terminated.copy(),
            self.truncated.copy(),
            None if final_obs is None else copy_tree(final_obs),
            None if self.acting is None else self.acting.copy(),
            self.info,
            self.reset_info,
        )

    def as_first(self) -> AgentSteps:
        """Return the steps as the first of an episode: without rewards and ends, and without agents that have left."""
        steps = self
        if self.final_obs is not None:
            if self.info is not None and self.reset_info is not None:
                info = list(self.info)
                for row, own in zip(np.flatnonzero(self.ended).tolist(), self.reset_info, strict=True):
                    info[row] = own  # of an agent that has left, or that begins once more
                steps = attrs.evolve(self, info=info)
            if self.acting is not None:
                steps = steps.take(np.flatnonzero(~self.ended | self.acting))
        return AgentSteps.first(agent_id=steps.agent_id, obs=steps.obs, acting=steps.acting, info=steps.info)

    def take(self, rows: np.ndarray) -> AgentSteps:
        """Return steps with copies of the rows at the indices ``rows``, in the order of ``rows``."""
        ended = self.ended
        final_obs = reset_info = None
        chosen_ended = rows[ended[rows]]
        if len(chosen_ended):
            place = np.cumsum(ended) - 1
            final_obs = take_rows(self.final_obs, place[chosen_ended])
            if self.reset_info is not None:
                reset_info = [self.reset_info[index] for index in place[chosen_ended]]
        return AgentSteps(
            self.agent_id[rows],
            take_rows(self.obs, rows),
            self.reward[rows],
            self.terminated[rows],
            self.truncated[rows],
            final_obs,
            None if self.acting is None else self.acting[rows],
            None if self.info is None else [self.info[row] for row in rows],
            reset_info,
        )


@attrs.define(eq=False)
class Batch:
    """Steps of n environments with one agent each, one row per environment: the result of ``EnvManager.recv``.

    ``env_ids`` int64[n]; ``obs`` a tree of ``[n, …]``; ``reward`` float32[n]; ``terminated``, ``truncated``, ``lost``
    bool[n]; ``final_obs`` a tree of ``[m, …]`` for the m rows whose episode ended, or None. If the manager has
    ``infos=True``, ``info`` has n dicts and ``reset_info`` m dicts. The rows are sorted by ``env_ids`` if the batch has
    all environments, else they are in order of arrival. If ``is_view``, the arrays are valid until the next ``recv``,
    ``step`` or ``reset``. ``of_tasks``: ``first``, ``task`` and ``final_task``, or None for each that has
    nothing to tell. ``behavior``: the behavior of all rows; of several kinds of environments a batch has one.
    """

    env_ids: np.ndarray
    obs: Tree
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    _lost: np.ndarray | None
    final_obs: Tree = None
    info: list[dict[str, Any]] | None = None
    reset_info: list[dict[str, Any]] | None = None
    is_view: bool = False
    of_tasks: tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None] = (None, None, None)
    behavior: str = "default"

    @classmethod
    def of(
        cls, steps: AgentSteps, env_ids: np.ndarray | None = None, is_view: bool = True, copies: bool = False
    ) -> Batch:
        """Return a batch of ``steps``, in which each environment must have one agent.

        ``env_ids``: env_id of each row, or None to use ``steps.env_id``. ``is_view``: see ``Batch``. The arrays are
        copied if ``copies``, else they are shared.
        """
        obs, final_obs = steps.obs, steps.final_obs
        reward, terminated, truncated = steps.reward, steps.terminated, steps.truncated
        if copies:
            obs = obs.copy() if obs.__class__ is np.ndarray else copy_tree(obs)
            final_obs = None if final_obs is None else copy_tree(final_obs)
            reward, terminated, truncated = reward.copy(), terminated.copy(), truncated.copy()
        return cls(
            steps.env_id if env_ids is None else env_ids,
            obs,
            reward,
            terminated,
            truncated,
            None,
            final_obs,
            steps.info,
            steps.reset_info,
            is_view and not copies,
        )

    @classmethod
    def joined(cls, parts: list[AgentSteps], env_ids: np.ndarray | None = None) -> Batch:
        """Return a batch with copies of the rows of all ``parts``, one part after the other.

        With ``env_ids``, which must be the sorted ids of all rows, the rows are sorted by env_id instead.
        """
        steps = concat_steps(parts)
        if env_ids is not None and (np.diff(steps.agent_id) < 0).any():
            steps = steps.take(np.argsort(steps.agent_id))
        return cls.of(steps, env_ids, is_view=False)

    def __len__(self) -> int:
        return len(self.env_ids)

    @property
    def lost(self) -> np.ndarray:
        """Whether each environment's worker was just replaced, which truncates an episode in progress: bool[n]."""
        if self._lost is None:
            self._lost = np.zeros(len(self.env_ids), np.bool_)
        return self._lost

    @property
    def first(self) -> np.ndarray:
        """Whether each row is no step: the first observation of an episode that a reset or a task began: bool[n]."""
        return np.zeros(len(self.env_ids), np.bool_) if self.of_tasks[0] is None else self.of_tasks[0]

    @property
    def task(self) -> np.ndarray:
        """Index of the task to whose episode each row's ``obs`` belongs, -1 without tasks: int64[n]."""
        return np.full(len(self.env_ids), -1, np.int64) if self.of_tasks[1] is None else self.of_tasks[1]

    @property
    def final_task(self) -> np.ndarray:
        """Index of the task of each ended episode, in the order of ``final_obs``, -1 without tasks: int64[m]."""
        n = np.count_nonzero(self.terminated | self.truncated)
        return np.full(n, -1, np.int64) if self.of_tasks[2] is None else self.of_tasks[2]

    def copy(self) -> Batch:
        """Return a batch with copies of the arrays, but the same infos."""
        names = ("env_ids", "obs", "reward", "terminated", "truncated", "_lost", "final_obs")
        copied = {name.lstrip("_"): copy_tree(getattr(self, name)) for name in names}
        copied["of_tasks"] = tuple(map(copy_tree, self.of_tasks))
        return attrs.evolve(self, **copied, is_view=False)


class DecisionSteps(NamedTuple):
    """The rows of an AgentSteps whose agents need an action, as in ML-Agents' DecisionSteps."""

    agent_id: np.ndarray
    obs: Tree
    reward: np.ndarray


class TerminalSteps(NamedTuple):
    """The rows of an AgentSteps whose episode ended, as in ML-Agents' TerminalSteps. ``obs``: final observations."""

    agent_id: np.ndarray
    obs: Tree
    reward: np.ndarray
    interrupted: np.ndarray


LEAST_LENT_BYTES = 1 << 16
"""Minimum size in bytes of observations that a local worker lends without a copy. Copying smaller ones is faster."""


@attrs.define(eq=False)
class RowBuffer:
    """Reusable arrays into which an environment may write its steps if it always has the same K agents.

    ``steps`` has K rows. ``final_obs`` is a tree of ``[K, …]``. If m episodes ended, the first m rows of ``final_obs``
    are used.
    """

    steps: AgentSteps
    final_obs: Tree
    views: Any = attrs.field(default=None, init=False, repr=False)
    """Views of the arrays, stored here by the environments that write into them."""

    @classmethod
    def empty(cls, observation: Tree, agent_id: np.ndarray) -> RowBuffer:
        """Return a buffer of new arrays for the agents ``agent_id``. ``observation`` is their observation spec."""
        n = len(agent_id)
        return cls(AgentSteps.first(agent_id=agent_id, obs=zeros(observation, n)), zeros(observation, n))


@attrs.define(eq=False)
class ActionInfo:
    """The actions that a policy returns for an AgentSteps, with one row for each *acting* row, in the same order.

    Only ``action`` (a tree of ``[n, …]``) is sent to the worker. The arrays ``[n, …]`` in ``outputs`` (such as
    log-probs or values) and the policy's ``version`` are returned to the trainer with the StepInfo.
    """

    action: Tree
    outputs: dict[str, np.ndarray] = attrs.field(factory=dict)
    version: int = 0

    def take(self, rows: slice) -> ActionInfo:
        """Return an ActionInfo with views of the actions and outputs at ``rows``."""
        outputs = {name: values[rows] for name, values in self.outputs.items()} if self.outputs else {}
        action = self.action
        own = action[rows] if action.__class__ is np.ndarray else take_rows(action, rows)
        return ActionInfo(own, outputs, self.version)


Steps = Mapping[str, AgentSteps]
Actions = Mapping[str, ActionInfo]


@attrs.frozen
class Lost:
    """The loss of the episodes in ``env_ids``. ``cause``: error of the old worker. ``generation``: that of the new one.

    They are all environments of the worker, unless episodes are kept. If the causes differ, ``cause`` is the first. If
    a healthy worker was replaced due to ``RestartPolicy.recycle_after_steps``, ``cause.phase`` is ``"recycled"``.
    """

    cause: WorkerError
    generation: int
    env_ids: tuple[int, ...]

    def holds(self, agent_id: np.ndarray) -> np.ndarray:
        """Return whether the environment of each agent is one of ``env_ids``: bool[n]."""
        return np.isin(agent_id >> AGENT_BITS, self.env_ids)

    def agents(self, agent_ids: Iterable[int]) -> list[int]:
        """Return those of ``agent_ids`` whose environment is one of ``env_ids``."""
        return [agent_id for agent_id in agent_ids if agent_id >> AGENT_BITS in self.env_ids]


class Transitions(NamedTuple):
    """Arrays with one row per action of an agent. ``next_obs`` is the final observation if the episode ended.

    ``reward`` is the sum until the agent acts again or ends, also of steps in which others acted.
    """

    obs: Tree
    action: Tree
    reward: np.ndarray
    next_obs: Tree
    terminated: np.ndarray
    truncated: np.ndarray
    agent_id: np.ndarray


_NOTHING: Mapping[Any, Any] = {}
"""Shared by StepInfos without tasks or waiting actions. Not a MappingProxyType, which cannot be pickled."""


@attrs.define(eq=False)
class StepInfo:
    """One step of a worker, with the previous steps, the actions chosen for them, and the current steps.

    Right after a reset, ``previous`` and ``actions`` are None. Later, ``previous`` *is* the ``current`` of the
    worker's preceding StepInfo. If episodes were lost, ``lost`` says which: their agents have no transitions, the rows
    of others are ordinary steps. If the worker has lost all, ``actions`` is None. With ``zero_copy`` the arrays are
    valid until the next StepInfo of the same worker is delivered; use ``copy()`` to keep them. ``specs``: the manager's
    specs, which ``transitions`` needs for shapes. ``of_tasks``: ``tasks`` and ``final_tasks``.
    """

    previous: Steps | None
    current: Steps
    actions: Actions | None
    worker_id: int
    lost: Lost | None = None
    specs: BehaviorSpecs = attrs.field(factory=dict, repr=False)
    of_tasks: tuple[Mapping[int, int], Mapping[int, int]] = attrs.field(default=(_NOTHING, _NOTHING), repr=False)
    waiting: Mapping[str, Transitions] = attrs.field(default=_NOTHING, repr=False)
    """Actions before the last, with the rewards so far, of agents that have neither ended nor acted again since."""
    still_waiting: Mapping[str, Transitions] = attrs.field(default=_NOTHING, init=False, repr=False)
    """``waiting`` of the worker's next StepInfo, set when the policies are called."""

    @property
    def is_step(self) -> bool:
        """Whether an environment of the worker has taken a step: it was not a reset, and not all episodes were lost."""
        return self.previous is not None and (self.lost is None or self.actions is not None)

    @property
    def tasks(self) -> Mapping[int, int]:
        """Index of the task whose episode each environment plays, by env_id."""
        return self.of_tasks[0]

    @property
    def final_tasks(self) -> Mapping[int, int]:
        """Index of the task of each environment whose episode ended, by env_id."""
        return self.of_tasks[1]

    def copy(self) -> StepInfo:
        """Return a StepInfo with copies of the arrays in ``previous`` and ``current``. Actions are not copied."""
        previous = None if self.previous is None else {name: steps.copy() for name, steps in self.previous.items()}
        current = {name: steps.copy() for name, steps in self.current.items()}
        return attrs.evolve(self, previous=previous, current=current)

    def transitions(self, behavior: str = "default") -> Transitions:
        """Return the transitions of one behavior that are complete now: their agents act again, or have ended.

        While an agent waits for its turn, its rewards are added to its last action. An agent that leaves without an
        end is truncated. There are 0 rows right after a reset, and none of lost episodes.
        """
        made, is_complete = self._joined(behavior)
        return made if is_complete is None else _rows_of(made, is_complete)

    def keep_waiting(self, behavior: str) -> None:
        """Add the actions of agents of ``behavior`` that wait for their turn to ``still_waiting``."""
        made, is_complete = self._joined(behavior)
        if is_complete is not None and not is_complete.all():
            self.still_waiting = {**self.still_waiting, behavior: _rows_of(made, ~is_complete)}

    def _joined(self, behavior: str) -> tuple[Transitions, np.ndarray | None]:
        """Return the actions of one behavior with what came of them, and which of them are complete (None: all)."""
        before = self.previous.get(behavior) if self.previous is not None and self.is_step else None
        taken = None if self.actions is None else self.actions.get(behavior)
        now, waiting = self.current.get(behavior), self.waiting.get(behavior)
        if before is None or taken is None or (now is None and waiting is None):
            return self._no_transitions(behavior), None
        obs, action, earned = before.obs, taken.action, None
        now = before.take(np.zeros(0, np.int64)) if now is None else now
        all_act = before.acting is None and now.acting is None
        is_same = self.lost is None and np.array_equal(before.agent_id, now.agent_id)
        if not all_act or waiting is not None or not is_same:
            acted = before.acting_rows
            ids, obs, earned = before.agent_id[acted], take_rows(obs, acted), np.zeros(len(acted), np.float32)
            if waiting is not None:
                now = _with_those_that_left(now, before, waiting.agent_id)
                ids, earned = np.append(ids, waiting.agent_id), np.append(earned, waiting.reward)
                obs = concat_rows([obs, waiting.obs]) if len(acted) else waiting.obs
                action = concat_rows([action, waiting.action]) if len(acted) else waiting.action
            if self.lost is not None:
                now = now.take(np.flatnonzero(~self.lost.holds(now.agent_id)))
            place = {agent_id: row for row, agent_id in enumerate(now.agent_id.tolist())}
            joined = [(k, place[agent_id]) for k, agent_id in enumerate(ids.tolist()) if agent_id in place]
            in_acted, in_now = np.array(joined, np.int64).reshape(-1, 2).T
            obs, action, now = take_rows(obs, in_acted), take_rows(action, in_acted), now.take(in_now)
            earned = earned[in_acted] + now.reward
        next_obs, reward = now.obs, now.reward if earned is None else earned
        if now.final_obs is not None:
            next_obs = with_rows(next_obs, np.flatnonzero(now.ended), now.final_obs)
        made = Transitions(obs, action, reward, next_obs, now.terminated, now.truncated, now.agent_id)
        return made, None if now.acting is None else now.acting | now.ended

    def _no_transitions(self, behavior: str) -> Transitions:
        """Return 0 transitions. Shapes and dtypes come from the behavior's spec or, if it is unknown, this StepInfo."""
        spec = self.specs.get(behavior)
        if spec is not None:
            obs, action = zeros(spec.observation, 0), zeros(spec.action, 0)
        else:
            seen, taken = self.current.get(behavior), (self.actions or {}).get(behavior)
            nothing = np.zeros(0, np.float32)
            obs = nothing if seen is None else copy_tree(take_rows(seen.obs, slice(0)))
            action = nothing if taken is None else copy_tree(take_rows(taken.action, slice(0)))
        flags = np.zeros(0, np.bool_), np.zeros(0, np.bool_)
        return Transitions(obs, action, np.zeros(0, np.float32), copy_tree(obs), *flags, np.zeros(0, np.int64))


def _rows_of(made: Transitions, chosen: np.ndarray) -> Transitions:
    return Transitions(*(take_rows(each, chosen) for each in made))


def _with_those_that_left(now: AgentSteps, before: AgentSteps, agent_ids: np.ndarray) -> AgentSteps:
    """Return ``now`` with a truncated row, as last seen, for each of ``agent_ids`` that is in ``before`` alone."""
    left = before.take(np.flatnonzero(np.isin(before.agent_id, agent_ids) & ~np.isin(before.agent_id, now.agent_id)))
    no, yes = np.zeros(len(left), np.bool_), np.ones(len(left), np.bool_)
    last = AgentSteps(left.agent_id, left.obs, np.zeros(len(left), np.float32), no, yes, left.obs, no)
    return concat_steps([now, last]) if len(left) else now


def concat_steps(parts: list[AgentSteps]) -> AgentSteps:
    """Return the concatenated rows of several AgentSteps of one behavior, in new arrays."""
    if len(parts) == 1:
        return parts[0].copy()
    acting = None
    if [part for part in parts if part.acting is not None]:
        acting = np.concatenate([np.ones(len(part), bool) if part.acting is None else part.acting for part in parts])
    steps = AgentSteps(
        np.concatenate([part.agent_id for part in parts]),
        concat_rows([part.obs for part in parts]),
        np.concatenate([part.reward for part in parts]),
        np.concatenate([part.terminated for part in parts]),
        np.concatenate([part.truncated for part in parts]),
        acting=acting,
    )
    steps.final_obs, steps.info, steps.reset_info = ends_and_infos(parts)
    return steps


def ends_and_infos(parts: list[AgentSteps]) -> tuple[Tree, _Dicts, _Dicts]:
    """Return the concatenated ``final_obs``, ``info`` and ``reset_info`` of ``parts``, each None if missing."""
    ended = [part for part in parts if part.final_obs is not None]
    final_obs = concat_rows([part.final_obs for part in ended]) if ended else None
    if parts[0].info is None:
        return final_obs, None, None

    def joined(lists: list[_Dicts]) -> _Dicts:
        known = [part for part in lists if part is not None]
        return [info for part in known for info in part] if known and len(known) == len(lists) else None

    return final_obs, joined([part.info for part in parts]), joined([part.reset_info for part in ended])
