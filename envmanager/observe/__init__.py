"""Modules that record what managers and training runs do: events, statistics, episodes, traces and metrics."""
