"""The documented way to ``envmanager.observe.events``."""

from envmanager.observe.events import *  # noqa: F403
