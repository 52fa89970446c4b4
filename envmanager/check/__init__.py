"""Checks of one environment or one Godot game, with findings in plain words."""

from envmanager.check.environment import Finding, check_environment

__all__ = ["Finding", "check_environment"]
