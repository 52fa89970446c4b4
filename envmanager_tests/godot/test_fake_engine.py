"""The fake engine: a real program behind a real socket, which hosts Python's environments as a worker process does."""

from __future__ import annotations

import functools
import os
import signal
import time

import attrs
import numpy as np
import pytest

from envmanager import RandomPolicy
from envmanager.adapters.factories import factories_for
from envmanager.errors import UsageError
from envmanager.godot.frames import BadFrame, Kind
from envmanager.hosts.hosting import GroupFactory, make_contexts
from envmanager.observe.events import EpisodesDiverged
from envmanager.testing import EchoEnvironment, Raise, faulty
from envmanager.testing.faults import CloseOutput
from envmanager_tests.envs import EchoGym
from envmanager_tests.godot.engine_client import PATIENCE_S, HungUp, Told, engine
from envmanager_tests.godot.engine_codec import plain
from envmanager_tests.godot.engine_misbehaviour import MODES, Misbehaviour
from envmanager_tests.godot.fake_engine_manager import FakeEngineManager
from envmanager_tests.godot.hosted import Crowd, Speaks
from envmanager_tests.godot.test_codec import assert_same
from envmanager_tests.process.test_kept_episodes import KEPT, Chain

HOSTED = {
    "several agents": (functools.partial(EchoEnvironment, n_agents=3, episode_length=2), False),
    "agents that come and go": (Crowd, False),
    "agents that come and go, with infos": (Crowd, True),
    "gymnasium, with infos": (EchoGym, True),
    "CartPole": ("CartPole-v1", False),
}


def described(said):
    """As Python's last line says it."""
    return f"{said['type']}: {said['message']}"


def group_of(source, arenas, *, infos, seed=0):
    """The same environments in this process, as a worker has them."""
    contexts = make_contexts(range(arenas), worker_id=0, generation=0, seed=seed, log_dir=None)
    return GroupFactory(factories_for(source, arenas), contexts, infos, check_values=False)()


def as_sent(steps, *, infos):
    """What is left of steps once JSON has said their infos."""
    if not infos:
        return steps
    return {
        name: attrs.evolve(
            own,
            info=[{}] * len(own) if own.info is None else plain(own.info),
            reset_info=plain(own.reset_info or [{}] * int(own.ended.sum())) if own.ended.any() else None,
        )
        for name, own in steps.items()
    }


def actions_for(policies, steps):
    """Of the rows that want one."""
    return {name: policies[name].get_action(own.take(own.acting_rows)).action for name, own in steps.items()}


@pytest.mark.parametrize(("source", "infos"), HOSTED.values(), ids=HOSTED)
def test_it_hands_out_what_a_worker_process_hands_out(source, infos, tmp_path):
    group = group_of(source, 3, infos=infos, seed=5)
    with engine(source, tmp_path, arenas=3, infos=infos) as client:
        client.accept()
        specs = client.configure(seed=5)
        assert specs.behavior_specs.keys() == group.behavior_specs.keys()
        assert specs.max_agents == group.max_agents
        policies = {name: RandomPolicy(spec, seed=1) for name, spec in specs.behavior_specs.items()}
        for seeds in ([1, 2, 3], [4, None, 6]):
            steps = client.reset(seeds, {})
            assert_same(steps, as_sent(group.reset(seeds=seeds, options=None), infos=infos))
            for _ in range(12):
                actions = actions_for(policies, steps)
                steps = client.step(actions)
                expected = group.step(actions)
                assert_same(steps, as_sent(expected, infos=infos))
    group.close()


@pytest.fixture
def crowd(tmp_path):
    """An engine with three crowds, reset."""
    with engine("envmanager_tests.godot.hosted:Crowd", tmp_path, arenas=3) as client:
        client.accept()
        client.configure()
        client.reset([3, None, 5], {"level": 2})
        yield client


def test_calls_reach_the_arenas_they_are_for_and_bring_their_values(crowd):
    assert crowd.call("get", "seed") == [3, None, 5]
    assert crowd.call("get", "options", arenas=[1]) == [{"level": 2}]
    assert crowd.call("method", "add", 1, arenas=[2, 0]) == [2.5, 2.5]
    assert crowd.call("set", "height", 3.0, 4.0, arenas=[0, 2]) == [None, None]
    assert crowd.call("method", "add", 1, other=10) == [14.0, 12.5, 15.0]
    assert crowd.call("render", None, arenas=[1]) == [[[0, 1], [2, 3]]]


def test_an_arena_gets_its_own_rows_of_the_actions_and_none_of_a_behavior_left_out(crowd):
    acting = crowd.decoder.acting["hero"].n
    crowd.step({"hero": np.arange(acting)})

    # One hero in each arena, in the order of the arenas.
    assert crowd.call("get", "last_actions") == [{"hero": [0]}, {"hero": [1]}, {"hero": [2]}]


def test_a_call_that_fails_is_told_and_the_engine_goes_on(crowd):
    crowd.call("set", "height", *["x" * 300_000] * 3)
    for what, name, args, message in (
        ("method", "nothing", [], "AttributeError: 'Crowd' object has no attribute 'nothing'"),
        ("method", "add", [], "TypeError: Crowd.add() missing 1 required positional argument: 'one'"),
        ("get", "_people", [], "TypeError: Object of type Population is not JSON serializable"),
        (
            "method",
            "add_text",
            ["x" * 300_000],
            "UsageError: the answer has 1800021 bytes, more than the limit of 1048576",
        ),
    ):
        with pytest.raises(Told) as told:
            crowd.call(what, name, *args)
        assert described(told.value.said).startswith(message)
        assert crowd.step({}) is not None


def test_closing_ends_it_with_exit_code_0(crowd):
    crowd.send(Kind.CLOSE)

    assert crowd.exit_code() == 0


def test_it_ends_when_the_trainer_hangs_up(crowd):
    crowd.connections[-1].close()

    assert crowd.exit_code() == 0


def test_an_exception_is_told_with_its_place_and_printed_first_and_reset_goes_on(tmp_path):
    with engine(faulty(Raise(KeyError("x")), after=1, only_env=1), tmp_path) as client:
        client.accept()
        client.configure()
        client.reset()
        client.step({"default": np.zeros(2, np.int64)})

        with pytest.raises(Told) as told:
            client.step({"default": np.zeros(2, np.int64)})

        said = told.value.said
        assert (described(said), said["function"], said["arena"]) == ("KeyError: 'x'", "strike", 1)
        assert said["script"].endswith("fakes.py")
        place = f"at: {said['function']} ({said['script']}:{said['line']})"
        assert f"SCRIPT ERROR: KeyError: 'x'\n          {place}\n" in client.output()
        assert "Traceback" in client.output()
        assert client.reset()["default"].agent_id.tolist() == [0, 1 << 32]


def test_an_exception_is_told_also_where_an_environment_has_closed_the_output(tmp_path):
    with engine(faulty([CloseOutput(), Raise(KeyError("x"))]), tmp_path) as client:
        client.accept()
        client.configure()
        client.reset()

        with pytest.raises(Told) as told:
            take_step(client)

        assert described(told.value.said) == "KeyError: 'x'"
        assert client.reset()["default"].agent_id.tolist() == [0, 1 << 32]


@pytest.mark.parametrize(
    ("source", "message", "arena"),
    [
        (faulty(Raise(KeyError("x")), at="start", only_env=1), "KeyError: 'x'", 1),
        (faulty(Raise(SystemExit(3)), at="start", only_env=1), "SystemExit: 3", 1),
        (Speaks, "UsageError: behavior 'default' has any object, which the protocol cannot hold", None),
        ("envmanager_tests.godot.hosted:Missing", "UsageError: env 'envmanager_tests.godot.hosted:Missing' c", None),
    ],
    ids=["raises", "exits", "objects", "not there"],
)
def test_what_fails_at_the_start_is_the_answer_to_configure(source, message, arena, tmp_path):
    with engine(source, tmp_path) as client:
        client.accept()

        with pytest.raises(Told) as told:
            client.configure()

        assert described(told.value.said).startswith(message)
        assert told.value.said["arena"] == arena


def test_environments_know_who_they_are_when_the_engine_is_told(tmp_path):
    context = {"worker_id": 2, "env_ids": [8, 9], "generation": 1}
    with engine([EchoEnvironment] * 10, tmp_path, context=context) as client:
        client.accept()
        client.configure()

        assert client.reset()["default"].obs[:, 0].tolist() == [8, 9]  # EchoEnvironment says its env_id


def test_a_workers_group_factory_is_hosted_as_it_is(tmp_path):
    contexts = make_contexts([4, 5], worker_id=1, generation=3, seed=None, log_dir=None)
    with engine(GroupFactory([EchoEnvironment] * 2, contexts, False, check_values=True), tmp_path) as client:
        client.accept()
        client.configure()

        assert client.reset()["default"].obs[:, 0].tolist() == [4, 5]
        assert client.call("get", "label") == ["env 4", "env 5"]


# Misbehaviour.


@pytest.fixture
def misbehaving(tmp_path):
    """Makes an engine with two echoes that misbehaves, once it was reset and has taken a good step."""
    open_engines = []

    def make(mode, *, is_reset=True, **options):
        context = engine("envmanager.testing:EchoEnvironment", tmp_path, mode=mode, **options)
        client = context.__enter__()
        open_engines.append(context)
        client.accept()
        if is_reset:
            client.configure()
            client.reset()
            take_step(client)
        return client

    yield make
    for context in open_engines:
        context.__exit__(None, None, None)


def take_step(client):
    return client.step({"default": np.array([1, 2])})["default"]


SPOILED = {
    "garbage": "kind 97",
    "oversize": "steps frame of 4294967280 bytes",
    "bytes_too_many": "4 bytes left over",
    "bytes_missing": "bytes missing",
    "unknown_kind": "kind 63",
    "reserved": "reserved bytes are 0 and 1",
    "empty": "bytes missing: its head",
}


@pytest.mark.parametrize("mode", SPOILED)
def test_a_spoiled_answer_is_refused(mode, misbehaving):
    client = misbehaving(f"{mode}@2")

    with pytest.raises(BadFrame, match=SPOILED[mode]):
        take_step(client)


def test_byte_by_byte_it_says_the_same(misbehaving):
    client = misbehaving("bytewise@2")

    assert [take_step(client).obs[:, 2].tolist() for _ in range(2)] == [[2, 2], [3, 3]]


@pytest.mark.parametrize("mode", ["half", "mute", "hangs"])
def test_half_an_answer_or_none_leaves_the_trainer_waiting(mode, misbehaving):
    client = misbehaving(f"{mode}@2")
    client.connections[-1].settimeout(1.0 if mode == "half" else 0.2)

    with pytest.raises(TimeoutError):
        take_step(client)

    assert client.is_midway is (mode == "half")
    assert client.process.poll() is None


@pytest.mark.parametrize(("mode", "exit_code"), [("half_and_die", 3), ("quits", 0)])
def test_it_ends_in_the_place_of_an_answer(mode, exit_code, misbehaving):
    client = misbehaving(f"{mode}@2")

    with pytest.raises(HungUp):
        take_step(client)

    assert client.exit_code() == exit_code
    assert client.is_midway is (mode == "half_and_die")


def test_it_is_busy_so_often_before_it_answers(misbehaving):
    client = misbehaving("busy=3@configure", is_reset=False)

    client.configure()
    client.reset()

    assert (client.n_busy, take_step(client).obs[:, 2].tolist()) == (3, [1, 1])


def test_it_can_take_its_time_between_two_busy_frames(misbehaving):
    client = misbehaving("busy=4@configure", is_reset=False, pause_s=0.05)
    started = time.monotonic()

    client.configure()

    assert time.monotonic() - started >= 4 * 0.05


def test_an_answer_with_an_old_ticket_comes_before_the_right_one(misbehaving):
    client = misbehaving("old_ticket@2")

    assert (take_step(client).obs[:, 2].tolist(), client.late) == ([2, 2], [3])


def test_a_note_comes_before_the_answer(misbehaving):
    client = misbehaving("note@2")

    take_step(client)

    assert client.notes == [b'{"name":"wave","height":3}']


@pytest.mark.parametrize(("mode", "problem"), [("stranger", BadFrame), ("silent_stranger", TimeoutError)])
def test_a_stranger_comes_first_and_then_the_engine(mode, problem, tmp_path):
    with engine("envmanager.testing:EchoEnvironment", tmp_path, mode=mode) as client:
        with pytest.raises(problem):
            client.accept(hello_s=0.2 if mode == "silent_stranger" else PATIENCE_S)

        client.accept()
        client.configure()
        assert client.reset()["default"].env_id.tolist() == [0, 1]


@pytest.mark.parametrize(("mode", "problem"), [("wrong_token", ValueError), ("silent", TimeoutError)])
def test_who_is_turned_away_ends(mode, problem, tmp_path):
    with engine("envmanager.testing:EchoEnvironment", tmp_path, mode=mode) as client:
        with pytest.raises(problem):
            client.accept(hello_s=0.2 if mode == "silent" else PATIENCE_S)
        client.connections[-1].close()

        assert client.exit_code() == 0


def test_another_major_version_is_said_in_the_hello(tmp_path):
    with engine("envmanager.testing:EchoEnvironment", tmp_path, mode="other_major") as client:
        assert client.accept().protocol == (2, 0)


def test_of_several_engines_only_the_first_misbehaves_where_that_is_asked_for(misbehaving, tmp_path):
    once = tmp_path / "once"
    first = misbehaving("quits@2", once=once)
    with pytest.raises(HungUp):
        take_step(first)

    assert take_step(misbehaving("quits@2", once=once)).obs[:, 2].tolist() == [2, 2]


def test_a_misbehaviour_that_there_is_not_is_refused():
    assert all(Misbehaviour.of(mode).mode == mode for mode in MODES)
    with pytest.raises(UsageError, match="there is no misbehaviour 'dances'; there are stranger"):
        Misbehaviour.of("dances@3")


@pytest.mark.parametrize("fault", ["kill", "clock", "ends"])
def test_an_engines_episode_that_is_elsewhere_or_has_ended_is_lost_alone(fault, tmp_path):
    """``clock``: its third step is never the same again. ``ends``: the episode is shorter in the next engine."""

    class Game(Chain):
        def reset(self, **arguments):
            made = super().reset(**arguments)
            self._length = 2 if fault == "ends" and (tmp_path / "killed").exists() else 50
            return made

    def make(context):
        return Game(str(tmp_path / f"steps-{context.env_id}"), "clock", (3,) if fault == "clock" else ())

    with FakeEngineManager(make, 2, seed=1, restarts=KEPT) as manager:
        manager.reset()
        batch = manager.recv("all")
        for _ in range(4):
            manager.send(np.ones(2, np.int64), batch.env_ids)
            batch = manager.recv("all")
        seen = batch.obs.copy()
        (tmp_path / "killed").touch()
        os.kill(manager.stats().workers[0].pid, signal.SIGKILL)
        manager.send(np.ones(2, np.int64), batch.env_ids)
        batch = manager.recv("all")
        is_lost = fault != "kill"
        assert batch.lost.tolist() == [is_lost, False]
        assert manager.events.count(EpisodesDiverged) == manager.stats().episodes_diverged == is_lost
        if is_lost:
            assert batch.final_obs.tolist() == [seen[0].tolist()]
        else:
            assert batch.obs[:, 1].tolist() == [5, 5]
        for _ in range(3):
            manager.send(np.ones(len(batch), np.int64), batch.env_ids)
            batch = manager.recv("all")
        assert (batch.obs[0, 1], batch.lost.any(), manager.stats().restarts) == (2 if is_lost else 8, False, 1)


def test_an_episode_with_other_agents_in_the_next_engine_is_lost_and_told(tmp_path):
    def make(context):
        return EchoEnvironment(context, n_agents=5 if (tmp_path / "killed").exists() else 3, episode_length=50)

    with FakeEngineManager(make, 1, seed=1, restarts=KEPT) as manager:
        manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"]))
        manager.reset()
        for _ in range(4):
            manager.step("all")
        (tmp_path / "killed").touch()
        os.kill(manager.stats().workers[0].pid, signal.SIGKILL)
        lost = [info.lost is not None for _ in range(3) for info in manager.step("all")]
        assert lost == [True, False, False]
        (told,) = [event for event in manager.events if isinstance(event, EpisodesDiverged)]
        assert told.path == "the agents of behavior 'default'"
