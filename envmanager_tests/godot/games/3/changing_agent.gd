extends "res://addons/envmanager/agent.gd"
# One of several agents of a scene that is reloaded.

export(int) var number = 0


func observe() -> PoolRealArray:
	return PoolRealArray([number, arena.ticks, number * arena.drawn])
