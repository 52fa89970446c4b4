extends "res://addons/envmanager/arena.gd"
# An episode begins with the player somewhere on a line, and ends in the middle of it or after ten seconds.

const WIDTH := 400.0
const MAX_TICKS := 600

var ticks := 0

onready var player: Node = $"../Line/Player/Agent"


func reset(from: RandomNumberGenerator, _options: Dictionary) -> void:
	player.begin_at(from.randf_range(-WIDTH / 2, WIDTH / 2))
	ticks = 0


func after_tick() -> void:
	ticks += 1
	player.add_reward(-0.01)
	if player.is_home():
		player.add_reward(1.0)
		end_episode()
	elif ticks >= MAX_TICKS:
		end_episode(true)
