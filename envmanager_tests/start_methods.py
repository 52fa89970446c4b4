"""Start methods as parameters of tests: in `make test` the first one, in `make faults` all of them.

The portable transport has only "spawn", so `make test-portable` runs these tests once.
"""

from __future__ import annotations

import os

import pytest

from envmanager.options import START_METHODS

IS_PORTABLE = os.environ.get("ENVMANAGER_TRANSPORT") == "portable"
"""Whether managers of the tests use the portable transport unless a test chooses one."""
MEMORY = "memfd:envmanager (deleted)"
"""Part of the name of the shared memory under /proc."""
FIRST_START_METHOD, *_others = ("spawn",) if IS_PORTABLE else START_METHODS
MARKED_START_METHODS = [FIRST_START_METHOD, *(pytest.param(each, marks=pytest.mark.start_methods) for each in _others)]

native_only = pytest.mark.skipif(IS_PORTABLE, reason="about the native transport: its helper, pipe or memory")
loses = pytest.mark.skipif(IS_PORTABLE, reason="what the portable transport cannot do, see docs/choosing-a-manager.md")
