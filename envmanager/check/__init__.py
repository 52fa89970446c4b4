"""Checks of an environment or a Godot game, which return findings: sentences for the author of either."""

from envmanager.check.environment import Finding, check_environment

__all__ = ["Finding", "check_environment"]
