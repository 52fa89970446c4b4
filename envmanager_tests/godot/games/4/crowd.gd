extends "res://addons/envmanager/arena.gd"
## A cat stays. Of the rats one comes at tick 4, the oldest leaves at 8, the then oldest begins anew at 12.
## All ends at 20.

const RAT := preload("res://rat.tscn")

var ticks := 0
var rats := []
var label := "none"

@onready var cat: Node = $"../Cat/Agent"


func reset(_from: RandomNumberGenerator, options: Dictionary) -> void:
	while not rats.is_empty():
		_remove_oldest()
	ticks = 0
	cat.sleeps_from = options.get("sleeps_from", 1000)
	for i in options.get("rats", 2):
		_add_rat()


func after_tick() -> void:
	ticks += 1
	cat.wants_action = ticks < cat.sleeps_from
	if ticks == 4:
		_add_rat()
	elif ticks == 8:
		rats[0].get_node("Agent").add_reward(5.0)
		_remove_oldest()
	elif ticks == 12:
		rats[0].get_node("Agent").end(true)
	elif ticks == 20:
		cat.add_reward(2.0)
		end_episode()
		cat.add_reward(100.0)  # too late


func count_rats(times := 1) -> int:
	return rats.size() * int(times)


func is_visible() -> bool:
	return root.visible


func pause() -> void:
	get_tree().paused = true


func shout(text: String) -> Dictionary:
	note("shout", {"text": text, "at": Vector2(1, 2)})
	return {"said": text, "where": [Vector2(3, 4), NAN]}


func press(key: int, with_ctrl: bool) -> void:
	var event := InputEventKey.new()
	event.keycode = int(key) as Key
	event.ctrl_pressed = with_ctrl
	event.pressed = true
	Input.parse_input_event(event)


func call_nobody(_times: int) -> void:
	var nobody = null
	nobody.call_me()


func _add_rat() -> void:
	var rat := RAT.instantiate()
	rats.append(rat)
	root.add_child(rat)


func _remove_oldest() -> void:
	var rat: Node = rats.pop_front()
	rat.get_node("Agent").leave()
	rat.queue_free()
