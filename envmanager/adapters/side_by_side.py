"""The group of environments of any kind, each an Environment, and the check of their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np

from envmanager.data.casting import Casting
from envmanager.data.specs import (
    ArraySpec,
    BehaviorSpec,
    BehaviorSpecs,
    SpecMismatch,
    check_values,
    describe_value,
    matched,
    merge_specs,
)
from envmanager.data.steps import AGENT_BITS, COLUMNS, AgentSteps, Begin, Steps, concat_steps
from envmanager.data.trees import Tree, build, copy_tree, leaves, snapshot, take_rows
from envmanager.environment import Environment, OnDemand, RowGroup, behavior_of, check_repeated, repeated


class SideBySide(RowGroup):
    """A group of any environments. It concatenates their rows by behavior."""

    def __init__(
        self, environments: Sequence[Environment], env_ids: Sequence[int], *, infos: bool, check_values: bool
    ) -> None:
        self._environments: Sequence[Environment] = list(environments)
        self.env_ids = tuple(env_ids)
        self._all = range(len(self._environments))
        self._infos = infos
        self._check_values = check_values
        self._last: list[Steps] = [{} for _ in self._all]
        """The last result of each environment."""
        self.casting = Casting(strict=check_values)
        for environment in self._environments:
            if environment.casting is not None:
                environment.casting = self.casting
        self.partial_actions = all(environment.partial_actions for environment in self._environments)
        self.begins_on_demand = self.takes_actions = all(environment.can_rest for environment in self._environments)
        self._specs: dict[str, BehaviorSpec] = {}
        self._n_known = [0] * len(self._environments)
        self._kind: str | None = None
        self._names: dict[str, str] = {}
        """Names of the behaviors in the manager, by those that the environments give them."""
        self._learn_all()

    def name_behaviors(self, kind: str) -> None:
        self._kind, self._specs, self._n_known = kind, {}, [0] * len(self._environments)
        self._learn_all()

    @property
    def behavior_specs(self) -> BehaviorSpecs:
        return self._specs

    @property
    def max_agents(self) -> Mapping[str, int]:
        total: Counter[str] = Counter()
        for environment in self._environments:
            total.update(environment.max_agents)
        return {self._names.get(behavior, behavior): n for behavior, n in total.items()}

    @property
    def envs(self) -> Sequence[Any]:
        return [environment.wrapped for environment in self._environments]

    @property
    def subjects(self) -> Sequence[Any]:
        return [environment.subject for environment in self._environments]

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        self._set_on_demand(None)
        return self._joined(lambda each, seed: each.reset(seeds=[seed], options=options), seeds, self._all)

    def reset_on_demand(self, begins: Sequence[Begin]) -> Steps:
        self._set_on_demand(OnDemand(len(self._environments), begins))
        return self.step({}, np.zeros(0, np.int64))

    def _set_on_demand(self, on_demand: OnDemand | None) -> None:
        self.on_demand = on_demand
        for environment in self._environments:
            environment.rests = on_demand is not None

    def step(self, actions: Mapping[str, Tree], rows: np.ndarray | None = None) -> Steps:
        chosen, begins = self._chosen(rows)
        shares = self._shares(actions, [row for row in chosen if row not in begins])
        return self._joined(lambda each, own: each.step(own), shares, chosen, begins)

    def actions_of(self, actions: Mapping[str, Tree], rows: np.ndarray | None = None) -> Iterable[Any]:
        chosen = self._all if rows is None else rows.tolist()
        shares = zip(self._each(chosen), self._shares(actions, chosen), strict=True)
        return [self._environments[row].action_of(own) for row, own in shares]

    def joined(self, results: Iterable[Any], rows: np.ndarray | None = None) -> Steps:
        return self._joined(lambda each, result: each.steps_of(result), results, *self._chosen(rows))

    def _chosen(self, rows: np.ndarray | None) -> tuple[Sequence[int], Mapping[int, Begin]]:
        if self.on_demand is not None:
            return self.on_demand.rows(rows)
        return (self._all if rows is None else rows.tolist()), {}

    def _shares(
        self, actions: Mapping[str, Tree], rows: Iterable[int], taken: dict[str, int] | None = None
    ) -> list[dict[str, Tree]]:
        """Split ``actions`` by environment. Return one dict of actions by behavior for each environment at ``rows``.

        ``taken``: by behavior, the number of actions to leave out, to which those returned are added.
        """
        taken = dict.fromkeys(actions, 0) if taken is None else taken
        shares = []
        for row in rows:
            own = {}
            for behavior, steps in self._last[row].items():
                name = self._names[behavior]
                if name in actions:
                    start = taken[name]
                    taken[name] = stop = start + len(steps.acting_rows)
                    # A copy, because an environment may keep or change its action.
                    own[behavior] = copy_tree(take_rows(actions[name], slice(start, stop)))
            shares.append(own)
        return shares

    def _joined(
        self,
        steps_of: Callable[[Environment, Any], Steps],
        given: Iterable[Any],
        rows: Sequence[int],
        begins: Mapping[int, Begin] = MappingProxyType({}),
    ) -> Steps:
        """Check ``steps_of(environment, each of given)`` at ``rows``, and concatenate their rows by behavior.

        At the rows in ``begins``, for which nothing is given, an episode begins instead.
        """
        # An environment's code, in ``steps_of``, may raise StopIteration, so it is not called in a generator.
        parts: dict[str, list[AgentSteps]] = {}
        own_given = dict(zip([row for row in rows if row not in begins], given, strict=True))
        for row in self._each(rows):
            environment, begin = self._environments[row], begins.get(row)
            if begin is None:
                last = self._checked(row, steps_of(environment, own_given[row]))
            elif begin.actions is None:
                last = self._checked(row, environment.reset(seeds=[begin.seed], options=begin.options))
            else:
                last = self._after_actions(environment, begin, begin.actions)
            self._last[row] = last
            if self.on_demand is not None:
                self.on_demand.plays[row] = any(len(steps.acting_rows) for steps in last.values())
            for behavior, steps in last.items():
                own = attrs.evolve(steps, agent_id=steps.agent_id + (self.env_ids[row] << AGENT_BITS))
                parts.setdefault(self._names[behavior], []).append(own)
        return {behavior: concat_steps(steps) for behavior, steps in parts.items()}

    def _after_actions(self, environment: Environment, begin: Begin, actions: Mapping[str, Tree]) -> Steps:
        """Begin an episode and take its actions. Return its first steps, which are empty if it could not begin."""
        row, step, taken = begin.row, 0, dict.fromkeys(actions, 0)
        counts: dict[int, tuple[float, int]] = {}
        n_of = {behavior: _n_rows(tree) for behavior, tree in actions.items()}
        calls = self._calls_of(begin)
        try:
            repeated(calls, -1, None)
            steps = repeated(calls, 0, environment.reset(seeds=[begin.seed], options=begin.options), _copied)
            while taken != n_of:
                step += 1
                self._last[row], n_taken = steps, sum(taken.values())
                (own,) = self._shares(actions, [row], taken)
                if any(taken[behavior] > n_of[behavior] for behavior in taken) or not any(map(_n_rows, own.values())):
                    acting = {self._names[behavior]: len(each.acting_rows) for behavior, each in steps.items()}
                    raise SpecMismatch("the actions to begin with", f"for the agents that act, {acting}", "for others")
                steps = environment.step(own)
                if not any(len(each.acting_rows) for each in steps.values()):
                    self._could_not_begin(begin, step, None)
                    return {}
                if begin.counted_from is not None and n_taken >= begin.counted_from:
                    self._count(counts, row, steps)
                if calls:
                    steps = repeated(calls, sum(taken.values()), steps, _copied)
            check_repeated(calls)
            if begin.counted_from is not None:
                self.not_begun = {**self.not_begun, self.env_ids[row]: (begin, step, counts)}
            return self._checked(row, {name: each.as_first() for name, each in steps.items()} if step else steps)
        except Exception as error:
            self._could_not_begin(begin, step, error)
            return {}

    def _count(self, counts: dict[int, tuple[float, int]], row: int, steps: Steps) -> None:
        """Add the rewards of a repeated step to the return and the length of each agent, and forget those that end."""
        for behavior, each in steps.items():
            before = self._last[row].get(behavior)
            acted = [] if before is None else before.agent_id[before.acting_rows].tolist()
            rewards = np.asarray(each.reward, np.float32).tolist()
            for agent, reward, ended in zip(each.agent_id.tolist(), rewards, each.ended.tolist(), strict=True):
                agent_id = self.env_ids[row] << AGENT_BITS | agent
                total, length = counts.get(agent_id, (0.0, 0))
                counts[agent_id] = (0.0, 0) if ended else (total + reward, length + (agent in acted))

    def _at(self, rows: Iterable[int]) -> Iterable[Any]:
        yield from super()._at(rows)
        self._learn_all()  # a call may have added agents

    def _learn_all(self) -> None:
        for row in self._each(self._all):
            self._learn(row, self._environments[row].behavior_specs)

    def _learn(self, row: int, specs: BehaviorSpecs) -> None:
        """Add the environment's ``specs`` to the group. Raises SpecConflict if a behavior already has another spec."""
        if len(specs) != self._n_known[row]:
            for behavior in specs:
                self._names[behavior] = behavior if self._kind is None else behavior_of(self._kind, behavior)
            named = {self._names[behavior]: spec for behavior, spec in specs.items()}
            merge_specs(self._specs, named, seen_in="an env before it", now_in=f"env {self.env_ids[row]}")
            self._n_known[row] = len(specs)

    def _checked(self, row: int, results: Steps) -> Steps:
        specs = self._environments[row].behavior_specs
        if not isinstance(results, Mapping):
            raise SpecMismatch("the result", "a mapping {behavior: AgentSteps}", describe_value(results))
        self._learn(row, specs)
        checked = {}
        for behavior, steps in results.items():
            if behavior not in specs:
                raise SpecMismatch("the result", f"of behaviors {sorted(specs)}", f"of behavior {behavior!r}")
            spec = specs[behavior]
            try:
                check_steps(spec, steps, check_numbers=self._check_values)
            except SpecMismatch:
                if self._check_values or not isinstance(steps, AgentSteps):
                    raise
                of_columns = {**_COLUMN_SPECS, "obs": spec.observation, "final_obs": spec.observation}
                cast = {name: _cast(own, getattr(steps, name), name, self.casting) for name, own in of_columns.items()}
                steps = attrs.evolve(steps, **cast)
                check_steps(spec, steps, check_numbers=self._check_values)
            info = reset_info = None
            if self._infos or spec.has_objects:
                info, reset_info = snapshot(steps.info), snapshot(steps.reset_info)
            checked[behavior] = steps = attrs.evolve(steps, info=info, reset_info=reset_info)
            if spec.has_objects and self._environments[row].casting is None:
                steps.obs, steps.final_obs = snapshot(steps.obs), snapshot(steps.final_obs)
        return checked


def _copied(steps: Steps) -> Steps:
    return {name: each.copy() for name, each in steps.items()}


def _n_rows(tree: Tree) -> int:
    return len(leaves(tree)[0])


_COLUMN_SPECS = {name: ArraySpec((), dtype) for name, dtype in COLUMNS.items()}


def _cast(spec: Tree, tree: Tree, root: str, casting: Casting) -> Tree:
    """Return ``tree`` with each array cast to its spec's dtype. Arrays that cannot be cast stay unchanged."""

    def cast(leaf: ArraySpec, value: Any, path: str) -> Any:
        if leaf.is_object or not isinstance(value, np.ndarray) or value.dtype == leaf.dtype:
            return value
        made = casting.cast(value, leaf.dtype, path, f"{leaf.dtype}{list(value.shape)}")
        return value if made is None else made

    try:
        return build(spec, [cast(*part) for part in matched(spec, tree, root)])
    except SpecMismatch:
        return tree


def check_steps(spec: BehaviorSpec, steps: AgentSteps, *, check_numbers: bool) -> None:
    """Raise SpecMismatch unless ``steps``, a result of one environment for one behavior, satisfies ``spec``.

    Checks structure, shapes, dtypes, agent ids and infos. With ``check_numbers``, also checks finiteness and bounds.
    """
    if not isinstance(steps, AgentSteps):
        raise SpecMismatch("the result", "AgentSteps", describe_value(steps))
    ids = steps.agent_id
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype != np.int64:
        raise SpecMismatch("agent_id", "int64[n]", describe_value(ids))
    numbers = ids.tolist()  # for a few agents, Python is faster than NumPy
    if numbers and not 0 <= min(numbers) <= max(numbers) < 2**AGENT_BITS:
        raise SpecMismatch("agent_id", f"from 0 to 2**{AGENT_BITS} - 1", f"from {min(numbers)} to {max(numbers)}")
    if len(set(numbers)) < len(numbers):
        raise SpecMismatch("agent_id", "a different number for each agent", f"{numbers}")
    n = len(steps)
    _check_rows(spec.observation, steps.obs, n, "obs", check_numbers)
    for name, dtype in COLUMNS.items():
        column = getattr(steps, name)
        if column is None and name == "acting":
            continue
        if not isinstance(column, np.ndarray) or column.shape != (n,) or column.dtype != dtype:
            raise SpecMismatch(name, f"{dtype}[{n}]", describe_value(column))
    if check_numbers and not np.isfinite(steps.reward).all():
        raise SpecMismatch("reward", "finite", "NaN or infinite in part")
    n_ended = int(np.count_nonzero(steps.ended))
    if steps.final_obs is None and n_ended:
        raise SpecMismatch("final_obs", f"{n_ended} rows, one per agent that ended", "None")
    if steps.final_obs is not None:
        _check_rows(spec.observation, steps.final_obs, n_ended, "final_obs", check_numbers)
    _check_infos(steps.info, n, "info")
    _check_infos(steps.reset_info, n_ended, "reset_info")


def _check_infos(infos: Any, n: int, name: str) -> None:
    if infos is None:
        return
    if not isinstance(infos, list) or len(infos) != n:
        got = f"a list of {len(infos)}" if isinstance(infos, list) else describe_value(infos)
        raise SpecMismatch(name, f"a list of {n} dicts", got)
    for row, info in enumerate(infos):
        if not isinstance(info, Mapping):
            raise SpecMismatch(f"{name}[{row}]", "a dict", describe_value(info))


def _check_rows(spec: Tree, value: Tree, n: int, root: str, check_numbers: bool) -> None:
    for leaf_spec, leaf, path in matched(spec, value, root):
        expected = f"{leaf_spec.dtype}{[n, *leaf_spec.shape]}"
        if not isinstance(leaf, np.ndarray) or leaf.shape != (n, *leaf_spec.shape) or leaf.dtype != leaf_spec.dtype:
            raise SpecMismatch(path, expected, describe_value(leaf))
        if check_numbers:
            check_values(leaf_spec, leaf, path)
