extends "res://addons/envmanager/arena.gd"
# An arena that observes the parameters of its episode, which lasts two actions, and a number of its rng.

const TICKS = 8

var ticks = 0
var drawn = 0.0


func reset(from: RandomNumberGenerator, _options: Dictionary) -> void:
	ticks = 0
	drawn = from.randf()


func observe():
	return PoolRealArray([parameter("wind", -1.0), parameter("rain", -1.0), parameter("snow", -1.0), parameter("hail", -1.0), drawn])


func act(_continuous, _discrete) -> void:
	pass


func info():
	return {"is_wet": parameter("rain", 0.0)}


func after_tick() -> void:
	ticks += 1
	if ticks == TICKS:
		add_reward(parameter("rain", 0.0))
		end_episode()
