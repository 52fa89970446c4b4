"""Public import path of ``envmanager._workers.hosting``."""

from envmanager._workers.hosting import *  # noqa: F403
