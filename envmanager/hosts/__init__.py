"""Hosts, which start, drive, replace and end workers in other processes or in the trainer's (the local worker)."""
