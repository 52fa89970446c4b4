"""Public import path of ``envmanager.adapters.factories``."""

from envmanager.adapters.factories import *  # noqa: F403
