"""Modules that record what a manager does: events, statistics, episodes, traces, metrics. None affects the run."""
