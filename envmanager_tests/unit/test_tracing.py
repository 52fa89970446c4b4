"""The trace as a file, without processes: what is in it, and that it can be read at any moment."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path

import pytest

from envmanager import RandomPolicy, RestartPolicy, SimpleEnvManager
from envmanager.errors import EnvManagerError, UsageError, WorkerDied
from envmanager.observe import events
from envmanager.observe.timing import WorkerTimes
from envmanager.observe.tracing import Tracer
from envmanager.testing import EchoEnvironment, FakeEnvironment, Raise, faulty


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run.json")


@pytest.fixture
def tracer(path):
    return Tracer(path, [[0], [1, 2]])


def read(path, *, closed=True):
    with open(path, encoding="utf-8") as file:
        return json.loads(file.read() + ("" if closed else "]"))


def spans(path, number):
    """The names and times in nanoseconds, from the tracer's start, of what is drawn on a track."""
    drawn = [e for e in read(path) if e["ph"] == "X" and e["tid"] == number]
    return [(e["name"], round(e["ts"] * 1e3), round(e["dur"] * 1e3)) for e in drawn]


def worker_times(tracer, worker_id=0):
    times = WorkerTimes()
    times.track = tracer.workers[worker_id]
    return times


def died(worker_id=0, generation=0):
    error = WorkerDied(worker_id=worker_id, env_ids=[worker_id], phase="step", exit="SIGKILL")
    return events.Died(worker_id=worker_id, generation=generation, error=error)


def test_tracks_have_names(tracer, path):
    tracer.close()

    assert [event["args"]["name"] for event in read(path) if event["name"] == "thread_name"] == [
        "trainer",
        "worker 0 (env 0)",
        "worker 1 (envs 1-2)",
    ]


def test_between_the_spans_of_a_worker_it_is_idle(tracer, path):
    zero, times = tracer._zero_ns, worker_times(tracer)
    times.started(zero + 100, zero + 400, generation=0)
    times.responded("reset", 50, zero + 500)
    times.stepped(30, zero + 540)
    times.stepped(30, zero + 570)
    tracer.close()

    assert spans(path, 1) == [
        ("start", 100, 300),
        ("idle", 400, 50),
        ("reset", 450, 50),
        ("idle", 500, 10),
        ("step", 510, 30),
        ("step", 540, 30),
    ]


def test_idle_time_goes_on_over_a_write(tracer, path):
    zero, times = tracer._zero_ns, worker_times(tracer)
    times.stepped(30, zero + 100)
    tracer.write()
    times.stepped(30, zero + 150)
    tracer.close()

    assert spans(path, 1) == [("step", 70, 30), ("idle", 100, 20), ("step", 120, 30)]


def test_what_is_told_late_is_drawn_in_its_place(tracer, path):
    zero, times = tracer._zero_ns, worker_times(tracer)
    times.responded("call", 10, zero + 200)
    times.stepped(30, zero + 100)
    tracer.close()

    assert spans(path, 1) == [("step", 70, 30), ("idle", 100, 90), ("call", 190, 10)]


def test_nothing_is_known_of_a_worker_between_its_death_and_its_next_start(tracer, path):
    times = worker_times(tracer)
    times.started(tracer._zero_ns, tracer._zero_ns + 1, generation=0)
    tracer.happened(died())
    later = tracer.write_at_ns
    times.started(later, later + 100, generation=1)
    tracer.close()

    assert [name for name, _, _ in spans(path, 1)] == ["start", "start"]
    assert [e["args"]["generation"] for e in read(path) if e["name"] == "start"] == [0, 1]


def test_failures_and_restarts_are_marked_with_their_first_line(tracer, path):
    tracer.happened(died(worker_id=1, generation=3))
    tracer.close()

    (mark,) = [event for event in read(path) if event["ph"] == "i"]
    assert (mark["name"], mark["tid"], mark["args"]["generation"]) == ("Died", 2, 3)
    assert mark["args"]["text"].startswith("worker 1 (env 1) died in step (SIGKILL")


def test_starts_and_late_replies_are_not_marked(tracer, path):
    tracer.happened(events.Started(worker_id=0, generation=0, pid=1, start_s=0.1))
    tracer.happened(events.LateReplyDiscarded(worker_id=0, generation=0, ticket=4))
    tracer.close()

    assert not [event for event in read(path) if event["ph"] == "i"]


@pytest.mark.parametrize("name", ['"quoted"', "back\\slash\\", "größe 🎲", "half a \ud83d pair", "two\nlines"])
def test_any_behavior_can_be_drawn(tracer, path, name):
    spec = FakeEnvironment.SPEC
    policy = tracer.policy(name, RandomPolicy(spec))
    environment = FakeEnvironment()
    policy.get_action(environment.reset(seeds=[0], options=None)["default"])
    tracer.close()

    assert len([event for event in read(path) if event["name"].startswith("policy ")]) == 1
    with open(path, encoding="utf-8") as file:
        assert "\\u" not in file.read()


def test_before_it_is_closed_the_file_lacks_only_the_bracket(tracer, path):
    read(path, closed=False)
    worker_times(tracer).stepped(30, tracer._zero_ns + 100)
    tracer.write()

    assert read(path, closed=False)[-1]["name"] == "step"


def test_what_has_happened_is_written_after_a_second(tracer, path):
    times = worker_times(tracer)
    times.stepped(30, tracer.write_at_ns - 1)
    assert "step" not in {event["name"] for event in read(path, closed=False)}

    times.stepped(30, tracer.write_at_ns)
    assert "step" in {event["name"] for event in read(path, closed=False)}


def test_memory_is_bounded_also_after_the_end(tracer):
    times = worker_times(tracer)
    for closed in (False, True):
        for _ in range(5000):
            times.stepped(1, tracer._zero_ns)
        assert len(tracer.records) < 1025
        if not closed:
            tracer.close()


def test_closing_twice_writes_one_bracket(tracer, path):
    tracer.close()
    tracer.close()

    assert read(path)


def test_a_trace_that_cannot_be_written_any_more_ends_with_a_warning(tracer, path, caplog):
    os.unlink(path)
    with caplog.at_level(logging.WARNING, "envmanager"):
        tracer.write()
        tracer.write()
        tracer.close()

    assert len(caplog.records) == 1
    assert not os.path.exists(path)


def test_a_forked_process_writes_nothing(tracer, path, mocker):
    worker_times(tracer).stepped(30, tracer._zero_ns + 100)
    mocker.patch("os.getpid", return_value=-1)
    tracer.close()

    assert {event["ph"] for event in read(path, closed=False)} == {"M"}


def test_the_trainer_may_change_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracer = Tracer("run.json", [[0]])
    monkeypatch.chdir("/")
    tracer.close()

    assert read(tmp_path / "run.json")


@pytest.mark.parametrize("where", ["missing/run.json", "."])
def test_a_trace_that_cannot_be_written_is_refused_before_anything_starts(tmp_path, where):
    with pytest.raises(UsageError, match="trace"):
        SimpleEnvManager(FakeEnvironment, trace=str(tmp_path / where))


def test_a_trace_is_for_its_owner_alone_also_in_the_place_of_a_file_that_was_not(path):
    Path(path).write_text("of another run")
    os.chmod(path, 0o666)
    with SimpleEnvManager(FakeEnvironment, trace=path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert "of another run" not in Path(path).read_text()


def test_a_trace_does_not_follow_a_symbolic_link(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "run.json").symlink_to(tmp_path / "victim")

    with pytest.raises(UsageError, match="symbolic link"):
        SimpleEnvManager(FakeEnvironment, trace=str(tmp_path / "run.json"))
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_trace_that_becomes_a_symbolic_link_ends_with_a_warning(tracer, path, tmp_path, caplog):
    (tmp_path / "victim").write_text("precious")
    os.unlink(path)
    os.symlink(tmp_path / "victim", path)
    with caplog.at_level(logging.WARNING, "envmanager"):
        tracer.close()

    assert len(caplog.records) == 1
    assert (tmp_path / "victim").read_text() == "precious"


def test_in_process_the_trainer_and_its_worker_are_drawn(path):
    with SimpleEnvManager(FakeEnvironment, 2, trace=path) as manager:
        manager.set_policy("default", RandomPolicy(FakeEnvironment.SPEC))
        manager.reset()
        for _ in range(5):
            manager.step()
        manager.get_attr("closed")

    names = [name for name, _, _ in spans(path, 0)]
    assert {name: names.count(name) for name in ("reset", "step", "policy default", "get_attr")} == {
        "reset": 1,
        "step": 5,
        "policy default": 5,
        "get_attr": 1,
    }
    of_worker = [name for name, _, _ in spans(path, 1) if name != "idle"]
    assert of_worker == ["start", "reset", *["step"] * 5, "get_attr"]


def test_an_in_process_worker_that_is_replaced_goes_on_in_its_next_generation(path):
    factory = faulty(Raise(ValueError("gear 7")), after=2, only_generation=0)
    restarts = RestartPolicy(on_exception="restart", backoff_s=0.0)
    with SimpleEnvManager(factory, trace=path, restarts=restarts) as manager:
        manager.set_policy("default", RandomPolicy(FakeEnvironment.SPEC))
        manager.reset()
        for _ in range(6):
            manager.step()

    told = read(path)
    assert [e["name"] for e in told if e["ph"] == "i"] == ["Raised", "Restarted"]
    assert {e["args"]["generation"] for e in told if e["name"] == "step" and e["tid"] == 1} == {0, 1}
    assert [e["args"]["generation"] for e in told if e["name"] == "start"] == [0, 1]


def test_a_manager_that_nobody_closes_closes_its_trace(path):
    manager = SimpleEnvManager(FakeEnvironment, trace=path)
    manager.reset()
    del manager

    assert "reset" in {event["name"] for event in read(path)}


def test_two_managers_may_not_write_one_trace_at_the_same_time(path):
    with (
        SimpleEnvManager(FakeEnvironment, 1, trace=str(path)),
        pytest.raises(UsageError, match="is being written by another manager"),
    ):
        SimpleEnvManager(FakeEnvironment, 1, trace=str(path))
    with SimpleEnvManager(FakeEnvironment, 1, trace=str(path)):
        pass


def test_a_manager_that_did_not_start_lets_go_of_its_trace(path):
    for _ in range(2):
        with pytest.raises(EnvManagerError, match="cannot be made"):
            SimpleEnvManager(faulty(Raise(ValueError("cannot be made")), at="start"), 1, trace=str(path))


def test_a_manager_that_did_not_start_leaves_the_trace_of_an_earlier_one(path):
    with SimpleEnvManager(FakeEnvironment, trace=path) as manager:
        manager.reset()
    earlier = Path(path).read_bytes()
    with pytest.raises(EnvManagerError, match="cannot be made"):
        SimpleEnvManager(faulty(Raise(ValueError("cannot be made")), at="start"), 1, trace=path)

    assert Path(path).read_bytes() == earlier


def test_a_trace_that_another_process_replaces_ends_and_the_other_is_whole(tracer, path, caplog, monkeypatch):
    monkeypatch.setattr("envmanager.observe.tracing._being_written", set())  # as in another process
    other = Tracer(str(path), [[0], [1]])
    other.started()
    tracer.trainer.span("step", 1, 2)
    with caplog.at_level(logging.WARNING, "envmanager"):
        tracer.close()
    other.trainer.span("reset", 3, 4)
    other.close()

    assert "another process" in caplog.text
    names = {event["name"] for event in read(path)}
    assert "reset" in names
    assert "step" not in names


def test_the_spans_of_a_worker_name_the_tasks_that_it_plays_until_the_next_reset(path):
    with SimpleEnvManager(EchoEnvironment, 2, trace=path) as manager:
        manager.reset(tasks=[{"task": 0}, {"task": 1}, {"task": 2}])
        while not manager.tasks.done:
            batch = manager.recv()
            manager.send([1] * len(batch), batch.env_ids)
        manager.reset()
        batch = manager.recv()
        manager.send([1] * len(batch), batch.env_ids)
        manager.recv()

    steps = [event["args"] for event in read(path) if event["name"] == "step" and event["tid"] == 1]
    told = [args.get("tasks") for args in steps]
    assert told[:7] == [{"0": 0, "1": 1}] * 7  # environment 0 takes seven steps for an episode, the other eight
    assert {"0": 2} in told
    assert told[-1] is None
