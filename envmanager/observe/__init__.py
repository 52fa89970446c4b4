"""Modules that record a manager's events, statistics, episodes, traces and metrics. They do not affect the run."""
