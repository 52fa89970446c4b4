"""Public import path of ``envmanager.observe.stats``."""

from envmanager.observe.stats import *  # noqa: F403
