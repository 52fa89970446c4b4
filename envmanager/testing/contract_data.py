"""Tests of how managers handle behaviors that appear late."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import pytest

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import ActionInfo, AgentSteps, Steps
from envmanager.data.trees import Tree
from envmanager.env_manager import EnvManager
from envmanager.environment import EnvContext, Environment
from envmanager.errors import BadObservation, RestartsExhausted
from envmanager.options import RestartPolicy, Wait
from envmanager.testing.contract import OwnManagers


class LateSpecsContract(OwnManagers):
    """Tests of behaviors that appear late. Managers need the option ``restarts``."""

    @pytest.mark.parametrize("early", [(), ("host",)], ids=["nothing known", "another known"])
    def test_behaviors_that_appear_with_the_reset_are_known_after_it(self, early: tuple[str, ...]) -> None:
        with self.make_manager(lambda context: _Guests(context, early), 2) as manager:
            assert set(manager.behavior_specs) == set(early)
            manager.reset()
            assert manager.behavior_specs["guest"] == _Guests.SPEC
            for behavior in manager.behavior_specs:
                manager.set_policy(behavior, _Fives())
            manager.step(Wait.all())
            for info in manager.step(Wait.all()):
                for behavior in (*early, "guest"):
                    steps = info.current[behavior]
                    assert steps.obs.tolist() == [[env_id, 5] for env_id in steps.env_id.tolist()]
                    assert info.transitions(behavior).action.tolist() == [5] * len(steps)

    @pytest.mark.parametrize(
        "ask",
        [
            lambda manager: manager.call("invite", env_ids=[1]),
            lambda manager: manager.get_attr("doorbell", env_ids=[1]),
            lambda manager: manager.set_attr("doorbell", ["rings"], env_ids=[1]),
            lambda manager: manager.render(env_ids=[1]),
        ],
        ids=["call", "get_attr", "set_attr", "render"],
    )
    def test_a_behavior_that_appears_with_a_call_is_known_after_it(self, ask: Callable[[EnvManager], Any]) -> None:
        with self.make_manager(lambda context: _Guests(context, ("host",)), 2) as manager:
            manager.reset()
            for behavior in ("host", "guest"):
                manager.set_policy(behavior, _Fives())
            ask(manager)
            manager.set_policy("invited", _Fives())
            assert manager.behavior_specs["invited"] == _Guests.SPEC
            manager.step(Wait.all())
            (info,) = [info for info in manager.step(Wait.all()) if "invited" in info.current]
            assert info.current["invited"].obs.tolist() == [[1, 5]]

    def test_a_behavior_that_appears_with_a_replacement_is_known(self) -> None:
        policy = RestartPolicy(on_exception="restart", backoff_s=0.0)
        with self.make_manager(_Raises, 1, restarts=policy) as manager:
            manager.reset()
            for behavior in ("guest 0", "guest 1"):
                manager.set_policy(behavior, _Fives())
            (lost,) = manager.step(Wait.all())
            assert lost.lost is not None
            assert set(manager.behavior_specs) == {"guest 0", "guest 1"}
            (info,) = manager.step(Wait.all())
            assert info.current["guest 1"].obs.tolist() == [[0, 5]]

    def test_a_late_behavior_with_two_specs_is_blamed_on_the_environment_that_reports_it_later(self) -> None:
        with self.make_manager(_Disagrees, 2) as manager:
            with pytest.raises(BadObservation, match="guest") as raised:
                manager.reset()
            assert (raised.value.path, raised.value.phase) == ("behavior 'guest'", "reset")
            assert "int64[2]" in raised.value.expected
            assert "float32[3]" in raised.value.got

    def test_a_replacement_with_another_spec_than_the_first_is_refused(self) -> None:
        policy = RestartPolicy(max_restarts=1, on_exception="restart", backoff_s=0.0)
        with self.make_manager(_Changes, 1, restarts=policy) as manager:
            manager.reset()
            for behavior in ("host", "guest"):
                manager.set_policy(behavior, _Fives())
            with pytest.raises(RestartsExhausted, match="spec") as raised:
                manager.step(Wait.all())
            assert isinstance(raised.value.last, BadObservation)
            assert raised.value.last.path == "behavior 'host'"


class _Fives:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.full(len(steps), 5, np.int64))


class _Guests(Environment):
    """An environment with one agent per behavior. Some behaviors appear after the start.

    The ``early`` behaviors exist from the start, ``late`` exists after the first reset, and "invited" exists after
    ``invite``, ``doorbell`` or ``render`` was used. An observation is ``[env_id, last action]``.
    """

    SPEC = BehaviorSpec(ArraySpec((2,), np.int64), ArraySpec((), np.int64))
    partial_actions = True

    def __init__(self, context: EnvContext, early: tuple[str, ...] = (), late: str = "guest") -> None:
        self._env_id = context.env_id
        self._late = late
        self._names = list(early)

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        return dict.fromkeys(self._names, self.SPEC)

    def invite(self) -> None:
        self._names.append("invited")

    @property
    def doorbell(self) -> str:
        self.invite()
        return "rings"

    @doorbell.setter
    def doorbell(self, _: str) -> None:
        self.invite()

    def render(self) -> None:
        self.invite()

    def reset(self, *, seeds: Any, options: Any) -> Steps:
        if self._late not in self._names:
            self._names.append(self._late)
        return self._steps({})

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        return self._steps({name: int(action[0]) for name, action in actions.items()})

    def close(self) -> None:
        pass

    def _steps(self, actions: Mapping[str, int]) -> Steps:
        return {
            name: AgentSteps.first(agent_id=np.array([number]), obs=np.array([[self._env_id, actions.get(name, 0)]]))
            for number, name in enumerate(self._names)
        }


class _Raises(_Guests):
    """An environment whose late behavior has a new name in each generation. Every step of generation 0 raises."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__(context, late=f"guest {context.generation}")
        self._is_first = context.generation == 0

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        if self._is_first:
            raise RuntimeError("fell over")
        return super().step(actions)


class _Changes(_Guests):
    """An environment that raises in every step. In generation 1 its behaviors have a different spec."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__(context, ("host",))
        if context.generation == 1:
            self.SPEC = BehaviorSpec(ArraySpec((2,), np.int64), ArraySpec((), np.int32))

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        raise RuntimeError("fell over")


class _Disagrees(_Guests):
    """An environment that gives its behavior "guest" a different spec if the env_id is 1."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__(context)
        if context.env_id == 1:
            self.SPEC = BehaviorSpec(ArraySpec((3,)), ArraySpec((), np.int64))

    def reset(self, **arguments: Any) -> Steps:
        (steps,) = super().reset(**arguments).values()
        return {"guest": attrs.evolve(steps, obs=np.zeros((1, *self.SPEC.observation.shape), np.float32))}
