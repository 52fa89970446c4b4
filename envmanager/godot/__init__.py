"""Godot engines as workers: the addon a game needs, demo games, and what puts them into place."""
