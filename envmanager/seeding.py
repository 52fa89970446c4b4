"""The documented way to ``envmanager.data.seeding``."""

from envmanager.data.seeding import *  # noqa: F403
