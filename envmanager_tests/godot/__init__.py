"""The Godot side: the addon and the demos, in real engines."""

SUITE = "godot start-methods faults"
