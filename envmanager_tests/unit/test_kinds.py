"""Kinds of environments without processes: how they are written, split among workers, and share the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from envmanager import ConfigError, EnvRecipe, UsageError, Wait, make_manager
from envmanager.adapters.kinds import Kinds, count_kinds, written_as_kinds
from envmanager.adapters.names import GymnasiumId
from envmanager.data.env_rows import split_by_kind
from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.kernel.shares import Shares
from envmanager.kernel.table import Replacement, WorkerState, WorkerTable
from envmanager.observe.events import EventLog, KindLeftOut
from envmanager.options import KindOptions
from envmanager.registry import ManagerOptions, structure

TWO = [EnvRecipe("CartPole-v1", n=6, behavior="cart"), EnvRecipe("Acrobot-v1", n=2, behavior="acro")]


# What is written.


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"n": 3}, "n=3 is the number of environments of one kind of several: name it by behavior"),
        ({"n": 0, "behavior": "a"}, "n must be a whole number of at least 1"),
        ({"behavior": "a/b"}, 'behavior must be a name without "/"'),
        ({"behavior": "*"}, 'behavior must be a name without "/"'),
        ({"behavior": ""}, 'behavior must be a name without "/"'),
        ({"behavior": 7}, 'behavior must be a name without "/"'),
    ],
)
def test_a_recipe_refuses_what_names_no_kind(given: Mapping[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        EnvRecipe("CartPole-v1", **given)


@pytest.mark.parametrize(
    ("env_factory", "options", "complaint"),
    [
        ([*TWO, TWO[0]], {"n_envs": 14}, r"env_factory\[2\] has the behavior 'cart' of another one"),
        ([*TWO, "CartPole-v1"], {"n_envs": 9}, r"env_factory\[2\] names no kind: make each an EnvRecipe"),
        ([*TWO, EnvRecipe("CartPole-v1")], {"n_envs": 9}, r"env_factory\[2\] names no kind: make each an EnvRecipe"),
        (TWO, {"n_envs": 5}, r"n_envs=5, but the kinds have n = 6 \+ 2 environments: leave n_envs out"),
        (TWO, {"n_envs": 8, "n_workers": "auto"}, "with several kinds, give the number of workers"),
    ],
)
def test_kinds_that_do_not_fit_are_refused(env_factory: Any, options: Mapping[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Kinds.of(env_factory, KindOptions(**options))


def test_an_env_factory_without_names_has_no_kinds() -> None:
    class Named:
        behavior = "of its own"

    for env_factory in (
        "CartPole-v1",
        ["CartPole-v1"],
        EnvRecipe("CartPole-v1"),
        Named,
        [Named],
        {"vector": "x"},
        None,
    ):
        assert count_kinds(env_factory) is None
        assert Kinds.of(env_factory, KindOptions()) is None


def test_one_recipe_with_a_name_is_one_kind() -> None:
    kinds = Kinds.of(TWO[0], KindOptions(n_envs=6))
    assert kinds is not None
    assert kinds.blocks(2) == ([range(3), range(3, 6)], ["cart", "cart"])


def test_workers_have_environments_of_one_kind_and_those_with_more_get_more_workers() -> None:
    assert split_by_kind([6, 2], 2) == [[range(6)], [range(6, 8)]]
    assert split_by_kind([6, 2], 4) == [[range(2), range(2, 4), range(4, 6)], [range(6, 8)]]
    assert split_by_kind([1, 5], 6) == [[range(1)], [range(number, number + 1) for number in range(1, 6)]]
    for n_workers in range(3, 13):
        blocks = [block for own in split_by_kind([7, 1, 4], n_workers) for block in own]
        assert len(blocks) == n_workers
        assert [env_id for block in blocks for env_id in block] == [*range(12)]


def test_fewer_workers_than_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match="n_workers=1 is less than the 2 kinds"):
        Kinds(TWO).blocks(1)


def test_a_config_lists_kinds_as_tables() -> None:
    table = {
        "env": [
            {"env": "CartPole-v1", "n": 6, "behavior": "cart"},
            {"env": "Acrobot-v1", "n": 2, "behavior": "acro", "env_kwargs": {"max_episode_steps": 50}},
        ],
        "n_workers": 4,
        "wait": {"shares": {"cart": 0.7, "acro": 0.3}, "shares_of": "time"},
    }
    options = structure(ManagerOptions, table, where="manager")
    assert (options.n_envs, options.env_name) == (8, "6 cart, 2 acro")
    assert options.env[1] == EnvRecipe("Acrobot-v1", n=2, behavior="acro", env_kwargs={"max_episode_steps": 50})
    assert options.wait == Wait(shares={"cart": 0.7, "acro": 0.3}, shares_of="time")


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (
            {"env": "CartPole-v1", "behavour": "cart", "n": 2},
            r"^There is no option env\[0\].behavour; did you mean env\[0\].behavior",
        ),
        ({"env": "CartPole-v1", "behavior": "cart", "n": "2"}, r"^env\[0\].n should be a whole number"),
        ({"behavior": "cart"}, r"env\[0\].env is missing"),
    ],
)
def test_a_mistake_in_a_table_of_a_kind_is_named_by_its_place(kind: Mapping[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        structure(ManagerOptions, {"env": [kind]}, where="manager")


def test_factories_that_are_equal_are_written_as_one_kind() -> None:
    def one() -> None: ...
    def other() -> None: ...

    assert written_as_kinds([one, one]) == ""
    assert written_as_kinds([one, other, one]) == (
        "[EnvRecipe(env_factory[0], n=2, behavior='kind1'), EnvRecipe(env_factory[1], n=1, behavior='kind2')]"
    )


def test_kinds_of_equal_names_are_written_with_different_behaviors() -> None:
    written = written_as_kinds([GymnasiumId(f"{name}/X-v0", None) for name in ("old", "new", "other")])
    kinds = Kinds.of(eval(written, {"EnvRecipe": EnvRecipe}), KindOptions(n_envs=3))
    assert kinds is not None
    assert [each.behavior for each in kinds.recipes] == ["x-v0", "x-v0-2", "x-v0-3"]


@pytest.mark.parametrize(
    "env", [["CartPole-v1", {"env": "Acrobot-v1", "behavior": "b"}], [{"env": "A", "behavior": "b"}, ["C"]]]
)
def test_a_table_of_a_kind_beside_what_names_none_is_refused(env: Any) -> None:
    options = structure(ManagerOptions, {"env": env}, where="manager")
    assert options.env_name == "1 b"
    with pytest.raises(UsageError, match="names no kind: make each an EnvRecipe"):
        make_manager(options)


def test_shares_in_a_config_that_are_no_mapping_are_named() -> None:
    with pytest.raises(ConfigError, match=r"manager\.wait\.shares must be a mapping"):
        structure(ManagerOptions, {"wait": {"shares": [0.5, 0.5]}}, where="manager")


# Shares.


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"shares": {"a": 0.5, "b": 0.4}}, "shares must sum to 1, not to 0.9"),
        ({"shares": {"a": 1.5, "b": -0.5}}, "shares must give 'b' a number above 0, not -0.5"),
        ({"shares": {"a": 1, "b": 0}}, "shares must give 'b' a number above 0, not 0"),
        ({"shares": {"a": "0.5", "b": 0.5}}, "shares must give 'a' a number above 0, not '0.5'"),
        ({"shares": {}}, "shares must sum to 1, not to 0"),
        ({"shares": [0.5, 0.5]}, "shares must be a mapping"),
        ({"shares": {"a": 1}, "max_lead": 3}, "a step waits for any worker: take min_ready=1, no max_lead"),
        ({"shares": {"a": 1}, "min_ready": 2}, "a step waits for any worker: take min_ready=1, no max_lead"),
        ({"shares": {"a": 1}, "shares_of": "rewards"}, "shares_of must be 'steps' or 'time'"),
        ({"shares_of": "time"}, "give shares too"),
    ],
)
def test_a_wait_refuses_shares_that_cannot_be_kept(given: Mapping[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Wait(**given)


def test_shares_of_thirds_may_be_rounded() -> None:
    Wait(shares={"a": 0.333, "b": 0.333, "c": 0.333})


class Two:
    """A table of a worker of two environments of kind a, and one of one environment of kind b, both in flight."""

    def __init__(self, a: float = 0.5) -> None:
        self.table = WorkerTable([[0, 1], [2]], ["a", "b"])
        self.events = EventLog([(0, 1), (2,)])
        self.shares = Shares(Wait(shares={"a": a, "b": 1 - a}), self.table, self.events)
        for entry in self.table.entries:
            self.table.move([entry], WorkerState.IN_FLIGHT, ())

    def deliver(self, worker_id: int) -> None:
        """A worker responds, its step is delivered, and another one is sent."""
        entry = self.table.entries[worker_id]
        entry.n_envs_in_flight = len(entry.env_ids)
        response = EnvironmentResponse(CommandName.STEP, worker_id, {})
        self.table.move([entry], WorkerState.READY, (response,))
        self.shares.count([entry])
        self.table.delivered([entry])
        self.table.move([entry], WorkerState.IN_FLIGHT, ())

    def deliver_until_held(self, worker_id: int) -> int:
        kind = self.table.entries[worker_id].kind
        for number in range(1000):
            if kind in self.shares.held_back():
                return number
            self.deliver(worker_id)
        return 1000


def test_a_kind_that_is_ahead_waits_until_the_other_has_caught_up() -> None:
    two = Two()
    n = two.deliver_until_held(0)
    assert 0 < n < 10
    two.deliver(1)
    two.deliver(1)
    assert two.shares.held_back() == set()
    assert two.deliver_until_held(0) == 1


def test_the_kind_that_is_behind_is_never_held_back() -> None:
    two = Two(a=0.9)
    for _ in range(300):
        held = two.shares.held_back()
        assert held < {"a", "b"}
        two.deliver(1 if "a" in held else 0)


def test_a_kind_that_rests_holds_nothing_back_and_comes_back_at_the_pace_of_the_others() -> None:
    two = Two()
    two.table.move([two.table.entries[1]], WorkerState.READY, (EnvironmentResponse(CommandName.STEP, 1, {}),))
    two.table.delivered([two.table.entries[1]])
    assert two.deliver_until_held(0) == 1000
    two.table.move([two.table.entries[1]], WorkerState.IN_FLIGHT, ())
    assert two.shares.held_back() == set()
    assert two.deliver_until_held(0) < 10
    assert not [*two.events]


def test_a_kind_that_failed_holds_nothing_back_until_it_has_taken_a_step_and_is_reported_once() -> None:
    two = Two()
    entry = two.table.entries[1]
    for generation in (1, 2):
        entry.replacement, entry.restarts = Replacement(None), generation
        two.table.set_pending(entry)
        assert two.shares.held_back() == set()
        entry.replacement = None
        two.table.move([entry], WorkerState.READY, (EnvironmentResponse(CommandName.RESET, 1, {}),))
        two.table.delivered([entry])
        two.table.move([entry], WorkerState.IN_FLIGHT, ())
        assert two.deliver_until_held(0) == 1000
    assert [type(event) for event in two.events] == [KindLeftOut]
    two.deliver(1)
    assert two.deliver_until_held(0) < 10
