"""The documented way to ``envmanager.observe.tensorboard``."""

from envmanager.observe.tensorboard import *  # noqa: F403
