"""Godot engines as workers: an engine process hosts environments and exchanges frames with the trainer over TCP."""
