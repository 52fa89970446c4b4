"""Where workers stand: every move that makes sense, every one that does not, and what waits where."""

from __future__ import annotations

import pytest

from envmanager.data.steps import EnvironmentResponse
from envmanager.errors import WorkerDied
from envmanager.kernel.table import Entry, Replacement, WorkerState, WorkerTable

IDLE, IN_FLIGHT, READY, REPLACING, FAILED, DROPPED = WorkerState

MEANT = {
    (IDLE, IN_FLIGHT): "a step is sent",
    (IDLE, READY): "the first observations are offered, or it failed while nobody asked anything and that is raised",
    (IDLE, REPLACING): "it failed while nobody asked anything",
    (IDLE, DROPPED): "the same, past the budget",
    (IN_FLIGHT, READY): "its response is here",
    (IN_FLIGHT, REPLACING): "it failed, or is recycled",
    (IN_FLIGHT, DROPPED): "it failed past the budget",
    (READY, IDLE): "handed out",
    (READY, READY): "handed out, and something follows",
    (READY, REPLACING): "handed out after it had failed; or the replacement failed before it was",
    (READY, FAILED): "its failure was raised",
    (READY, DROPPED): "handed out after it had been dropped",
    (REPLACING, READY): "the first observations of the next generation are here",
    (REPLACING, REPLACING): "the next generation failed too",
    (REPLACING, DROPPED): "the same, past the budget",
    (FAILED, IDLE): "a reset, which it can obey",
    (FAILED, REPLACING): "a reset, for which another must take its place",
}


@pytest.mark.parametrize("before", WorkerState, ids=lambda state: state.name)
@pytest.mark.parametrize("to", WorkerState, ids=lambda state: f"to {state.name}")
def test_a_worker_moves_where_it_makes_sense_and_nowhere_else(before, to):
    table = WorkerTable([[0]])
    (entry,) = table.entries
    outbox = (response(),) if to is READY else ()
    entry.state, table.ready = before, dict.fromkeys([entry] if before is READY else [])
    if (before, to) in MEANT:
        table.move([entry], to, outbox)
        assert (entry.state, entry.outbox, list(table.ready)) == (to, outbox, [entry] if to is READY else [])
    else:
        with pytest.raises(RuntimeError, match=f"worker 0 cannot go from {before.name} to {to.name}"):
            table.move([entry], to, outbox)
        assert entry.state is before


@pytest.mark.parametrize("state", WorkerState, ids=lambda state: state.name)
def test_a_worker_waits_while_something_of_it_is_to_be_handed_out(state):
    assert Entry(0, (0,), state=state).waiting == (state in (IN_FLIGHT, READY, REPLACING))


def response(name="step", worker_id=0):
    payload = WorkerDied(worker_id=worker_id, env_ids=[0], phase="step", exit="SIGKILL") if name == "failed" else {}
    return EnvironmentResponse(name, worker_id, payload)


def flying(n_workers=1):
    table = WorkerTable([[worker_id] for worker_id in range(n_workers)])
    table.move(table.entries, IN_FLIGHT, ())
    return table


def arrive(table, *responses):
    for each in responses:
        table.move([table.entries[each.worker_id]], READY, (each,))


def test_a_response_waits_in_its_outbox_until_it_is_delivered():
    table = flying()
    (entry,) = table.entries
    answer = response()
    arrive(table, answer)
    assert (entry.state, entry.outbox, list(table.ready)) == (READY, (answer,), [entry])

    table.delivered([entry])
    assert (entry.state, entry.outbox, list(table.ready)) == (IDLE, (), [])
    assert (entry.steps, entry.steps_since_reset) == (1, 1)


def test_those_that_are_ready_stand_in_order_of_arrival():
    table = flying(3)
    arrive(table, *(response(worker_id=worker_id) for worker_id in (2, 0, 1)))
    assert table.n_waiting == 3
    table.delivered([table.entries[0]])

    assert table.n_waiting == 2
    assert [entry.worker_id for entry in table.ready] == [2, 1]


def test_a_move_that_makes_no_sense_moves_no_other_worker():
    table = WorkerTable([[0], [1]])
    first, second = table.entries
    table.move([second], IN_FLIGHT, ())
    with pytest.raises(RuntimeError, match="cannot go from IN_FLIGHT to IN_FLIGHT"):
        table.move([first, second], IN_FLIGHT, ())
    assert (first.state, table.n_waiting) == (IDLE, 1)


def test_a_step_that_is_delivered_is_counted_with_its_environments_and_the_time_it_waited(mocker):
    mocker.patch("envmanager.kernel.table.time.perf_counter_ns", return_value=1500)
    table = WorkerTable([[0, 1], [2]])
    for entry in table.entries:
        entry.n_envs_in_flight = len(entry.env_ids)
    table.move(table.entries, IN_FLIGHT, ())
    table.entries[0].times.stepped(10, 1100)  # the other has reported no times
    arrive(table, response(), response(worker_id=1))
    table.delivered(table.entries)

    assert (table.env_steps, [entry.steps for entry in table.entries]) == (3, [1, 1])
    assert [entry.times.queued_ns for entry in table.entries] == [400, 0]


def test_what_is_no_step_counts_as_none():
    table = flying()
    arrive(table, response("reset"))
    table.delivered(table.entries)

    assert table.entries[0].steps == 0


def test_what_follows_a_response_is_ready_when_that_was_delivered():
    table = flying()
    (entry,) = table.entries
    answer, failure = response(), response("failed")
    arrive(table, answer)
    entry.error = failure.payload
    table.set_pending(entry, answer, failure)

    table.delivered([entry])
    assert (entry.state, entry.outbox, list(table.ready)) == (READY, (failure,), [entry])
    assert list(table.failures) == [entry]
    table.delivered([entry])
    assert (entry.state, entry.outbox, list(table.ready), list(table.failures)) == (FAILED, (), [], [])
    assert not entry.ignores_action, "a later send() raises the error"


def test_a_response_keeps_its_turn_when_something_is_to_follow_it():
    table = flying(2)
    first, second = table.entries
    arrive(table, response(), response(worker_id=1))
    first.replacement = Replacement(None)
    table.set_pending(first, *first.outbox)

    assert list(table.ready) == [first, second]
    table.delivered([first])
    assert (first.state, first.ignores_action) == (REPLACING, True), "the trainer cannot know that it has gone"


def test_the_first_observations_of_a_generation_end_its_replacement():
    table = flying()
    (entry,) = table.entries
    entry.replacement = Replacement(None)
    table.set_pending(entry)
    assert table.unusual == {entry}

    entry.replacement.has_begun = True
    table.set_pending(entry, response("reset"))
    assert entry.is_first_of_generation
    table.delivered([entry])
    assert (entry.state, entry.replacement, entry.ignores_action) == (IDLE, None, False)
    assert table.unusual == set()


def test_the_slowest_is_one_that_takes_part():
    table = flying(3)
    for entry, steps in zip(table.entries, (5, 3, 1), strict=True):
        entry.steps_since_reset = steps
    table.entries[2].error = ValueError()

    assert table.slowest() == 3


def test_the_slowest_is_known_while_workers_overtake_each_other_and_after_a_reset():
    table = flying(3)
    seen = []
    for worker_id in (0, 1, 0, 2, 2, 1):
        seen.append(table.slowest())
        arrive(table, response(worker_id=worker_id))
        table.delivered([table.entries[worker_id]])
        table.move([table.entries[worker_id]], IN_FLIGHT, ())
    assert [*seen, table.slowest()] == [0, 0, 0, 0, 1, 1, 2]

    table.begin_counting()
    assert table.slowest() == 0
