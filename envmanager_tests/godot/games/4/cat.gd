extends "res://addons/envmanager/agent.gd"

var choice := -1
var by_heuristic := 0
var sleeps_from := 1000


func observe() -> PackedFloat32Array:
	return PackedFloat32Array([choice, by_heuristic])


func act(_continuous: PackedFloat32Array, discrete: PackedInt32Array) -> void:
	choice = discrete[0]


func heuristic() -> void:
	by_heuristic += 1
	act(PackedFloat32Array(), PackedInt32Array([1]))
