"""Adapters for environments of other libraries: one module per library, imported when needed.

``choosing.as_environment`` chooses an adapter by the object's classes. Call an adapter directly to pass it options,
such as ``pettingzoo.ParallelEnvironment(env, behavior_of=…)``.
"""
