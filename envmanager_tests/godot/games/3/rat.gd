extends "res://addons/envmanager/agent.gd"

var age: int = 0
var restarts: int = 0
var last: PoolRealArray = PoolRealArray([0, 0])


func observations() -> Array:
	return [
		{"name": "image", "shape": [2, 3], "dtype": "uint8", "low": 0, "high": 255},
		{"name": "last", "shape": [2], "dtype": "float32", "low": null, "high": null},
		{"name": "age", "shape": [], "dtype": "int32", "low": 0, "high": null},
	]


func observe() -> Array:
	var image = PoolByteArray([1, 2, 3, 4, 5, 250])
	return [image, last, PoolIntArray([age])]


func act(continuous: PoolRealArray, discrete: PoolIntArray) -> void:
	age += 1
	last = PoolRealArray([continuous[0], 10 * discrete[0] + discrete[1]])


func heuristic() -> void:
	act(PoolRealArray([-0.5]), PoolIntArray([2, 1]))


func restart() -> void:
	restarts += 1
	age = 0


func info():
	return {"age": age, "restarts": restarts}
