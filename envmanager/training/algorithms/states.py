"""States of trainers as named arrays and JSON data for files, and the running returns that are a part of them.

``to_plain`` converts attrs objects to JSON data, ``from_plain`` converts them back. One error can list several invalid
keys. Unknown keys are ignored, because a later version may have written them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
import cattrs
import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec, describe_value
from envmanager.data.steps import AgentSteps, StepInfo
from envmanager.data.trees import Tree
from envmanager.errors import ConfigError
from envmanager.structuring import structured


def copy_into(place: np.ndarray, arrays: Mapping[str, np.ndarray], name: str) -> None:
    """Copy ``arrays[name]`` into ``place``. Raises KeyError if absent, ValueError if shape or dtype kind differ."""
    array = arrays[name]
    if array.shape != place.shape or array.dtype.kind != place.dtype.kind:
        raise ValueError(f"{name} should be {describe_value(place)}, but is {describe_value(array)}")
    place[...] = array


Options = TypeVar("Options")


def from_plain(cls: type[Options], plain: Any, *, where: str = "") -> Options:
    """Build a ``cls`` object from JSON data. Raises ConfigError for invalid data. ``where`` prefixes keys in errors."""
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{where or 'the whole'} should be a mapping, but is {describe_value(plain)}.")
    return structured(_OF_FILES, cls, plain, where)


def to_plain(value: Any) -> Any:
    """Convert an attrs object to JSON data: dicts, lists, strings, numbers, bools and None."""
    return _OF_FILES.unstructure(value)


def plain_spec(spec: BehaviorSpec) -> dict[str, Any]:
    """Convert ``spec`` to JSON data, including the dtypes of its bounds. ``spec_from_plain`` converts it back."""
    return {"observation": _to_plain(spec.observation), "action": _to_plain(spec.action)}


def spec_from_plain(plain: Mapping[str, Any]) -> BehaviorSpec:
    """Convert a result of ``plain_spec`` back to a spec. Invalid data raises an error, such as KeyError."""
    return BehaviorSpec(_from_plain(plain["observation"]), _from_plain(plain["action"]))


def _to_plain(tree: Tree) -> dict[str, Any]:
    if isinstance(tree, dict):  # pairs keep integer keys and the order
        return {"dict": [[key, _to_plain(child)] for key, child in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [_to_plain(child) for child in tree]}
    leaf: ArraySpec = tree
    plain: dict[str, Any] = {"shape": list(leaf.shape), "dtype": leaf.dtype.str}
    for name in ("minimum", "maximum"):
        bound = getattr(leaf, name)
        if bound is not None:
            # JSON has neither infinity nor NaN, so they are written as strings.
            numbers = [str(x) if isinstance(x, float) and not math.isfinite(x) else x for x in bound.ravel().tolist()]
            is_one = numbers and numbers.count(numbers[0]) == len(numbers)  # an image has equal bounds for all pixels
            values = numbers[0] if is_one else numbers
            plain[name] = {"shape": list(bound.shape), "dtype": bound.dtype.str, "values": values}
    return {**plain, "name": leaf.name} if leaf.name else plain


def _from_plain(plain: Mapping[str, Any]) -> Tree:
    if "dict" in plain:
        return {key: _from_plain(child) for key, child in plain["dict"]}
    if "tuple" in plain:
        return tuple(_from_plain(child) for child in plain["tuple"])
    bounds: dict[str, np.ndarray] = {}
    for name in ("minimum", "maximum"):
        if name in plain:
            values = plain[name]["values"]
            given = values if isinstance(values, list) else [values]
            array = np.array([float(x) if isinstance(x, str) else x for x in given], plain[name]["dtype"])
            shape = plain[name]["shape"]
            bounds[name] = array.reshape(shape) if values is given else np.full(shape, array[0], array.dtype)
    return ArraySpec(plain["shape"], plain["dtype"], name=plain.get("name", ""), **bounds)


def _is_named_tuple(wanted: Any) -> bool:
    return isinstance(wanted, type) and issubclass(wanted, tuple) and hasattr(wanted, "_fields")


_OF_FILES = cattrs.Converter()
_OF_FILES.register_structure_hook_func(_is_named_tuple, lambda values, wanted: wanted(*values))
_OF_FILES.register_unstructure_hook_func(_is_named_tuple, list)
_OF_FILES.register_structure_hook(BehaviorSpec, lambda plain, _: spec_from_plain(plain))
_OF_FILES.register_unstructure_hook(BehaviorSpec, plain_spec)


LIMIT = 10.0
"""Absolute bound to which normalized rewards are clipped, as in VecNormalize of Stable-Baselines3."""
_EPSILON = 1e-8


@attrs.frozen(kw_only=True)
class SpreadState:
    """The number, mean and variance of returns, and the running ones by agent_id, as saved in a checkpoint."""

    count: float
    mean: float
    variance: float
    running: tuple[tuple[int, float], ...] = ()

    def with_more(self, returns: np.ndarray) -> SpreadState:
        """Return the state with ``returns`` added (Chan, Golub and LeVeque 1979)."""
        n = len(returns)
        total = self.count + n
        delta = float(returns.mean()) - self.mean
        spread = self.variance * self.count + float(returns.var()) * n + delta**2 * self.count * n / total
        return SpreadState(count=total, mean=self.mean + delta * n / total, variance=spread / total)


@attrs.define
class ReturnSpread:
    """A running estimate of the standard deviation of agents' discounted returns, as in Gymnasium's NormalizeReward."""

    gamma: float
    enabled: bool = True
    """Whether rewards are normalized. If not, rewards are unchanged and no spread is computed."""
    spread: SpreadState = SpreadState(count=1e-4, mean=0.0, variance=1.0)
    _returns: dict[int, float] = attrs.field(factory=dict, init=False)

    @property
    def factor(self) -> float:
        """Factor by which a reward is multiplied to normalize it."""
        return 1.0 / math.sqrt(self.spread.variance + _EPSILON)

    def normalized(self, reward: np.ndarray) -> np.ndarray:
        """Return ``reward`` divided by the current spread and clipped to ±``LIMIT``; unchanged if not ``enabled``."""
        if not self.enabled:
            return reward
        scaled: np.ndarray = (reward * self.factor).clip(-LIMIT, LIMIT)
        return scaled

    def add(self, info: StepInfo, behavior: str) -> None:
        """Update the running returns and the spread with the rewards of one worker's step."""
        if not self.enabled:
            return
        now = info.current.get(behavior)
        before = None if info.previous is None else info.previous.get(behavior)
        if before is None or now is None or info.actions is None:
            for steps in (before, now):
                self._forget([] if steps is None else steps.agent_id.tolist())
            return
        acted = set(before.agent_id[before.acting_rows].tolist())
        self._forget(set(before.agent_id.tolist()).difference(now.agent_id.tolist()))
        if info.lost is not None:
            lost = info.lost.agents({*acted, *self._returns})
            self._forget(lost)
            acted.difference_update(lost)
        found = self._run_on(now, acted)
        if found:
            self.spread = self.spread.with_more(np.array(found))

    def environments_were_reset(self) -> None:
        """Restart all running returns at 0."""
        self._returns.clear()

    def _run_on(self, now: AgentSteps, acted: set[int]) -> list[float]:
        """Discount the running returns of ``acted``, add the rewards in ``now``, and return the sums for ``acted``."""
        found = []
        for agent_id, reward, ended in zip(now.agent_id.tolist(), now.reward.tolist(), now.ended.tolist(), strict=True):
            if agent_id in acted:
                self._returns[agent_id] = self.gamma * self._returns.get(agent_id, 0.0) + reward
                found.append(self._returns[agent_id])
            elif agent_id in self._returns:  # received in another agent's turn, for this agent's last action
                self._returns[agent_id] += reward
            if ended:
                self._returns.pop(agent_id, None)
        return found

    def _forget(self, agent_ids: Any) -> None:
        for agent_id in agent_ids:
            self._returns.pop(agent_id, None)

    def state(self) -> SpreadState | None:
        """Return the spread for a checkpoint; None unless ``enabled``."""
        return attrs.evolve(self.spread, running=tuple(self._returns.items())) if self.enabled else None

    def restore(self, state: SpreadState | None) -> None:
        """Restore the spread and the running returns from ``state``. Raises ValueError if ``enabled`` changed."""
        if (state is not None) != self.enabled:
            raise ValueError(f"it was written with normalize_rewards={str(state is not None).lower()}")
        if state is not None:
            self.spread, self._returns = attrs.evolve(state, running=()), dict(state.running)
