"""How a manager takes arguments, and refuses invalid calls without losing a step. Kinds leave this to the kernel.

A kind of manager cannot get it wrong, so it is no part of ManagerContract; here it runs over every manager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    ArraySpec,
    BadAction,
    BadObservation,
    BehaviorSpec,
    EnvContext,
    Environment,
    EnvManagerError,
    EnvRaised,
    TaskResult,
    UsageError,
    Wait,
)  # fmt: skip
from envmanager.data.steps import Steps
from envmanager.data.trees import Tree
from envmanager.observe.events import Started
from envmanager.testing import EchoEnvironment, FakeEnvironment
from envmanager.testing.contract import NumberedActions, OwnManagers, check_echo


class CallContract(OwnManagers):
    """Calls, policies, results and episodes on demand, which may differ between kinds."""

    # Policies and what a step refers to.

    def test_before_the_first_action_transitions_have_no_rows_and_the_specs_shapes(self) -> None:
        with self.make_manager(EchoEnvironment, 2) as manager:
            for info in manager.reset():
                made = info.transitions("default")
                assert (made.obs.shape, made.next_obs.shape, made.action.shape) == ((0, 5), (0, 5), (0,))
                assert [part.dtype for part in (made.obs, made.action, made.reward)] == [np.int64, np.int64, np.float32]

    def test_previous_is_the_current_of_the_workers_last_step(self) -> None:
        with self.make_manager(EchoEnvironment, 3) as manager:
            manager.set_policy("default", NumberedActions())
            last = {info.worker_id: info for info in manager.reset()}
            for _ in range(20):
                for info in manager.step():
                    assert info.previous is last[info.worker_id].current
                    last[info.worker_id] = info

    def test_the_policys_outputs_come_back_with_the_step(self) -> None:
        with self.stepping(EchoEnvironment, 2) as manager:
            (info, *_) = manager.step(Wait.all())

            assert info.actions is not None
            taken = info.actions["default"]
            assert (taken.outputs["twice"] == 2 * taken.action).all()
            assert taken.version == 3

    def test_a_policy_may_return_the_same_arrays_again(self) -> None:
        with self.stepping(EchoEnvironment, 3, _ReusesItsArrays()) as manager:
            infos = [info for _ in range(20) for info in manager.step()]

        for info in infos:
            assert info.previous is not None
            assert info.actions is not None
            taken, number = info.actions["default"], info.previous["default"].obs[:, 2]
            assert taken.outputs["twice"].tolist() == (2 * number).tolist()
            assert taken.action.tolist() == number.tolist() == info.current["default"].obs[:, 3].tolist()

    @pytest.mark.parametrize("n_envs", [1, 3])
    def test_a_policy_may_write_into_its_steps(self, n_envs: int) -> None:
        policy, n_steps = _WritesIntoItsSteps(), Counter[int]()
        with self.stepping(EchoEnvironment, n_envs, policy) as manager:
            for _ in range(10):
                for info in manager.step(Wait.all()):
                    check_echo(info, policy.given, n_steps)

    def test_max_ready_limits_what_is_delivered(self) -> None:
        with self.stepping(EchoEnvironment, 3) as manager:
            assert all(len(manager.step(Wait(max_ready=1))) == 1 for _ in range(12))

    # Invalid calls.

    def test_a_second_send_before_the_response_is_refused(self) -> None:
        with self.receiving(EchoEnvironment, 2) as manager:
            manager.send(np.array([1, 2]), [0, 1])
            with pytest.raises(BadAction, match="waiting"):
                manager.send(np.array([3, 4]), [0, 1])

            assert manager.recv(Wait.all()).obs[:, 3].tolist() == [1, 2]

    def test_a_policys_bad_action_is_refused_and_the_next_one_is_paired(self) -> None:
        class Short:
            def get_action(self, steps: AgentSteps) -> ActionInfo:
                return ActionInfo(np.zeros(len(steps) + 1, np.int64))

        policy, n_steps = NumberedActions(), Counter[int]()
        with self.stepping(EchoEnvironment, 3, Short()) as manager:
            with pytest.raises(BadAction):
                manager.step(Wait.all())
            manager.set_policy("default", policy)
            for _ in range(5):
                for info in manager.step(Wait.all()):
                    check_echo(info, policy.given, n_steps)

    def test_step_without_a_policy_says_so(self) -> None:
        with self.make_manager(EchoEnvironment, 1) as manager:
            manager.reset()
            with pytest.raises(UsageError, match="set_policy"):
                manager.step()

    def test_calls_before_reset_say_so(self) -> None:
        with self.make_manager(EchoEnvironment, 1) as manager:
            manager.set_policy("default", NumberedActions())
            with pytest.raises(UsageError, match="reset"):
                manager.step()
            with pytest.raises(UsageError, match="reset"):
                manager.recv()
            with pytest.raises(UsageError, match="reset"):
                manager.send(np.zeros(1, np.int64), [0])
            manager.reset()
            assert len(manager.step()) == 1

    def test_recv_with_nothing_in_flight_says_so(self) -> None:
        with self.receiving(EchoEnvironment, 2) as manager, pytest.raises(UsageError, match="in flight"):
            manager.recv()

    def test_step_and_send_do_not_mix_between_two_resets(self) -> None:
        with self.stepping(EchoEnvironment, 1) as manager:
            manager.step()
            with pytest.raises(UsageError, match="not both"):
                manager.recv()
            manager.reset()
            assert len(manager.recv()) == 1

    def test_multi_agent_environments_step_and_refuse_send(self) -> None:
        policy, n_steps = NumberedActions(), Counter[int]()
        with self.stepping(_two_agents, 3, policy) as manager:
            for _ in range(20):
                for info in manager.step():
                    check_echo(info, policy.given, n_steps)
            manager.reset()
            with pytest.raises(UsageError, match=r"step\(\)"):
                manager.recv()

    def test_a_refused_call_leaves_open_which_way_to_step(self) -> None:
        with self.stepping(EchoEnvironment, 2) as manager:
            with pytest.raises(BadAction):
                manager.send(np.zeros(1, np.int64), [0, 1])
            assert manager.step(Wait.all())

    def test_a_factory_without_a_return_is_named(self) -> None:
        with pytest.raises(UsageError, match="returned None"):
            self.make_manager(lambda: None, 1)

    def test_an_environment_instead_of_a_factory_is_refused(self) -> None:
        with pytest.raises(UsageError, match="Pass a function that makes one"):
            self.make_manager(FakeEnvironment(), 1)

    def test_errors_are_all_of_one_family(self) -> None:
        with pytest.raises(EnvManagerError):
            self.make_manager(None, 1)

    # Arguments of reset, call and set_attr.

    def test_seed_and_options_of_a_reset_may_be_given_by_name(self) -> None:
        with self.make_manager(_Remembers, 3) as manager:
            manager.reset({"seed": 4})
            manager.reset(seed=4)
            manager.reset(seed=[7, 8, 9], options={"level": 2})
            manager.reset(options={"level": 3})

            seeds = manager.get_attr("seeds")
            assert all(first == again for first, again, *_ in seeds)
            assert len({first for first, *_ in seeds}) == 3
            assert [own[2:] for own in seeds] == [[7, None], [8, None], [9, None]]
            assert manager.get_attr("levels") == [[None, None, 2, 3]] * 3

    def test_arguments_of_a_call_may_be_given_by_name(self) -> None:
        with self.make_manager(_Talks, 3) as manager:
            manager.reset()
            assert manager.call("greet", "hello", sign="?", name="you") == [f"hello you? {i}" for i in range(3)]
            assert manager.call("greet", word="bye", env_ids=[2, 0]) == ["bye nobody. 2", "bye nobody. 0"]
            with pytest.raises(EnvRaised, match="no_such_argument"):
                manager.call("greet", "hello", no_such_argument=1)
            assert manager.call("greet", "hello", env_ids=[1]) == ["hello nobody. 1"]

    def test_env_ids_is_never_an_argument_of_the_environments_method(self) -> None:
        with self.make_manager(_Talks, 2) as manager:
            manager.reset()
            assert manager.call("gather", [5, 6], env_ids=[1]) == [[5, 6]]
            with pytest.raises(EnvRaised, match="env_ids"):  # the manager takes env_ids, so the method lacks it
                manager.call("gather", env_ids=[1])

    def test_a_function_is_called_with_each_environment_and_with_arguments_by_name(self) -> None:
        with self.make_manager(EchoEnvironment, 2) as manager:
            manager.reset()
            assert manager.call(lambda env, word, *, sign: f"{word}, {env.label}{sign}", "hello", sign="!") == [
                "hello, env 0!",
                "hello, env 1!",
            ]

    # Results.

    def test_an_observation_that_breaks_its_spec_is_named(self) -> None:
        with self.stepping(_BreaksItsSpec, 1) as manager:
            with pytest.raises(BadObservation) as raised:
                manager.step()
            assert raised.value.path == "obs"
            assert "float32[1, 3]" in raised.value.expected
            assert raised.value.got == "float32[1, 2]"
            manager.reset()
            assert manager.get_attr("closed") == [False]

    def test_stats_count_what_was_delivered(self) -> None:
        with self.stepping(EchoEnvironment, 3) as manager:
            n_steps = Counter(info.worker_id for _ in range(10) for info in manager.step())
            stats = manager.stats()

            assert {worker.worker_id: worker.steps for worker in stats.workers if worker.steps} == n_steps
            assert stats.steps == sum(n_steps.values())
            assert [env_id for worker in stats.workers for env_id in worker.env_ids] == [0, 1, 2]

    # Episodes on demand.

    @pytest.fixture
    def on_demand(self) -> None:
        if not self.begins_on_demand:
            pytest.skip("episodes do not begin on demand")

    @pytest.mark.usefixtures("on_demand")
    def test_step_asks_for_tasks_where_nothing_else_would_begin_an_episode(self) -> None:
        with self.make_manager(EchoEnvironment, 1, episodes="on_demand") as manager:
            manager.set_policy("default", NumberedActions())
            manager.reset()
            with pytest.raises(UsageError, match="tasks"):
                manager.step()
            assert len(manager.recv(Wait.all())) == 1

    @pytest.mark.usefixtures("on_demand")
    def test_an_episode_that_begin_cuts_is_neither_finished_nor_lost(self) -> None:
        with self.make_manager(EchoEnvironment, 1, episodes="on_demand") as manager:
            manager.reset()
            manager.recv(Wait.all())
            manager.begin([0], [{"task": 10}])
            first = manager.recv(Wait.all())
            manager.send(np.array([1]), [0])
            manager.recv(Wait.all())
            manager.begin([0], [{"task": 11}])
            second = manager.recv(Wait.all())
            assert [batch.obs[:, 4].tolist() for batch in (first, second)] == [[10], [11]]
            assert [batch.first.tolist() for batch in (first, second)] == [[True], [True]]
            assert (manager.episodes.count, manager.episodes.lost) == (0, 0)
            assert [(result.index, result.cut) for result in manager.tasks.results] == [(0, True)]

    @pytest.mark.usefixtures("on_demand")
    def test_an_error_of_the_source_is_raised_once_and_nothing_is_lost(self) -> None:
        class Stumbles:
            def __init__(self) -> None:
                self.n_asked = 0
                self.told: list[int] = []

            def next_task(self, env_id: int) -> dict[str, int]:
                self.n_asked += 1
                if self.n_asked == 6:
                    raise ValueError("no level today")
                if self.n_asked > 12:
                    raise StopIteration
                return {"task": self.n_asked}

            def ended(self, result: TaskResult) -> None:
                self.told.append(result.index)

        source, errors = Stumbles(), []

        def again(call: Any) -> Any:
            try:
                return call()
            except ValueError as error:
                errors.append(error)
                return call()

        with self.make_manager(EchoEnvironment, 2) as manager:
            manager.reset(tasks=source, prefetch=False)
            while not manager.tasks.done:
                batch = again(manager.recv)
                again(lambda rows=batch: manager.send(np.ones(len(rows), np.int64), rows.env_ids))
            assert len(errors) == 1
            assert [result.index for result in manager.tasks.results] == list(range(11))
            assert sorted(source.told) == list(range(11))


class ValueContract(OwnManagers):
    """Values that are refused, cast or empty: the kernel and the environments' processes see to them in each kind."""

    @pytest.mark.parametrize(
        ("actions", "env_ids"),
        [
            (np.zeros(2, np.int64), [0, 1, 2]),
            (np.zeros((3, 1), np.int64), [0, 1, 2]),
            (np.full(3, 0.5), [0, 1, 2]),
            (None, [0, 1, 2]),
            (np.zeros(3, np.int64), [0, 1, 3]),
            (np.zeros(3, np.int64), [0, 1, -1]),
            (np.zeros(3, np.int64), [0, 1, 1]),
            (np.zeros(3, np.int64), ["0", "1", "2"]),
            ({"a": np.zeros(3, np.int64)}, [0, 1, 2]),
        ],
        ids=["length", "shape", "dtype", "none", "unknown env", "negative env", "twice", "text", "structure"],
    )
    def test_bad_actions_are_refused_before_anything_is_sent(self, actions: Any, env_ids: Any) -> None:
        with self.receiving(EchoEnvironment, 3) as manager:
            with pytest.raises(BadAction):
                manager.send(actions, env_ids)

            manager.send(np.array([5, 6, 7]), [0, 1, 2])
            batch = manager.recv(Wait.all())
            assert batch.obs[:, 3].tolist() == [5, 6, 7]
            assert batch.obs[:, 2].tolist() == [1, 1, 1]

    @pytest.mark.parametrize(
        ("config", "named", "message"),
        [
            ({"seed": 1}, {"seed": 2}, "not both"),
            ({"options": {}}, {"options": {}}, "not both"),
            ({}, {"seed": 2}, "not both"),
            (None, {"seed": [1]}, "1 seeds for 2 environments"),
            (None, {"seed": -1}, "a seed must be"),
            (None, {"options": 3}, "options must be a mapping"),
        ],
    )
    def test_a_contradictory_reset_is_refused_and_nothing_begins(
        self, config: Any, named: Mapping[str, Any], message: str
    ) -> None:
        with self.make_manager(_Remembers, 2) as manager:
            manager.reset()
            with pytest.raises(UsageError, match=message):
                manager.reset(config, **named)
            assert manager.get_attr("seeds") == [[None], [None]]
            assert len(manager.recv("all")) == 2

    @pytest.mark.parametrize("value", ["xy", 2, 0.5, True, None, {"x": 1, "y": 2}], ids=repr)
    def test_a_value_that_is_no_sequence_is_set_in_all_environments(self, value: Any) -> None:
        with self.make_manager(EchoEnvironment, 2) as manager:
            manager.set_attr("label", value)
            assert manager.get_attr("label") == [value, value]

    def test_one_value_is_set_in_the_environments_asked_for(self) -> None:
        with self.make_manager(EchoEnvironment, 3) as manager:
            manager.set_attr("label", "x", env_ids=[2, 0])
            assert manager.get_attr("label") == ["x", "env 1", "x"]

    def test_a_sequence_is_one_value_for_each_environment(self) -> None:
        with self.make_manager(EchoEnvironment, 2) as manager:
            manager.set_attr("label", ("x", "y"))
            assert manager.get_attr("label") == ["x", "y"]
            manager.set_attr("label", [["a", "b"]] * 2)
            assert manager.get_attr("label") == [["a", "b"]] * 2

    @pytest.mark.parametrize("values", [["x"], ("x", "y", "z"), []], ids=repr)
    def test_a_sequence_of_another_length_is_refused_and_nothing_is_set(self, values: Any) -> None:
        with self.make_manager(EchoEnvironment, 2) as manager:
            with pytest.raises(UsageError, match="one value for each of 2"):
                manager.set_attr("label", values)
            assert manager.get_attr("label") == ["env 0", "env 1"]

    @pytest.mark.parametrize("nothing", [{}, (), {"a": (), "b": {}}], ids=repr)
    def test_spaces_that_are_empty_work(self, nothing: Tree) -> None:
        with self.make_manager(lambda: _Empty(nothing), 4) as manager:
            manager.reset()
            batch = manager.recv(Wait.all())
            for env_ids in ([0, 1, 2, 3], [2, 1], [3], [0, 1, 2, 3]):
                manager.send(nothing, env_ids)
                batch = manager.recv(Wait.all())
                assert sorted(batch.env_ids.tolist()) == sorted(env_ids)
                assert batch.obs == nothing
            assert manager.get_attr("n_steps") == [2, 3, 3, 3]
            assert batch.terminated.any()
            manager.set_policy("default", _Chooses(nothing))
            manager.reset()
            assert manager.step(Wait.all())[0].transitions().action == nothing

    @pytest.mark.parametrize(
        "change",
        [
            lambda steps: {"obs": {**steps.obs, "camera": np.full(len(steps), 7.5)}},
            lambda steps: {"obs": {**steps.obs, "camera": np.full(len(steps), 300)}},
            lambda steps: {"obs": {**steps.obs, "camera": np.full(len(steps), np.nan)}},
            lambda steps: {"obs": {**steps.obs, "place": np.full((len(steps), 2), 1e300)}},
            lambda steps: {"terminated": np.full(len(steps), 2)},
            lambda steps: {"reward": np.full(len(steps), "1")},
        ],
        ids=["0.5 in integers", "300 in uint8", "NaN in integers", "infinite", "2 as a bool", "text"],
    )
    def test_values_that_do_not_survive_a_cast_are_refused(self, change: Callable[[AgentSteps], Any]) -> None:
        with self.make_manager(lambda: _OtherDtypes(change), 1) as manager, pytest.raises(BadObservation):
            manager.reset()

    @pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.uint64, np.bool_])
    def test_actions_that_survive_a_cast_are_cast(self, dtype: type) -> None:
        with self.receiving(EchoEnvironment, 2) as manager:
            manager.send(np.array([1, 0], dtype), [1, 0])
            batch = manager.recv(Wait.all())
            assert dict(zip(batch.env_ids.tolist(), batch.obs[:, 3].tolist(), strict=True)) == {1: 1, 0: 0}

    @pytest.mark.parametrize("info", [None, [], ["x"], "x"], ids=repr)
    def test_an_info_that_is_no_dict_is_refused_also_without_infos(self, info: Any) -> None:
        with self.stepping(lambda: _Informs(info), 1, _Fives()) as manager:
            with pytest.raises(BadObservation) as raised:
                manager.step()
            assert (raised.value.path, raised.value.env_ids, raised.value.phase) == ("info[0]", (0,), "step")


class KernelContract(CallContract, ValueContract):
    """Both, for kinds of which each brings values by a way of its own."""


class CastContract(OwnManagers):
    """For managers that have the option ``check_values``."""

    def test_values_that_survive_a_cast_are_cast_silently(self) -> None:
        with self.make_manager(_OtherDtypes, 3) as manager:
            manager.set_policy("default", _Fives())
            for _ in range(2):
                manager.reset()
                for info in manager.step(Wait.all()) + manager.step(Wait.all()):
                    steps = info.current["default"]
                    assert steps.obs["place"].dtype == np.float32
                    assert steps.obs["camera"].dtype == np.uint8
                    assert steps.obs["place"].tolist() == [[0.5, 1.5]] * len(steps)
                    assert steps.obs["camera"].tolist() == [7] * len(steps)
                    assert steps.reward.dtype == np.float32
                    assert steps.terminated.dtype == np.bool_
            assert {type(event) for event in manager.events} <= {Started}

    def test_check_values_refuses_to_cast_what_environments_return(self) -> None:
        with self.make_manager(_OtherDtypes, 1, check_values=True) as manager, pytest.raises(BadObservation) as raised:
            manager.reset()
        assert raised.value.path == "obs['place']"

    def test_check_values_refuses_actions_of_another_kind_of_numbers(self) -> None:
        with self.receiving(EchoEnvironment, 1, check_values=True) as manager:
            with pytest.raises(BadAction, match="float32"):
                manager.send(np.ones(1, np.float32), [0])
            manager.send(np.ones(1, np.int32), [0])


def _two_agents(context: EnvContext) -> EchoEnvironment:
    return EchoEnvironment(context, n_agents=2)


class _Remembers(FakeEnvironment):
    def __init__(self) -> None:
        super().__init__()
        self.levels: list[Any] = []

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        self.levels.append((options or {}).get("level"))
        return super().reset(seeds=seeds, options=options)


class _Talks(EchoEnvironment):
    def __init__(self, context: EnvContext) -> None:
        super().__init__(context)
        self._number = context.env_id

    def greet(self, word: str, *, sign: str = ".", name: str = "nobody") -> str:
        """Return a greeting. ``call`` has a parameter ``name`` too, which must cause no conflict."""
        return f"{word} {name}{sign} {self._number}"

    def gather(self, env_ids: list[int]) -> list[int]:
        """Return ``env_ids``. Pass them to ``call`` by position, because ``call`` has a keyword ``env_ids`` too."""
        return env_ids


class _OtherDtypes(FakeEnvironment):
    """An environment whose values have other dtypes than its spec. ``change(steps)`` returns the fields to replace."""

    SPEC = BehaviorSpec({"place": ArraySpec((2,)), "camera": ArraySpec((), np.uint8)}, ArraySpec((), np.int64))

    def __init__(self, change: Callable[[AgentSteps], Any] | None = None) -> None:
        super().__init__()
        self._change = change

    def reset(self, **arguments: Any) -> Steps:
        super().reset(**arguments)
        return self._other()

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        return self._other()

    def _obs(self, action: int) -> Any:
        return {"place": np.array([[0.5, 1.5]]), "camera": np.array([7])}

    def _other(self) -> Steps:
        no = np.zeros(1, np.int64)
        steps = AgentSteps(np.zeros(1, np.int64), self._obs(0), np.zeros(1), no, np.zeros(1, np.bool_))
        return {"default": steps if self._change is None else attrs.evolve(steps, **self._change(steps))}


class _Informs(FakeEnvironment):
    def __init__(self, info: Any) -> None:
        super().__init__()
        self._info = info

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        return {"default": attrs.evolve(super().step(actions)["default"], info=[self._info])}


class _Fives:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.full(len(steps), 5, np.int64))


class _ReusesItsArrays:
    """A policy whose actions are the step numbers in the observations. It returns the same two arrays every time."""

    def __init__(self) -> None:
        self._action, self._twice = np.zeros(8, np.int64), np.zeros(8, np.int64)

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        action, twice = self._action[: len(steps)], self._twice[: len(steps)]
        action[:] = steps.obs[:, 2]
        twice[:] = 2 * action
        return ActionInfo(action, {"twice": twice})


class _WritesIntoItsSteps(NumberedActions):
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        taken = super().get_action(steps)
        for array in (steps.agent_id, steps.obs, steps.reward):
            array[:] = -7
        return taken


@attrs.frozen
class _Chooses:
    """A policy that always returns ``action``, a nested structure without arrays."""

    action: Tree

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(self.action)


class _Empty(Environment):
    """An environment whose observations and actions have no arrays. Every third step ends an episode."""

    def __init__(self, nothing: Tree) -> None:
        self._nothing = nothing
        self.n_steps = 0

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        return {"default": BehaviorSpec(self._nothing, self._nothing)}

    def reset(self, *, seeds: Any, options: Any) -> Steps:
        return self._steps(ended=False)

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        assert actions == {"default": self._nothing}
        self.n_steps += 1
        return self._steps(ended=self.n_steps % 3 == 0)

    def close(self) -> None:
        pass

    def _steps(self, *, ended: bool) -> Steps:
        flags = np.array([ended]), np.zeros(1, np.bool_)
        final_obs = self._nothing if ended else None
        return {"default": AgentSteps(np.zeros(1, np.int64), self._nothing, np.zeros(1, np.float32), *flags, final_obs)}


class _BreaksItsSpec(FakeEnvironment):
    def step(self, actions: Any) -> Any:
        results = super().step(actions)
        results["default"].obs = results["default"].obs[:, :2]
        return results
