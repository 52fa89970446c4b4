extends "res://addons/envmanager/agent.gd"
# Sees random numbers, some of which are large, how often all have acted, and at the end what it did last. Without a trainer it prints what it does.

const MOST := 20  # actions without a trainer

var seen := PackedFloat32Array()
var n_acts := 0
var by_heuristic := 0


func look(did: PackedFloat32Array) -> void:
	seen = PackedFloat32Array()
	while seen.size() < observation_size - did.size():
		seen.append(arena.rng.randfn(0.0, 2.0) * (100.0 if arena.rng.randi() % 20 == 0 else 1.0))
	if arena.rng.randi() % 20 == 0:
		seen[0] = INF
	seen.append_array(did)


func observe():
	seen[1] = arena.n_acts / 100.0
	return seen


func act(continuous: PackedFloat32Array, discrete: PackedInt32Array) -> void:
	var before := seen
	arena.n_acts += 1
	look(PackedFloat32Array(Array(continuous) + Array(discrete)))
	if OS.get_environment("ENVMANAGER_ADDRESS") == "":
		print("%s in tick %d: %s" % [behavior, Engine.get_physics_frames(), Marshalls.raw_to_base64((before + seen).to_byte_array())])
		n_acts += 1
		if n_acts == MOST:
			get_tree().quit()


func heuristic() -> void:
	var continuous := PackedFloat32Array()
	continuous.resize(continuous_size)
	var discrete := PackedInt32Array()
	discrete.resize(discrete_choices.size())
	by_heuristic += 1
	act(continuous, discrete)
