"""Any order of moves: what the seats count and keep in arrays is what one would find by looking at each of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from envmanager.kernel.seats import Drawn, Seat, Seats, SeatState
from envmanager.tasks import Task

BLOCKS = [(0, 1, 2), (3,)]
RESTS, COMING, SENT, PLAYS, CUT = SeatState
MOVES = ("assign", "at_once", "withdraw", "tell", "send", "begin", "end", "vacate", "first")


class Game:
    """Seats, moves that are allowed now, and the tasks that went in and came out."""

    def __init__(self) -> None:
        self.seats = Seats(BLOCKS)
        self.n_drawn = 0
        self.left: list[Drawn] = []

    def move(self, name: str, seat: Seat) -> None:
        seats, state, knows_next = self.seats, seat.state, seat.is_laid or seat.state is SENT
        if name in ("assign", "at_once") and not knows_next and (seat.next is None or name == "at_once"):
            if seat.next is not None:
                self.left.append(seat.next)
            drawn = Drawn(self.n_drawn, Task())
            self.n_drawn += 1
            seats.assign(seat, drawn, at_once=name == "at_once")
        elif name == "withdraw" and seat.next is not None and not knows_next:
            self.left.append(seat.next)
            seats.withdraw(seat)
            assert seat.state is (RESTS if state is COMING else PLAYS)
        elif name == "tell":
            was_told = {each for each in seats.of_worker[seat.worker_id] if each.is_laid or each.state is SENT}
            for told, drawn, at_once in seats.tell(seat.worker_id):
                assert told not in was_told
                assert told.next is drawn
                assert at_once == (told.state is SENT) != told.is_laid
        elif name == "send" and state is RESTS:
            seats.send([seat])
        elif name == "begin" and seats.first[seat.env_id]:
            before, coming = seat.playing, seat.next
            cut = seats.begin(seat)
            assert cut is (before if state is SENT else None)
            assert seat.playing is (coming if state is SENT else before)
            self.left += [cut] if cut else []
        elif name == "end" and state in (PLAYS, CUT) and not seats.first[seat.env_id]:
            self.left += [seat.playing] if seat.playing else []
            goes_on = seat.is_laid
            assert seats.end(seat) == goes_on == (seat.state is PLAYS)
        elif name == "vacate":
            playing, coming, was_begun = seats.vacate(seat)
            assert was_begun == (state is SENT)
            self.left += [drawn for drawn in (playing, coming) if drawn]
        elif name == "first" and state is PLAYS:  # a reset's observations are returned by recv once more
            seats.set_first(seat, True)

    def check(self) -> None:
        seats = self.seats
        for worker_id, own in enumerate(seats.of_worker):
            assert seats.n_acting_in[worker_id] == sum(seat.state is PLAYS for seat in own)
            assert seats.n_first_in[worker_id] == sum(bool(seats.first[seat.env_id]) for seat in own)
            untold = [seat for seat in own if seat.next is not None and not seat.is_laid and seat.state is not SENT]
            assert sorted(seat.env_id for seat in seats.untold.get(worker_id, [])) == [seat.env_id for seat in untold]
            assert (worker_id in seats.untold) == bool(untold)
            playing = {seat.env_id: seat.playing.index for seat in own if seat.playing is not None}
            assert seats.tasks_in(worker_id) == playing
        assert seats.n_acting == sum(seats.n_acting_in)
        assert seats.n_first == sum(seats.n_first_in)
        assert seats.n_active == sum(seat.state is not RESTS for seat in seats.all)
        for seat in seats.all:
            assert seats.acts[seat.env_id] == (seat.state is PLAYS)
            assert seats.index[seat.env_id] == (-1 if seat.playing is None else seat.playing.index)
            assert seats.first[seat.env_id] or seat.state is not SENT
            assert not (seat.state is RESTS and (seat.playing or seat.next))
            assert not (seat.state in (COMING, CUT) and (seat.next is None or seat.is_laid))
            assert not (seat.is_laid and seat.next is None)
        inside = [drawn.index for seat in seats.all for drawn in seat.tasks]
        assert sorted(inside + [drawn.index for drawn in self.left]) == list(range(self.n_drawn)), "each task once"


@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 3)), max_size=60))
def test_no_order_of_moves_loses_a_task_or_miscounts(moves):
    game = Game()
    for name, env_id in moves:
        game.move(name, game.seats.all[env_id])
        game.check()


def test_seats_of_episodes_that_begin_by_themselves_play_from_the_start():
    seats = Seats(BLOCKS, plays=True)
    assert seats.n_acting == seats.n_active == 4
    assert seats.acts.all()
    assert not seats.first.any()
