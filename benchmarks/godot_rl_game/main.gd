extends Node2D
## Copies of the arena on a square grid, `--arenas=N` of them, and godot_rl_agents' node that trains them.

const SPACING := 480.0
const Sync := preload("res://addons/godot_rl_agents/sync.gd")


func _ready() -> void:
	var count := 1
	for argument in OS.get_cmdline_args():
		if argument.begins_with("--arenas="):
			count = argument.get_slice("=", 1).to_int()
	var columns := ceili(sqrt(count))
	for i in count:
		var arena: Node2D = preload("res://arena.tscn").instantiate()
		@warning_ignore("integer_division")
		arena.position = Vector2(i % columns, i / columns) * SPACING
		arena.visible = i == 0
		add_child(arena)
	# After the arenas, so that a tick's observations include what the arenas recorded in the same tick.
	add_child(Sync.new())
