"""Adapters for environments of other libraries: one module per library, imported when needed.

``choosing.as_environment(env)`` chooses the adapter by the classes of ``env``. Call an adapter directly to pass it
options, such as ``pettingzoo.ParallelEnvironment(env, behavior_of=…)``.
"""
