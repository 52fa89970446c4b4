"""Public import path of ``envmanager.data.specs``."""

from envmanager.data.specs import *  # noqa: F403
