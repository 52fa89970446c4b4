extends "res://mirror.gd"
# Sees whole numbers too, in arrays of their own.


func observations() -> Array:
	var counts = {"name": "counts", "shape": [2], "dtype": "int32", "low": null, "high": null}
	var levels = {"name": "levels", "shape": [3], "dtype": "uint8", "low": 0, "high": 255}
	return [counts, levels] + .observations()


func observe():
	return [PoolIntArray([arena.n_acts, -7]), PoolByteArray([1, 200, arena.n_acts % 256]), .observe()]
