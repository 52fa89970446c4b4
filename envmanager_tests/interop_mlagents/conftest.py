"""ML-Agents' modules warn of many deprecations when they are imported, which the tests must not take for errors."""

from __future__ import annotations

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import mlagents.trainers.learn  # noqa: F401
