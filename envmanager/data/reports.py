"""Reports of a worker about its environments."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from envmanager.data.fitting import Cast
from envmanager.data.specs import BehaviorSpecs


@attrs.frozen
class StartReport:
    """The report of a worker that has made its environments."""

    specs: BehaviorSpecs
    max_agents: Mapping[str, int]
    partial_actions: bool


@attrs.frozen
class News:
    """Report sent with a response: all specs if a behavior is new, and the casts made since the last report."""

    specs: BehaviorSpecs | None = None
    casts: tuple[Cast, ...] = ()
