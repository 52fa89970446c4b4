"""Godot engines as workers: an engine process hosts environments and speaks with the trainer over a socket."""
