"""Modules for operating system services: signals, processes, CPU cores and files."""
