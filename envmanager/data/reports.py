"""What a worker reports of its environments, besides responses."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from envmanager.data.fitting import Cast
from envmanager.data.specs import BehaviorSpecs


@attrs.frozen
class StartReport:
    """What a worker reports of its environments once they are made."""

    specs: BehaviorSpecs
    max_agents: Mapping[str, int]
    partial_actions: bool


@attrs.frozen
class News:
    """What a worker reports with a response: all specs if there are new behaviors, and what it had to cast."""

    specs: BehaviorSpecs | None = None
    casts: tuple[Cast, ...] = ()
