"""What a row, a failure and a worker cost with a thousand fake workers: not more than with a few.

Counted are the instructions of Python's virtual machine, not time, so the loops of comprehensions count too.
`python -m benchmarks.many_workers` prints times, with ten thousand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from benchmarks import many_workers
from benchmarks.many_workers import FEW, POLICIES, PORTIONS, USES, ends, rounds, storm

SUITE = "many portable"

MANY = 1000
MORE = 1.05
"""Maximum ratio of a cost with many workers to the cost with few, for what is not constant to the last instruction."""


def n_instructions(function: Callable[[], int], before: Callable[[], int]) -> float:
    """How many instructions one of the things takes of which ``function`` does a number, those of the fakes aside.

    ``before`` does the same and is not counted. Python 3.12 and later do not tell of all in what is traced first.
    """
    count = 0

    def note(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename == many_workers.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return note

    tracer = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 wants that of a frame before it begins
    sys.settrace(note)
    try:
        before()
        count = 0
        n_things = function()
    finally:
        sys.settrace(tracer)
    return count / n_things


@pytest.mark.parametrize("state", POLICIES)
@pytest.mark.parametrize("use", USES)
def test_a_row_costs_the_same_however_many_workers_there_are_and_whatever_one_of_them_does(
    use: str, state: str
) -> None:
    with rounds(use, state, FEW) as few, rounds(use, state, MANY) as many:
        for wait in PORTIONS:
            if not ends(state, wait):
                continue
            # Twice, also because step() first sends actions for the rows of the wait before.
            costs = [n_instructions(partial(go_on, wait), partial(go_on, wait)) for go_on in (few, many)]
            assert costs[1] <= MORE * costs[0], f"wait for {wait}: {costs}"


@pytest.mark.parametrize("at_once", [False, True], ids=["singly", "at once"])
@pytest.mark.parametrize("then", ["raise", "drop", "restart", "back off"])
@pytest.mark.parametrize("use", USES)
def test_a_failure_costs_the_same_however_many_workers_fail(use: str, then: str, at_once: bool) -> None:
    costs = []
    for n_workers in (32, 256):
        with storm(use, then, 32, at_once=at_once) as first, storm(use, then, n_workers, at_once=at_once) as second:
            costs.append(n_instructions(second, first))
    few, many = costs
    assert many <= MORE * few
