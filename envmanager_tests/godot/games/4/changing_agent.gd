extends "res://addons/envmanager/agent.gd"
## One of several agents of a scene that is reloaded.

@export var number := 0


func observe() -> PackedFloat32Array:
	return PackedFloat32Array([number, arena.ticks, number * arena.drawn])
