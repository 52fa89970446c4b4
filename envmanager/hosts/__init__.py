"""Hosts start, drive, replace and end workers: those in other processes, and the local one in the trainer's own."""
