extends "res://addons/envmanager/agent.gd"
# Sees random numbers, some of which are large, how often all have acted, and at the end what it did last. Without a trainer it prints what it does.

const Wire = preload("res://addons/envmanager/wire.gd")
const MOST = 20  # actions without a trainer

var seen: PoolRealArray = PoolRealArray()
var n_acts: int = 0
var by_heuristic: int = 0


func look(did: PoolRealArray) -> void:
	seen = PoolRealArray()
	while seen.size() < observation_size - did.size():
		seen.append(arena.rng.randfn(0.0, 2.0) * (100.0 if arena.rng.randi() % 20 == 0 else 1.0))
	if arena.rng.randi() % 20 == 0:
		seen[0] = INF
	seen.append_array(did)


func observe():
	seen[1] = arena.n_acts / 100.0
	return seen


func act(continuous: PoolRealArray, discrete: PoolIntArray) -> void:
	var both = seen
	arena.n_acts += 1
	look(PoolRealArray(Array(continuous) + Array(discrete)))
	both.append_array(seen)
	if OS.get_environment("ENVMANAGER_ADDRESS") == "":
		print("%s in tick %d: %s" % [behavior, Engine.get_physics_frames(), Marshalls.raw_to_base64(Wire.bytes_of(both))])
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
