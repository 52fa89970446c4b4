"""Checks of an environment and of a Godot game. A check returns findings, which are sentences for the author."""

from envmanager.check.environment import Finding, check_environment

__all__ = ["Finding", "check_environment"]
