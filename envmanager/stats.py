"""The documented way to ``envmanager.observe.stats``."""

from envmanager.observe.stats import *  # noqa: F403
