"""Where workers stand: every move that makes sense, every one that does not, and what waits where."""

from __future__ import annotations

import pytest

from envmanager.core.table import Entry, Replacement, WorkerState, WorkerTable
from envmanager.data.steps import EnvironmentResponse
from envmanager.errors import WorkerDied

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
    entry = Entry(0, (0,), state=before)
    if (before, to) in MEANT:
        entry.move(to)
        assert entry.state is to
    else:
        with pytest.raises(RuntimeError, match=f"worker 0 cannot go from {before.name} to {to.name}"):
            entry.move(to)
        assert entry.state is before


@pytest.mark.parametrize("state", WorkerState, ids=lambda state: state.name)
def test_a_worker_waits_while_something_of_it_is_to_be_handed_out(state):
    assert Entry(0, (0,), state=state).waiting == (state in (IN_FLIGHT, READY, REPLACING))


def response(name="step", worker_id=0):
    payload = WorkerDied(worker_id=worker_id, env_ids=[0], phase="step", exit="SIGKILL") if name == "failed" else {}
    return EnvironmentResponse(name, worker_id, payload)


def flying(n_workers=1):
    table = WorkerTable([[worker_id] for worker_id in range(n_workers)])
    for entry in table.entries:
        table.sent(entry, 1)
    return table


def test_a_response_waits_in_its_entry_until_it_is_handed_out():
    table = flying()
    (entry,) = table.entries
    answer = response()
    assert table.arrived([answer]) == 1
    assert (entry.state, entry.response, table.ready) == (READY, answer, [entry])

    table.handed_out([entry])
    assert (entry.state, entry.response, table.ready) == (IDLE, None, [])
    assert (entry.steps, entry.steps_since_reset) == (1, 1)


def test_those_that_are_ready_stand_in_order_of_arrival():
    table = flying(3)
    for worker_id in (2, 0, 1):
        table.arrived([response(worker_id=worker_id)])
    assert table.n_waiting == 3
    table.handed_out([table.entries[0]])

    assert table.n_waiting == 2
    assert [entry.worker_id for entry in table.ready] == [2, 1]


@pytest.mark.parametrize(
    ("responses", "n_taken"),
    [
        ([response(), response(worker_id=1)], 2),
        ([response(), response()], 1),
        ([response("failed"), response(worker_id=1)], 0),
        ([response("reset")], 0),
        ([], 0),
    ],
    ids=["a step each", "a second one", "a failure first", "no step", "none"],
)
def test_steps_are_taken_up_to_the_first_response_that_is_none_or_that_nobody_waits_for(responses, n_taken):
    table = flying(2)
    assert table.arrived(responses) == n_taken
    assert [entry.response for entry in table.ready] == responses[:n_taken]
    if responses and not n_taken:
        assert table.arrived(responses, 1) == len(responses)


def test_a_worker_that_is_not_idle_is_sent_nothing():
    table = WorkerTable([[0, 1]])
    (entry,) = table.entries
    table.sent(entry, 2)
    assert (entry.state, entry.n_envs_in_flight) == (IN_FLIGHT, 2)
    with pytest.raises(RuntimeError, match="cannot go from IN_FLIGHT to IN_FLIGHT"):
        table.sent(entry, 1)


def test_a_step_that_is_handed_out_is_counted_with_its_environments_and_the_time_it_waited(mocker):
    mocker.patch("envmanager.core.table.time.monotonic_ns", return_value=1500)
    table = WorkerTable([[0, 1], [2]])
    for entry in table.entries:
        table.sent(entry, len(entry.env_ids))
    table.entries[0].times.stepped(10, 0, 1100)  # the other has told no times
    table.arrived([response(), response(worker_id=1)])
    table.handed_out(table.entries)

    assert (table.env_steps, [entry.steps for entry in table.entries]) == (3, [1, 1])
    assert [entry.times.queued_ns for entry in table.entries] == [400, 0]


def test_what_is_no_step_counts_as_none():
    table = flying()
    (entry,) = table.entries
    table.offered(entry, response("reset"))
    table.handed_out([entry])

    assert entry.steps == 0


def test_what_follows_a_response_is_ready_when_that_was_handed_out():
    table = flying()
    (entry,) = table.entries
    answer, failure = response(), response("failed")
    assert table.arrived([answer]) == 1
    entry.error = failure.payload
    table.expect(entry, answer, failure)
    assert entry.response is answer

    table.handed_out([entry])
    assert (entry.state, entry.response, table.ready) == (READY, failure, [entry])
    table.handed_out([entry])
    assert (entry.state, entry.response, table.ready) == (FAILED, None, [])
    assert not entry.ignores_action, "who sends to it gets the error"


def test_a_response_keeps_its_turn_when_something_is_to_follow_it():
    table = flying(2)
    first, second = table.entries
    table.arrived([response()])
    table.arrived([response(worker_id=1)])
    first.replacement = Replacement(1, None, 0.0)
    table.expect(first, first.response)

    assert table.ready == [first, second]
    table.handed_out([first])
    assert (first.state, first.ignores_action) == (REPLACING, True), "the trainer cannot know that it has gone"


def test_the_first_observations_of_a_generation_end_its_replacement():
    table = flying()
    (entry,) = table.entries
    entry.replacement = Replacement(1, None, 0.0)
    table.expect(entry)
    assert not table.is_ordinary

    entry.replacement.first = response("reset")
    table.expect(entry, entry.replacement.first)
    assert entry.is_first_of_generation
    table.handed_out([entry])
    assert (entry.state, entry.replacement, entry.ignores_action, table.is_ordinary) == (IDLE, None, False, True)


def test_the_slowest_is_one_that_takes_part():
    table = flying(3)
    for entry, steps in zip(table.entries, (5, 3, 1), strict=True):
        entry.steps, entry.steps_at_reset = 10 + steps, 10
    table.entries[2].error = ValueError()

    assert table.slowest() == 3
