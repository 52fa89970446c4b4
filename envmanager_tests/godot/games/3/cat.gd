extends "res://addons/envmanager/agent.gd"

var choice: int = -1
var by_heuristic: int = 0
var sleeps_from: int = 1000


func observe() -> PoolRealArray:
	return PoolRealArray([choice, by_heuristic])


func act(_continuous: PoolRealArray, discrete: PoolIntArray) -> void:
	choice = discrete[0]


func heuristic() -> void:
	by_heuristic += 1
	act(PoolRealArray(), PoolIntArray([1]))
