"""Start methods as parameters of tests: in `make test` the first one, in `make faults` all of them."""

from __future__ import annotations

import pytest

from envmanager.options import START_METHODS

_first, *_others = START_METHODS
MARKED_START_METHODS = [_first, *(pytest.param(each, marks=pytest.mark.start_methods) for each in _others)]
