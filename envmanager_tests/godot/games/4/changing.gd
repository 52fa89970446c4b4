extends "res://addons/envmanager/arena.gd"
## Changes its scene in the way that the option "change" names, at tick 6 of an episode.

@export var level := 1

var change := ""
var ticks := 0
var drawn := 0.0


func reset(from: RandomNumberGenerator, options: Dictionary) -> void:
	change = options.get("change", OS.get_environment("CHANGE"))
	ticks = 0
	drawn = from.randf()
	if change == "in reset":
		get_tree().reload_current_scene()


func observe() -> PackedFloat32Array:
	return PackedFloat32Array([ticks, drawn, level])


func after_tick() -> void:
	ticks += 1
	add_reward(1.0)
	if ticks == 6:
		make_change(change)


func info() -> Dictionary:
	return {"ticks": ticks}


func make_change(how: String) -> void:
	match how:
		"reload":
			get_tree().reload_current_scene()
		"truncate":
			end_episode(true)
			get_tree().reload_current_scene()
		"level":
			get_tree().change_scene_to_file("res://changed.tscn")
		"by hand":
			get_tree().current_scene.queue_free()
			var next: Node = load("res://changed.tscn").instantiate()
			get_tree().root.add_child(next)
			get_tree().current_scene = next
		"swap":
			var next: Node = duplicate()
			queue_free()
			get_parent().add_child(next)
		"menu":
			get_tree().change_scene_to_file("res://empty.tscn")
		"free":
			queue_free()
		"free root":
			root.queue_free()
