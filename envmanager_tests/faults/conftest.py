"""A guard for tests of this folder that start programs and kill processes; they ask for it by ``usefixtures``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Fail when a test leaves processes behind, and end them."""
    from envmanager_tests.faults.scripts import ending_what_is_left  # here, because Windows cannot import it

    with ending_what_is_left():
        yield
