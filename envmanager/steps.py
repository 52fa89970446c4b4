"""Public import path of ``envmanager.data.steps`` and ``envmanager.data.batches``."""

from envmanager.data.batches import *  # noqa: F403
from envmanager.data.steps import *  # noqa: F403
