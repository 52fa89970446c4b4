"""Start methods as parameters of tests: in `make test` the first one, in `make faults` all of them."""

from __future__ import annotations

import pytest

MARKED_START_METHODS = [
    "forkserver",
    pytest.param("spawn", marks=pytest.mark.start_methods),
    pytest.param("fork", marks=pytest.mark.start_methods),
]
