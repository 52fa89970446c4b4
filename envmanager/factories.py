"""The documented way to ``envmanager.adapters.factories``."""

from envmanager.adapters.factories import *  # noqa: F403
