"""Checks of an environment and of a Godot game. Their findings are sentences for the author."""

from envmanager.check.environment import Finding, check_environment

__all__ = ["Finding", "check_environment"]
