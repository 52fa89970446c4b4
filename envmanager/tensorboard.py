"""Public import path of ``envmanager.observe.tensorboard``."""

from envmanager.observe.tensorboard import *  # noqa: F403
