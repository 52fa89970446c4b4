"""Hosts, which start, replace and stop workers in other processes, and the local worker, in the trainer's process."""
