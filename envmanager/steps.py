"""The documented way to ``envmanager.data.steps`` and ``batches``."""

from envmanager.data.batches import *  # noqa: F403
from envmanager.data.steps import *  # noqa: F403
