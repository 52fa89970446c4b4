"""Checks of one environment, or of one Godot game: what is wrong with it, in plain words."""

from envmanager.check.environment import Finding, check_environment

__all__ = ["Finding", "check_environment"]
