"""The documented way to ``envmanager.data.specs``."""

from envmanager.data.specs import *  # noqa: F403
