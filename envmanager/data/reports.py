"""The report of a worker about its environments."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from envmanager.data.specs import BehaviorSpecs


@attrs.frozen
class StartReport:
    """The report of a worker that has made its environments."""

    specs: BehaviorSpecs
    max_agents: Mapping[str, int]
    partial_actions: bool
