"""The local worker in the trainer's process, and hosts, which start, replace and stop workers in other processes."""
