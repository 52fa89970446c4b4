"""Public import path of ``envmanager.data.seeding``."""

from envmanager.data.seeding import *  # noqa: F403
