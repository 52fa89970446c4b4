"""The documented way to ``envmanager.data.steps``."""

from envmanager.data.steps import *  # noqa: F403
