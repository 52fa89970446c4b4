"""Checks of an environment and of a Godot game. The findings are written for the author of the environment or game."""

from envmanager.check.environment import Finding, check_environment

__all__ = ["Finding", "check_environment"]
