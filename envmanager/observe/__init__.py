"""Observation of a running manager: events, counters, times, traces. Nothing here changes what a manager does."""
