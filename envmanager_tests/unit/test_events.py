"""EventLog: what is kept, counted and logged."""

from __future__ import annotations

import json
import logging
import math
import sys
import threading

import attrs
import numpy as np
import pytest

from envmanager.errors import RestartsExhausted, WorkerDied, WorkerError
from envmanager.observe import events
from envmanager.observe.events import KEPT, EventLog
from envmanager.options import RestartPolicy

FOREIGN = "100 %s of the %d %(name)s, 5 % done {0} {name}"


def died(text="SIGSEGV"):
    return WorkerDied(worker_id=3, env_ids=[6, 7], phase="step", exit=text)


def started(worker_id=3, generation=0):
    return events.Started(worker_id=worker_id, generation=generation, pid=4711, start_s=0.5)


def restarted(cause, delay_s=0.0, **policy):
    return events.Restarted(**WHERE, cause=cause, delay_s=delay_s, number=2, policy=RestartPolicy(**policy))


WHERE = {"worker_id": 3, "generation": 2}
LEVELS = {
    started(): logging.DEBUG,
    events.Raised(**WHERE, error=died()): logging.DEBUG,
    events.Recycled(**WHERE, steps=500): logging.INFO,
    events.PoolShrunk(**WHERE, error=died(), n_left=7, n_envs=8): logging.WARNING,
    events.StepCancelled(**WHERE, env_id=3): logging.INFO,
    events.LateReplyDiscarded(**WHERE, ticket=12): logging.INFO,
    events.Died(**WHERE, error=died()): logging.DEBUG,
    events.TimedOut(**WHERE, error=died()): logging.DEBUG,
    events.ProtocolBroken(**WHERE, error=died()): logging.DEBUG,
    events.NotStarted(**WHERE, error=died()): logging.DEBUG,
    events.Disconnected(**WHERE, error=died()): logging.DEBUG,
    events.ServerGone(**WHERE, error=ConnectionRefusedError(111, "refused"), wait_s=9.0): logging.WARNING,
    events.ServerBack(**WHERE, n_workers=64, after_s=3.1): logging.INFO,
    events.LoopBlocked(**WHERE, blocked_s=1.5, where="game.py:7 (step)", is_over=True): logging.WARNING,
    events.Abandoned(**WHERE, what="coroutine"): logging.WARNING,
    restarted(died()): logging.WARNING,
    events.Dropped(**WHERE, error=died()): logging.ERROR,
}
BY_KIND = pytest.mark.parametrize(("event", "level"), LEVELS.items(), ids=lambda each: type(each).__name__)


@pytest.fixture
def records(caplog):
    caplog.set_level(logging.DEBUG, logger="envmanager")
    return caplog


def test_events_are_kept_oldest_first():
    log = EventLog()
    added = [started(worker_id) for worker_id in range(5)]
    for event in added:
        log.add(event)

    assert list(log) == added
    assert len(log) == 5
    assert (log[0], log[-1], log[1:3]) == (added[0], added[-1], added[1:3])
    assert added[2] in log
    with pytest.raises(IndexError):
        _ = log[5]


def test_only_the_last_events_are_kept_and_all_are_counted():
    log = EventLog()
    for generation in range(KEPT + 250):
        log.add(started(generation=generation))

    assert len(log) == KEPT
    assert (log[0].generation, log[-1].generation) == (250, KEPT + 249)
    assert log.count(events.Started) == KEPT + 250


def test_a_kind_is_counted_with_its_subclasses():
    log = EventLog()
    for kind in (events.Died, events.TimedOut, events.Raised, events.Died):
        log.add(kind(**WHERE, error=died()))
    log.add(started())

    kinds = (events.Died, events.TimedOut, events.Raised, events.Failed, events.Started, events.Event, events.Dropped)
    assert [log.count(kind) for kind in kinds] == [2, 1, 1, 4, 1, 5, 0]


def test_an_event_may_be_added_while_the_log_is_read():
    log = EventLog()
    log.add(started())
    for _ in log:
        log.add(started())

    assert len(log) == 2


def test_kinds_may_be_counted_while_another_thread_adds_some():
    log, errors, done = EventLog(), [], threading.Event()
    own_kinds = [type(f"Own{number}", (events.Event,), {}) for number in range(3000)]

    def count():
        try:
            while not done.is_set():
                log.count(events.Event)
        except RuntimeError as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=count)
        thread.start()
        for kind in own_kinds:
            log.add(kind(**WHERE))
        done.set()
        thread.join()
    finally:
        sys.setswitchinterval(before)

    assert errors == []
    assert log.count(events.Event) == len(own_kinds)


@BY_KIND
def test_each_event_is_logged_once_at_the_level_of_its_kind(event, level, records):
    EventLog().add(event)

    (record,) = records.records
    assert (record.name, record.levelno) == ("envmanager", level)
    assert record.getMessage() == str(event)


@BY_KIND
def test_a_record_carries_the_kind_the_worker_and_its_environments_for_handlers(event, level, records):
    EventLog([[0], [1], [2], np.array([6, 7])]).add(event)

    (record,) = records.records
    fields = {"event": record.event, "worker_id": record.worker_id, "env_ids": record.env_ids}
    assert json.loads(json.dumps(fields)) == {"event": type(event).__name__, "worker_id": 3, "env_ids": [6, 7]}


@BY_KIND
def test_an_event_says_which_worker_it_is_about(event, level):
    assert "worker 3" in str(event)


def test_foreign_text_is_never_a_format(records):
    error = WorkerError(FOREIGN, worker_id=3, env_ids=[6], phase="step", cause=FOREIGN)
    exhausted = RestartsExhausted(first=error, last=died(FOREIGN), restarts=3, within_s=60.0)
    log = EventLog()
    for event in (
        events.Died(**WHERE, error=died(FOREIGN)),
        events.Raised(**WHERE, error=error),
        restarted(error),
        events.Dropped(**WHERE, error=exhausted),
    ):
        log.add(event)

    assert [FOREIGN in record.getMessage() for record in records.records] == [True] * 4
    assert all(record.msg == "%s" for record in records.records), "foreign text is an argument"


def test_of_a_worker_that_is_dropped_no_advice_is_given_that_comes_too_late():
    exhausted = RestartsExhausted(first=died(), last=died(), restarts=1, within_s=60.0)

    assert str(events.Dropped(**WHERE, error=exhausted)) == (
        "worker 3 is dropped; the others go on without it. It was restarted once within 60 s and failed again: "
        f"{exhausted.last}"
    )


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (restarted(died()), "worker 3 died in step (SIGSEGV); restart 2 (at most 3 in 60 s)"),
        (
            restarted(died(), 0.25, max_restarts=9),
            "worker 3 died in step (SIGSEGV); restart 2 (at most 9 in 60 s), after 0.2 s",
        ),
        (restarted(died(), within_s=math.inf), "worker 3 died in step (SIGSEGV); restart 2 (at most 3)"),
    ],
)
def test_a_restart_is_one_line_with_the_budget(event, line):
    assert str(event) == line


@pytest.mark.parametrize("kind", [events.Died, events.ProtocolBroken, events.Dropped])
def test_a_failure_is_logged_with_all_its_evidence(kind, records):
    error = WorkerDied(worker_id=3, env_ids=[6], phase="step", exit="SIGSEGV", output="Fatal Python error\nframe 1")
    EventLog().add(kind(**WHERE, error=error))

    assert records.records[0].getMessage().endswith("Fatal Python error\nframe 1")


def test_a_handler_that_formats_sees_foreign_text_unharmed(records):
    EventLog().add(events.Died(**WHERE, error=died(FOREIGN)))

    formatted = logging.Formatter("%(levelname)s {braces} %(message)s").format(records.records[0])
    assert formatted.startswith("DEBUG {braces} ")
    assert FOREIGN in formatted


def test_events_are_stamped_by_the_monotonic_clock_in_order():
    log = EventLog()
    for _ in range(10):
        log.add(started())

    times = [event.at_s for event in log]
    assert times == sorted(times)


def test_events_are_values_that_cannot_change():
    event = started()

    assert event == attrs.evolve(event)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        event.worker_id = 4


def test_the_log_shows_what_it_counted():
    log = EventLog()
    assert repr(log) == "<EventLog: nothing happened>"
    log.add(events.Died(**WHERE, error=died()))
    log.add(started())
    log.add(started())

    assert repr(log) == "<EventLog: 1 Died, 2 Started>"
