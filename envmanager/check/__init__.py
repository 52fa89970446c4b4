"""Checks of an environment or a Godot game, which return their findings as sentences for its author."""

from envmanager.check.environment import Finding, check_environment

__all__ = ["Finding", "check_environment"]
