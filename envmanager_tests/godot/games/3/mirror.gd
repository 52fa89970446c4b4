extends "res://addons/envmanager/agent.gd"
# Sees random numbers and, behind these, what it did last. Without a trainer it prints what it does.

const Wire = preload("res://addons/envmanager/wire.gd")
const MOST = 20  # actions without a trainer

var seen: PoolRealArray = PoolRealArray()
var n_acts: int = 0
var by_heuristic: int = 0


func look(did: PoolRealArray) -> void:
	seen = PoolRealArray()
	while seen.size() < observation_size - did.size():
		seen.append(arena.rng.randfn(0.0, 2.0))
	seen.append_array(did)


func observe() -> PoolRealArray:
	return seen


func act(continuous: PoolRealArray, discrete: PoolIntArray) -> void:
	var both = seen
	look(PoolRealArray(Array(continuous) + Array(discrete)))
	both.append_array(seen)
	if OS.get_environment("ENVMANAGER_ADDRESS") == "":
		print("%s in tick %d: %s" % [behavior, Engine.get_physics_frames(), Marshalls.raw_to_base64(Wire.float_bytes(both))])
		n_acts += 1
		if n_acts == MOST:
			get_tree().quit()


func heuristic() -> void:
	var continuous = PoolRealArray()
	for _i in continuous_size:
		continuous.append(0.0)
	var discrete = PoolIntArray()
	for _n in discrete_choices:
		discrete.append(0)
	by_heuristic += 1
	act(continuous, discrete)
