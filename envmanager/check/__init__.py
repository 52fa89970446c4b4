"""Checks of one environment or one Godot game, whose findings are sentences for its author."""

from envmanager.check.environment import Finding, check_environment

__all__ = ["Finding", "check_environment"]
