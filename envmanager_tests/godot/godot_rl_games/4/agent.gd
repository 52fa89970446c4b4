extends Node
## An agent as godot_rl_agents has them. It observes its own number, episode and action, so that tests see whose it is.

@export var kind := "continuous"
@export var policy_name := "shared_policy"
@export var number := 0
## Whether an episode ends a tick before the next one begins.
@export var resets_late := false

const LENGTH := 4

var done := false
var needs_reset := false
var is_cut := false
var reward := 0.0
var episode := 0
var acted := 0
var action := [0.0, 0.0]
var draw := 0.0
var ticks := 0


func _ready() -> void:
	add_to_group("AGENT")


func _physics_process(_delta: float) -> void:
	ticks += 1
	if needs_reset:
		begin()
	elif acted >= LENGTH + number:
		done = true
		if resets_late:
			needs_reset = true
		else:
			begin()


func begin() -> void:
	needs_reset = false
	episode += 1
	acted = 0
	action = [0.0, 0.0]
	draw = randf()


func get_obs() -> Dictionary:
	var seen := [number, episode, acted, action[0], action[1], draw, ticks]
	if is_cut:
		seen.pop_back()
	if kind == "camera":
		var picture := Image.create(4, 3, false, Image.FORMAT_RGB8)
		picture.fill(Color8(number, acted, 255))
		return {"camera_2d": picture.get_data().hex_encode(), "obs": seen}
	if kind == "mixed":
		return {"obs": seen, "mode": acted % 3}
	return {"obs": seen}


func get_obs_space() -> Dictionary:
	var space := {"obs": {"size": [7], "space": "box"}}
	if kind == "faulty":
		space["obs"]["size"] = [get_obs()["seen"].size()]
	if kind == "camera":
		space["camera_2d"] = {"size": [3, 4, 3], "space": "box"}
	if kind == "mixed":
		space["mode"] = {"size": 3, "space": "discrete"}
	return space


func get_action_space() -> Dictionary:
	var push := {"size": 2, "action_type": "continuous"}
	var move := {"size": 4, "action_type": "discrete"}
	if kind == "discrete":
		return {"move": move}
	if kind == "mixed":
		return {"push": push, "move": move}
	return {"push": push}


func set_action(given: Dictionary) -> void:
	acted += 1
	reward += 1 + number
	if kind == "discrete":
		action = [given["move"], 0.0]
	elif kind == "mixed":
		action = [given["push"][0], given["move"]]
	else:
		action = given["push"]


func take_reward() -> float:
	var taken := reward
	reward = 0.0
	return taken


func who() -> int:
	return number


func pace() -> Array:
	return [Engine.time_scale, Engine.physics_ticks_per_second]
