"""Workers that are Python processes on this machine and share memory with the trainer."""
