"""The documented way to ``envmanager._workers.hosting``."""

from envmanager._workers.hosting import *  # noqa: F403
