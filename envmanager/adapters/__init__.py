"""Adapters for the environments of other libraries.

``choosing.as_environment(env)`` chooses the adapter by the class of ``env``. Call an adapter directly to pass it
options, such as ``pettingzoo.ParallelEnvironment(env, behavior_of=…)``.
"""
