"""Public import path of ``envmanager.observe.events``."""

from envmanager.observe.events import *  # noqa: F403
