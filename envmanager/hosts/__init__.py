"""Hosts of workers: the life of every worker that is not in the trainer's process, and of the one that is."""
