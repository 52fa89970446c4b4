"""Hosts, which start, replace and end workers in other processes, and the local worker in the trainer's process."""
