"""What makes an Environment of another library's: one module per library, imported only when it is needed.

``choosing.as_environment`` chooses by the object's classes. Wrap by hand when an adapter has a choice to offer, such
as ``pettingzoo.ParallelEnvironment(env, behavior_of=…)``.
"""
