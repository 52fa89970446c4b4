"""Modules that probe an environment and choose where, and in how many workers, the environments run."""
